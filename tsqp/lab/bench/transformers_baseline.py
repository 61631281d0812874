"""The same model in transformers: prefill, and decode with its KV cache, on this machine's CPU.

    python -m tsqp.lab.bench.transformers_baseline MODEL [--dtype bfloat16] [--threads N]
        [--tokens 128,512] [--context 128,512] [--new-tokens 32] [--repeats 5] [--case-s 10]
        [--attention sdpa] [--json FILE]

MODEL: a directory with all weights. Prints a list of `tsqp.lab.bench.results.Baseline` as JSON:
prefill of each of `--tokens`, and one decode step, as the median of `--new-tokens` steps, after
each of `--context` (default: the shortest of these prompts). Only the last token's logits are
computed.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers

from protocol.tensors import torch_dtype
from tsqp.lab.bench.results import Baseline, Spread
from tsqp.lab.measure import elapsed_us, random_ids, rounds, script, write_results


def _step(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _baseline(
    model: Any, phase: Any, tokens: int, new_tokens: int, dtype: str, times_ms: Sequence[float]
) -> Baseline:
    attention = model.config._attn_implementation
    return Baseline(
        name="transformers",
        description=f"transformers {transformers.__version__}, {torch.get_num_threads()} threads,"
        f" {attention} attention, no service",
        phase=phase,
        tokens=tokens,
        new_tokens=new_tokens,
        dtype=dtype,
        against="none",
        step_ms=Spread.of(times_ms),
    )


@torch.inference_mode()
def measure_all(options: Any) -> list[Baseline]:
    """Measure what the command line asks for."""
    torch.set_num_threads(options.threads)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    # From a local directory, and from nowhere else.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=torch_dtype(options.dtype),
        attn_implementation=options.attention,
        local_files_only=True,
        use_safetensors=True,
    )
    model.eval()
    vocabulary, found = model.config.vocab_size, []
    for tokens in options.tokens:
        step = partial(_step, model, random_ids(vocabulary, tokens, seed=tokens), None)
        step()
        times_ms = [elapsed_us(step) / 1e3 for _ in rounds(options.repeats, options.case_s)]
        found.append(_baseline(model, "prefill", tokens, 0, options.dtype, times_ms))
    contexts = options.context or [min(options.tokens)]
    for tokens in contexts if options.new_tokens else ():
        output = _step(model, random_ids(vocabulary, tokens, seed=tokens), None)
        times_ms = []
        for _ in range(options.new_tokens + 1):
            ids = output.logits[:, -1:].argmax(-1)
            started = time.perf_counter()
            output = _step(model, ids, output.past_key_values)
            times_ms.append((time.perf_counter() - started) * 1e3)
        # The first one warms up.
        found.append(
            _baseline(model, "decode", tokens, options.new_tokens, options.dtype, times_ms[1:])
        )
    return found


if __name__ == "__main__":
    write_results(
        *script(
            __doc__,
            measure_all,
            "model",
            dtype=("bfloat16", "float32", "float16"),
            threads=torch.get_num_threads(),
            tokens=(128, 512),
            context=(),
            new_tokens=32,
            repeats=5,
            case_s=10.0,
            attention=("sdpa", "eager"),
        )
    )
