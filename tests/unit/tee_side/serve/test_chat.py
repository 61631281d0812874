"""Tools and thinking, from a client's fields to the prompt, and from tokens to the answer."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tee_side.chat.template import ChatTemplate
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.grammar import GrammarCompiler
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
    offered = model(tokenizer=tokenizer(), template=ChatTemplate(tokenizer()), max_model_len=9999)
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
            for piece in choice["delta"].get("tool_calls", ()):
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
