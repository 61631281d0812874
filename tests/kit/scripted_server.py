"""The real server with a model that follows a script, for trials of other people's clients.

    python -m tests.kit.scripted_server --form hermes

Prints its address. The template writes a conversation as JSON, so that the engine can read it in a
prompt. It calls the first tool (twice for a user who says "both"), quotes a tool's result, follows
a schema that it finds in the conversation, and else says a sentence; it thinks first where a client
asks for an effort. Where a request has a grammar, it says what that allows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import tokenizers
import torch
import uvicorn
from tokenizers import AddedToken

from tee_side.chat.calls import CALL_FORMS, CallForm
from tee_side.chat.template import ChatTemplate
from tee_side.engine.request import NewToken, Request
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.app import create_app
from tee_side.serve.background import Delivery
from tee_side.serve.grammar import GrammarCompiler, GrammarKind, GrammarMatcher
from tests.kit.serve import SAID, FakeEngine, model, serving
from tsqp.end_with_parent import end_with
from tsqp.run.settings import model_directory

MAX_MODEL_LEN = 16 * 1024
THOUGHT = "<think>\nWhat was asked is plain.\n</think>\n\n"
# By these, the server knows how the model writes; they stand in no prompt.
TEMPLATE = """{#- tools: SIGNS <think></think> -#}
{{- '<|im_start|>' + {'messages': messages, 'tools': tools or [],
    'thinks': enable_thinking is defined and enable_thinking} | tojson + '<|im_end|>' }}"""
# Of how a form is written, what is one token.
_MARK = re.compile(r"</?(?:seed:)?(?:tool_call|arg_key|arg_value)>|<[|｜][^<>]+[|｜]>|\[[A-Z_]+\]")
_ASKED = re.compile(r"<\|im_start\|>(.*)<\|im_end\|>", re.DOTALL)
# What a grammar is answered with where the script is no answer: the first of these it allows.
_SHORT = [
    "<|end_of_text|>",
    '"',
    "}",
    "]",
    "{",
    "[",
    ":",
    ",",
    *"abcdefghijklmnopqrstuvwxyz",
    *"0123456789",
    "-",
]


def instance(schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """Return a value that a JSON schema takes: of an object, all that it names.

    `root`: where references lead, None for the schema itself.
    """
    root = schema if root is None else root
    schema = schema if isinstance(schema, Mapping) else {}
    if ref := schema.get("$ref"):
        return instance(reduce(getitem, ref.removeprefix("#/").split("/"), root), root)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return choices[0]
    if several := next((schema[key] for key in ("anyOf", "oneOf", "allOf") if key in schema), None):
        return instance(several[0], root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {key: instance(one, root) for key, one in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema.get("items"), root)] * max(1, schema.get("minItems", 1))
    text = "Paris".ljust(schema.get("minLength", 0), "s")[: schema.get("maxLength", 99)]
    least = schema.get("minimum", schema.get("exclusiveMinimum", 2) + 1)
    return {"string": text, "boolean": True, "null": None}.get(kind, least)


def spelled(form: CallForm, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, by name and arguments, as a model of this form writes them."""
    before, call, between, behind = form.written

    def written(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return form.parameter.replace("KEY", key).replace("VALUE", text)

    texts = []
    for name, given in calls:
        tagged = "".join(written(*one) for one in given.items())
        said = tagged if form.parameter else json.dumps(given)
        texts.append(call.replace("NAME", name).replace("ARGUMENTS", said))
    return before + between.join(texts) + behind


def _schemas_in(text: str) -> Iterator[Mapping[str, Any]]:
    for found in re.finditer(r"\{", text):
        with suppress(ValueError):
            one, _ = json.JSONDecoder().raw_decode(text, found.start())
            if "properties" in one:
                yield one


def replies(form: CallForm, asked: Mapping[str, Any], schema: Any) -> list[str]:
    """Return what the model says, the likeliest first. `schema`: of an answer, None for a text."""
    contents = [str(message.get("content") or "") for message in asked["messages"]]
    functions = [tool["function"] for tool in asked["tools"]]
    calls = []
    for one in functions:
        # Of a schema that refers to itself there is none.
        with suppress(RecursionError):
            calls.append((one["name"], instance(one.get("parameters") or {"type": "object"})))
    found = [spelled(form, [call]) for call in calls]
    if asked["messages"][-1]["role"] == "tool":
        found.insert(0, f"The tool says: {contents[-1]}")
    elif calls and "both" in contents[-1]:
        found.insert(0, spelled(form, calls[:1] * 2))
    everything = "\n".join(contents)
    if schema := next(_schemas_in(everything), None) if schema is None else schema:
        text = json.dumps(instance(schema))
        found += [f"```json\n{text}\n```", text] if "```json" in everything else [text]
    return [THOUGHT * bool(asked["thinks"]) + one for one in [*found, SAID]]


@dataclass
class ScriptedEngine(FakeEngine):
    """Answers by rules; see above. `form`: of its calls; `schemas`: of grammars."""

    tokenizer: Tokenizer = field(kw_only=True)
    form: CallForm = field(kw_only=True)
    schemas: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)

    def _script(self, request: Request) -> list[Delivery]:
        tokens, samples = list(self._said(request)), range(request.samples)
        steps = [tuple(replace(one, sample=at) for at in samples) for one in tokens]
        found = [Delivery(step) for step in steps or [()]]
        found[0] = replace(found[0], prompt=self._read(request))
        return [*found[:-1], replace(found[-1], ended=True)]

    def _said(self, request: Request) -> Iterator[NewToken]:
        """Yield the tokens of a sample, up to one that ends it."""
        raw, most = self.tokenizer.raw, request.max_new_tokens
        ends = model().config.eos_token_ids if request.stop_ids is None else request.stop_ids
        asked = _ASKED.search(raw.decode(list(request.prompt_ids), skip_special_tokens=False))
        schema = None if request.grammar is None else self.schemas.get(request.grammar)
        texts = replies(self.form, json.loads(asked[1]), schema) if asked else [SAID]
        scripts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        # Where no token ends a text, it is said again.
        scripts = [[*ids, min(ends)] if ends else ids * most for ids in scripts]
        short = [one for one in map(raw.token_to_id, _SHORT) if one is not None]
        grammar = None if request.grammar is None else request.grammar.copy()
        said: list[int] = []
        while len(said) < most:
            at = len(said)
            scripts = [ids for ids in scripts if ids[:at] == said and at < len(ids)]
            wanted = [*(ids[at] for ids in scripts), *short]
            if grammar is not None:
                scores_V = grammar.hide(torch.zeros(raw.get_vocab_size()))
                allowed = (scores_V == 0).nonzero().flatten().tolist()
                wanted = [one for one in wanted if one in allowed] or allowed
                grammar.advance(wanted[0])
            said.append(token := wanted[0])
            text = raw.decode(said) if request.stop else ""
            number = None if request.logprobs is None else self.numbers(token, request.logprobs)
            if token in ends or any(stop in text for stop in request.stop):
                yield NewToken(0, token, number, "stop")
                return
            yield NewToken(0, token, number, "length" if at + 1 == most else None)


def main() -> None:
    """Serve until the parent ends."""
    parser = argparse.ArgumentParser(prog="tests.kit.scripted_server", description="see above")
    parser.add_argument("--form", choices=CALL_FORMS, default="hermes", help="of calls")
    parser.add_argument("--port", type=int, default=0, help="0 for a free one")
    options = parser.parse_args()
    end_with(os.getppid())
    signs, form = CALL_FORMS[options.form]
    raw = tokenizers.Tokenizer.from_file(str(model_directory("demo") / "tokenizer.json"))
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    marks = _MARK.findall("".join((*form.begins, *form.written, form.parameter)))
    raw.add_tokens([AddedToken(one, normalized=False) for one in ("<think>", "</think>", *marks)])
    with TemporaryDirectory() as folder:
        raw.save(f"{folder}/tokenizer.json")
        source = TEMPLATE.replace("SIGNS", " ".join(signs))
        (Path(folder) / "chat_template.jinja").write_text(source)
        tokenizer = Tokenizer(Path(folder))
        template = ChatTemplate(tokenizer)
    config = model().config
    size = max(config.vocab_size, raw.get_vocab_size())
    compiler = GrammarCompiler(tokenizer, size, config.eos_token_ids)
    offered = model(
        tokenizer=tokenizer,
        template=template,
        config=config.model_copy(update={"vocab_size": size}),
        max_model_len=MAX_MODEL_LEN,
        default_max_tokens=1024,
    )
    engine = ScriptedEngine(tokenizer=tokenizer, form=form)

    def compiled(kind: GrammarKind, source: Any, owner: str, **more: Any) -> GrammarMatcher:
        found = compiler.compile(kind, source, owner, **more)
        engine.schemas[found] = source if kind == "json_schema" else None
        return found

    app = create_app(serving(engine, model=offered, compile_grammar=compiled))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", options.port))
        listening.listen()  # who connects from now on waits
        sys.stdout.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        settings = uvicorn.Config(app, log_level="warning", lifespan="off")
        uvicorn.Server(settings).run(sockets=[listening])


if __name__ == "__main__":
    main()
