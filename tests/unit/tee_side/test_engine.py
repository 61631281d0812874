"""When generation ends, and which prompts are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import PromptError
from tee_side.engine import Sequence
from tests.support import SavedModel, Tee, assemble, token_ids

Models = Callable[..., SavedModel]

PROMPT = token_ids(6)


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


@pytest.fixture(scope="module")
def tee(model: SavedModel) -> Tee:
    return assemble(model.directory)


def _run(tee: Tee, prompt: list[int], **settings: object) -> Sequence:
    engine = tee.engine()
    sequence = engine.add(prompt, **settings)  # type: ignore[arg-type]
    while engine.running:
        engine.step()
    return sequence


def _first_new_id(ids: list[int], start: int) -> int:
    """Position from `start` on of an id that has not been there before."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


def test_generation_ends_at_max_new_tokens_with_reason_length(tee: Tee, model: SavedModel) -> None:
    sequence = _run(tee, PROMPT, max_new_tokens=7)
    assert sequence.token_ids == model.greedy(PROMPT, 7)
    assert sequence.finish_reason == "length"


def test_any_of_several_eos_ids_ends_generation_and_is_kept(tee: Tee, model: SavedModel) -> None:
    ids = model.greedy(PROMPT, 12)
    place = _first_new_id(ids, 3)
    unused = next(i for i in range(320) if i not in ids)
    sequence = _run(
        tee, PROMPT, max_new_tokens=12, eos_token_ids=frozenset({unused, ids[place], 319})
    )
    assert sequence.token_ids == ids[: place + 1]
    assert sequence.finish_reason == "stop"


def test_eos_ids_of_the_model_count_when_none_are_given(tmp_path: Path, model: SavedModel) -> None:
    import json
    import shutil

    ids = model.greedy(PROMPT, 12)
    place = _first_new_id(ids, 3)
    directory = tmp_path / "model"
    shutil.copytree(model.directory, directory)
    eos = {"eos_token_id": [319, ids[place]]}
    (directory / "generation_config.json").write_text(json.dumps(eos))
    sequence = _run(assemble(directory), PROMPT, max_new_tokens=12)
    assert sequence.token_ids == ids[: place + 1]
    assert sequence.finish_reason == "stop"


def test_eos_as_the_last_allowed_token_counts_as_stop(tee: Tee, model: SavedModel) -> None:
    ids = model.greedy(PROMPT, 12)
    place = _first_new_id(ids, 3)
    sequence = _run(tee, PROMPT, max_new_tokens=place + 1, eos_token_ids=frozenset({ids[place]}))
    assert (len(sequence.token_ids), sequence.finish_reason) == (place + 1, "stop")


def test_an_eos_id_in_the_prompt_does_not_end_generation(tee: Tee) -> None:
    sequence = _run(tee, PROMPT, max_new_tokens=1, eos_token_ids=frozenset(PROMPT[:-1]))
    assert len(sequence.token_ids) == 1


def test_generation_ends_with_reason_length_where_the_context_is_full(
    saved_model: Models,
) -> None:
    short = saved_model("llama", max_position_embeddings=32)
    prompt = token_ids(20)
    sequence = _run(assemble(short.directory), prompt, max_new_tokens=1000)
    assert sequence.token_ids == short.greedy(prompt, 12)
    assert sequence.finish_reason == "length"
    assert sequence.cache.capacity == 31


def test_the_longest_possible_prompt_still_gets_one_token(saved_model: Models) -> None:
    short = saved_model("llama", max_position_embeddings=32)
    prompt = token_ids(31)
    sequence = _run(assemble(short.directory), prompt, max_new_tokens=5)
    assert sequence.token_ids == short.greedy(prompt, 1)
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "no tokens"),
        ([1] * 256, "256 tokens"),
        ([1] * 300, "300 tokens"),
        ([5, 320], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_anything_runs(
    tee: Tee, prompt: list[int], said: str
) -> None:
    engine = tee.engine()
    with pytest.raises(PromptError) as caught:
        engine.add(prompt, max_new_tokens=4)
    assert said in caught.value.got
    assert engine.running == ()


def test_a_refused_prompt_says_what_the_bounds_are(tee: Tee) -> None:
    with pytest.raises(PromptError, match=r"fewer than the context of 256"):
        tee.engine().add([1] * 256, max_new_tokens=1)
    with pytest.raises(PromptError, match=r"0 to 319"):
        tee.engine().add([320], max_new_tokens=1)


def test_token_ids_outside_the_vocabulary_are_not_quoted(tee: Tee) -> None:
    """Prompts are secret, and errors are logged."""
    with pytest.raises(PromptError) as caught:
        tee.engine().add([123456], max_new_tokens=1)
    assert "123456" not in str(caught.value)


@pytest.mark.parametrize("max_new_tokens", [0, -3])
def test_a_request_for_no_new_tokens_is_refused(tee: Tee, max_new_tokens: int) -> None:
    with pytest.raises(PromptError):
        tee.engine().add(PROMPT, max_new_tokens=max_new_tokens)


def test_a_removed_sequence_is_not_run_any_more_and_others_go_on(
    tee: Tee, model: SavedModel
) -> None:
    engine = tee.engine()
    kept = engine.add(PROMPT, max_new_tokens=6)
    dropped = engine.add(PROMPT[::-1], max_new_tokens=6)
    engine.step()
    engine.remove(dropped)
    assert engine.running == (kept,)
    while engine.running:
        engine.step()
    assert len(dropped.token_ids) == 1
    assert kept.token_ids == model.greedy(PROMPT, 6)


def test_removing_a_sequence_twice_is_harmless(tee: Tee) -> None:
    engine = tee.engine()
    sequence = engine.add(PROMPT, max_new_tokens=2)
    engine.remove(sequence)
    engine.remove(sequence)
    assert engine.running == ()


def test_a_step_without_sequences_gives_nothing(tee: Tee) -> None:
    assert tee.engine().step() == []


def test_stop_ends_a_sequence_with_reason_stop(tee: Tee) -> None:
    engine = tee.engine()
    sequence = engine.add(PROMPT, max_new_tokens=50)
    engine.step()
    sequence.stop()
    assert engine.running == ()
    assert (sequence.finish_reason, len(sequence.token_ids)) == ("stop", 1)


def test_decode_goes_before_prefill_when_a_step_is_too_small_for_both(tee: Tee) -> None:
    engine = tee.engine(step_tokens=3)
    decoding = engine.add(PROMPT[:2], max_new_tokens=9)
    engine.step()
    waiting = engine.add(token_ids(20), max_new_tokens=1)
    for expected in range(2, 6):
        engine.step()
        assert len(decoding.token_ids) == expected
        assert waiting.cache.length == 2 * (expected - 1)


def test_a_long_prefill_never_keeps_a_decoding_sequence_waiting(tee: Tee) -> None:
    engine = tee.engine(step_tokens=4)
    decoding = engine.add(PROMPT[:2], max_new_tokens=20)
    engine.step()
    long = engine.add(token_ids(40), max_new_tokens=2)
    # Also when the one that decodes was admitted later than the one that is prefilled.
    late = engine.add(PROMPT[:1], max_new_tokens=20)
    for _ in range(6):
        before = len(decoding.token_ids), len(late.token_ids)
        engine.step()
        after = len(decoding.token_ids), len(late.token_ids)
        assert after == (before[0] + 1, before[1] + 1)
    assert not long.token_ids
    assert long.cache.length > 0
