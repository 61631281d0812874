"""Train the demo model that ships with TSQP, into a new directory.

    python -m benchmarks.train_demo OUTPUT [--seed 7] [--tokens 10000000] [--threads N]
        [--json FILE]

Ten million tokens of `benchmarks.stories` take 37 minutes on two cores. OUTPUT is then a Hugging
Face directory with a model card, the record of the training (training.json, also printed) and the
held-out text (validation.txt).
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from benchmarks.stories import (
    ASSISTANT,
    BEGIN,
    END,
    END_OF_TURN,
    SPECIAL_TOKENS,
    USER,
    Corpus,
    without_special_tokens,
)
from tsqp.lab.measure import script, write_results

VALIDATION_FILE = "validation.txt"
_VOCABULARY_SIZE, _MAX_LENGTH = 1024, 512


@dataclass(frozen=True)
class Phase:
    """A part of the run with one sequence length. `share`: of all tokens."""

    share: float
    length: int
    batch: int
    aligned: bool


# Short rows are faster. The last phase has rows of the full length that start with a document,
# so that every position is trained and a prompt looks the same as in training.
_PHASES = (Phase(0.6, 256, 8, aligned=False), Phase(0.4, 512, 4, aligned=True))
_PEAK_LEARNING_RATE, _FINAL_SHARE, _WARM_UP_SHARE = 2.5e-3, 0.02, 0.04
_WEIGHT_DECAY, _BETAS, _GRADIENT_NORM = 0.1, (0.9, 0.95), 1.0

# The training text has no system messages, so the template leaves them out.
_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end_of_turn|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end_of_turn|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_CARD = """\
# TSQP demo model

A small LLaMA model that tells short stories for children and answers questions about them. It
exists so that TSQP can be tried and tested without a download; it knows nothing else.

## How it was made

`python -m benchmarks.train_demo OUTPUT --seed {seed}`, in a checkout of TSQP, made every file here
from nothing but the project's story grammar (`benchmarks/stories.toml`). The training text is drawn
from the grammar without end, so no story is seen twice on purpose. `validation.txt` holds
{validation_documents} documents from another seed, one a line, special tokens included; no story of
theirs is in the training text.

| | |
|---|---|
| parameters | {parameters:,} (float32) |
| training tokens | {tokens_seen:,} in {steps:,} steps |
| time | {seconds:.0f} s with {threads} threads |
| validation loss | {validation_loss_nats_per_token:.4f} nats per token |
| bits per byte | {validation_bits_per_byte:.4f} |
| torch, transformers | {torch_version}, {transformers_version} |

`training.json` holds the same numbers. The loss is computed from the saved weights in float32,
each document on its own. The bytes are those of the text without special tokens, whose loss is
counted. The same seed, type of machine, number of threads and version of torch give the same
weights bit for bit; otherwise they may differ slightly.

## Use

The directory loads with `AutoModelForCausalLM` and `AutoTokenizer`. Ask in the form of the
training text, such as "Tell me a story about Mia and a kite." and then "What did Mia learn?".
The context is 512 tokens. The chat template leaves system messages out, as training had none.
The names, words and kinds of story are those of the grammar; other requests give poor answers. The
hero that was asked for appears in the story; a thing or a place that was asked for often does not.
The model is small and its training short: it sometimes mixes names up, and a story need not hold
the thing, animal or place that was asked for.

## License

Apache-2.0, like the TSQP project.
"""


def _tokenizer(corpus: Corpus, documents: int) -> Any:
    """Train a byte-level BPE tokenizer and return it as a transformers tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = itertools.islice(corpus.texts("tokenizer"), documents)
    tokenizer.train_from_iterator(map(without_special_tokens, texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    # transformers leaves its constructors without annotations.
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT, END_OF_TURN],
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_LENGTH,
        chat_template=_CHAT_TEMPLATE,
    )


def _learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step counted from 0: linear warm-up, then a cosine."""
    warm_up = max(1, round(steps * _WARM_UP_SHARE))
    if step < warm_up:
        return _PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return _PEAK_LEARNING_RATE * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


def _batches(corpus: Corpus, tokenizer: Any, counts: list[int]) -> Iterator[torch.Tensor]:
    """Yield the token ids of each step."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for number, (phase, count) in enumerate(zip(_PHASES, counts, strict=True)):
        # One token more than the length: the inputs are all but the last, the targets all but the
        # first.
        purpose, length = f"training phase {number}", phase.length + 1
        rows = corpus.rows(purpose, encode, length, aligned=phase.aligned)
        for _ in range(count):
            yield torch.tensor(list(itertools.islice(rows, phase.batch)))


def _fit(model: LlamaForCausalLM, tokenizer: Any, corpus: Corpus, tokens: int) -> tuple[int, int]:
    """Train the model and return the number of steps and of tokens seen."""
    counts = [max(1, round(tokens * one.share / (one.batch * one.length))) for one in _PHASES]
    steps, started = sum(counts), time.monotonic()
    # Norm weights are not decayed: their natural value is 1, not 0.
    groups: list[dict[str, Any]] = [
        {
            "params": [one for one in model.parameters() if one.ndim > 1],
            "weight_decay": _WEIGHT_DECAY,
        },
        {"params": [one for one in model.parameters() if one.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=_PEAK_LEARNING_RATE, betas=_BETAS)
    model.train()
    for done, batch in enumerate(_batches(corpus, tokenizer, counts), start=1):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(done - 1, steps)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
        optimizer.step()
        if done % 50 == 0 or done == steps:
            left_s = (time.monotonic() - started) / done * (steps - done)
            line = f"step {done}/{steps}: loss {loss.item():.4f}, {left_s:.0f} s left"
            print(line, file=sys.stderr, flush=True)
    model.train(False)
    seen = (count * one.batch * one.length for count, one in zip(counts, _PHASES, strict=True))
    return steps, sum(seen)


def evaluate(directory: Path) -> dict[str, float | int]:
    """Return the loss of a saved model, in float32, on its validation documents.

    The file has one document a line, special tokens included. Each document is scored on its own,
    from its second token on: the mean in nats over all predicted tokens, and in bits a byte of text
    without special tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.train(False)
    nats, tokens, size = 0.0, 0, 0
    lines = (directory / VALIDATION_FILE).read_text("utf-8").splitlines()
    for line in lines:
        ids = tokenizer(line, add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = ids[:, : model.config.max_position_embeddings]
        with torch.inference_mode():
            logits = model(input_ids=ids).logits
        nats += torch.nn.functional.cross_entropy(
            logits[0, :-1].double(), ids[0, 1:], reduction="sum"
        ).item()
        tokens += ids.shape[1] - 1
        size += len(without_special_tokens(line).encode())
    return {
        "validation_loss_nats_per_token": nats / tokens,
        "validation_bits_per_byte": nats / math.log(2) / size,
        "validation_documents": len(lines),
        "validation_tokens": tokens,
    }


def train_demo(
    output: Path,
    *,
    seed: int = 7,
    tokens: int = 10_000_000,
    validation_documents: int = 160,
    tokenizer_documents: int = 4000,
) -> dict[str, Any]:
    """Train on about so many tokens, save in an empty directory, and return the record."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SystemExit(f"{output}: got files, expected an empty directory")
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    corpus = Corpus(seed, validation_documents)
    tokenizer = _tokenizer(corpus, tokenizer_documents)
    bos, *ends = tokenizer.convert_tokens_to_ids([BEGIN, END, END_OF_TURN])
    ids: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": ends[0]}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY_SIZE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=_MAX_LENGTH,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            dtype=torch.float32,
            **ids,
        )
    )
    steps, seen = _fit(model, tokenizer, corpus, tokens)
    model.generation_config = GenerationConfig.from_dict({**ids, "do_sample": False})
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / VALIDATION_FILE).write_text("\n".join(corpus.validation) + "\n", "utf-8")
    record: dict[str, Any] = {
        **evaluate(output),
        "tokens_seen": seen,
        "steps": steps,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - started, 1),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    (output / "README.md").write_text(_CARD.format(**record), "utf-8")
    return record


def measure(options: Any) -> dict[str, Any]:
    """Train as the command line asks for."""
    torch.set_num_threads(options.threads)
    return train_demo(Path(options.output), seed=options.seed, tokens=options.tokens)


if __name__ == "__main__":
    write_results(
        *script(
            __doc__,
            measure,
            "output",
            seed=7,
            tokens=10_000_000,
            threads=torch.get_num_threads(),
        )
    )
