"""What is shown of a text: as it comes, never taken back, and up to a stop string."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import decoders, models, pre_tokenizers

from tee_side.engine.sampling import SamplingSettings
from tee_side.engine.text_stream import TextStream
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import Models, token_ids


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
    """Also where another generation of the same runner has run this one's steps ahead."""
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
    assert (beside.arrived, beside.token_count, beside.token_ids) == (True, 0, [])
    list(beside)
    same = beside.result()
    assert 0 < same.timing.ttft_s <= same.timing.total_s
    assert (same.token_ids, same.text, same.usage) == (result.token_ids, result.text, result.usage)


def test_the_work_between_two_steps_is_the_same_whatever_a_token_says(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that the generating thread calls from one step to the next, in order.

    A token of half a character shows nothing, and the one after it shows two.
    """
    called: list[list[str]] = []
    step = runner.step

    def watched() -> None:
        sys.setprofile(None)
        step()
        called.append([])
        sys.setprofile(watch)

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called[-1].append(frame.f_code.co_qualname)

    monkeypatch.setattr(runner, "step", watched)
    sampling = SamplingSettings(temperature=1.5, seed=3)
    generation = runner.generate(PROMPT, max_new_tokens=40, sampling=sampling)
    try:
        for _ in generation.steps():
            pass
    finally:
        sys.setprofile(None)
    stream = TextStream(runner.tokenizer)
    assert {stream.feed(token_id) == "" for token_id in generation.token_ids} == {True, False}
    assert len({tuple(calls) for calls in called[1:-1]}) == 1
    assert not any("_decode" in calls for calls in called)
