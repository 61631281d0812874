"""A plan says how long sequences become, and refuses or fits what is too long."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from protocol.errors import SettingsError
from tsqp.lab.bench.job import Answer, Failed, Finished, Plan

STEP = 512


def plan(**changes: object) -> Plan:
    made = Plan(
        prefill=(1, 100), decode=((20, 1), (20, 4)), generation=(30, 10), repeats=5, decode_steps=24
    )
    return made.model_copy(update=changes)


@pytest.mark.parametrize(
    ("steps", "observed"), [(1, 3), (3, 3), (7, 7), (12, 12), (13, 12), (900, 12)]
)
def test_as_many_steps_are_observed_as_timed_within_bounds(steps: int, observed: int) -> None:
    one = plan(decode_steps=steps)
    assert one.observed("decode", steps) == observed
    assert one.runs("decode") == 2 + steps + observed


def test_prompts_are_observed_a_few_times() -> None:
    assert plan(repeats=40).observed("prefill", 40) == 3
    assert plan(repeats=2).observed("prefill", 2) == 2
    assert plan(repeats=5).runs("prefill") == 2 + 5 + 3


def test_tokens_decoded_while_others_are_in_prefill_count() -> None:
    one = plan()
    # To warm up, timed and observed: 2 + 24 + 12 steps.
    assert one.new_tokens(20, 4, STEP) == 1 + 38
    # 800 tokens of prompts, at least 509 a step beside three that decode.
    assert one.new_tokens(200, 4, STEP) == 2 + 38
    # Worst: all but one row are taken.
    assert one.new_tokens(20, 4, 4) == 80 + 38


def test_the_longest_sequence_is_of_whichever_case() -> None:
    assert plan().longest(STEP) == 101
    assert plan(prefill=(10,)).longest(STEP) == 20 + 39
    assert plan(prefill=(10,), decode=()).longest(STEP) == 40
    assert plan(prefill=(), decode=(), generation=None).longest(STEP) == 1


def test_cached_tokens_are_those_of_one_case_at_a_time() -> None:
    assert plan().cached_tokens(STEP) == 4 * (20 + 39 - 1)
    assert plan(decode=((20, 1),)).cached_tokens(STEP) == 100
    assert plan(prefill=(), decode=()).cached_tokens(STEP) == 39
    assert plan(prefill=(), decode=(), generation=None).cached_tokens(STEP) == 0


@pytest.mark.parametrize(
    ("changes", "context", "where", "got"),
    [
        ({}, 100, "--prefill", "100 tokens"),
        ({"prefill": (1,)}, 58, "--context, --decode-steps", "20 tokens and 39 decoded"),
        ({"prefill": (1,), "decode": ()}, 39, "the request", "40 tokens"),
        ({"decode": ((1, 513),)}, 9999, "--batch", "513 sequences"),
    ],
)
def test_too_long_for_the_model_is_refused(
    changes: dict[str, object], context: int, where: str, got: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        plan(**changes).check(context, STEP)
    assert refused.value.where == where
    assert refused.value.got.startswith(got)


@pytest.mark.parametrize(
    ("changes", "context"),
    [({}, 101), ({"prefill": (1,)}, 59), ({"prefill": (1,), "decode": ()}, 40)],
)
def test_what_just_fits_is_taken(changes: dict[str, object], context: int) -> None:
    plan(**changes).check(context, STEP)


def test_only_lengths_that_nobody_asked_for_give_way() -> None:
    one = plan(prefill=(1, 100), decode=((40, 1), (20, 4)))
    kept = one.fitted(70, STEP, prefill=False, context=False)
    assert (kept.prefill, kept.decode) == (one.prefill, one.decode)
    fitted = one.fitted(70, STEP, prefill=True, context=True)
    assert fitted.prefill == (1,)
    assert fitted.decode == ((31, 1), (20, 4))
    fitted.check(70, STEP)
    assert one.fitted(9999, STEP, prefill=True, context=True) == one
    # Two that become the same are one.
    assert one.model_copy(update={"decode": ((40, 1), (50, 1))}).fitted(
        70, STEP, prefill=True, context=True
    ).decode == ((31, 1),)


def test_a_context_without_room_is_refused_and_not_dropped() -> None:
    with pytest.raises(SettingsError, match="--decode-steps"):
        plan(prefill=(1,)).fitted(39, STEP, prefill=True, context=True).check(39, STEP)


def test_the_request_is_shortened_to_the_model() -> None:
    assert plan().fitted(35, STEP, prefill=True, context=True).generation == (25, 10)
    assert plan().fitted(10, STEP, prefill=True, context=True).generation is None


def test_lines_are_told_apart() -> None:
    lines: TypeAdapter[Answer] = TypeAdapter(Answer)
    for line in (
        Failed(where="a", got="b", expected="c"),
        Finished(peak_bytes=1, kv_bytes=2, vocabulary_bytes=3),
    ):
        assert lines.validate_json(line.model_dump_json()) == line
