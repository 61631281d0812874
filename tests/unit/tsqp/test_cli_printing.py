"""What is shown is decoded and written by a thread of its own, by the clock and not by tokens."""

from __future__ import annotations

import io
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from tsqp.cli import printing
from tsqp.cli.printing import Printer, for_terminal
from tsqp.cli.status import StatusLine

HOUR_S = 3600.0


class Text:
    """Decodes token 0 to nothing, as half of a character, and others to letters."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def feed(self, token_id: int) -> str:
        self.threads.add(threading.current_thread().name)
        return "" if token_id == 0 else chr(96 + token_id)

    def flush(self) -> str:
        return "."


class Output(io.StringIO):
    """Standard output that notes who writes, and may be a terminal or broken."""

    def __init__(self, *, tty: bool = False, error: OSError | None = None) -> None:
        super().__init__()
        self.tty, self.error = tty, error
        self.threads: set[str] = set()

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return super().write(text)


def printer(monkeypatch: pytest.MonkeyPatch, output: Output, text: Any = None) -> Printer:
    monkeypatch.setattr(sys, "stdout", output)
    return Printer(text or Text(), StatusLine("tsqp", enabled=False))


def test_tokens_become_text_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    text, output = Text(), Output()
    with printer(monkeypatch, output, text) as shown:
        for token_id in (1, 0, 2, 3):
            shown.put(token_id)
    assert output.getvalue() == "abc."
    assert text.threads == output.threads == {"printer"}


def test_handing_over_is_the_same_work_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock that counts calls: nothing is decoded or written between two tokens."""
    monkeypatch.setattr(printing, "TICK_S", HOUR_S)
    called: list[list[str]] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_qualname if event == "call" else argument.__name__
            called[-1].append(name)

    output = Output()
    with printer(monkeypatch, output) as shown:
        for token_id in (1, 0, 0, 2, 1, 0):
            called.append([])
            sys.setprofile(watch)
            shown.put(token_id)
            sys.setprofile(None)
        assert output.getvalue() == ""
    assert len({tuple(calls) for calls in called}) == 1
    assert called[0][0] == "Printer.put"
    assert output.getvalue() == "aba."


def test_a_reader_that_has_gone_ends_the_generation_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(printing, "TICK_S", 0.0)
    output = Output(error=BrokenPipeError())

    def generate() -> None:
        with printer(monkeypatch, output) as shown:
            for token_id in [1] * (10 * printing.QUEUED_TOKENS):
                shown.put(token_id)

    with pytest.raises(BrokenPipeError):
        generate()


def test_what_is_said_after_an_error_begins_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()

    def generate() -> None:
        with printer(monkeypatch, output) as shown:
            shown.put(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate()
    assert output.getvalue() == "a.\n"


@pytest.mark.parametrize(("tty", "expected"), [(True, "\\x1b[2J"), (False, "\x1b[2J")])
def test_a_terminal_gets_no_control_characters_and_a_pipe_the_text_as_it_is(
    tty: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Evil(Text):
        def feed(self, token_id: int) -> str:
            return "\x1b[2J"

    output = Output(tty=tty)
    with printer(monkeypatch, output, Evil()) as shown:
        shown.put(1)
    assert output.getvalue() == expected + "."


def test_newlines_tabs_and_letters_of_any_language_stay() -> None:
    kept = "a\n\tb é 漢 🙂 ~\xa0"
    assert for_terminal(kept) == kept
    assert for_terminal("\r\x07\x00\x7f\x9b1m\x85") == r"\x0d\x07\x00\x7f\x9b1m\x85"
