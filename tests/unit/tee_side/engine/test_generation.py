"""Generated text: what is streamed is the text of all tokens, and stop strings end it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tee_side.engine.sampling import SamplingSettings
from tee_side.engine.text_stream import TextStream
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import SavedModel, token_ids

Models = Callable[..., SavedModel]


@pytest.fixture(scope="module")
def directory(saved_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 256 byte tokens: it writes broken UTF-8, and stops in the middle of it."""
    path = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(saved_model("llama", vocab_size=256).directory, path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def runner(directory: Path) -> Iterator[Runner]:
    with Runner(RunnerSettings(directory, load_policy("tee-only"))) as started:
        yield started


@pytest.mark.parametrize("seed", range(12))
def test_the_text_that_is_streamed_is_the_text_of_all_tokens(runner: Runner, seed: int) -> None:
    """Also where generation ends in the middle of a character."""
    generation = runner.generate(
        token_ids(4, seed, vocab_size=256),
        max_new_tokens=10 + seed,
        sampling=SamplingSettings(temperature=1.5, seed=seed),
    )
    streamed = "".join(generation)
    result = generation.result()
    assert result.text == streamed
    assert streamed == runner.tokenizer.decode(result.token_ids)


def test_a_result_tells_what_was_asked_and_what_it_cost(runner: Runner) -> None:
    generation = runner.generate(token_ids(6, vocab_size=256), max_new_tokens=5)
    list(generation)
    result = generation.result()
    assert result.prompt_token_ids == token_ids(6, vocab_size=256)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (6, 5)
    assert result.usage.total_tokens == 11
    assert (result.finish_reason, result.policy) == ("length", "tee-only")
    assert (result.rpc.count, result.rpc.bytes_sent, result.rpc.bytes_received) == (0, 0, 0)
    assert 0 < result.timing.ttft_s <= result.timing.total_s
    assert result.pads is None


def test_a_stop_string_ends_generation_and_is_not_part_of_the_text(runner: Runner) -> None:
    prompt = token_ids(6, vocab_size=256)
    sampling = SamplingSettings(temperature=1.0, seed=3)
    whole = runner.generate(prompt, max_new_tokens=40, sampling=sampling)
    text = "".join(whole)
    letters = [i for i, letter in enumerate(text) if letter.isascii() and letter not in text[:i]]
    stop = text[letters[3]]
    stopped = runner.generate(prompt, max_new_tokens=40, sampling=sampling, stop=[stop])
    assert "".join(stopped) == text[: letters[3]]
    result = stopped.result()
    assert result.finish_reason == "stop"
    assert result.token_ids == whole.result().token_ids[: len(result.token_ids)]
    assert len(result.token_ids) < 40


def test_a_stop_string_cuts_the_result_where_the_text_ends_even_if_more_was_sampled(
    runner: Runner,
) -> None:
    """Another generation of the same runner may have run this one's steps ahead."""
    prompt, sampling = token_ids(6, vocab_size=256), SamplingSettings(temperature=1.0, seed=3)
    whole = runner.generate(prompt, max_new_tokens=40, sampling=sampling)
    text = "".join(whole)
    letters = [i for i, letter in enumerate(text) if letter.isascii() and letter not in text[:i]]
    stop = [text[letters[3]]]
    alone = runner.generate(prompt, max_new_tokens=40, sampling=sampling, stop=stop)
    list(alone)
    beside = runner.generate(prompt, max_new_tokens=40, sampling=sampling, stop=stop)
    list(runner.generate(prompt, max_new_tokens=40, sampling=sampling))
    list(beside)
    assert beside.result().token_ids == alone.result().token_ids
    assert beside.result().text == alone.result().text
    assert beside.result().usage == alone.result().usage
    assert beside.result().finish_reason == "stop"


def test_a_generation_that_was_left_early_is_not_iterated_over_again(runner: Runner) -> None:
    """Its sequence is gone: no step would ever give it another token."""
    generation = runner.generate(token_ids(4, vocab_size=256), max_new_tokens=9)
    for _ in generation.steps():
        break
    for again in (generation, generation.steps()):
        with pytest.raises(RuntimeError, match="iterated over or closed before"):
            next(iter(again))
    closed = runner.generate(token_ids(4, vocab_size=256), max_new_tokens=9)
    closed.close()
    with pytest.raises(RuntimeError, match="iterated over or closed before"):
        next(iter(closed))
    assert len(generation.token_ids) == 1


def test_a_generation_that_is_stopped_keeps_the_tokens_so_far(runner: Runner) -> None:
    prompt = token_ids(4, vocab_size=256)
    whole = [one.token_id for one in runner.generate(prompt, max_new_tokens=9).steps()]
    generation = runner.generate(prompt, max_new_tokens=9)
    for _ in generation.steps():
        if generation.token_count == 3:
            generation.stop()
    result = generation.result()
    assert (result.token_ids, result.finish_reason) == (whole[:3], "stop")
    assert result.text == generation.text == runner.tokenizer.decode(whole[:3])


def test_the_work_between_two_steps_is_the_same_whatever_a_token_says(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that the generating thread calls from one step to the next, in order.

    A token of half a character shows nothing, and the one after it shows two.
    """
    sampling = SamplingSettings(temperature=1.5, seed=3)
    prompt = token_ids(4, vocab_size=256)
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
    generation = runner.generate(prompt, max_new_tokens=40, sampling=sampling)
    try:
        for _ in generation.steps():
            pass
    finally:
        sys.setprofile(None)
    detokenizer = TextStream(runner.tokenizer)
    silent = {detokenizer.feed(token_id) == "" for token_id in generation.token_ids}
    assert silent == {True, False}
    assert len({tuple(calls) for calls in called[1:-1]}) == 1
    assert not any("_decode" in calls for calls in called)
