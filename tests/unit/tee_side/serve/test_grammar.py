"""Whatever a model says, the text follows its grammar; what cannot be compiled is refused."""

import json
import re
import traceback
from typing import Any

import pytest
import torch

from protocol.errors import PromptError
from tee_side.engine.request import SamplingSettings
from tee_side.engine.step import Sampler
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve import grammar, grammar_trial
from tee_side.serve.answers import TokenBytes
from tee_side.serve.grammar import (
    MAX_GRAMMAR_BYTES,
    CallsSource,
    GrammarCompiler,
    GrammarKind,
)
from tests.kit.rows import each_row
from tsqp.run.settings import model_directory

# The demo model's tokenizer has 1024 tokens: the other rows are padding.
VOCABULARY = 1100
EOS = {1, 4}
CANARY = "canary-5309"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_directory("demo"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, EOS)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]?$"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "code", "tags"],
    "additionalProperties": False,
}


def test_any_sample_under_a_json_schema_is_json_that_obeys_it(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Of random logits, until the grammar is complete: a model without any sense."""
    ends = EOS & set(tokenizer.raw.get_added_tokens_decoder())
    for seed in range(20):
        compiled = compiler.compile("json_schema", [SCHEMA, json.dumps(SCHEMA)][seed % 2])
        generator, ids = torch.Generator().manual_seed(seed), list[int]()
        sampler = Sampler(SamplingSettings(temperature=1, seed=seed), 0, compiled.copy())
        while not ids or ids[-1] not in ends:
            assert len(ids) < 1000
            ids.append(sampler.sample(4 * torch.randn(VOCABULARY, generator=generator), ids))
        assert all(token_id < tokenizer.raw.get_vocab_size() for token_id in ids)
        found = json.loads(b"".join(map(TokenBytes(tokenizer), ids[:-1])))
        assert set(found) == set(SCHEMA["properties"])
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 5
        assert found["age"] in range(151)
        assert found["kind"] in ("cat", "dog", None)
        assert re.fullmatch("[A-Z]{2}[0-9]?", found["code"])
        assert len(found["tags"]) <= 3
        assert all(isinstance(tag, bool) for tag in found["tags"])


def test_samples_of_one_grammar_do_not_know_of_each_other(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    compiled = compiler.compile("choice", ["ab", "cd"])
    first, second = compiled.copy(), compiled.copy()
    scores = torch.arange(VOCABULARY, dtype=torch.float32)
    beginning = second.hide(scores)
    kept = beginning.isfinite()
    assert 0 < kept.sum() < 1024  # the tokenizer's own, at most
    assert torch.equal(beginning[kept], scores[kept])
    ids = tokenizer.encode("ab", add_special_tokens=False)
    for token_id in ids:
        first.advance(token_id)
        assert torch.equal(second.hide(scores), beginning)
    # Behind a complete text only the end, however often.
    for behind in (4, 4, 1):
        assert set(first.hide(scores).isfinite().nonzero()[:, 0].tolist()) == EOS
        first.advance(behind)


def test_what_cannot_go_on_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("choice", ["ab"], where="guided_choice")
    with pytest.raises(PromptError, match="guided_choice: got a grammar that cannot go on"):
        matcher.advance(9)
    with pytest.raises(PromptError):
        matcher.hide(torch.zeros(VOCABULARY))


REFUSED: list[tuple[GrammarKind, Any]] = [
    ("json_schema", f'{{"type": "{CANARY}"}}'),
    ("json_schema", f'{{"{CANARY}'),
    ("json_schema", [CANARY]),
    ("json_schema", f'"{CANARY}"'),
    ("json_schema", {"type": "string", "pattern": f"({CANARY}"}),
    ("json_schema", {"oneOf": [{"minProperties": 1}, {CANARY: 2}], "if": {}}),
    ("json_schema", {"const": float("nan"), "title": CANARY}),
    ("json_schema", "[" * 60_000 + CANARY),
    ("json_schema", {"$ref": f"https://{CANARY}/x"}),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),  # endless
    ("regex", f"({CANARY}"),
    ("regex", f"{CANARY}\ud800"),
    ("regex", 5309),
    ("grammar", f'start: "a" {CANARY}'),
    ("grammar", f"start: {'(' * 9000}{CANARY}"),
    ("grammar", '{"grammars": [{"json_schema": {}}]}'),
    ("choice", CANARY),
    ("choice", []),
    ("choice", [CANARY, 1]),
    ("choice", 5),
]


@each_row(("kind", "source"), REFUSED)
def test_what_is_malformed_or_not_supported_is_refused_and_quoted_nowhere(
    compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str], kind: GrammarKind, source: Any
) -> None:
    with pytest.raises(PromptError) as caught:
        compiler.compile(kind, source, where="response_format.json_schema")
    assert caught.value.where == "response_format.json_schema"
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert "".join(capfd.readouterr()) == ""


def test_what_is_too_long_is_refused_with_its_size(compiler: GrammarCompiler) -> None:
    too_long: list[tuple[GrammarKind, Any]] = [
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
        ("grammar", 'start: "' + "é" * (MAX_GRAMMAR_BYTES // 2) + '"'),
        ("choice", ["a" * 1000] * 66),
        ("json_schema", {"title": "a" * MAX_GRAMMAR_BYTES}),
    ]
    for kind, source in too_long:
        with pytest.raises(PromptError, match=rf"{kind} of \d{{5}} bytes, expected at most 65536"):
            compiler.compile(kind, source)


def test_what_costs_more_than_its_size_says_ends_in_a_process_of_its_own(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes or gigabytes of work to the library. Were it compiled here, this would not end."""
    patterns = [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(1, 60)]
    terminals = "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(2500))
    monkeypatch.setattr(
        grammar_trial, "compiled", lambda *_: pytest.fail("compiled in this process")
    )
    for kind, source in (
        ("json_schema", {"allOf": patterns}),
        ("grammar", f'start: R0\n{terminals}R2500: "a"'),
    ):
        with pytest.raises(PromptError, match="that is not compiled"):
            compiler.compile(kind, source)  # type: ignore[arg-type]


@each_row(
    ("kind", "source", "tried"),
    [
        ("regex", "a", True),
        ("grammar", 'start: "a"', True),
        ("json_schema", {"properties": {"a": {"type": "string", "pattern": "a"}}}, True),
        ("json_schema", '{"type": "integer", "multiple\\u004ff": 1000003}', True),
        ("json_schema", {"x-guidance": {"whitespace_pattern": "a"}}, True),
        ("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}}, False),
        ("json_object", "", False),
        ("choice", ["a"], False),
    ],
)
def test_what_may_cost_more_than_its_size_says_is_tried_in_a_process_of_its_own(
    compiler: GrammarCompiler, kind: GrammarKind, source: Any, tried: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_is_affordable", lambda _grammar: False)
        if tried:
            with pytest.raises(PromptError, match="that is not compiled"):
                compiler.compile(kind, source)
        else:
            compiler.compile(kind, source)


def test_a_client_s_own_grammar_is_tried_as_it_is(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens by their ids are no other text there, which might cost less."""
    tried: list[str] = []
    monkeypatch.setattr(grammar, "_is_affordable", lambda text: tried.append(text) is None)
    compiler.compile("grammar", "start: <[5]>")
    compiler.compile("tool schema", CallsSource('start: <[5]> "a"', '{"pattern": ""}'))
    assert ["<[5]>" in one for one in tried] == [True, False]


def test_a_trial_is_made_once_for_each_owner(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(grammar, "_is_affordable", lambda text: tried.append(text) is None)
    monkeypatch.setattr(grammar, "_MOST_REMEMBERED", 3)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    for owner, source in [("a", "x+"), ("a", "x+"), ("b", "x+"), ("a", "y+"), ("b", "x+")]:
        compiler.compile("regex", source, owner)
    assert len(tried) == 3
    compiler.compile("regex", "z+", "a")  # one more than are remembered
    compiler.compile("regex", "x+", "a")
    assert len(tried) == 5
