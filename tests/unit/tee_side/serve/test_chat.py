"""Tools and thinking, from a client's fields to the prompt, and from tokens to the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tee_side.chat.template import ChatTemplate
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.grammar import GrammarCompiler
from tests.kit.rows import each_row
from tests.kit.serve import FakeEngine, Reply, call, model, serving
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
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@cache
def tokenizer() -> Tokenizer:
    folder = Path(mkdtemp())
    raw = tokenizers.Tokenizer.from_file(str(model_directory("demo") / "tokenizer.json"))
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    raw.add_tokens([AddedToken(name, normalized=False) for name in OTHERS])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), tokenizer().raw.get_vocab_size(), [0])


def talk(said: str, **body: Any) -> tuple[Reply, FakeEngine]:
    """Send a chat to a model that says this."""
    engine = FakeEngine(says=tokenizer().encode(said, add_special_tokens=False))
    offered = model(tokenizer=tokenizer(), template=ChatTemplate(tokenizer()), max_model_len=10**6)
    found = serving(engine, model=offered, compile_grammar=compiler().compile)
    messages = [{"role": "user", "content": "Hello"}]
    return call(found, "POST", "/v1/chat/completions", {"messages": messages} | body), engine


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


def prompt(engine: FakeEngine) -> str:
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


NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
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
        ({"response_format": JSON}, [CALL, "{}", f"{THOUGHT}{{}}"], ["Hi"]),
        # Without tools, thinking stands before what follows a grammar.
        (
            {"tools": [], "response_format": {"type": "json_object"}},
            ["{}", f"{THOUGHT}{{}}"],
            [CALL],
        ),
        ({"tools": [], "guided_regex": "ab*"}, ["abb", f"{THOUGHT}a"], ["b"]),
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
            "tool_calls": [{"id": "c", "type": "function", "function": SENT_BACK}],
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
        "<|im_end|><|im_start|>tool\nsunny(weather)<|im_end|>"
        "<|im_start|>assistant\n<think>so</think>Sun.<|im_end|>"
        "<|im_start|>user\nthanks<|im_end|><|im_start|>assistant\n"
    )
    end = tokenizer().raw.token_to_id("<|im_end|>")
    assert engine.requests[0].prompt_ids.count(end) == len(history)


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
        ({"continue_final_message": True, "add_generation_prompt": True}, "body.messages"),
        ({"stream": True, "prompt_logprobs": 1}, "body.prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(body: dict[str, Any], param: str) -> None:
    reply, engine = talk("x", **body)
    assert (reply.status, reply.error()["param"]) == (400, param)
    assert not engine.requests


HUGE = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(9000)}}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@each_row(
    "schema",
    [HUGE, LOOP, {"$ref": "http://a/b"}],
)
def test_a_schema_that_cannot_be_followed_is_refused_and_the_next_request_is_fine(
    schema: Mapping[str, Any],
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    reply, _ = talk(CALL, tools=[tool], tool_choice="required")
    assert (reply.status, reply.error()["param"]) == (400, "body.tools")
    # Nothing has to follow it then.
    assert told(talk(CALL, tools=[tool])[0])["tool_calls"]


def test_a_thousand_tools_are_as_good_as_one() -> None:
    tools = [
        {"type": "function", "function": {"name": f"t{at}", "parameters": {}}} for at in range(1000)
    ]
    reply, _ = talk(CALL, tools=[*tools, WEATHER], max_tokens=500)
    assert told(reply)["tool_calls"]


def test_what_a_request_does_not_say_is_the_model_s_own() -> None:
    own = {"temperature": 0.5, "top_k": 20}
    found = serving(engine := FakeEngine(), model=replace(model(), sampling=own))
    messages = [{"role": "user", "content": "Hello"}]
    for more in ({}, {"temperature": 0}):
        call(found, "POST", "/v1/chat/completions", {"messages": messages, **more})
    sampled = [request.sampling for request in engine.requests]
    assert [(one.temperature, one.top_k) for one in sampled] == [(0.5, 20), (0, 20)]
    (described,) = call(found, "GET", "/v1/models").json()["data"]
    assert described["default_sampling_params"] == own
