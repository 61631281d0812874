"""A conversation goes on, and what is shown is written by the clock and not by tokens."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.cli import printing
from tsqp.cli.chat import Conversation
from tsqp.cli.printing import Printer
from tsqp.cli.program import model_directory
from tsqp.cli.status import StatusLine

SETTINGS: dict[str, Any] = {
    "as_json": True,
    "stats": True,
    "stop": (),
    "max_new_tokens": 100,
    "seed": None,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    directory = model_directory("demo")
    settings = RunnerSettings(directory, load_policy("tee-only"))
    with Runner(settings, tokenizer=Tokenizer(directory)) as started:
        yield started


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_stops_the_answer_and_a_second_one_the_chat(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    """A step that waits for a service must not hold a person who gives up."""
    made = Conversation(runner, SETTINGS, None, in_terminal=True)
    before, step, steps = signal.getsignal(signal.SIGINT), runner.step, SimpleNamespace(count=0)

    def interrupted() -> None:
        steps.count += 1
        if steps.count == 4:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
        step()

    monkeypatch.setattr(runner, "step", interrupted)
    lines = iter(("Tell me a story about a fox.", "Tell me another one."))
    if signals == 2:
        with pytest.raises(KeyboardInterrupt):
            made.run(lambda: next(lines, None))
    else:
        made.run(lambda: next(lines, None))
        first, second = made.turns
        assert (len(first.token_ids), first.finish_reason) == (3, "stop")
        assert len(second.token_ids) > 3
        assert made.messages[1]["content"] == first.text != ""
    assert signal.getsignal(signal.SIGINT) == before


class Text:
    """Decodes token 0 to nothing, as half of a character, 9 to a command, others to letters."""

    def feed(self, token_id: int) -> str:
        return {0: "", 9: "\x1b[2J"}.get(token_id, chr(96 + token_id))

    def flush(self) -> str:
        return "."


class Output(io.StringIO):
    """Standard output that may be a terminal or broken."""

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
    text: Any = Text()
    return Printer(text, StatusLine("tsqp", enabled=False))


def test_handing_over_is_the_same_work_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake clock that counts calls: nothing is decoded or written between two tokens."""
    monkeypatch.setattr(printing, "TICK_S", 3600.0)
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
    monkeypatch.setattr(printing, "TICK_S", 0.0)

    def generate() -> None:
        with printer(monkeypatch, Output(error=BrokenPipeError())) as shown:
            for _ in range(10 * printing.QUEUED_TOKENS):
                shown.put(1)

    with pytest.raises(BrokenPipeError):
        generate()
