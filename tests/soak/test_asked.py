"""What is noticed of a wrong answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.soak.asked import CHAT, COMPLETIONS, Job, Said, Tally
from tests.soak.served import Reply

_TEXTS = ("the cat sat on a wall", "a dog ran to the hill")
OTHERS = [Job(COMPLETIONS, {}, 3, (Said("once there was a bird who sang", (), (), "stop"),))]
Events = list[dict[str, Any]]


def job(path: str) -> Job:
    said = [_said(text) for text in _TEXTS]
    return Job(path, {"logprobs": 0}, 5, tuple(said))


def _said(text: str) -> Said:
    names = tuple(word if at == 0 else f" {word}" for at, word in enumerate(text.split(" ")))
    return Said(text, names, tuple(-0.5 * at for at in range(len(names))), "length")


def _choice(path: str, index: int, said: Said, places: range) -> dict[str, Any]:
    last, names = places.stop == len(said.tokens), [said.tokens[at] for at in places]
    choice: dict[str, Any] = {"index": index, "finish_reason": said.finish if last else None}
    if path == CHAT:
        content = [{"token": said.tokens[at], "logprob": said.logprobs[at]} for at in places]
        return choice | {"delta": {"content": "".join(names)}, "logprobs": {"content": content}}
    before = [len("".join(said.tokens[:at])) for at in places]
    logprobs = {"tokens": names, "token_logprobs": [said.logprobs[at] for at in places]}
    return choice | {"text": "".join(names), "logprobs": logprobs | {"text_offset": before}}


def events_of(asked: Job) -> Events:
    found: Events = []
    if asked.path == CHAT:
        opening: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        found = [{"choices": [opening | {"index": i, "finish_reason": None}]} for i in range(2)]
    for at in range(len(asked.choices[0].tokens)):
        for index, said in enumerate(asked.choices):
            found.append({"choices": [_choice(asked.path, index, said, range(at, at + 1))]})
    used = {"prompt_tokens": asked.prompt_tokens, "completion_tokens": asked.new_tokens}
    return [event | {"id": "x"} for event in [*found, {"choices": [], "usage": used}]]


def reply_of(events: Events, *, ends: bool = True) -> Reply:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    body = "".join([*lines, "data: [DONE]\n\n" if ends else ""])
    return Reply(200, {"content-type": "text/event-stream"}, body.encode())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_right_stream(path: str) -> None:
    tally = Tally()
    assert tally.judge(job(path), reply_of(events_of(job(path))), OTHERS)
    assert tally == Tally(right=1, tokens=12, prompt_tokens=5)


def test_a_right_answer_in_one_piece() -> None:
    asked = job(COMPLETIONS)
    choices = [_choice(asked.path, i, said, range(6)) for i, said in enumerate(asked.choices)]
    used = {"prompt_tokens": 5, "completion_tokens": 12}
    body = json.dumps({"choices": choices, "usage": used}).encode()
    assert Tally().judge(asked, Reply(200, {"content-type": "application/json"}, body))


def _without_one(events: Events) -> Events:
    return events[:5] + events[6:]


def _one_twice(events: Events) -> Events:
    return events[:6] + events[5:]


def _out_of_order(events: Events) -> Events:
    return [*events[:4], events[6], events[5], events[4], *events[7:]]


def _another_id(events: Events) -> Events:
    return [*events[:5], events[5] | {"id": "y"}, *events[6:]]


def _goes_on(events: Events) -> Events:
    return [*events[:-1], events[5], events[-1]]


def _usage_twice(events: Events) -> Events:
    return [*events, events[-1]]


def _another_count(events: Events) -> Events:
    return [*events[:-1], {**events[-1], "usage": {"prompt_tokens": 5, "completion_tokens": 11}}]


def _another_logprob(events: Events) -> Events:
    return json.loads(json.dumps(events).replace("-1.5", "-1.25"))  # type: ignore[no-any-return]


def _another_offset(events: Events) -> Events:
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(events).replace('"text_offset": [7]', '"text_offset": [8]')
    )


def _of_another(events: Events) -> Events:
    text = json.dumps(events).replace('" cat"', '" there was a bird"')
    return json.loads(text)  # type: ignore[no-any-return]


def _broken_off(events: Events) -> Events:
    return [*events[:5], {"error": {"code": "engine_error"}}]


WRONG: list[tuple[Callable[[Events], Events], set[str]]] = [
    (_without_one, {"lost"}),
    (_one_twice, {"duplicated"}),
    (_out_of_order, {"duplicated"}),
    (_another_id, {"duplicated"}),
    (_goes_on, {"duplicated"}),
    (_usage_twice, {"duplicated"}),
    (_another_count, set()),
    (_another_logprob, set()),
    (_another_offset, {"duplicated"}),
    (_of_another, {"crossed"}),
    (_broken_off, {"lost"}),
]


@pytest.mark.parametrize(("change", "kinds"), WRONG, ids=lambda of: getattr(of, "__name__", ""))
def test_a_wrong_stream(change: Callable[[Events], Events], kinds: set[str]) -> None:
    tally, asked = Tally(), job(COMPLETIONS)
    assert not tally.judge(asked, reply_of(change(events_of(asked))), OTHERS)
    assert (tally.right, tally.wrong) == (0, 1)
    assert {n for n in ("lost", "duplicated", "crossed") if getattr(tally, n)} >= kinds


@pytest.mark.parametrize(
    "reply", [Reply(), Reply(503), reply_of(events_of(job(COMPLETIONS)), ends=False)]
)
def test_an_answer_without_an_end_is_lost(reply: Reply) -> None:
    tally = Tally()
    assert not tally.judge(job(COMPLETIONS), reply, OTHERS)
    assert (tally.lost, tally.wrong) == (1, 1)
