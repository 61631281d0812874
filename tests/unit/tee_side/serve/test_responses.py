"""`/v1/responses` says what a chat says, in items and in OpenAI's order of events."""

import json
from dataclasses import replace
from typing import Any

import openai.types.responses as sdk
from pydantic import TypeAdapter

from protocol.errors import EndpointError
from tests.kit.rows import each_row
from tests.kit.serve import FakeEngine, Reply, call, compile_grammar
from tests.unit.tee_side.serve.test_chat import CALL, THOUGHT, WEATHER, prompt, serves

FLAT = {"type": "function", **WEATHER["function"], "strict": False}
HI = {"role": "user", "content": "hi"}
CHOICE = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "weather"}],
}
SAID = f"{THOUGHT}Let me see.\n{CALL}"
ARGUMENTS = '{"city": "Paris"}'


def image(kind: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": f"input_{kind}"}]}


# One turn of the assistant.
JOINED = [
    *({"type": "reasoning", "summary": [{"text": text}]} for text in ("a", None)),
    image("image") | {"role": "assistant"},
]


def respond(said: str, engine: FakeEngine | None = None, **body: Any) -> tuple[Reply, Any]:
    found = serves(said)
    found = found if engine is None else replace(found, engine=engine)
    asked = {"input": "Hello", "max_output_tokens": 500} | body
    return call(found, "POST", "/v1/responses", asked), found.engine


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """Return the events, each of which OpenAI's SDK takes; their names are on lines before."""
    found = []
    for lines in reply.text.split("\n\n")[:-1]:
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        event.pop("obfuscation", None)
        TypeAdapter(sdk.ResponseStreamEvent).validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response_has_an_item_for_thinking_text_and_each_call() -> None:
    whole = respond(SAID, tools=[FLAT])[0].json()
    sdk.Response.model_validate(whole)
    reasoning, message, called = whole["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    assert (called["name"], called["arguments"]) == ("weather", ARGUMENTS)
    assert (whole["status"], whole["store"], whole["tools"]) == ("completed", False, [FLAT])
    usage = whole["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


def test_a_stream_tells_the_same_in_openai_s_order() -> None:
    events = events_of(respond(SAID, tools=[FLAT], stream=True)[0])
    kinds = [event["type"].removeprefix("response.") for event in events]
    told = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    part = ("content_part.done", "output_item.done")
    assert told == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *part,
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *part,
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
        "completed",
    ]
    for name, index, text in (
        ("reasoning_text", 0, "hm"),
        ("output_text", 1, "Let me see."),
        ("function_call_arguments", 2, ARGUMENTS),
    ):
        deltas = [event for event in events if event["type"] == f"response.{name}.delta"]
        assert "".join(event["delta"] for event in deltas) == text
        assert {event["output_index"] for event in deltas} == {index}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_log_probabilities_stand_beside_the_text_that_their_tokens_make() -> None:
    """Some are no text before others have come; those of thinking are left out."""
    said, asked = "Hi \U0001f44b\U0001f3fd.", {"top_logprobs": 2, "stream": True}
    events = events_of(respond(f"{THOUGHT}{said}", **asked)[0])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    told = [one for event in deltas for one in event["logprobs"]]
    assert done["logprobs"] == told
    for event in deltas:
        made = bytes(byte for one in event["logprobs"] for byte in one["bytes"])
        assert made.decode().strip() == event["delta"].strip()
    assert bytes(byte for one in told for byte in one["bytes"]).decode().strip() == said
    assert {len(one["top_logprobs"]) for one in told} == {2}


def test_a_stream_that_is_cut_or_fails_says_so() -> None:
    events = events_of(respond(SAID, stream=True, max_output_tokens=9)[0])
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == ("response.incomplete", "incomplete")
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    (cut,) = respond(CALL, tools=[FLAT], stop="Par")[0].json()["output"]
    assert (cut["type"], cut["status"]) == ("function_call", "incomplete")
    failing = FakeEngine(error=EndpointError("engine", got="a", expected="b"), fail_after=2)
    assert events_of(respond("", failing, stream=True)[0])[-1]["type"] == "error"


def test_items_become_the_turns_of_a_chat() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"text": "wh"}]},
        {"type": "reasoning", "summary": [{"text": "y"}, {"text": None}]},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "weather",
            "arguments": ARGUMENTS,
            "parsed_arguments": {},
        },
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Sun"}],
        },
        {"role": "user", "content": "and now?"},
    ]
    _, engine = respond("x", input=items, instructions="be brief", reasoning={"effort": "none"})
    assert prompt(engine) == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\nhi<|im_end|>"
        '<|im_start|>assistant\n<think>why</think><tool_call>weather {"city": "Paris"}</tool_call>'
        "<|im_end|><|im_start|>tool\nsunny(weather)<|im_end|><|im_start|>assistant\nSun<|im_end|>"
        "<|im_start|>user\nand now?<|im_end|><|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@each_row(
    ("body", "kind"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "json_schema"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "weather"}}, "tool schema"),
        (
            {
                "tools": [FLAT],
                "tool_choice": CHOICE,
            },
            "tool schema",
        ),
    ],
)
def test_what_a_reply_follows_is_as_in_a_chat(body: dict[str, Any], kind: str) -> None:
    found = replace(serves("x"), compile_grammar=compile_grammar)
    reply = call(found, "POST", "/v1/responses", {"input": "a"} | body)
    assert reply.status == 200, reply.text
    engine: Any = found.engine
    assert engine.requests[0].grammar.kind == kind


@each_row(
    ("body", "param", "said"),
    [
        ({"store": True}, "body.store", "false: no answer is kept here"),
        ({"previous_response_id": "r"}, "body.previous_response_id", "its earlier items in input"),
        ({"conversation": "c"}, "body.conversation", "its earlier items in input"),
        ({"background": True}, "body.background", "false: an answer comes with its request"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "body.input.0", "earlier items"),
        ({"tools": [{"type": "web_search"}]}, "body.tools.0", "no tool runs here"),
        ({"truncation": "auto"}, "body.truncation", "disabled"),
        # What a chat would say of it, by this API's names and places.
        ({"input": [HI, image("image")]}, "body.input.1.content.0", "images"),
        ({"input": [HI, {"role": "user"}]}, "body.input.1.content", "a value"),
        (
            {"input": [HI, HI | {"content": [{"type": "text", "text": "a", "x": 1}]}]},
            "body.input.1.content.0.x",
            "",
        ),
        ({"input": [HI, {"type": "function_call"}]}, "body.input.1.name", "a value"),
        ({"input": [HI, *JOINED]}, "body.input.3.content.0", "images"),
        ({"tools": [FLAT], "tool_choice": {"type": "function"}}, "body.tool_choice.name", "a val"),
        ({"instructions": "a", "input": [HI, {"content": "a"}]}, "body.input.1", "a role"),
        ({"instructions": "a", "input": [HI, image("file")]}, "body.input.1.content.0", "images"),
        ({"text": {"format": {"type": "json_schema"}}}, "body.text.format.schema", "a value"),
        ({"text": {"format": {"type": "text", "x": 1}}}, "body.text.format.x", "no such field"),
        ({"unheard_of": 1}, "body.unheard_of", "no such field"),
        ({"tools": [FLAT | {"x": 1}]}, "body.tools.0.x", "no such field"),
        ({"tools": [WEATHER]}, "body.tools.0.name", "a value"),
        ({"tools": [FLAT | {"name": "a b"}]}, "body.tools.0.name", "letters, digits"),
        (
            {"input": [{"type": "reasoning", "summary": ["a"]}]},
            "body.input.0.summary.0",
            "a JSON object",
        ),
        (
            {"tools": [FLAT], "tool_choice": CHOICE | {"tools": ["weather"]}},
            "body.tool_choice.tools.0",
            "a JSON object",
        ),
        (
            {"tools": [FLAT], "tool_choice": CHOICE | {"tools": 5}},
            "body.tool_choice.tools",
            "a valid list",
        ),
        (
            {"text": {"format": {"type": "text"}}, "response_format": {"type": "text"}},
            "body.text.format",
            "none beside response_format",
        ),
    ],
)
def test_what_needs_a_memory_or_a_tool_of_the_server_s_is_refused(
    body: dict[str, Any], param: str, said: str
) -> None:
    error = respond("x", **body)[0].error()
    assert error["param"] == param
    assert said in error["message"]
