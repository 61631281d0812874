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

from protocol.errors import EndpointError, PromptError
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
    "max_new_tokens": 12,
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


def conversation(
    runner: Runner, *, system: str | None = None, in_terminal: bool = True, **settings: Any
) -> Conversation:
    return Conversation(runner, SETTINGS | settings, system, in_terminal=in_terminal)


def told(made: Conversation, *lines: str) -> None:
    """Have a conversation of these lines."""
    left = iter(lines)
    made.run(lambda: next(left, None))


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(
    runner: Runner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    templates: list[list[dict[str, str]]] = []
    render = runner.tokenizer.apply_chat_template

    def watched(messages: list[dict[str, str]]) -> list[int]:
        templates.append(messages)
        return render(messages)

    monkeypatch.setattr(runner.tokenizer, "apply_chat_template", watched)
    made = conversation(runner, system="Tell stories.")
    lines = [f"Tell me a story about a fox and a dog and a kite, number {n}." * 3 for n in range(9)]
    told(made, *lines)
    # All of it is in the transcript, and the model was told the system message and the end.
    assert [one["content"] for one in made.messages[1::2]] == lines
    last = templates[-1]
    assert last[0] == {"role": "system", "content": "Tell stories."}
    assert last[1:-1] == made.messages[-len(last) :][:-2]
    assert last[-1]["content"] == lines[-1]
    assert 2 < len(last) < 12
    context = runner.config.context_length
    assert all(turn.usage.prompt_tokens <= context - 12 for turn in made.turns)
    assert "the context is full: the oldest" in capsys.readouterr().err


def test_what_fails_does_not_end_a_chat_in_a_terminal(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, too_long = conversation(runner), "story " * 600
    told(made, "/system Be kind.", too_long, "Another one.")
    assert [one["content"] for one in made.messages[:2]] == ["Be kind.", "Another one."]
    script = conversation(runner, in_terminal=False)
    with pytest.raises(PromptError):
        told(script, too_long)
    lost = EndpointError("unix:///s", got="a lost connection", expected="a gpu-service")
    with monkeypatch.context() as patched:
        patched.setattr(runner, "generate", lambda *_, **__: (_ for _ in ()).throw(lost))
        told(made, "Tell me a story.")
        with pytest.raises(EndpointError):
            told(script, "Tell me a story.")
    told(made, "/clear", "Tell me a story.", "/quit", "Never read.")
    assert [one["role"] for one in made.messages] == ["system", "user", "assistant"]
    # Lines of a script are messages, whatever they begin with.
    told(script, "/quit")
    assert [one["content"] for one in script.messages[::2]] == ["/quit"]
    said = capsys.readouterr().err
    assert "prompt: got" in said
    assert "a lost connection" in said


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_stops_the_answer_and_a_second_one_the_chat(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    """A step that waits for a service must not hold a person who gives up."""
    made = conversation(runner, max_new_tokens=100)
    before, step, steps = signal.getsignal(signal.SIGINT), runner.step, SimpleNamespace(count=0)

    def interrupted() -> None:
        steps.count += 1
        if steps.count == 4:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
        step()

    monkeypatch.setattr(runner, "step", interrupted)
    lines = ("Tell me a story about a fox.", "Tell me another one.")
    if signals == 2:
        with pytest.raises(KeyboardInterrupt):
            told(made, *lines)
    else:
        told(made, *lines)
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
