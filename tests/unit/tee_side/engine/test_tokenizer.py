"""Text in and out: as it comes, never taken back."""

import itertools
import json
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from protocol.errors import ModelError
from tee_side.chat.template import ChatTemplate, Conversation
from tee_side.engine.request import SamplingSettings
from tee_side.engine.step import Sampled, Sequence
from tee_side.engine.tokenizer import TextStream, Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tee_side.serve.answers import TokenBytes
from tests.kit.model import Models, token_ids
from tests.kit.rows import each_row
from tests.kit.sentencepiece import write_sentencepiece
from tsqp.run.settings import model_directory

CANARY = "canary-5309"
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  the café?  "},
    {"role": "assistant", "content": "日本語 🙂"},
    {"role": "user", "content": "on\nthe mat"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer: byte-level BPE with BOS, as Llama 3 and Qwen have them."""
    path = tmp_path_factory.mktemp("byte-level")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_directory("demo") / name, path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    template = (model_directory("demo") / "chat_template.jinja").read_text()
    special = {"__type": "AddedToken", "content": config["eos_token"], "special": True}
    content = {**config, "eos_token": special, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def known(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers by kind."""
    path = tmp_path_factory.mktemp("sentencepiece")
    write_sentencepiece(path)
    return {"byte-level": Tokenizer(directory), "sentencepiece": Tokenizer(path)}


# Short of "▁" itself, which sentencepiece takes for a space.
@given(text=st.text(max_size=20).map(lambda text: text.replace("▁", "_")))
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_text_is_what_its_tokens_say_as_bytes_and_as_they_come(
    known: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """Most characters here are split over several tokens."""
    found = known[kind]
    ids = found.encode(text, add_special_tokens=False)
    assert found.decode([*found.raw.get_added_tokens_decoder(), *ids]) == text
    joined = b"".join(map(TokenBytes(found), ids)).decode()
    assert joined == (f" {text}" if kind == "sentencepiece" and text else text)
    stream, whole = TextStream(found), found.decode(ids)
    streamed = "".join(stream.feed(token_id) for token_id in ids)
    # What ends so looks like the first half of a character, and is kept until nothing more comes.
    assert streamed == whole or whole.endswith("\ufffd")
    assert streamed + stream.flush() == whole == text


@each_row(
    ("file", "content", "said"),
    [
        ("chat_template.jinja", None, "got no chat template"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "got Template"),
        ("tokenizer.json", None, "got no tokenizer.json"),
        (
            "tokenizer.json",
            None,
            r"no tokenizer\.json but tokenizer\.model, expected one, as tsqp imp",
        ),
        ("tokenizer_config.json", b'{"pad_token": 5}', "pad_token: got 5"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}', "decoder.x: got 'x'"),
        ("special_tokens_map.json", b'{"additional_special_tokens": true}', "tokens: got True"),
        ("added_tokens.json", b'{"[PAD]": null}', r"\[PAD\]: got None"),
        *(
            ("tokenizer.json", content, "tokenizer.json")
            for content in (b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "X"}}')
        ),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(
    directory: Path, tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    shutil.copy(directory / "tokenizer.json", tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if "but tokenizer" in said:
        (tmp_path / "tokenizer.model").touch()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=said) as caught:
        ChatTemplate(Tokenizer(tmp_path)).encode(Conversation(messages=MESSAGES))
    assert str(tmp_path) in caught.value.where


@each_row(
    "change",
    [
        lambda raw: raw.enable_padding(length=50),
        lambda raw: raw.enable_padding(direction="left", pad_to_multiple_of=2**40),
        lambda raw: raw.enable_truncation(3),
    ],
    ids=["padding", "endless padding", "truncation"],
)
def test_a_prompt_is_neither_filled_up_nor_cut_off(
    directory: Path, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    raw = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    change(raw)
    raw.save(str(tmp_path / "tokenizer.json"))
    text, tokenizer = "the cat sat on the mat", Tokenizer(directory)
    assert len(tokenizer.encode(text)) > 3
    assert Tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


TALKS = SimpleNamespace(decode=Mock(side_effect=ValueError(f"no token for {CANARY}")))
TALKS.encode_batch_fast = TALKS.decode
_WORDS = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}
_STRIPS = {"type": "Strip", "content": "t", "start": 2**40, "stop": 2**40}
_CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@each_row(
    ("changes", "use"),
    [
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, lambda t: t.encode("the cat")),
        ({"model": _WORDS}, lambda t: t.encode("the cat")),
        ({"decoder": _STRIPS}, lambda t: t.decode(t.encode("ttt"))),
        ({"decoder": _STRIPS}, lambda t: [TextStream(t).feed(i) for i in t.encode("ttt")]),
        ({"normalizer": _CHARSMAP}, lambda _: None),  # panics when it is loaded
        ({}, lambda t: (setattr(t, "raw", TALKS), t.encode("the cat"))),
        ({}, lambda t: (setattr(t, "raw", TALKS), t.decode([1]))),
    ],
)
def test_what_the_library_raises_is_a_model_error_that_names_the_file_and_quotes_nothing(
    directory: Path, tmp_path: Path, changes: dict[str, Any], use: Callable[[Tokenizer], object]
) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(ModelError) as caught:
        use(Tokenizer(tmp_path))
    assert caught.value.where == str(tmp_path / "tokenizer.json")
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def _before_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read one character after the other; the stop string that is complete first ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


# Few letters, so that stop strings occur, overlap and almost occur.
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=12),
)
@example(text="abc", stops=["abc", "b"], cuts=[])
@example(text="aaab", stops=["aab"], cuts=[1, 2, 3])
def test_however_a_text_is_sliced_it_is_shown_up_to_its_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    final, found = _before_stop(text, stops)
    by: Any = SimpleNamespace(decode=lambda ids: "".join(pieces[token_id] for token_id in ids))
    stream, fed, shown = TextStream(by, stops), "", ""
    for token_id, piece in enumerate(pieces):
        fed += piece
        shown += stream.feed(token_id)
        # Nothing would have to be taken back, and only what could begin a stop string is held.
        assert final.startswith(shown)
        held = "" if stream.found else fed[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert (shown + stream.flush(), stream.found) == (final, found)


@pytest.fixture(scope="module")
def runner(saved_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A model with 256 byte tokens: it writes broken UTF-8, and stops in the middle of it."""
    path = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(saved_model("llama", vocab_size=256).directory, path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(path / "tokenizer.json"))
    with Runner(RunnerSettings(path, load_policy("tee-only"))) as started:
        yield started


PROMPT = token_ids(6, vocab_size=256)
WARM = SamplingSettings(temperature=1.0, seed=3)


def test_a_stop_string_ends_generation_and_is_not_part_of_the_text(runner: Runner) -> None:
    """Also where another generation of the same runner had its turn before."""
    whole = runner.generate(PROMPT, max_new_tokens=40, sampling=WARM)
    text = "".join(whole)
    letters = [i for i, letter in enumerate(text) if letter.isascii() and letter not in text[:i]]
    alone, beside = (
        runner.generate(PROMPT, max_new_tokens=40, sampling=WARM, stop=[text[letters[3]]])
        for _ in range(2)
    )
    assert "".join(alone) == text[: letters[3]]
    result = alone.result()
    assert (result.finish_reason, result.text) == ("stop", text[: letters[3]])
    assert result.token_ids == whole.result().token_ids[: len(result.token_ids)]
    assert len(result.token_ids) < 40
    list(runner.generate(PROMPT, max_new_tokens=40, sampling=WARM))
    assert (beside.token_count, beside.token_ids) == (0, [])
    list(beside)
    with pytest.raises(RuntimeError, match="iterated over or closed before"):
        list(beside)
    same = beside.result()
    assert 0 < same.timing.ttft_s <= same.timing.total_s
    assert (same.token_ids, same.text, same.usage) == (result.token_ids, result.text, result.usage)


def test_the_work_between_two_steps_is_the_same_whatever_a_token_says(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that the generating thread calls from one step to the next, in order.

    A token of half a character shows nothing, and the one after it shows two. The step gives two
    tokens, as where a guess was right: the second is not there before it is yielded.
    """
    called: list[list[str]] = []
    yielded: list[int] = []
    step = runner.engine.step

    def watched(only: list[Sequence]) -> list[Sampled]:
        sys.setprofile(None)
        sampled = [*step(only), *step(only)]
        called.append([])
        sys.setprofile(watch)
        return sampled

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called[-1].append(frame.f_code.co_qualname)

    monkeypatch.setattr(runner.engine, "step", watched)
    sampling = SamplingSettings(temperature=1.5, seed=3)
    generation = runner.generate(PROMPT, max_new_tokens=40, sampling=sampling)
    try:
        for sampled in generation.steps():
            yielded.append(sampled.token_id)
            assert generation.token_ids == yielded
    finally:
        sys.setprofile(None)
    stream = TextStream(runner.tokenizer)
    assert {stream.feed(token_id) == "" for token_id in generation.token_ids} == {True, False}
    assert len({tuple(calls) for calls in called[1:-1]}) == 1
    assert not any("_decode" in calls for calls in called)


def test_a_continuation_keeps_the_space_of_its_first_token(known: dict[str, Tokenizer]) -> None:
    """Which a decoder drops at the beginning of a text alone, however many tokens are none."""
    tokenizer = known["sentencepiece"]
    word, end = tokenizer.encode("the")[0], tokenizer.raw.token_to_id("</s>")
    assert tokenizer.decode([word, word]) == "the the"
    for nothing in (0, 3, 40):
        stream = TextStream(tokenizer, (), [word])
        fed = [stream.feed(token_id) for token_id in (*[end] * nothing, word)]
        assert "".join(fed) + stream.flush() == " the"
    assert TextStream(tokenizer, (), [word, *[end] * 40]).feed(word) == " the"
    # Behind half a character the other half is no text of its own.
    first, second = tokenizer.encode("ü")[-2:]
    stream = TextStream(tokenizer, (), [word, first])
    assert stream.feed(second) + stream.flush() == "\ufffd"


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json", "class"])
def test_tokens_that_stand_beside_the_tokenizer_are_as_in_transformers(
    directory: Path, tmp_path: Path, place: str
) -> None:
    raw = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    next_id = raw.get_vocab_size()
    raw.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if place == "added_tokens.json":
        added = {"<|more|>": next_id + 1, "[PAD]": next_id}
        (tmp_path / place).write_text(json.dumps(added))
        settings["pad_token"] = "[PAD]"
    elif place == "tokenizer_config.json":
        said = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        both = (("[PAD]", True), ("<|more|>", False))
        settings["added_tokens_decoder"] = {
            str(next_id + index): {"content": token, "special": special, **said}
            for index, (token, special) in enumerate(both)
        }
    else:
        settings |= {"pad_token": "[PAD]", "additional_special_tokens": ["<|more|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "the[PAD] cat<|more|>."
    ours, theirs = Tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert {next_id, next_id + 1} <= set(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_class_has_special_tokens_of_its_own(directory: Path, tmp_path: Path) -> None:
    shutil.copy(directory / "tokenizer.json", tmp_path)
    for kind, ids in (("Qwen2TokenizerFast", 1), ("LlamaTokenizer", 9)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        assert len(Tokenizer(tmp_path).encode("<|endoftext|>", add_special_tokens=False)) == ids


def test_a_special_token_of_more_than_one_id_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat with it would be another."""
    monkeypatch.setattr(Tokenizer, "_add_tokens", lambda _: ["two words"])
    with pytest.raises(ModelError, match=r"special token: got \d+ ids for it, expected one"):
        Tokenizer(directory)
