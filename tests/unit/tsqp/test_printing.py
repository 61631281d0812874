"""What is shown is decoded and written by a thread of its own, by the clock and not by tokens."""

import io
import sys
import threading
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from tsqp.cli import terminal
from tsqp.cli.terminal import Printer, StatusLine


class Output(io.StringIO):
    def __init__(self, *, tty: bool = False, error: OSError | None = None) -> None:
        super().__init__()
        self.tty, self.error, self.threads = tty, error, set[str]()

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return super().write(text)


def printer(monkeypatch: pytest.MonkeyPatch, output: Output) -> Printer:
    monkeypatch.setattr(sys, "stdout", output)
    # Token 0 is half of a character, 9 a command, others are letters.
    text = mock.Mock(flush=lambda: ".")
    text.feed = lambda token_id: {0: "", 9: "\x1b[2J"}.get(token_id, chr(96 + token_id))
    return Printer(text, StatusLine("tsqp", enabled=False))


def test_handing_over_is_the_same_work_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock that counts calls: nothing is decoded or written between two tokens."""
    monkeypatch.setattr(terminal, "TICK_S", 3600.0)
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
    assert (output.getvalue(), output.threads) == ("aba.", {"printer"})


def test_a_terminal_gets_no_control_characters_and_a_reader_that_has_gone_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tty, expected in ((True, "\\x1b[2J."), (False, "\x1b[2J.")):
        output = Output(tty=tty)
        with printer(monkeypatch, output) as shown:
            shown.put(9)
        assert output.getvalue() == expected
    monkeypatch.setattr(terminal, "TICK_S", 0.0)

    def generate() -> None:
        with printer(monkeypatch, Output(error=BrokenPipeError())) as shown:
            for _ in range(10 * terminal.QUEUED_TOKENS):
                shown.put(1)

    with pytest.raises(BrokenPipeError):
        generate()
