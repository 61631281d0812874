"""Stop strings: what is shown does not depend on the slicing, and is never taken back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from tee_side.engine.text_stream import TextStream

# Few letters, so that stop strings occur, overlap and almost occur.
TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", max_size=4), max_size=4)


def _before_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read one character after the other; the stop string that is complete first ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


class Pieces:
    """A stream that is fed pieces of text, each as a token of its own."""

    def __init__(self, stops: list[str]) -> None:
        self._pieces: list[str] = []
        self._stream = TextStream(cast(Any, self), stops)
        self.flush = self._stream.flush

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)

    @property
    def found(self) -> bool:
        return self._stream.found

    def feed(self, piece: str) -> str:
        self._pieces.append(piece)
        return self._stream.feed(len(self._pieces) - 1)


def _slices(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12))
@example(text="abc", stops=["abc", "b"], cuts=[])
def test_what_is_shown_does_not_depend_on_how_the_text_is_sliced(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = Pieces(stops)
    shown = "".join(stream.feed(piece) for piece in _slices(text, cuts)) + stream.flush()
    assert (shown, stream.found) == _before_stop(text, stops)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12))
def test_nothing_is_shown_that_would_have_to_be_taken_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    final, _ = _before_stop(text, stops)
    stream, shown = Pieces(stops), ""
    for piece in _slices(text, cuts):
        shown += stream.feed(piece)
        assert final.startswith(shown)


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=12))
def test_only_what_could_begin_a_stop_string_is_held_back(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream, fed, shown = Pieces(stops), "", ""
    for piece in _slices(text, cuts):
        fed += piece
        shown += stream.feed(piece)
        if stream.found:
            break
        held = fed[len(shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_a_stop_string_over_several_pieces_is_found_and_not_shown() -> None:
    stream = Pieces(["</end>"])
    pieces = ["Hello ", "<", "b> </", "en", "d> more"]
    assert [stream.feed(piece) for piece in pieces] == ["Hello ", "", "<b> ", "", ""]
    assert stream.found
    assert stream.flush() == ""


def test_an_almost_complete_stop_string_is_shown_at_the_end() -> None:
    stream = Pieces(["stop"])
    assert stream.feed("nonsto") == "non"
    assert stream.flush() == "sto"
    assert not stream.found


def test_nothing_is_shown_after_a_stop_string() -> None:
    stream = Pieces(["x"])
    assert stream.feed("axb") == "a"
    assert stream.feed("c") == ""
    assert stream.flush() == ""


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_everything_is_shown_at_once(stops: list[str]) -> None:
    stream = Pieces(stops)
    assert stream.feed("abc") == "abc"
    assert not stream.found


def test_a_stop_string_that_repeats_its_own_beginning_is_found() -> None:
    stream = Pieces(["aab"])
    assert "".join(stream.feed(letter) for letter in "aaab") == "a"
    assert stream.found


class Bytes:
    """A tokenizer of single bytes that notes how many it decodes at a time."""

    most = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.most = max(self.most, len(token_ids))
        return bytes(token_ids).decode("utf-8", "replace")


def test_bytes_that_never_become_text_are_not_decoded_again_and_again() -> None:
    tokenizer = Bytes()
    stream = TextStream(cast(Any, tokenizer))
    shown = "".join(stream.feed(0x80) for _ in range(1000)) + stream.flush()
    assert set(shown) == {"\ufffd"}
    assert len(shown) == 1000
    assert tokenizer.most < 50


def test_a_character_of_four_bytes_waits_for_its_end() -> None:
    stream = TextStream(cast(Any, Bytes()))
    assert [stream.feed(byte) for byte in "\U0001f98a".encode()] == ["", "", "", "\U0001f98a"]
