"""The demo model and its text, for the rows that use it."""

from __future__ import annotations

import random
from functools import cache

from tee_side.engine.tokenizer import Tokenizer
from tsqp.cli.program import model_directory

DEMO = model_directory("demo")


@cache
def text_ids() -> tuple[int, ...]:
    """Return the token ids of the text that the demo model was never trained on."""
    text = (DEMO / "validation.txt").read_text(encoding="utf-8")
    return tuple(Tokenizer(DEMO).encode(text[:40_000]))


def prompt(length: int, chance: random.Random) -> list[int]:
    """Return a stretch of the text."""
    start = chance.randrange(len(text_ids()) - length)
    return list(text_ids()[start : start + length])
