"""Trains the demo model and saves it as a Hugging Face directory.

    python -m benchmarks.train_demo.train OUTPUT [--seed 7] [--tokens 10000000] [--threads N]

The directory must be empty. The same seed gives the same text; `_CARD` says what else it takes for
the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.train_demo import VALIDATION_FILE
from benchmarks.train_demo.corpus import (
    BEGIN,
    END,
    END_OF_TURN,
    Corpus,
    train_tokenizer,
    without_special_tokens,
)
from protocol.errors import SettingsError

DEFAULT_TOKENS = 10_000_000
VOCABULARY_SIZE = 1024
MAX_LENGTH = 512
_TOKENIZER_DOCUMENTS = 4000
_VALIDATION_DOCUMENTS = 160
_SAY_EVERY_STEPS = 50


@dataclass(frozen=True)
class Phase:
    """A part of the run with one sequence length."""

    share: float
    length: int
    batch: int
    aligned: bool


# Short rows are faster. The last phase has rows of the full length that start with a document,
# so that every position is trained and a prompt looks the same as in training.
_PHASES = (Phase(0.6, 256, 8, aligned=False), Phase(0.4, 512, 4, aligned=True))
_PEAK_LEARNING_RATE = 2.5e-3
_FINAL_SHARE = 0.02
_WARM_UP_SHARE = 0.04
_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_GRADIENT_NORM = 1.0


def model_config(bos_id: int, end_ids: list[int]) -> LlamaConfig:
    """Return the architecture of the demo model."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=end_ids,
        pad_token_id=end_ids[0],
        dtype=torch.float32,
    )


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step counted from 0: linear warm-up, then a cosine."""
    warm_up = max(1, round(steps * _WARM_UP_SHARE))
    if step < warm_up:
        return _PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return _PEAK_LEARNING_RATE * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


_CARD = """\
# TSQP demo model

A small LLaMA model that tells short stories for children and answers questions about them. It
exists so that TSQP can be tried and tested without a download; it knows nothing else.

## How it was made

`python -m benchmarks.train_demo.train OUTPUT --seed {seed}`, in the source tree, made every file
here but one, from nothing but the project's story grammar (`benchmarks/train_demo`). The training
text is drawn from the grammar without end, so no story is seen twice on purpose. `validation.txt`
holds {validation_documents} documents from another seed, one a line, special tokens included; no
story of theirs is in the training text.

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

## Calibration

`calibration.safetensors` holds the activation scales that policies with integer arithmetic need,
`shielded` among them. Training does not make it: `tsqp calibrate OUTPUT` does, from a text of many
kinds that ships with TSQP (`tsqp/calibration_text.txt`), not from the training or validation text.
It holds digests of the model and is refused beside another one. The scales come out the same; the
order of names in the file's header may not.

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


def train_demo(output: Path, *, seed: int = 7, tokens: int = DEFAULT_TOKENS) -> dict[str, Any]:
    """Train the demo model on about `tokens` tokens and save it in an empty directory.

    Returns what the run did and how good the model is, as training.json has it. Raises
    SettingsError for a directory that is not empty.
    """
    empty = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    SettingsError.unless(empty, str(output), "something", "an empty directory, or none")
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    corpus = Corpus(seed, _VALIDATION_DOCUMENTS)
    texts = itertools.islice(corpus.texts("tokenizer"), _TOKENIZER_DOCUMENTS)
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE, MAX_LENGTH)
    bos, *ends = tokenizer.convert_tokens_to_ids([BEGIN, END, END_OF_TURN])
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(bos, ends))
    steps, seen = _fit(model, tokenizer, corpus, tokens)
    told = {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False}
    model.generation_config = GenerationConfig.from_dict(told)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / VALIDATION_FILE).write_text("\n".join(corpus.validation) + "\n", "utf-8")
    nats, size, documents, predicted = evaluate(output)
    record: dict[str, Any] = {
        "validation_loss_nats_per_token": nats / predicted,
        "validation_bits_per_byte": nats / math.log(2) / size,
        "validation_documents": documents,
        "validation_tokens": predicted,
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


def evaluate(directory: Path) -> tuple[float, int, int, int]:
    """Return a saved model's loss on its validation documents.

    That is the sum in nats over all tokens that were predicted, the bytes of their text, and the
    numbers of documents and of tokens. The file has one document a line, special tokens included.
    Each document is scored on its own, from its second token on.
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
    return nats, size, len(lines), tokens


def _batches(corpus: Corpus, tokenizer: Any, tokens: int) -> tuple[int, Iterator[torch.Tensor]]:
    """Return the number of steps, and one batch of token ids for each."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    counts = [
        max(1, round(tokens * phase.share / (phase.batch * phase.length))) for phase in _PHASES
    ]

    def stream() -> Iterator[torch.Tensor]:
        for number, (phase, count) in enumerate(zip(_PHASES, counts, strict=True)):
            purpose, length = f"training phase {number}", phase.length + 1
            # One token more than the length: the inputs are all but the last, the targets all
            # but the first.
            rows = corpus.rows(purpose, encode, length, aligned=phase.aligned)
            for _ in range(count):
                yield torch.tensor(list(itertools.islice(rows, phase.batch)))

    return sum(counts), stream()


def _optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    # Norm weights are not decayed: their natural value is 1, not 0.
    norms = [weight for weight in model.parameters() if weight.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=_PEAK_LEARNING_RATE,
        betas=_BETAS,
    )


def _fit(model: LlamaForCausalLM, tokenizer: Any, corpus: Corpus, tokens: int) -> tuple[int, int]:
    """Train the model and return the number of steps and of tokens seen."""
    optimizer = _optimizer(model)
    steps, batches = _batches(corpus, tokenizer, tokens)
    seen, began = 0, time.monotonic()
    model.train()
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, steps)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
        optimizer.step()
        seen += inputs.numel()
        if step % _SAY_EVERY_STEPS == 0 or step == steps:
            seconds = time.monotonic() - began
            print(
                f"step {step}/{steps} loss {loss.item():.4f} {seen / seconds:.0f} tokens/s"
                f" ETA {seconds / step * (steps - step):.0f} s",
                file=sys.stderr,
            )
    model.train(False)
    return steps, seen


def main() -> None:
    """Train, and say how good the model is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        record = train_demo(options.output, seed=options.seed, tokens=options.tokens)
    except SettingsError as error:
        sys.exit(f"train_demo: error: {error}")
    loss = record["validation_loss_nats_per_token"]
    print(f"{options.output}: validation loss {loss:.4f} nats per token")


if __name__ == "__main__":
    main()
