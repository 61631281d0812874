"""What clients send beside what is documented: harmless values are accepted, others refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.serve import FakeEngine, call, chat, complete, serving

UNUSED: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "session_id": "s",
    "chat_id": "c",
    "id_slot": -1,
    "spaces_between_special_tokens": True,
}
# The neutral value, and one that would change the answer.
NEUTRAL: dict[str, tuple[Any, Any]] = {
    "suffix": (None, "end"),
    "prompt_logprobs": (None, 1),
    "verbosity": (None, "low"),
    "allowed_token_ids": (None, [1]),
    "bad_words": ([], ["a"]),
    "chat_template_kwargs": ({}, {"a": 1}),
    "continue_final_message": (False, True),
    "detokenize": (True, False),
    "early_stopping": (False, True),
    "return_token_ids": (False, True),
    "return_tokens_as_token_ids": (False, True),
    "timings_per_token": (False, True),
    "tools": ([], [{}]),
    "best_of": (1, 2),
}


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("name", [*UNUSED, *NEUTRAL])
def test_harmless_extras_are_accepted(ask: Any, name: str) -> None:
    given = UNUSED[name] if name in UNUSED else NEUTRAL[name][0]
    for value in (given, None):
        assert ask(FakeEngine(), **{name: value}).status == 200


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("name", NEUTRAL)
def test_what_would_change_the_answer_is_refused_by_name(ask: Any, name: str) -> None:
    reply = ask(FakeEngine(), **{name: NEUTRAL[name][1]})
    assert (reply.status, reply.error()["param"].split(".")[1]) == (400, name)
    if name in ("tools", "bad_words", "chat_template_kwargs"):
        assert reply.error()["message"].endswith("nothing: this is not supported")


def test_embeddings_accept_the_same_extras() -> None:
    body = {"input": "a", "truncate_prompt_tokens": None} | UNUSED
    assert call(serving(), "POST", "/v1/embeddings", body).status == 200
