"""What is compared with what: only what did the same work."""

from __future__ import annotations

import pytest

from tee_side.words import Phase
from tsqp.lab.bench.compare import baseline_name, compare
from tsqp.lab.bench.model import Baseline

from .sample_report import of_device, policy_run, sample_report, spread


def baseline(name: str = "b", **changes: object) -> Baseline:
    made = sample_report(layers=1).baselines[0]
    return made.model_copy(update={"name": name, **changes})


@pytest.mark.parametrize(
    ("device", "against", "ours"),
    [
        ("null", "null", "overhead_ms"),
        ("null", "cpu", None),
        ("null", "none", None),
        ("model:h100", "null", None),
        ("model:h100", "none", None),
        ("cpu", "null", None),
        ("cpu", "cpu", "step_ms"),
        ("cpu", "none", "step_ms"),
        ("cuda:0", "cpu", None),
        ("cuda:0", "none", "step_ms"),
        ("given services", "null", None),
        ("given services", "none", None),
    ],
)
def test_a_ratio_is_given_only_for_the_same_work(
    device: str, against: str, ours: str | None
) -> None:
    report = of_device(
        device,
        baselines=(baseline(against=against, tokens=512, new_tokens=1, step_ms=spread(900)),),
    )
    found = compare(report)
    assert [one.policy for one in found] == ["tsqp", "attention-in-tee", "shielded"]
    measured = report.policies[1].cases[1]
    assert (measured.phase, measured.tokens) == ("prefill", 512)
    assert measured.overhead_ms < measured.step_ms.median
    if ours is None:
        assert found[1].ratio is None
    else:
        ours_ms = measured.overhead_ms if ours == "overhead_ms" else measured.step_ms.median
        assert found[1].ours_ms == ours_ms
        assert found[1].ratio == pytest.approx(900 / ours_ms)


@pytest.mark.parametrize(("against", "same"), [("null", False), ("none", True), ("cpu", True)])
def test_what_computes_everything_itself_needs_no_device(against: str, same: bool) -> None:
    run = policy_run("tee-only", layers=1)
    report = of_device("null", baselines=(baseline(against=against),), policies=(run,))
    (found,) = compare(report)
    assert found.policy == "tee-only"
    assert (found.ratio is not None) == same


def test_each_case_is_compared_by_what_it_computed() -> None:
    # As `shielded`: its prompts stay in the TEE, its decode steps leave it.
    stays, leaves = policy_run("tee-only", layers=1), policy_run("shielded", layers=1)
    cases = [c for c in stays.cases if c.phase == "prefill"]
    cases += [c for c in leaves.cases if c.phase == "decode"]
    run = leaves.model_copy(update={"cases": tuple(cases)})
    kinds: list[tuple[Phase, int]] = [("prefill", 0), ("decode", 0), ("prefill", 64)]
    for against, expected in (("null", [False, True, False]), ("none", [True, False, False])):
        found = compare(
            of_device(
                "null",
                policies=(run,),
                baselines=tuple(
                    baseline(phase=phase, tokens=512, new_tokens=new, against=against)
                    for phase, new in kinds
                ),
            )
        )
        assert [one.ratio is not None for one in found] == expected
        # Time without the vocabulary is an overhead only where something is sent.
        assert found[0].ours_ms == cases[1].step_ms.median
        assert all(one.ours_ms is not None for one in found)


def test_a_prompt_with_many_tokens_is_compared_with_the_whole_request() -> None:
    report = of_device("null", baselines=(baseline(tokens=512, new_tokens=64),))
    made = report.policies[0].generation
    assert made is not None
    assert compare(report)[0].ours_ms == made.total_ms
    other = report.model_copy(update={"baselines": (baseline(tokens=512, new_tokens=63),)})
    assert [one.policy for one in compare(other)] == [None]


def test_the_mean_of_many_decode_steps_is_compared_with_one() -> None:
    report = of_device("null", baselines=(baseline(phase="decode", tokens=512, new_tokens=64),))
    found = compare(report)[1]
    assert found.ours_ms == report.policies[1].cases[3].overhead_ms
    assert baseline_name(found.baseline) == "decode at 512 (mean of 64)"


def test_a_baseline_that_no_case_matches_is_kept() -> None:
    report = of_device("null", baselines=(baseline(tokens=77, new_tokens=1),))
    (found,) = compare(report)
    assert (found.policy, found.ours_ms, found.ratio) == (None, None, None)
