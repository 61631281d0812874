"""Text in and out: streaming equals decoding at once, chat templates equal transformers'."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from protocol.errors import ModelError, PromptError
from tee_side.engine import tokenizer as module
from tee_side.engine.text_stream import TextStream
from tee_side.engine.tokenizer import Tokenizer
from tsqp.cli.program import model_directory, run

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CORPUS = ["the cat sat on the mat", "naïve café 日本語 🙂 the end"]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] not in ['user', 'assistant', 'system'] %}\n"
    "        {{ raise_exception('unknown role') }}\n"
    "    {% endif %}\n"
    "<|user|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% if loop.last %}{% break %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  the café?  "},
    {"role": "assistant", "content": "日本語 🙂"},
    {"role": "user", "content": "on\nthe mat"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with BOS, as Llama 3 and Qwen have them."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    path = tmp_path_factory.mktemp("byte-level")
    raw.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with one token a byte for what it has no piece for, as Llama 2 and Mistral."""
    pieces = ["▁", "▁the", "the", "a", "t", "c"]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    vocabulary += [(piece, -2.0) for piece in pieces]
    raw = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path = tmp_path_factory.mktemp("byte-fallback")
    raw.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def _stream(tokenizer: Tokenizer, ids: list[int]) -> str:
    streamer = TextStream(tokenizer)
    return "".join(streamer.feed(token_id) for token_id in ids)


def test_encoding_adds_bos_where_the_tokenizer_does_and_not_where_it_is_told_not_to(
    tokenizer: Tokenizer, directory: Path
) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    text = "the café 🙂"
    assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.encode(text)[0] == 0
    plain = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == plain


def test_decoding_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0, *tokenizer.encode("the cat"), 1]) == "the cat"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=20))
def test_streamed_text_equals_the_text_that_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    """Most characters here are split over several byte tokens."""
    ids = tokenizer.encode(text)
    streamer = TextStream(tokenizer)
    streamed = "".join(streamer.feed(token_id) for token_id in ids)
    # What ends so looks like the first half of a character, and is kept until nothing more comes.
    assert streamed == text or text.endswith("\ufffd")
    assert streamed + streamer.flush() == tokenizer.decode(ids) == text


@given(text=st.text(max_size=20))
def test_streamed_text_of_byte_fallback_tokens_equals_decoding_at_once(
    byte_fallback: Tokenizer, text: str
) -> None:
    ids = byte_fallback.encode(text)
    whole = byte_fallback.decode(ids)
    streamed = _stream(byte_fallback, ids)
    assert streamed == whole or (whole.endswith("\ufffd") and whole.startswith(streamed))


def test_a_character_split_over_tokens_is_shown_when_it_is_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    streamer = TextStream(tokenizer)
    pieces = [streamer.feed(token_id) for token_id in ids]
    assert pieces == [*[""] * (len(ids) - 1), "😀"]


@given(ids=st.lists(st.integers(0, 289), max_size=25))
def test_any_tokens_a_model_may_produce_stream_as_they_decode_but_for_an_unfinished_end(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    whole, streamed = tokenizer.decode(ids), _stream(tokenizer, ids)
    assert whole == streamed or (whole.startswith(streamed) and whole.endswith("\ufffd"))


@given(ids=st.lists(st.integers(0, 264), max_size=25))
def test_invalid_byte_fallback_tokens_never_break_the_stream(
    byte_fallback: Tokenizer, ids: list[int]
) -> None:
    """A model may sample any bytes; that they are no UTF-8 is no reason to stop generating."""
    streamer = TextStream(byte_fallback)
    for token_id in ids:
        streamer.feed(token_id)
    tail = byte_fallback.encode("the cat", add_special_tokens=False)
    assert "".join(streamer.feed(token_id) for token_id in tail).endswith("the cat")


def test_two_streams_of_one_tokenizer_are_independent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日本", add_special_tokens=False)
    first, second = TextStream(tokenizer), TextStream(tokenizer)
    texts = ["", ""]
    for token_id in ids:
        texts[0] += first.feed(token_id)
        texts[1] += second.feed(token_id)
    assert texts == ["日本", "日本"]


@pytest.fixture(scope="module")
def sentencepiece_bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2's: pieces with "▁" for a space, which the normalizer also puts in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "c", "a", "é", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    raw = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("sentencepiece-bpe")
    raw.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(model_directory("demo"))


# Short of "▁" itself, which these tokenizers take for a space.
TEXT = st.text(max_size=20).map(lambda text: text.replace("▁", "_"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
@pytest.mark.parametrize("name", ["demo", "tokenizer", "byte_fallback", "sentencepiece_bpe"])
def test_the_bytes_of_a_texts_tokens_are_the_texts(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    """But for the space that sentencepiece begins a text with."""
    found: Tokenizer = request.getfixturevalue(name)
    ids = found.encode(text, add_special_tokens=False)
    joined = b"".join(found.token_bytes(token_id) for token_id in ids).decode()
    begins_with_space = name in ("byte_fallback", "sentencepiece_bpe")
    assert joined.removeprefix(" " if begins_with_space else "") == text.removeprefix(
        " " if name == "byte_fallback" else ""
    )


def test_every_token_of_the_demo_model_has_the_text_that_the_library_decodes(
    demo: Tokenizer,
) -> None:
    for token_id in range(demo.vocabulary_size):
        text = demo._raw.decode([token_id], skip_special_tokens=False)
        assert demo.token_text(token_id) == text
        assert demo.token_bytes(token_id)
    every_byte = {demo.token_bytes(token_id) for token_id in range(demo.vocabulary_size)}
    assert {bytes([byte]) for byte in range(256)} <= every_byte


def test_bytes_of_special_added_and_missing_tokens(
    tokenizer: Tokenizer, sentencepiece_bpe: Tokenizer, directory: Path, tmp_path: Path
) -> None:
    assert tokenizer.vocabulary_size == 290
    assert tokenizer.special_tokens == {text: token_id for token_id, text in enumerate(SPECIAL)}
    assert tokenizer.token_bytes(2) == b"<|user|>"
    # Of a character that has two bytes, the first.
    assert tokenizer.token_bytes(tokenizer.encode("\u0141")[1]) == "\u0141".encode()[:1]
    assert tokenizer.token_text(tokenizer.encode("\u0141")[1]) == "\ufffd"
    assert tokenizer.token_bytes(290) == b""
    assert sentencepiece_bpe.token_bytes(3 + 0x0A) == b"\n"
    assert sentencepiece_bpe.token_text(268) == " the"
    assert sentencepiece_bpe.token_bytes(1) == b"<s>"
    raw = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    raw.add_tokens(["café au lait"])
    raw.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).token_bytes(290) == "café au lait".encode()
    assert "café au lait" not in Tokenizer(tmp_path).special_tokens


def test_bytes_of_a_tokenizer_that_is_neither_are_what_it_decodes(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    raw.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).token_bytes(2) == b"##b"
    raw.decoder = decoders.WordPiece()
    raw.save(str(tmp_path / "tokenizer.json"))
    assert [Tokenizer(tmp_path).token_bytes(token_id) for token_id in (1, 2)] == [b"a", b"##b"]


def test_the_chat_template_gives_the_ids_of_transformers(
    tokenizer: Tokenizer, directory: Path
) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    for messages in (MESSAGES, MESSAGES[1:2]):
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokenizer.apply_chat_template(messages) == expected


def test_a_template_file_wins_over_the_one_in_the_configuration(
    directory: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}<|assistant|>")
    reference = PreTrainedTokenizerFast.from_pretrained(copy)
    expected = reference.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    tokenizer = Tokenizer(copy)
    assert tokenizer.apply_chat_template(MESSAGES) == expected
    assert tokenizer.decode(expected) == "be brief"


def test_a_conversation_is_rendered_with_and_without_the_assistants_next_turn(
    tokenizer: Tokenizer, directory: Path
) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(directory)
    for add in (True, False):
        expected = reference.apply_chat_template(
            MESSAGES, add_generation_prompt=add, tokenize=False
        )
        assert tokenizer.render_chat(MESSAGES, add_generation_prompt=add) == expected
        assert tokenizer.encode(expected, add_special_tokens=False) == (
            tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add)
        )
    assert tokenizer.render_chat(MESSAGES).endswith("<|assistant|>")


def test_messages_that_the_template_refuses_are_a_prompt_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="chat template: got TemplateError"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


CANARY = "canary-5309"


def _chain(error: BaseException) -> str:
    """Return all that a traceback of an error would print of it."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('odd: ' ~ messages[0].content) }}",
        "{{ messages[0][messages[0].content] + 1 }}",
    ],
)
def test_what_a_template_says_of_the_messages_is_not_shown(
    directory: Path, tmp_path: Path, template: str
) -> None:
    tokenizer = _with_template(directory, tmp_path, template)
    with pytest.raises(PromptError) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": CANARY}])
    assert CANARY not in _chain(caught.value)
    assert caught.value.got.endswith(" (a template's own words are not shown)")


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.encode(CANARY),
        lambda t: t.decode([1, 2]),
        lambda t: TextStream(t).feed(1),
    ],
    ids=["encode", "decode", "stream"],
)
def test_what_the_library_says_of_a_text_is_not_shown(
    directory: Path, use: Callable[[Tokenizer], object]
) -> None:
    class Talks:
        def encode(self, *_: object, **__: object) -> None:
            raise ValueError(f"no token for {CANARY}")

        decode = encode_batch_fast = encode

    tokenizer = Tokenizer(directory)
    tokenizer._raw = Talks()
    with pytest.raises(ModelError) as caught:
        use(tokenizer)
    assert CANARY not in _chain(caught.value)
    assert caught.value.got == "ValueError on use"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include 'config.json' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(
    directory: Path, tmp_path: Path, template: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(PromptError):
        Tokenizer(copy).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"],
)
def test_a_template_that_fails_is_a_prompt_error_that_names_the_directory(
    directory: Path, tmp_path: Path, template: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(PromptError, match=str(copy)):
        Tokenizer(copy).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ messages | no_such_filter }}", "{{ 'x", "{% for m in messages %}"]
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_damaged_template_is_a_model_error_that_names_its_file(
    directory: Path, tmp_path: Path, template: str, file: str
) -> None:
    """No other conversation would help."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    content = json.dumps({"chat_template": template}) if file.endswith("json") else template
    (copy / file).write_text(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer(copy).apply_chat_template(MESSAGES)
    assert caught.value.where == str(copy / file)
    assert caught.value.got.startswith("Template")


def test_a_model_without_a_chat_template_says_so(directory: Path, tmp_path: Path) -> None:
    shutil.copy(directory / "tokenizer.json", tmp_path)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path).apply_chat_template(MESSAGES)
    assert (caught.value.where, caught.value.got) == (str(tmp_path), "no chat template")
    assert "chat_template.jinja" in caught.value.expected


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert (caught.value.where, caught.value.got) == (str(tmp_path), "no tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "X"}}'])
def test_a_damaged_tokenizer_is_refused_by_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


def test_a_damaged_tokenizer_configuration_is_refused_by_its_path(
    directory: Path, tmp_path: Path
) -> None:
    shutil.copy(directory / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path).apply_chat_template(MESSAGES)


def _changed(directory: Path, into: Path, **changes: Any) -> Path:
    """Write the good tokenizer with some of its parts exchanged; return its directory."""
    content = json.loads((directory / "tokenizer.json").read_text())
    (into / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return into


@pytest.mark.parametrize(
    "changes",
    [
        {
            "padding": {
                "strategy": {"Fixed": 50},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<s>",
            }
        },
        {
            "padding": {
                "strategy": "BatchLongest",
                "direction": "Left",
                "pad_to_multiple_of": 2**40,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<s>",
            }
        },
        {
            "truncation": {
                "direction": "Right",
                "max_length": 3,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        },
    ],
    ids=["padding", "endless padding", "truncation"],
)
def test_a_prompt_is_neither_filled_up_nor_cut_off(
    directory: Path, tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    text = "the cat sat on the mat"
    changed = Tokenizer(_changed(directory, tmp_path, **changes))
    assert len(tokenizer.encode(text)) > 3
    assert changed.encode(text) == tokenizer.encode(text)


_WORDS = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}
_STRIPS = {"type": "Strip", "content": "t", "start": 2**40, "stop": 2**40}
_FAILS_ON: list[tuple[dict[str, Any], Callable[[Tokenizer], object]]] = [
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, lambda t: t.encode("the cat")),
    ({"model": _WORDS}, lambda t: t.encode("the cat")),
    ({"decoder": _STRIPS}, lambda t: t.decode(t.encode("ttt"))),
    ({"decoder": _STRIPS}, lambda t: [TextStream(t).feed(i) for i in t.encode("ttt")]),
]


@pytest.mark.parametrize(
    ("changes", "use"), _FAILS_ON, ids=["panic", "no unknown token", "decode", "stream"]
)
def test_what_the_library_raises_on_use_is_a_model_error_that_names_the_file(
    directory: Path, tmp_path: Path, changes: dict[str, Any], use: Callable[[Tokenizer], object]
) -> None:
    tokenizer = Tokenizer(_changed(directory, tmp_path, **changes))
    with pytest.raises(ModelError) as caught:
        use(tokenizer)
    assert caught.value.where == str(tmp_path / "tokenizer.json")


def test_a_panic_of_the_library_on_loading_is_a_model_error(
    directory: Path, tmp_path: Path
) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(ModelError, match="PanicException") as caught:
        Tokenizer(_changed(directory, tmp_path, normalizer=normalizer))
    assert caught.value.where == str(tmp_path / "tokenizer.json")


def test_a_panic_that_nobody_foresaw_ends_a_program_with_one_line(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}

    @click.command()
    def command() -> None:
        tokenizers.Tokenizer.from_str(json.dumps(content))

    monkeypatch.setattr(sys, "argv", ["tsqp"])
    monkeypatch.delenv("TSQP_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        run(command, "tsqp")
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("tsqp: internal error: PanicException at tests/")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_not_of_the_library_passes(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), module._library_errors(tmp_path, quoted=True):
        raise error


def _with_template(directory: Path, into: Path, template: str) -> Tokenizer:
    shutil.copytree(directory, into, dirs_exist_ok=True)
    (into / "chat_template.jinja").write_text(template)
    return Tokenizer(into)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% set x = range(99999) | map('int') | list %}{% endfor %}",
    ],
    ids=["nested loops", "recursion", "filters"],
)
def test_a_template_without_an_end_is_a_model_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(module, "_TEMPLATE_SECONDS", 0.2)
    before = sys.gettrace()
    with pytest.raises(ModelError, match=r"chat template: got no end after 0\.2 s"):
        _with_template(directory, tmp_path, template).apply_chat_template(MESSAGES)
    assert sys.gettrace() is before


def test_a_template_that_writes_too_much_is_a_model_error(directory: Path, tmp_path: Path) -> None:
    template = "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}"
    with pytest.raises(ModelError, match="more than 16777216 characters"):
        _with_template(directory, tmp_path, template).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    ["{{ 10 ** 10 ** 10 }}", "{{ 'x' * 10 ** 10 }}", "{{ 10 ** 10 * [1] }}", "{{ n * 2 ** 4095 }}"],
)
def test_one_operation_of_a_template_is_not_endless(
    directory: Path, tmp_path: Path, template: str
) -> None:
    """The watch sees lines of Python alone, not how long one takes."""
    tokenizer = _with_template(
        directory, tmp_path, "{% set n = 2 ** 4000 * 2 ** 4000 %}" + template
    )
    with pytest.raises(PromptError, match="OverflowError"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_template_may_compute(directory: Path, tmp_path: Path) -> None:
    template = "{{ 'ab' * 2 }} {{ 2 ** 10 }} {{ 3 * 4 }} {{ 1.5 * 2 }}"
    tokenizer = _with_template(directory, tmp_path, template)
    assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES)) == "abab 1024 12 3.0"
