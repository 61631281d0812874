"""Calls in every family's form: read however they are cut, asked for by a grammar; text stays."""

import json
import random
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from protocol.errors import PromptError
from tee_side.chat.call_grammar import ReplyGrammar
from tee_side.chat.calls import CALL_FORMS, CallReader, form_of
from tee_side.chat.reply import ReplyReader, add_calls
from tests.kit.rows import each_row
from tsqp.run.settings import model_directory

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "area": {"type": ["null", "string"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: dict[str, Any] = {"weather": SCHEMA, "now": {"type": "object", "properties": {}}}
ODD = 'P}ar"is {\n</para'
BOTH = [("weather", {"city": ODD, "days": 3}), ("now", {})]


def _json(name: str, arguments: Any, keys: tuple[str, str] = ("name", "arguments")) -> str:
    return json.dumps({keys[0]: name, keys[1]: arguments})


def _tagged(name: str, arguments: Any, call: str, parameter: str) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    said = "".join(parameter.format(key=key, value=value) for key, value in values.items())
    return call.format(name=name, arguments=said)


def _bar(name: str) -> str:
    return f"<\uff5ctool\u2581{name}\uff5c>"


# How a model writes calls, as people know it; the text of each form by its calls.
WRITTEN: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_json(*one)}\n</tool_call>" for one in calls),
    "qwen3-coder": lambda calls: "\n".join(
        _tagged(
            *one,
            "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
            "<parameter={key}>\n{value}\n</parameter>\n",
        )
        for one in calls
    ),
    "seed": lambda calls: "\n".join(
        _tagged(
            *one,
            "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
            "<parameter={key}>{value}</parameter>\n",
        )
        for one in calls
    ),
    "glm": lambda calls: "\n".join(
        _tagged(
            *one,
            "<tool_call>{name}\n{arguments}</tool_call>",
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        )
        for one in calls
    ),
    "llama3": lambda calls: "; ".join(_json(*one, ("name", "parameters")) for one in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls),
    "mistral-v3": lambda calls: f"[TOOL_CALLS][{', '.join(_json(*one) for one in calls)}]",
    "deepseek": lambda calls: (
        _bar("calls▁begin")
        + "\n".join(
            f"{_bar('call▁begin')}function{_bar('sep')}{name}\n```json\n{json.dumps(arguments)}\n```"
            f"{_bar('call▁end')}"
            for name, arguments in calls
        )
        + _bar("calls▁end")
    ),
    "deepseek-v3.1": lambda calls: (
        _bar("calls▁begin")
        + "".join(
            f"{_bar('call▁begin')}{name}{_bar('sep')}{json.dumps(arguments)}{_bar('call▁end')}"
            for name, arguments in calls
        )
        + _bar("calls▁end")
    ),
    "cohere": lambda calls: (
        "<|START_ACTION|>["
        + ", ".join(_json(*one, ("tool_name", "parameters")) for one in calls)
        + "]<|END_ACTION|>"
    ),
    "phi": lambda calls: f"<|tool_call|>[{', '.join(_json(*one) for one in calls)}]<|/tool_call|>",
    "granite": lambda calls: f"<|tool_call|>[{', '.join(_json(*one) for one in calls)}]",
}


def read(form: str, text: str, seed: int = 0, most: int | None = None) -> tuple[str, list[Any]]:
    """Read a text that comes in pieces; of seed 0 in one."""
    reader, said, calls = CallReader(CALL_FORMS[form][1], TOOLS, most), "", list[dict[str, Any]]()
    dice, at = random.Random(seed), 0
    while at < len(text):
        size = dice.choice([1, 1, 2, 3, 7, 40]) if seed else len(text)
        shown, pieces = reader.feed(text[at : at + size])
        said, at = said + shown, at + size
        add_calls(calls, pieces)
    shown, pieces = reader.feed("", final=True)
    add_calls(calls, pieces)
    return said + shown, [(one["function"]["name"], one["function"]["arguments"]) for one in calls]


@each_row("form", CALL_FORMS)
def test_calls_of_each_form_are_read_however_they_come(form: str) -> None:
    assert WRITTEN.keys() == CALL_FORMS.keys()
    before = "" if form == "llama3" else "Let me see.\n"
    for seed in range(30):
        said, calls = read(form, before + WRITTEN[form](BOTH), seed)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == BOTH, seed
        assert said == before.strip(), seed
    said, calls = read(form, WRITTEN[form](BOTH), most=1)
    assert (said, [name for name, _ in calls]) == ("", ["weather"])


@each_row("form", CALL_FORMS)
def test_ids_are_those_that_templates_of_the_form_take(form: str) -> None:
    reader = CallReader(CALL_FORMS[form][1], TOOLS)
    _, pieces = reader.feed(WRITTEN[form](BOTH), final=True)
    ids = [piece.id for piece in pieces if piece.id]
    assert len(set(ids)) == 2
    assert all((len(one) == 9) == form.startswith("mistral") for one in ids)


_CALL, _NOW = '{"name": "now", "arguments": {}}', [("now", "{}")]
LIKE = "<tool_call>\n{}\n</tool_call>"
_ZIP = (
    "<tool_call>weather<arg_key>zip</arg_key><arg_value>{}</arg_value>"
    "<arg_key>area</arg_key><arg_value>{}</arg_value></tool_call>"
)


@each_row(
    ("form", "text", "said", "calls"),
    [
        ("hermes", "a <tool_call> is a tag", None, []),
        ("hermes", LIKE.format('{"name": "other", "arguments": {}}'), None, []),
        ("hermes", LIKE.format('{"name": 5, "arguments": {}}'), None, []),
        ("hermes", LIKE.format('{"name": "now", "arguments": [1]}'), None, []),
        ("hermes", LIKE.format("[[[" * 2000), None, []),
        ("hermes", "ends in <tool_ca", None, []),
        ("llama3", ' {"answer": 42}', None, []),
        ("qwen3-coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>", None, []),
        # Before its arguments, or without any.
        (
            "hermes",
            LIKE.format('{"arguments": {"a": 1}, "name": "now"}'),
            "",
            [("now", '{"a": 1}')],
        ),
        ("hermes", LIKE.format('{"name": "now"}'), "", _NOW),
        ("hermes", LIKE.format('{"name": "now", "arguments": null}'), "", _NOW),
        # Cut off, or no JSON: it has begun.
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a', "", [("now", '{"a')]),
        ("hermes", LIKE.format('{"name": "now", "arguments": {a: }}'), "", [("now", "{a: }")]),
        ("qwen3-coder", "<tool_call><function=now><parameter=a>\n{", "", [("now", '{"a": ')]),
        # No text at a parameter that is one, no JSON at another.
        (
            "glm",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>5</arg_value><arg_key>days"
            "</arg_key><arg_value>NaN</arg_value></tool_call>",
            "",
            [("weather", '{"city": "5", "days": "NaN"}')],
        ),
        # A text, or null: a number is a text.
        ("glm", _ZIP.format("12345", "null"), "", [("weather", '{"zip": "12345", "area": null}')]),
        ("glm", _ZIP.format("a", '"b"'), "", [("weather", '{"zip": "a", "area": "b"}')]),
        ("granite", f"<|tool_call|>[{_CALL}]\n\nbye", "\n\nbye", _NOW),
        (
            "mistral-v3",
            '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "x"}]',
            "",
            _NOW,
        ),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]x[ARGS]{} and", " and", _NOW),
        ("mistral-v3", f"[TOOL_CALLS]{' ' * 4096}", None, []),
        # What stands beside a call is text.
        ("llama3", '{"name": "now", "parameters": {}}\n\nDone', "\n\nDone", _NOW),
        ("hermes", f"```\n{LIKE.format(_CALL)}\n```", "```\n```", _NOW),
    ],
)
def test_what_only_looks_like_a_call_stays_text(
    form: str, text: str, said: str | None, calls: list[Any]
) -> None:
    for seed in range(8):
        found = read(form, f"{text} and on" if said is None else text, seed)
        assert found == (f"{text} and on" if said is None else said, calls), seed


@each_row(
    ("form", "begin"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": "'),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>"),
    ],
)
def test_a_call_of_a_megabyte_takes_no_longer_than_its_length(form: str, begin: str) -> None:
    """Each piece is looked at once: the state does not hold the arguments."""
    reader = CallReader(CALL_FORMS[form][1], TOOLS)
    reader.feed(begin)
    for _ in range(1000):
        _, (piece,) = reader.feed("}" * 1000)
        assert len(piece.arguments) == 1000
        assert len(reader._held) == 0


def test_a_long_value_is_not_held_to_its_end() -> None:
    """Of one that is no text: from some length on it comes as it is."""
    value, reader = [{"a": 1}] * 40_000, CallReader(CALL_FORMS["glm"][1], TOOLS)
    begin = "<tool_call>weather<arg_key>days</arg_key><arg_value>"
    text = f"{begin}{json.dumps(value)}</arg_value></tool_call>"
    found, most = "", 0
    for at in range(0, len(text), 1000):
        found += "".join(piece.arguments for piece in reader.feed(text[at : at + 1000])[1])
        most = max(most, len(text[:at]) - len(found))
    assert json.loads(found) == {"days": value}
    assert most < len(text) // 2


def test_what_begins_as_a_call_or_as_space_is_not_held_for_long() -> None:
    for form in CALL_FORMS:
        sign, reader = CALL_FORMS[form][1].begins[0], CallReader(CALL_FORMS[form][1], TOOLS)
        assert sign in reader.feed(f"The sign {sign} is one{' of many' * 100}")[0]
        assert CallReader(CALL_FORMS[form][1], TOOLS).feed(" " * 20_000)[0]
    for inside in (True, False):
        held = ReplyReader(("<think>", "</think>"), inside=inside)
        for text in (" " * 20_000, "x", " " * 20_000):
            held.feed(text)
            assert not held._held


def test_a_form_is_known_by_what_a_template_writes() -> None:
    for name, (signs, _) in CALL_FORMS.items():
        assert form_of(f"{{% if tools %}}{' '.join(signs)}{{% endif %}}") == name
    assert form_of("{{ messages }}") is None


@pytest.fixture(scope="module")
def vocabulary() -> tokenizers.Tokenizer:
    """A vocabulary in which some of the signs are tokens, special and not, and some are none."""
    raw = tokenizers.Tokenizer.from_file(str(model_directory("demo") / "tokenizer.json"))
    signs = ["<tool_call>", "</tool_call>", "<think>", "</think>", "</arg_value>"]
    raw.add_tokens([AddedToken(one, normalized=False) for one in signs])
    raw.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    return raw


def rules_for(raw: tokenizers.Tokenizer) -> ReplyGrammar:
    """Return a grammar's beginning."""
    added = raw.get_added_tokens_decoder().items()
    return ReplyGrammar({token.content: token_id for token_id, token in added})


def follows(raw: tokenizers.Tokenizer, lark: str, *pieces: str) -> bool:
    """Say whether a grammar takes a text to its end, of which each piece is encoded alone."""
    known = LLTokenizer(raw.to_str(), n_vocab=raw.get_vocab_size(), eos_token=[0])
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    matcher = LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [i for piece in pieces for i in raw.encode(piece, add_special_tokens=False).ids]
    return (
        matcher.validate_tokens(ids) == len(ids)
        and matcher.consume_tokens(ids)
        and bool(matcher.is_accepting())
    )


@each_row("form", CALL_FORMS)
def test_a_grammar_takes_the_calls_of_its_form_and_no_others(
    vocabulary: tokenizers.Tokenizer, form: str
) -> None:
    one, wrong = [BOTH[0]], [("weather", {"town": "x"})]
    for thinking, inside, before in (
        (None, False, ""),
        (("<think>", "</think>"), True, "hm</think>\n\n"),
        (("<think>", "</think>"), False, "<think>hm</think>\n"),
    ):
        rules = rules_for(vocabulary)
        lead = rules.thinking(thinking, inside=inside)
        calls = rules.calls(CALL_FORMS[form][1], TOOLS, one=len(before) == 0, free=False)
        lark = rules.lark(f"{lead} {calls}")
        assert follows(vocabulary, lark, before + WRITTEN[form](one))
        assert follows(vocabulary, lark, before + WRITTEN[form](BOTH)) == bool(before)
        assert not follows(vocabulary, lark, before + "Hello")
        # Elsewhere a value without a schema of its own is any JSON.
        assert not follows(vocabulary, lark, before + WRITTEN[form](wrong))


@each_row("form", CALL_FORMS)
def test_names_in_a_grammar_are_as_they_are(vocabulary: tokenizers.Tokenizer, form: str) -> None:
    """Also those that stand for others where the form is written down."""
    name, given = "NAME_ARGUMENTS", {"KEY": "VALUE", "VALUE": "ARGUMENTS"}
    properties = {"KEY": {"type": "string"}, "VALUE": {"type": "string", "const": "ARGUMENTS"}}
    schema = {"properties": properties, "required": list(properties)}
    rules = rules_for(vocabulary)
    lark = rules.lark(rules.calls(CALL_FORMS[form][1], {name: schema}, one=True, free=False))
    for changed, well in (({}, True), ({"VALUE": "other"}, False), ({"KEY": "KEY"}, True)):
        text = WRITTEN[form]([(name, given | changed)])
        assert follows(vocabulary, lark, text) == well


def test_a_value_between_tags_ends_with_its_tag(vocabulary: tokenizers.Tokenizer) -> None:
    """Else who reads the call would take the rest of the value for something else."""
    for form in ("glm", "qwen3-coder", "seed"):
        rules = rules_for(vocabulary)
        lark = rules.lark(rules.calls(CALL_FORMS[form][1], TOOLS, one=True, free=False))
        whole = WRITTEN[form]([("weather", {"city": "x", "days": 3})])
        end = "</arg_value>" if form == "glm" else "</parameter>"
        front, _, rest = whole.partition("x")
        assert follows(vocabulary, lark, whole)
        # Spelled by other tokens, too.
        assert not follows(vocabulary, lark, f"{front}x{end[:3]}", f"{end[3:]}y{rest}")


def test_arguments_between_tags_may_be_of_any_kind(vocabulary: tokenizers.Tokenizer) -> None:
    schema = {"properties": {"x": True}, "required": ["y"]}
    rules = rules_for(vocabulary)
    lark = rules.lark(rules.calls(CALL_FORMS["seed"][1], {"now": schema}, one=True, free=False))
    for given, well in (({"x": 1, "y": [2]}, True), ({"y": 1}, True), ({"x": 1}, False)):
        for order in (given, dict(sorted(given.items(), reverse=True))):
            if follows(vocabulary, lark, WRITTEN["seed"]([("now", order)])):
                break
        else:
            assert not well
            continue
        assert well


@each_row("key", ["$ref", "allOf", "anyOf", "oneOf"])
def test_a_tag_for_each_argument_needs_them_at_the_top(key: str) -> None:
    led: dict[str, Any] = {"now": {"properties": {}, key: "#/$defs/a"}}
    for form, (_, written) in CALL_FORMS.items():
        rules = ReplyGrammar({})
        if written.parameter:
            with pytest.raises(PromptError, match="one by one"):
                rules.calls(CALL_FORMS[form][1], led, one=True, free=False)
        else:
            assert rules.calls(CALL_FORMS[form][1], led, one=True, free=False)


def test_a_free_reply_is_a_text_an_answer_or_calls(vocabulary: tokenizers.Tokenizer) -> None:
    calls = WRITTEN["hermes"](BOTH)
    text = rules_for(vocabulary)
    lark = text.lark(text.calls(CALL_FORMS["hermes"][1], TOOLS, one=False, free=True))
    for said, well in (("Hi", True), (f"Hi\n{calls}", True), ("Hi <tool_call>", False)):
        assert follows(vocabulary, lark, said) == well
    # Spelled by other tokens, a sign would be one to who reads it.
    assert not follows(vocabulary, lark, "Hi <tool", "_call>")
    answer = rules_for(vocabulary)
    form = CALL_FORMS["hermes"][1]
    lark = answer.lark(answer.calls(form, TOOLS, one=False, free=True, answer={"type": "integer"}))
    for said, well in (("42", True), (calls, True), ("Hi", False)):
        assert follows(vocabulary, lark, said) == well
    bare = rules_for(vocabulary)
    lark = bare.lark(bare.calls(CALL_FORMS["llama3"][1], TOOLS, one=False, free=True))
    for said, well in (("Hi", True), (WRITTEN["llama3"](BOTH), True), ('{"name": 1}', False)):
        assert follows(vocabulary, lark, said) == well
    # An answer may begin as a call does.
    beside, form = rules_for(vocabulary), CALL_FORMS["llama3"][1]
    schema = {"properties": {"q": {"type": "integer"}}}
    lark = beside.lark(beside.calls(form, TOOLS, one=False, free=True, answer=schema))
    for said in ('{"q": 1}', WRITTEN["llama3"](BOTH)):
        assert follows(vocabulary, lark, said)
    with pytest.raises(PromptError, match="is no token of this model"):
        ReplyGrammar({}).calls(CALL_FORMS["hermes"][1], TOOLS, one=False, free=True)


@each_row(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm </thin \n</think>\n\nHello <think> x", False, "hm </thin", "Hello <think> x"),
        ("hm\n</think>\n\nHi", True, "hm", "Hi"),
        ("<think>\nhm\n</think>\n\nHi", True, "hm", "Hi"),
        ("Hi <think>no</think>", False, "", "Hi <think>no</think>"),
        ("never ends </thi", True, "never ends </thi", ""),
        ("  <thi", False, "", "  <thi"),
        ("\n\nHi", False, "", "\n\nHi"),
    ],
)
def test_thinking_is_told_apart_however_it_comes(
    text: str, inside: bool, reasoning: str, content: str
) -> None:
    for seed in range(20):
        dice, at = random.Random(seed), 0
        reader, thought, said = ReplyReader(("<think>", "</think>"), inside=inside), "", ""
        while at <= len(text):
            size = dice.choice([1, 2, 3, 7]) if seed else len(text) + 1
            piece = reader.feed(text[at : at + size], final=at + size > len(text))
            thought, said, at = thought + piece.reasoning, said + piece.content, at + size
        assert (thought, said) == (reasoning, content), seed
