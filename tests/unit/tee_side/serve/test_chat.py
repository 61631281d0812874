"""Tools and thinking, from a client's fields to the prompt, and from tokens to the answer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tee_side.chat.template import ChatTemplate
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.app import create_app
from tee_side.serve.exchange import Serving
from tee_side.serve.grammar import GrammarCompiler
from tests.kit.rows import each_row
from tests.kit.serve import (
    FakeEngine,
    Reply,
    ask,
    call,
    connected,
    in_a_loop,
    model,
    serving,
)
from tsqp.run.settings import model_directory

# In the manner of Qwen 3: tools, thinking that can be switched off, results of tools.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<tool_call>{"name":..., "arguments":...}</tool_call><|im_end|>' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + ' ' }}
{{- call.function.arguments | tojson }}{{ '</tool_call>' }}{% endfor %}
{%- if m.name %}{{ '(' + m.name + ')' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}
{%- elif begins %}{{ '<think>\n' }}{% endif %}{% endif %}"""
SPECIAL, OTHERS = (
    ("<|im_start|>", "<|im_end|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@cache
def tokenizer(template: str = TEMPLATE) -> Tokenizer:
    folder = Path(mkdtemp())
    raw = tokenizers.Tokenizer.from_file(str(model_directory("demo") / "tokenizer.json"))
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    raw.add_tokens([AddedToken(name, normalized=False) for name in OTHERS])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), tokenizer().raw.get_vocab_size(), [0])


def serves(said: str, template: str = TEMPLATE, **changes: Any) -> Serving:
    """Return a server whose model says this."""
    read = tokenizer(template)
    engine = FakeEngine(says=read.encode(said, add_special_tokens=False))
    own = {"tokenizer": read, "template": ChatTemplate(read), "max_model_len": 10**6}
    offered = model(**own | changes)
    return serving(engine, model=offered, compile_grammar=compiler().compile)


def talk(said: str, *, template: str = TEMPLATE, **body: Any) -> tuple[Reply, Any]:
    """Send a chat to a model that says this."""
    found = serves(said, template)
    reply = call(found, "POST", "/v1/chat/completions", {"messages": HELLO} | body)
    return reply, found.engine


def told(reply: Reply) -> dict[str, Any]:
    """Return the message, and what a stream's pieces are together."""
    assert reply.status == 200, reply.text
    if reply.headers["content-type"] == "application/json":
        (choice,) = reply.json()["choices"]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    found: dict[str, Any] = {"content": "", "tool_calls": []}
    for event in reply.events()[:-1]:
        for choice in event["choices"]:
            for key, piece in choice["delta"].items():
                if key != "tool_calls":
                    found[key] = found.get(key, "") + piece
            pieces = choice["delta"].get("tool_calls", ())
            # Clients read one of a chunk.
            assert len({piece["index"] for piece in pieces}) == len(pieces)
            for piece in pieces:
                if "id" in piece:
                    found["tool_calls"].append({k: v for k, v in piece.items() if k != "index"})
                else:
                    function = found["tool_calls"][piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
            found["finish_reason"] = choice["finish_reason"]
    found["content"] = found["content"] or None
    return {key: value for key, value in found.items() if value != []}


def prompt(engine: Any) -> str:
    (request,) = engine.requests
    return tokenizer().raw.decode(list(request.prompt_ids), skip_special_tokens=False)


THOUGHT = "<think>\nhm\n</think>\n\n"
SENT_BACK = {"name": "weather", "arguments": '{"city": "Paris"}', "parsed_arguments": {}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CALLED = {"function": {"name": "weather", "arguments": '{"city": "Paris"}'}, "type": "function"}


@each_row("streamed", [{}, STREAMED], ids=["whole", "stream"])
def test_thinking_text_and_calls_are_told_apart(streamed: dict[str, Any]) -> None:
    said = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}"
    reply, engine = talk(said, tools=[WEATHER], max_tokens=500, **streamed)
    found = told(reply)
    calls = found.pop("tool_calls")
    assert [{k: v for k, v in call.items() if k != "id"} for call in calls] == [CALLED] * 2
    assert len({call["id"] for call in calls}) == 2
    assert (found["content"], found["finish_reason"]) == ("Let me see.", "tool_calls")
    assert found["reasoning_content"] == found["reasoning"] == "hm"
    usage = (reply.events()[-2] if streamed else reply.json())["usage"]
    # Its second sign among them.
    thought = len(tokenizer().encode("\nhm\n</think>", add_special_tokens=False))
    assert usage["completion_tokens_details"]["reasoning_tokens"] == thought
    assert engine.requests[0].grammar is None
    one, _ = talk(said, tools=[WEATHER], max_tokens=500, parallel_tool_calls=False, **streamed)
    assert len(told(one)["tool_calls"]) == 1


@each_row(("body", "finish"), [({"stop": "Par"}, "stop"), ({"max_tokens": 33}, "length")])
def test_a_call_that_is_cut_ends_as_a_text_does(body: dict[str, Any], finish: str) -> None:
    """A client that is told of a call runs it."""
    for more in ({}, STREAMED):
        found = told(talk(CALL, **{"tools": [WEATHER], "max_tokens": 500} | body | more)[0])
        (call,) = found["tool_calls"]
        assert call["function"]["arguments"].startswith('{"city": "')
        assert not call["function"]["arguments"].endswith("}")
        assert found["finish_reason"] == finish


NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
LIST = {"type": "function", "function": {"name": "weather", "parameters": {"type": "array"}}}
JSON = {"type": "json_object"}
OTHER = {"type": "function", "function": {"name": "other"}}


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


@each_row(
    ("body", "takes", "refuses"),
    [
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{CALL}"], ["Hi"]),
        ({"tool_choice": NAMED}, [CALL], ["Hi", f"{CALL}\n{CALL}"]),
        ({"tool_choice": allowed("required"), "tools": [OTHER, WEATHER]}, [CALL], ["Hi"]),
        ({"tools": [STRICT]}, [CALL, "Hi", THOUGHT + CALL], [CALL.replace("Paris", "\n")]),
        # Of arguments without a type, or of another one: they are an object all the same.
        (
            {"tool_choice": "required", "tools": [LIST]},
            [CALL],
            [CALL.replace('{"city": "Paris"}', "[]")],
        ),
        ({"response_format": JSON}, [CALL, "{}", f"{THOUGHT}{{}}"], ["Hi"]),
        # Without tools, thinking stands before what follows a grammar.
        (
            {"tools": [], "response_format": {"type": "json_object"}},
            ["{}", f"{THOUGHT}{{}}"],
            [CALL],
        ),
        ({"guided_regex": "ab*"}, ["abb", f"{THOUGHT}a"], ["b", CALL]),
    ],
)
def test_a_reply_follows_what_is_asked_of_it(
    body: dict[str, Any], takes: Sequence[str], refuses: Sequence[str]
) -> None:
    reply, engine = talk("x", **{"tools": [WEATHER]} | body)
    assert reply.status == 200, reply.text
    grammar: Any = engine.requests[0].grammar
    for text, well in [(one, True) for one in takes] + [(one, False) for one in refuses]:
        ids = tokenizer().encode(text, add_special_tokens=False)
        matcher = grammar.copy()._matcher
        taken = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids)
        assert (taken and matcher.is_accepting()) == well, text


def test_a_prompt_is_what_the_conversation_says() -> None:
    """What an answer had beside comes back; a sign in a client's words stays text."""
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi<|im_end|>"}], "id": "m1"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "why",
            "annotations": [],
            "refusal": None,
            "audio": None,
            "parsed": {},
            "images": [],
            "provider_specific_fields": {"refusal": None},
            "thinking_blocks": [{}],
            "reasoning_details": [{}],
            "tool_calls": [
                {"id": "c", "type": "function", "function": SENT_BACK},
                {"function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny", "cache_control": {}},
        {"role": "assistant", "content": "<think>so</think>Sun."},
        {"role": "user", "content": "thanks"},
    ]
    reply, engine = talk("ok", messages=history, tools=[WEATHER], tool_choice="none")
    assert reply.status == 200, reply.text
    assert prompt(engine) == (
        "<|im_start|>system\nbe brief<|im_end|><|im_start|>user\nhi<|im_end|><|im_end|>"
        '<|im_start|>assistant\n<think>why</think><tool_call>weather {"city": "Paris"}</tool_call>'
        "<tool_call>now {}</tool_call>"
        "<|im_end|><|im_start|>tool\nsunny(weather)<|im_end|>"
        "<|im_start|>assistant\n<think>so</think>Sun.<|im_end|>"
        "<|im_start|>user\nthanks<|im_end|><|im_start|>assistant\n"
    )
    end = tokenizer().raw.token_to_id("<|im_end|>")
    assert engine.requests[0].prompt_ids.count(end) == len(history)


def test_thinking_that_a_template_does_not_read_stays_in_the_text() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '</think>' if x }}"
    history = [{"role": "assistant", "content": "<think>so</think>Sun."}]
    reply, engine = talk("<think>a</think>b", template=plain, messages=history)
    assert prompt(engine) == "<think>so</think>Sun."
    assert told(reply)["reasoning"] == "a"


@each_row(
    ("body", "said", "reasoning", "content"),
    [
        ({}, "<think>a</think>b", "a", "b"),
        ({"chat_template_kwargs": {"begins": True}}, "a</think>b", "a", "b"),
        ({"reasoning_effort": "none"}, "<think>b", None, "<think>b"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "b", None, "b"),
        ({"reasoning_effort": "high", "max_tokens": 2}, "<think>a b c", "a", ""),
        # A client's own sign begins nothing.
        ({"messages": [{"role": "user", "content": "<think>"}]}, "b</think>", None, "b</think>"),
    ],
)
def test_thinking_is_on_or_off_as_asked(
    body: dict[str, Any], said: str, reasoning: str | None, content: str
) -> None:
    message = told(talk(said, **body)[0])
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


@each_row(
    ("body", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "body.tools"),
        ({"tool_choice": "required"}, "body.tools"),
        ({"tools": [WEATHER], "tool_choice": OTHER}, "body.tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "body.tools.0"),
        ({"tools": [WEATHER], "guided_regex": "a", "tool_choice": "required"}, "body.tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "body.tools.0.function.name",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "body.chat_template_kwargs.messages"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "body.continue_final_message",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "body.response_format.schema"),
        ({"stream": True, "prompt_logprobs": 1}, "body.prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(body: dict[str, Any], param: str) -> None:
    reply, engine = talk("x", **body)
    assert (reply.status, reply.error()["param"]) == (400, param)
    assert not engine.requests


DEEP = reduce(lambda below, _: [below], range(900), list[Any]())


@each_row(
    "parameters",
    [
        {"properties": {f"p{at}": {"type": "string"} for at in range(9000)}},
        {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]},
        {"properties": {"x": {"$ref": "http://a/b"}}, "required": ["x"]},
        {"properties": {"x": {"minimum": math.nan}}},
        {"properties": {"x": {"minimum": "a"}}},
        {"properties": ["x"]},
        {"properties": {"x": {}}, "required": 5},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_and_the_next_request_is_fine(
    parameters: Mapping[str, Any],
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    # Of calls that are JSON, and of those that are tagged.
    for source in (TEMPLATE, TEMPLATE.replace("<tool_call>{", "<tool_call><function={")):
        reply, _ = talk(CALL, tools=[tool], tool_choice="required", template=source)
        assert (reply.status, reply.error()["param"]) == (400, "body.tools")
    # Nothing has to follow it then.
    assert told(talk(CALL, tools=[tool])[0])["tool_calls"]


@each_row(
    "body",
    [
        {"chat_template_kwargs": {"a": DEEP}},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": DEEP}}}]},
    ],
)
def test_what_is_nested_too_deep_is_refused(body: dict[str, Any]) -> None:
    reply, _ = talk("x", **body)
    assert (reply.status, reply.error()["param"]) == (400, "body.messages")


@each_row(
    ("body", "param"),
    [
        (
            {
                "messages": HELLO,
                "chat_template_kwargs": {"begins": True},
                "tools": [],
                "add_special_tokens": False,
            },
            None,
        ),
        ({"messages": HELLO, "input": "a"}, "body"),
        ({}, "body"),
        ({"input": "a", "tools": [WEATHER]}, "body.tools"),
        ({"input": "a", "chat_template_kwargs": {"a": 1}}, "body.chat_template_kwargs"),
        ({"input": "a", "documents": [{"text": "a"}]}, "body.documents"),
        ({"messages": HELLO, "documents": [{"text": "a"}]}, "body.documents"),
        ({"messages": HELLO, "prompt_name": "query"}, "body.prompt_name"),
        ({"messages": [{"role": "user"}]}, "body.messages.0.content"),
    ],
)
def test_a_conversation_has_a_vector(body: dict[str, Any], param: str | None) -> None:
    reply = call(found := serves("x"), "POST", "/v1/embeddings", body)
    assert (None if reply.status == 200 else reply.error()["param"]) == param
    if param is None:
        assert prompt(found.engine).endswith("Hello<|im_end|><|im_start|>assistant\n<think>\n")


@in_a_loop
async def test_a_stream_that_is_left_within_a_call_holds_nothing_back() -> None:
    found = serves(CALL)
    engine: Any = found.engine
    engine.hold, app = True, create_app(found)
    asked = {"messages": HELLO, "tools": [WEATHER], "stream": True, "max_tokens": 500}
    async with connected(app, "POST", "/v1/chat/completions", asked) as left:
        await engine.submitted.wait()
        for delivery in engine._script(engine.requests[0])[:-8]:
            engine.step(delivery)
        while b"arguments" not in b"".join(left.reply.writes):
            left.changed.clear()
            await left.changed.wait()
    await engine.was_cancelled.wait()
    engine.hold = False
    (call_of_next,) = told(await ask(app, "POST", "/v1/chat/completions", asked))["tool_calls"]
    assert call_of_next["function"] == CALLED["function"]


def test_a_thousand_tools_are_as_good_as_one() -> None:
    tools = [
        {"type": "function", "function": {"name": f"t{at}", "parameters": {}}} for at in range(1000)
    ]
    reply, _ = talk(CALL, tools=[*tools, WEATHER], max_tokens=500)
    assert told(reply)["tool_calls"]


def test_a_form_of_calls_is_known_by_the_template_or_said() -> None:
    """Elsewhere tools are refused; a template that writes none tells the model of none."""
    known = "{% for t in tools %}{{ t }}{% endfor %}<tool_call>"
    unknown = known.replace("<tool_call>", "")
    asked = {"messages": HELLO, "tools": [WEATHER], "max_tokens": 500}
    for template, parser, calls in (
        (known, None, True),
        (unknown, "hermes", True),
        (unknown, None, None),
        (known, "glm", False),
        (known.replace("tools", "x"), "hermes", None),
    ):
        found = serves(CALL, template, tool_parser=parser)
        reply = call(found, "POST", "/v1/chat/completions", asked)
        if calls is None:
            assert (reply.status, reply.error()["param"]) == (400, "body.tools")
        else:
            assert ("tool_calls" in told(reply)) == calls


def test_how_much_to_think_is_a_request_s_or_the_server_s() -> None:
    for own, asked, thinks in (
        ("none", {}, False),
        ("none", {"reasoning_effort": "low"}, True),
        ("low", {"reasoning_effort": "none"}, False),
        ("none", {"chat_template_kwargs": {"enable_thinking": True}}, True),
        (None, {}, True),
    ):
        found = serves("x", reasoning_effort=own)
        call(found, "POST", "/v1/chat/completions", {"messages": HELLO} | asked)
        assert prompt(found.engine).endswith("assistant\n") == thinks
    always = "{{ messages }}</think>"
    reply, _ = talk("x", template=always, reasoning_effort="none")
    assert (reply.status, reply.error()["param"]) == (400, "body.reasoning_effort")
    # What the server would rather have is not asked of a client.
    found = serves("x", always, reasoning_effort="none")
    assert call(found, "POST", "/v1/chat/completions", {"messages": HELLO}).status == 200


def test_what_a_request_does_not_say_is_the_model_s_own() -> None:
    own = {"temperature": 0.5, "top_k": 20}
    found = serving(engine := FakeEngine(), model=replace(model(), sampling=own))
    for more in ({}, {"temperature": 0}):
        call(found, "POST", "/v1/chat/completions", {"messages": HELLO, **more})
    sampled = [request.sampling for request in engine.requests]
    assert [(one.temperature, one.top_k) for one in sampled] == [(0.5, 20), (0, 20)]
    (described,) = call(found, "GET", "/v1/models").json()["data"]
    assert described["default_sampling_params"] == own
