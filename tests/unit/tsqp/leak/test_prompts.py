"""Prompts are cut from a text at its beginnings, each once, or are random."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import PromptError
from tee_side.engine.tokenizer import Tokenizer
from tsqp.calibrate import default_text
from tsqp.cli.program import model_directory
from tsqp.lab.leak.prompts import cut_prompts, random_prompts, text_of

DEMO = model_directory("demo")
BOS = "<|begin_of_text|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Él dijo:\n\nsí.", encoding="utf-8")
    assert text_of(DEMO, file) == "Él dijo:\n\nsí."


def test_without_a_file_the_models_own_text_or_ours(tmp_path: Path) -> None:
    assert text_of(DEMO, None) == (DEMO / "validation.txt").read_text(encoding="utf-8")
    assert text_of(tmp_path, None) == default_text()


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    """With the reason, and nothing of what is in it."""
    with pytest.raises(PromptError) as caught:
        text_of(DEMO, tmp_path / "none.txt")
    assert (caught.value.where, caught.value.got) == (
        str(tmp_path / "none.txt"),
        "FileNotFoundError",
    )
    (tmp_path / "bytes").write_bytes(b"secret \xff\xfe")
    with pytest.raises(PromptError) as caught:
        text_of(DEMO, tmp_path / "bytes")
    assert caught.value.got == "UnicodeDecodeError"
    assert "secret" not in str(caught.value)


def test_prompts_begin_with_what_the_tokenizer_puts_before_a_text(tokenizer: Tokenizer) -> None:
    """After an empty line each, and cut to their length."""
    parts = ["Once upon a time there was a cat.", "The dog ran and ran and ran home.", "Lily sat."]
    found = cut_prompts(tokenizer, "\n\n".join([*parts, "", "  "]), 3, 5)
    assert found == [tokenizer.encode(part)[:5] for part in parts]
    start = tokenizer.encode("")[0]
    assert {ids[0] for ids in found} == {start}
    long = cut_prompts(tokenizer, "\n\n".join(parts), 2, 1000)
    assert long == [tokenizer.encode(part) for part in parts[:2]]


def test_a_text_with_beginnings_is_cut_at_them(tokenizer: Tokenizer) -> None:
    """And not at its empty lines; each has one beginning, not two."""
    stories = ["Once upon a time\n\nthere was a cat.", "The dog ran home.\n\n"]
    found = cut_prompts(tokenizer, "".join(f"{BOS}{story}" for story in stories), 2, 100)
    assert found == [tokenizer.encode(story) for story in stories]


def test_what_is_before_the_first_beginning_is_left_out(tokenizer: Tokenizer) -> None:
    found = cut_prompts(tokenizer, f"A heading of some length.{BOS}The dog ran home.", 1, 100)
    assert found == [tokenizer.encode("The dog ran home.")]


def test_equal_and_short_ones_are_left_out(tokenizer: Tokenizer) -> None:
    """Equal as far as they are cut."""
    text = "The dog ran home fast.\n\nNo\n\nThe dog ran home slowly.\n\nA cat sat on the mat."
    found = cut_prompts(tokenizer, text, 2, 4)
    assert found == [tokenizer.encode(t)[:4] for t in ("The dog ran home", "A cat sat on the mat.")]
    assert len(cut_prompts(tokenizer, text, 3, 12)) == 3


def test_too_few_are_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError) as caught:
        cut_prompts(tokenizer, "The dog ran home.\n\nA cat sat on the mat.\n\nNo", 5, 10)
    assert caught.value.got.startswith("2 different ones of at least 4 tokens")
    assert caught.value.expected.startswith("5 ")


def test_the_demo_models_text_gives_as_many_as_are_usual(tokenizer: Tokenizer) -> None:
    found = cut_prompts(tokenizer, text_of(DEMO, None), 40, 48)
    assert len({tuple(ids) for ids in found}) == 40
    assert all(4 <= len(ids) <= 48 for ids in found)


def test_random_prompts_depend_on_the_seed_alone() -> None:
    found = random_prompts(320, 5, 7, seed=3)
    assert found == random_prompts(320, 5, 7, seed=3)
    assert found != random_prompts(320, 5, 7, seed=4)
    assert [len(ids) for ids in found] == [7] * 5
    assert len({tuple(ids) for ids in found}) == 5
    assert all(0 <= one < 320 for ids in found for one in ids)
    assert max(one for ids in random_prompts(3, 50, 50, 0) for one in ids) == 2
