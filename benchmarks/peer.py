"""`tee-only-int8` beside llama.cpp, which operators run inside a VM without a GPU.

    python -m benchmarks.peer [--shape llama-3.2-1b] [--rounds 9] [--prompts 128,512]
        [--batch 1,8,32] [--json FILE]

It needs the extra `peer` (`make bench` installs it): `llama-cpp-python`, built from its source for
this processor, and `gguf`, which writes the same shape, of random weights, in llama.cpp's formats:
Q8_0 (blocks of 32 in 8 bits, as many as ours) and Q4_0 (4 bits, its fastest). RoPE's scaling is
left out of these files; it takes no time.

Ours has no instructions that llama.cpp was built without: AMX, where the compiler gets it wrong
(Makefile). All run in this process, in turns, with a thread a core, after a pause in which the
threads of the one before fall asleep. A step is a prompt up to its last token's logits, or a token
of each sequence behind 128 tokens of context; ours also samples. The exit status is 1 where
`tee-only-int8` is not as many times faster as it should be.
"""

import ctypes
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from benchmarks.harness import CORES, Fields, Found, Options, Place, main, new_tokens, noted, say
from protocol import native
from protocol.errors import SettingsError
from protocol.model.config import ModelConfig
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.extras import require
from tsqp.lab.bench import prepare
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.bench.worker import decode_step, prompt_step
from tsqp.lab.measure import elapsed_us, in_fresh_process, in_turns, random_ids

POLICY = "tee-only-int8"
KINDS = ("Q8_0", "Q4_0")
# Times faster than llama.cpp, by the kind of step: prompts, or sequences that decode.
WANTED = {("prefill", 512): 5.0, ("decode", 1): 1.5, ("decode", 8): 1.8, ("decode", 32): 4.0}
CONTEXT = 128
_WARM_UP = 2
_PAUSE_S = 0.02
# Whose linear modules have no biases, and whose heads have no norms.
_PLAIN = ("LlamaForCausalLM", "MistralForCausalLM")
# A block of random weights, of which every matrix is made.
_BLOCK = 1 << 22


def write_gguf(path: Path, config: ModelConfig, kind: str) -> Path:
    """Write a model of random weights, all matrices of them in one of llama.cpp's formats."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads, head_dim = config.heads
    hidden, wide = config.hidden_size, config.intermediate_size
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    quantisation = gguf.GGMLQuantizationType[kind]
    floats = numpy.random.default_rng(0).normal(scale=hidden**-0.5, size=(_BLOCK // hidden, hidden))
    quantised = gguf.quantize(floats.astype(numpy.float32), quantisation)
    values, bytes_each = gguf.GGML_QUANT_SIZES[quantisation]

    def matrix(name: str, rows: int, columns: int) -> None:
        shape = (rows, columns // values * bytes_each)
        # Over and over: as many bytes as any others, each in a place of its own.
        writer.add_tensor(f"{name}.weight", numpy.resize(quantised, shape), raw_dtype=quantisation)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", numpy.ones(hidden, numpy.float32))

    matrix("token_embd", config.vocab_size, hidden)
    norm("output_norm")
    if not config.tie_word_embeddings:
        matrix("output", config.vocab_size, hidden)
    for layer in (f"blk.{number}" for number in range(config.num_hidden_layers)):
        norm(f"{layer}.attn_norm")
        norm(f"{layer}.ffn_norm")
        for name, rows, columns in (
            ("attn_q", heads * head_dim, hidden),
            ("attn_k", kv_heads * head_dim, hidden),
            ("attn_v", kv_heads * head_dim, hidden),
            ("attn_output", hidden, heads * head_dim),
            ("ffn_gate", wide, hidden),
            ("ffn_up", wide, hidden),
            ("ffn_down", hidden, wide),
        ):
            matrix(f"{layer}.{name}", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_silent: list[Any] = []


class LlamaCpp:
    """A model in llama.cpp, by its C interface; it is freed with `closing`."""

    def __init__(self, closing: ExitStack, path: Path, threads: int) -> None:
        import llama_cpp

        self._library: Any = llama_cpp
        self._threads = threads
        if not _silent:  # kept for as long as the library may say something
            _silent.append(llama_cpp.llama_log_callback(lambda *_: None))
            llama_cpp.llama_log_set(_silent[0], ctypes.c_void_p())
        self._model = llama_cpp.llama_model_load_from_file(
            bytes(path), llama_cpp.llama_model_default_params()
        )
        SettingsError.unless(
            self._model is not None, str(path), "a file that llama.cpp refuses", "one that it reads"
        )
        closing.callback(llama_cpp.llama_model_free, self._model)

    @property
    def about(self) -> str:
        """What it was built for."""
        return str(self._library.llama_print_system_info().decode())

    def prompt_step(self, closing: ExitStack, prompt: Sequence[int]) -> Callable[[], object]:
        """Return what computes a prompt and its last token's logits."""
        context = self._context(closing, len(prompt), 1)
        batch = self._batch(closing, [(token, n, 0) for n, token in enumerate(prompt)], last=True)
        memory = self._library.llama_get_memory(context)

        def step() -> None:
            self._library.llama_memory_clear(memory, False)
            self._run(context, batch)

        return step

    def decode_step(
        self, closing: ExitStack, prompts: Sequence[Sequence[int]]
    ) -> Callable[[], object]:
        """Return what decodes a token of each sequence behind its prompt, always the same ones."""
        length = len(prompts[0])
        context = self._context(closing, length + 1, len(prompts))
        for number, prompt in enumerate(prompts):
            tokens = [(token, n, number) for n, token in enumerate(prompt)]
            self._run(context, self._batch(closing, tokens, last=True))
        batch = self._batch(closing, [(prompts[n][0], length, n) for n in range(len(prompts))])
        memory = self._library.llama_get_memory(context)

        def step() -> None:
            self._run(context, batch)
            self._library.llama_memory_seq_rm(memory, -1, length, -1)

        return step

    def _context(self, closing: ExitStack, length: int, sequences: int) -> Any:
        settings = self._library.llama_context_default_params()
        settings.n_ctx = length * sequences
        settings.n_seq_max = sequences
        settings.n_batch = settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = self._threads
        context = self._library.llama_init_from_model(self._model, settings)
        SettingsError.unless(context is not None, "llama.cpp", "no context", "memory for one")
        closing.callback(self._library.llama_free, context)
        return context

    def _batch(
        self, closing: ExitStack, tokens: Sequence[tuple[int, int, int]], *, last: bool = False
    ) -> Any:
        """Return a batch of (token id, position, sequence). `last`: only its logits are wanted."""
        batch = self._library.llama_batch_init(len(tokens), 0, 1)
        closing.callback(self._library.llama_batch_free, batch)
        batch.n_tokens = len(tokens)
        for n, (token, position, sequence) in enumerate(tokens):
            batch.token[n], batch.pos[n] = token, position
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
            batch.logits[n] = not last or n == len(tokens) - 1
        return batch

    def _run(self, context: Any, batch: Any) -> None:
        status = self._library.llama_decode(context, batch)
        SettingsError.unless(status == 0, "llama_decode", f"status {status}", "0")
        self._library.llama_synchronize(context)


def _timed_ms(step: Callable[[], object]) -> float:
    time.sleep(_PAUSE_S)
    return elapsed_us(step) / 1e3


def _ours(
    closing: ExitStack, runner: Runner, prompts: list[list[int]], steps: int
) -> Callable[[], object]:
    """Return what decodes a token of each sequence. SettingsError: one of them has ended."""
    step = decode_step(closing, runner, prompts, new_tokens(CONTEXT, len(prompts), steps))

    def checked() -> None:
        sampled: Any = step()
        SettingsError.unless(
            len(sampled) == len(prompts), "a step", f"{len(sampled)} tokens", f"{len(prompts)}"
        )

    return checked


def _case(
    runner: Runner, peers: dict[str, LlamaCpp], phase: str, count: int, options: Options
) -> Fields:
    """Time one kind of step in turns. `count`: the prompt's tokens, or how many decode."""
    with ExitStack() as closing:
        prefill = phase == "prefill"
        tokens, sequences = (count, 1) if prefill else (CONTEXT, count)
        prompts = random_ids(runner.config.vocab_size, tokens, seed=0, sequences=sequences).tolist()
        steps: list[Callable[[], object]] = (
            [prompt_step(runner, prompts[0])]
            + [one.prompt_step(closing, prompts[0]) for one in peers.values()]
            if prefill
            else [_ours(closing, runner, prompts, options.rounds + _WARM_UP)]
            + [one.decode_step(closing, prompts) for one in peers.values()]
        )
        rows = in_turns([partial(_timed_ms, step) for step in steps], options.rounds, _WARM_UP)
    ours, *theirs = (median(column) for column in zip(*rows, strict=True))
    return {
        "phase": phase,
        "count": count,
        "ours_ms": ours,
        "peers_ms": dict(zip(peers, theirs, strict=True)),
        "wanted": WANTED.get((phase, count)),
    }


def measure(options: Options, place: Place) -> Found:
    """Make the same shape for both, and time them in turns. Raises TsqpError."""
    for module in ("gguf", "llama_cpp"):
        require(module, "benchmarks.peer", "the extra peer: make bench installs it")
    shape = find_shape(options.shape)
    (name,) = shape.settings["architectures"]
    SettingsError.unless(name in _PLAIN, "--shape", name, f"one of {', '.join(_PLAIN)}")
    config, model = shape.config(), place.model(shape, linear=True)
    peers = {}
    for kind in KINDS:
        say(f"making the same shape in {kind}")
        path = in_fresh_process(write_gguf, place.folder / f"{kind}.gguf", config, kind)
        peers[kind] = LlamaCpp(place, path, CORES)
    about = peers[KINDS[0]].about
    best = native.use().variant
    without_amx = best == "amx" and "AMX_INT8 = 1" not in about
    settings = RunnerSettings(
        model=prepare.endless(model, place.folder),
        policy=load_policy(POLICY),
        threads=CORES,
        kernels="avx512" if without_amx else best,
    )
    runner = place.enter_context(Runner(settings))
    line = "{phase} {count}: ours {ours_ms:.1f} ms, llama.cpp {peers_ms}"
    results = [
        noted(line, _case(runner, peers, phase, count, options))
        for phase, counts in (("prefill", options.prompts), ("decode", options.batch))
        for count in counts
    ]
    return {
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "without_amx": without_amx,
        "built_for": about,
        "kernels": native.choice().variant,
        "results": results,
    }, all(
        one["peers_ms"][kind] >= one["ours_ms"] * (one["wanted"] or 0.0)
        for one in results
        for kind in KINDS
    )


if __name__ == "__main__":
    main(__doc__, measure, shape="llama-3.2-1b", rounds=9, prompts=(128, 512), batch=(1, 8, 32))
