"""Validation loss of a saved demo model on its own held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tsqp.tools.train_demo.chat_format import without_special_tokens

VALIDATION_FILE = "validation.txt"


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over all predicted tokens, and the same per byte of text."""

    nats_per_token: float
    bits_per_byte: float
    documents: int
    tokens: int


def evaluate(directory: Path) -> Evaluation:
    """Load a saved model in float32 and compute its loss on its validation documents.

    The file has one document a line, special tokens included. Each document is scored on its
    own, from its second token on.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    return Evaluation(nats / tokens, nats / math.log(2) / size, len(lines), tokens)
