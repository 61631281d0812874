"""A conversation goes on: what does not fit is forgotten, and commands are no messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import EndpointError, PromptError
from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.cli import chat
from tsqp.cli.chat import Conversation
from tsqp.cli.program import model_directory

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
    assert len(made.turns) == len(lines)
    # All of it is in the transcript, and the model was told the system message and the end.
    assert [one["content"] for one in made.messages[1::2]] == lines
    told_last = templates[-1]
    assert told_last[0] == {"role": "system", "content": "Tell stories."}
    assert [one["role"] for one in told_last[1::2]] == ["user"] * (len(told_last) // 2)
    assert told_last[1:-1] == made.messages[-len(told_last) :][:-2]
    assert told_last[-1]["content"] == lines[-1]
    assert 2 < len(told_last) < 12
    context = runner.config.context_length
    assert all(turn.usage.prompt_tokens <= context - 12 for turn in made.turns)
    said = capsys.readouterr().err
    assert "the context is full: the oldest" in said


def test_a_message_that_fits_nowhere_is_refused_and_the_chat_goes_on(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversation(runner)
    told(made, "Tell me a story about a fox.", "story " * 600, "Another one.")
    assert "prompt: got" in capsys.readouterr().err
    assert [one["content"] for one in made.messages[::2]] == [
        "Tell me a story about a fox.",
        "Another one.",
    ]
    with pytest.raises(PromptError):
        told(conversation(runner, in_terminal=False), "story " * 600)


def test_a_service_that_is_lost_for_a_while_does_not_end_a_chat_in_a_terminal(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = conversation(runner)
    lost = EndpointError("unix:///s", got="a lost connection", expected="a gpu-service")
    with monkeypatch.context() as patched:
        patched.setattr(runner, "generate", lambda *_, **__: (_ for _ in ()).throw(lost))
        told(made, "Tell me a story.")
        with pytest.raises(EndpointError):
            told(conversation(runner, in_terminal=False), "Tell me a story.")
    assert "a lost connection" in capsys.readouterr().err
    told(made, "Tell me a story.")
    assert len(made.turns) == 1


def test_commands_of_a_terminal(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    made = conversation(runner)
    told(made, "/system", "/system Be kind.", "/system", "/stats", "/help", "/nothing", "Hello.")
    assert made.messages[0] == {"role": "system", "content": "Be kind."}
    assert len(made.messages) == 3
    said = capsys.readouterr().err
    for text in ("no system message", "Be kind.", "statistics are off", "/nothing is no command"):
        assert text in said
    assert all(f"{name.split()[0]} " in said for name in chat.COMMANDS)
    told(made, "/clear", "/quit", "Never read.")
    assert [one["role"] for one in made.messages] == ["system"]


def test_lines_of_a_script_are_messages_whatever_they_begin_with(runner: Runner) -> None:
    made = conversation(runner, in_terminal=False)
    told(made, "/quit", "")
    assert [one["content"] for one in made.messages[::2]] == ["/quit"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = conversation(runner, max_new_tokens=100)
    before, step, steps = signal.getsignal(signal.SIGINT), runner.step, SimpleNamespace(count=0)

    def interrupted() -> None:
        steps.count += 1
        if steps.count == 4:
            os.kill(os.getpid(), signal.SIGINT)
        step()

    monkeypatch.setattr(runner, "step", interrupted)
    told(made, "Tell me a story about a fox.", "Tell me another one.")
    first, second = made.turns
    assert (len(first.token_ids), first.finish_reason) == (3, "stop")
    assert len(second.token_ids) > 3
    assert made.messages[1]["content"] == first.text != ""
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_ctrl_c_is_not_taken(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for a service must not hold a person who gives up."""
    step = runner.step

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        step()

    monkeypatch.setattr(runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        told(conversation(runner), "Tell me a story about a fox.")


@pytest.mark.parametrize("stats", [True, False])
def test_statistics_can_be_turned_off(
    runner: Runner, stats: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    told(conversation(runner, as_json=False, stats=stats), "Tell me a story.")
    out, err = capsys.readouterr()
    assert out.strip()
    assert ("tokens (" in err) == stats
