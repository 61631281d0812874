"""Whatever a model says, the text follows its grammar; what cannot be compiled is refused."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Raw
from tokenizers import models

from protocol.errors import ModelError, PromptError
from tee_side.engine import grammar, grammar_trial
from tee_side.engine.grammar import MAX_GRAMMAR_BYTES, CompiledGrammar, GrammarCompiler, Kind
from tee_side.engine.sampling import Sampler, SamplingSettings
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.rows import each_row
from tsqp.cli.program import model_directory

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


def _random_text(
    tokenizer: Tokenizer, compiled: CompiledGrammar, seed: int, longest: int = 400
) -> str:
    """Sample from random logits until the grammar is complete: a model without any sense."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(SamplingSettings(temperature=1, seed=seed), 0, compiled.matcher())
    ids: list[int] = []
    ends = EOS & set(tokenizer.special_tokens.values())
    while not ids or ids[-1] not in ends:
        assert len(ids) < longest
        ids.append(sampler.sample(4 * torch.randn(VOCABULARY, generator=generator), ids))
    assert all(token_id < tokenizer.vocabulary_size for token_id in ids)
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids[:-1]).decode()


def _allowed(compiled: CompiledGrammar, ids: list[int]) -> list[int]:
    matcher = compiled.matcher()
    for token_id in ids:
        matcher.advance(token_id)
    return [int(i) for i in matcher.hide(torch.zeros(VOCABULARY)).isfinite().nonzero()]


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


@each_row("source", [SCHEMA, json.dumps(SCHEMA)])
def test_any_sample_under_a_json_schema_is_json_that_obeys_it(
    tokenizer: Tokenizer, compiler: GrammarCompiler, source: dict[str, Any] | str
) -> None:
    compiled = compiler.compile("json_schema", source)
    for seed in range(20):
        found = json.loads(_random_text(tokenizer, compiled, seed, longest=1000))
        assert set(found) == set(SCHEMA["properties"])
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 5
        assert type(found["age"]) is int
        assert 0 <= found["age"] <= 150
        assert found["kind"] in ("cat", "dog", None)
        assert re.fullmatch("[A-Z]{2}[0-9]?", found["code"])
        assert len(found["tags"]) <= 3
        assert all(isinstance(tag, bool) for tag in found["tags"])


TEXTS: list[tuple[Kind, Any, str]] = [
    ("regex", r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)", r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)"),
    ("regex", r"^[0-9]{4}-[0-9]{2}$", r"[0-9]{4}-[0-9]{2}"),
    (
        "grammar",
        'start: item ("," item){0,3}\nitem: /[0-9]{1,2}/ | "x"',
        r"([0-9]{1,2}|x)(,([0-9]{1,2}|x)){0,3}",
    ),
    ("choice", ["yes", "no", "yesterday", '日本 "🙂" \\n'], r'yes|no|yesterday|日本 "🙂" \\n'),
]


@each_row(("kind", "source", "expected"), TEXTS)
def test_any_sample_is_a_text_of_the_grammar(
    tokenizer: Tokenizer, compiler: GrammarCompiler, kind: Kind, source: Any, expected: str
) -> None:
    compiled = compiler.compile(kind, source)
    found = {_random_text(tokenizer, compiled, seed) for seed in range(30)}
    assert len(found) > 2
    for text in found:
        assert re.fullmatch(expected, text)


def test_what_is_allowed_at_the_end_and_at_the_edges(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    choices = compiler.compile("choice", ["a", "ab", ""])
    assert {_random_text(tokenizer, choices, seed) for seed in range(40)} == {"a", "ab", ""}
    # A small model would go on with spaces.
    brace, space = (tokenizer.encode(text, add_special_tokens=False) for text in ("{", " "))
    found = compiler.compile("json_object")
    assert space[0] in _allowed(found, brace + 39 * space)
    assert space[0] not in _allowed(found, brace + 40 * space)
    # Behind a complete text only the end, however often.
    only, ids = compiler.compile("choice", ["ab"]), tokenizer.encode("ab", add_special_tokens=False)
    for behind in ([], [4], [4, 1, 4]):
        assert _allowed(only, [*ids, *behind]) == sorted(EOS)
    # Never padded rows or special tokens; a model may have fewer rows than there are tokens.
    allowed = _allowed(compiler.compile("regex", r"(.|\n)*"), [])
    assert max(allowed) < tokenizer.vocabulary_size == 1024
    assert set(tokenizer.special_tokens.values()) & set(allowed) == EOS
    fewer = GrammarCompiler(tokenizer, 1000, EOS).compile("choice", ["a"]).matcher()
    assert fewer.hide(torch.zeros(1000)).isfinite().sum() == 1


def test_samples_of_one_grammar_do_not_know_of_each_other(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    compiled = compiler.compile("choice", ["ab", "cd"])
    first, second = compiled.matcher(), compiled.matcher()
    scores = torch.arange(VOCABULARY, dtype=torch.float32)
    beginning = second.hide(scores)
    # Scores are kept as they are, and the argument is not changed.
    assert torch.equal(scores, torch.arange(VOCABULARY, dtype=torch.float32))
    kept = beginning.isfinite()
    assert kept.any()
    assert torch.equal(beginning[kept], scores[kept])
    assert (beginning[~kept] == -torch.inf).all()
    for token_id in tokenizer.encode("ab", add_special_tokens=False):
        first.advance(token_id)
        assert torch.equal(second.hide(scores), beginning)
    assert torch.equal(compiled.matcher().hide(scores), beginning)


def test_what_cannot_go_on_is_an_error(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A token that was not allowed, or a text that makes the next mask too costly."""
    matcher = compiler.compile("choice", ["ab"], where="guided_choice").matcher()
    with pytest.raises(PromptError, match="guided_choice: got a grammar that cannot go on"):
        matcher.advance(9)
    with pytest.raises(PromptError):
        matcher.hide(torch.zeros(VOCABULARY))
    costly = compiler.compile("regex", "[a-z]{3}((([a-z ]{1,1000}){1000}){1000}){1000}")
    with pytest.raises(PromptError, match="got a grammar that cannot go on"):
        _random_text(tokenizer, costly, 0)


REFUSED: list[tuple[Kind, Any]] = [
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
    compiler: GrammarCompiler,
    capfd: pytest.CaptureFixture[str],
    kind: Kind,
    source: Any,
) -> None:
    with pytest.raises(PromptError) as caught:
        compiler.compile(kind, source, where="response_format.json_schema")
    assert caught.value.where == "response_format.json_schema"
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert "".join(capfd.readouterr()) == ""


def test_what_is_too_long_is_refused_with_its_size(compiler: GrammarCompiler) -> None:
    too_long: list[tuple[Kind, Any]] = [
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
        ("json_schema", {"type": "object", "patternProperties": {"a": {}}}, True),
        ("json_schema", '{"type": "integer", "multiple\\u004ff": 1000003}', True),
        ("json_schema", {"x-guidance": {"whitespace_pattern": "a"}}, True),
        ("json_schema", {"type": "object", "properties": {"a": {"type": "string"}}}, False),
        ("json_object", "", False),
        ("choice", ["a"], False),
    ],
)
def test_what_may_cost_more_than_its_size_says_is_tried_in_a_process_of_its_own(
    compiler: GrammarCompiler, kind: Kind, source: Any, tried: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_is_affordable", lambda _grammar: False)
        if tried:
            with pytest.raises(PromptError, match="that is not compiled"):
                compiler.compile(kind, source)
        else:
            compiler.compile(kind, source)


def test_a_trial_is_made_once_for_each_owner(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def affordable(text: str) -> bool:
        tried.append(text)
        return True

    monkeypatch.setattr(grammar, "_is_affordable", affordable)
    monkeypatch.setattr(grammar, "_MOST_REMEMBERED", 3)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, EOS)
    for owner, source in [("a", "x+"), ("a", "x+"), ("b", "x+"), ("a", "y+"), ("b", "x+")]:
        compiler.compile("regex", source, owner)
    assert len(tried) == 3
    compiler.compile("regex", "z+", "a")  # one more than are remembered
    compiler.compile("regex", "x+", "a")
    assert len(tried) == 5
    # A process may have failed for reasons of its own.
    monkeypatch.setattr(grammar, "_is_affordable", lambda _text: False)
    for _ in range(2):
        with pytest.raises(PromptError):
            compiler.compile("regex", "w+", "a")
    monkeypatch.setattr(grammar, "_is_affordable", lambda _text: True)
    compiler.compile("regex", "w+", "a")


def test_a_model_without_an_end_or_with_another_tokenizer_cannot_have_grammars(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="EOS"):
        GrammarCompiler(tokenizer, VOCABULARY, ()).compile("choice", ["a"])
    Raw(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="tokenizer: got"):
        GrammarCompiler(Tokenizer(tmp_path), 10, {0}).compile("choice", ["a"])
