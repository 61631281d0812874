"""The record of a training run, and the model card made from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

RECORD_FILE = "training.json"
CARD_FILE = "README.md"


@dataclass(frozen=True)
class TrainingRecord:
    """What a training run did and how good the saved model is."""

    validation_loss_nats_per_token: float
    validation_bits_per_byte: float
    validation_documents: int
    validation_tokens: int
    tokens_seen: int
    steps: int
    seed: int
    threads: int
    seconds: float
    parameters: int
    torch_version: str
    transformers_version: str


_CARD = """\
# TSQP demo model

A small LLaMA model that tells short stories for children and answers questions about them. It
exists so that TSQP can be tried and tested without a download; it knows nothing else.

## How it was made

`tsqp train-demo OUTPUT --seed {seed}` made every file here but one, from nothing but the
project's story grammar (`tsqp/tools/train_demo`). The training text is drawn from the grammar
without end, so no story is seen twice on purpose. `validation.txt` holds {validation_documents}
documents from another seed, one a line, special tokens included; no story of theirs is in the
training text.

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


def write_record(directory: Path, record: TrainingRecord) -> None:
    """Write the record and the model card into the model's directory."""
    fields = dataclasses.asdict(record)
    (directory / RECORD_FILE).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    (directory / CARD_FILE).write_text(_CARD.format(**fields), "utf-8")


def read_record(directory: Path) -> TrainingRecord:
    """Read the record of a saved model."""
    return TrainingRecord(**json.loads((directory / RECORD_FILE).read_text("utf-8")))
