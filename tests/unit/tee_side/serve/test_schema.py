"""What a client may send: each field is done, accepted without effect, or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tee_side.serve import schema
from tests.kit.rows import each_row
from tests.kit.serve import FakeEngine, Reply, call, chat, complete, model, serving

Ask = Callable[..., Reply]


def embed(engine: FakeEngine | None = None, **body: Any) -> Reply:
    return call(serving(engine), "POST", "/v1/embeddings", {"input": [5, 6]} | body)


# Clients' own; none changes an answer.
_NAMES = """user metadata store service_tier prompt_cache_key prompt_cache_retention
safety_identifier parallel_tool_calls priority request_id cache_prompt guided_decoding_backend
spaces_between_special_tokens session_id chat_id id_slot"""
UNUSED: dict[str, Any] = dict.fromkeys(_NAMES.split(), "x")
# The value that changes nothing, and one that would change the answer.
NEUTRAL: dict[str, tuple[Any, Any]] = {
    "best_of": (1, 2),
    "functions": ([], [{}]),
    "function_call": ("none", "auto"),
    "tools": ([], [{"type": "function"}]),
    "tool_choice": ("none", "auto"),
    "audio": (None, {"voice": "x"}),
    "modalities": (["text"], ["text", "audio"]),
    "prediction": (None, {}),
    "reasoning_effort": ("none", "high"),
    "web_search_options": (None, {}),
    "min_tokens": (0, 1),
    "use_beam_search": (False, True),
    "length_penalty": (1, 1.5),
    "include_stop_str_in_output": (False, True),
    "skip_special_tokens": (True, False),
    "truncate_prompt_tokens": (None, 5),
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
}
IN_CHATS = {"add_special_tokens": (False, True), "chat_template": (None, "{{ 1 }}")}


@each_row("ask", [complete, chat, embed], ids=lambda ask: ask.__name__)
def test_what_is_unused_or_left_at_its_only_value_changes_nothing(ask: Ask) -> None:
    assert UNUSED.keys() == schema._Unused.model_fields.keys()
    assert NEUTRAL.keys() == schema._NotSupported.model_fields.keys()
    only = {name: values[0] for name, values in NEUTRAL.items()}
    if ask is chat:
        only |= {name: values[0] for name, values in IN_CHATS.items()} | {"echo": False}
    if ask is embed:
        only = {"truncate_prompt_tokens": None}
    engine = FakeEngine()
    ask(engine)
    for fields in (UNUSED, only, dict.fromkeys([*UNUSED, *only])):
        assert ask(engine, **fields).status == 200
    first, *others = map(asdict, engine.requests)
    assert others == [first] * 3


@each_row("ask", [complete, chat], ids=lambda ask: ask.__name__)
def test_what_would_change_the_answer_is_refused_by_name(ask: Ask) -> None:
    engine, told = FakeEngine(), {}
    for name, (_, other) in (NEUTRAL | (IN_CHATS if ask is chat else {})).items():
        told[name] = ask(engine, **{name: other}).error()
    assert [name for name in told if told[name]["param"].split(".")[:2] != ["body", name]] == []
    for name in ("tools", "bad_words", "chat_template_kwargs"):
        assert told[name]["message"].endswith("nothing: this is not supported")
    assert embed(truncate_prompt_tokens=5).error()["param"] == "body.truncate_prompt_tokens"
    assert not engine.requests


USER = {"role": "user", "content": "Hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HIDDEN, LONG = model().config.hidden_size, "a " * model().max_model_len


@each_row(
    ("ask", "field", "taken", "refused"),
    [
        (complete, "n", [1, 128], [0, 129, 1.5, "2", True]),
        (complete, "max_tokens", [1], [0, -1, 2**31, "5"]),
        (chat, "max_tokens", [1], [0]),
        (chat, "max_completion_tokens", [1], [0]),
        (complete, "stop", ["a", ["a"] * 16], ["", "a" * 101, ["a"] * 17, ["a", ""], 5]),
        (complete, "stop_token_ids", [[0, 1023]], [[1024], [-1], ["5"]]),
        (complete, "seed", [0, 2**62 - 1], [-1, 2**62, 0.5]),
        (complete, "temperature", [0, 100], [-0.1, 100.1, "0.5", math.nan, math.inf, -math.inf]),
        (complete, "top_p", [0.1, 1], [0, 1.1]),
        (complete, "top_k", [-1, 0], [-2]),
        (complete, "min_p", [0, 1], [-0.1, 1.1]),
        (complete, "frequency_penalty", [-2, 2], [-2.1, 2.1]),
        (complete, "presence_penalty", [-2, 2], [-2.1, 2.1]),
        (complete, "repetition_penalty", [0.01, 100], [0, 101]),
        (
            complete,
            "logit_bias",
            [{"1023": -100, "0": 100}, {}],
            [{"5": 101}, *({key: 1} for key in ("1024", "-1", "a", "1" * 5000, "²"))],
        ),
        (complete, "logprobs", [0, 20], [-1, 21, True]),
        (chat, "top_logprobs", [0], [1, 21, -1]),
        (complete, "stream_options", [None], [{"include_usage": True}]),
        (complete, "cache_salt", ["s" * 256], ["s" * 257]),
        (complete, "ignore_eos", [True], ["yes"]),
        (embed, "dimensions", [HIDDEN], [HIDDEN - 1]),
        (embed, "pooling", ["last", "mean"], ["max"]),
        (embed, "encoding_format", ["float", "base64"], ["int8"]),
        (
            complete,
            "prompt",
            ["", "a", ["a", "b"], [5], [[5], [6]]],
            [[], [[]], [[5], []], [1024], [[5], [9, 1024]], [-1], "\ud800", ["a"] * 2049, LONG],
        ),
        (embed, "input", ["a", [5] * 512], [[], [[]], [1024], None, {}, [5] * 513]),
        (
            chat,
            "messages",
            [[USER], [{"role": "assistant"}, USER]],
            [None, "Hello", [], {}, [{}], ["Hello"], [USER, {"role": 123, "content": "a"}]]
            + [[{"role": role, "content": "a"}] for role in ("tool", "function")]
            + [[{"role": "user", "content": one}] for one in (None, 5, "\ud800", LONG, [IMAGE])]
            + [[{"role": "user"}], [USER | {"weight": 1}], [USER | {"tool_calls": [{}]}]],
        ),
    ],
    ids=lambda row: f"{row[0].__name__} {row[1]}",
)
def test_a_value_is_within_its_bounds(
    ask: Ask, field: str, taken: Sequence[Any], refused: Sequence[Any]
) -> None:
    engine = FakeEngine()
    assert [value for value in taken if ask(**{field: value}).status != 200] == []

    def named(value: Any) -> list[str]:
        return str(ask(engine, **{field: value}).error()["param"]).split(".")[:2]

    assert [value for value in refused if named(value) != ["body", field]] == []
    assert not engine.requests


@each_row(
    ("ask", "body", "param"),
    [
        # Where a value fitted furthest.
        (complete, {"prompt": [1, 2, "a"]}, "body.prompt.2"),
        (complete, {"prompt": [[1], [2, 3.5]]}, "body.prompt.1.1"),
        (chat, {"messages": [USER, {"content": "a"}]}, "body.messages.1.role"),
        (
            chat,
            {"messages": [USER | {"content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "body.messages.0.content.1.type",
        ),
        # All samples are counted.
        (complete, {"prompt": [[5]] * 1025, "n": 2}, "body.prompt"),
        (chat, {"top_logprobs": 3, "logprobs": False}, "body.top_logprobs"),
        (complete, {"prompt": "", "add_special_tokens": False}, "body.prompt"),
        # An unknown field is named where it looks like one.
        (complete, {"nosuch": 1}, "body.nosuch"),
        (complete, {"no such": 1}, "body"),
        (complete, {"a" * 41: 1}, "body"),
        (complete, {"été": 1}, "body"),
    ],
)
def test_the_place_of_a_fault_is_named(ask: Ask, body: dict[str, Any], param: str) -> None:
    reply = ask(**body)
    assert (reply.status, reply.error()["param"]) == (400, param)


def test_a_body_of_many_faults_is_not_read_to_its_end() -> None:
    for body in (
        {f"field{at}": 1 for at in range(2000)},
        {"logit_bias": {str(at): 1000 for at in range(2000)}},
    ):
        assert complete(**body).error()["message"].endswith("fewer fields")
    for prompt in ([1] * 9 + ["a"] * 9**4, [{}] * 9**4):
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(schema.CompletionRequest).validate_python({"prompt": prompt})
        assert caught.value.error_count() < 10
