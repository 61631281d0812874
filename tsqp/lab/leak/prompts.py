"""The texts whose tokens are to be read: of a file, of ours, or random ids."""

from __future__ import annotations

import random
from pathlib import Path

from protocol.errors import PromptError
from tee_side.engine.tokenizer import Tokenizer
from tsqp.calibrate import default_text

# What the demo model was validated with stands beside it, one text after each such token.
_TEXT_FILE = "validation.txt"
_LEAST_TOKENS = 4


def text_of(model: Path, file: Path | None) -> str:
    """Return the text that prompts are cut from: a file's, the model's own, or ours.

    Raises PromptError.
    """
    path = file if file is not None else model / _TEXT_FILE
    if file is None and not path.is_file():
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(str(path), got=type(error).__name__, expected="UTF-8 text") from None


def cut_prompts(tokenizer: Tokenizer, text: str, count: int, tokens: int) -> list[list[int]]:
    """Cut a text into prompts of at most `tokens` tokens, each from the beginning of a piece.

    A piece begins with each BOS token in the text, or else after an empty line, and then gets what
    the tokenizer puts before a text. Raises PromptError where there are too few.
    """
    start = tokenizer.encode("")
    every = tokenizer.encode(text, add_special_tokens=False)
    pieces = (
        _split(every, start[0])
        if start and start[0] in every
        else [
            [*start, *tokenizer.encode(part, add_special_tokens=False)]
            for part in text.split("\n\n")
            if part.strip()
        ]
    )
    long_enough = [piece[:tokens] for piece in pieces if len(piece) >= _LEAST_TOKENS]
    # Two that are equal would be each other's chance.
    found = [list(piece) for piece in dict.fromkeys(map(tuple, long_enough))]
    if len(found) < count:
        raise PromptError(
            "prompts",
            got=f"{len(found)} different ones of at least {_LEAST_TOKENS} tokens in the text",
            expected=f"{count} (--text FILE with more, or fewer --prompts)",
        )
    return found[:count]


def random_prompts(vocab_size: int, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return random token ids, for a model that was never trained."""
    chance = random.Random(seed)
    return [[chance.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


def _split(ids: list[int], bos: int) -> list[list[int]]:
    starts = [index for index, token in enumerate(ids) if token == bos]
    ends = [*starts[1:], len(ids)]
    return [ids[start:end] for start, end in zip(starts, ends, strict=True)]
