"""What a report says: which cases are compared, with what, and what it lacks."""

from __future__ import annotations

import pytest

from tsqp.bench.model import Baseline, Report, Span, Stages
from tsqp.bench.summary import (
    baseline_name,
    busy_us,
    by_layer,
    by_operator,
    case_name,
    case_stages,
    compare,
    dominant,
    findings,
    growth,
    main_kind,
    missing,
    resource,
    tokens_per_step,
)

from .sample_report import case, partial_reports, policy_run, sample_report, setup, spread


def of_device(device: str, **changes: object) -> Report:
    return sample_report(layers=2).model_copy(update={"setup": setup(device=device), **changes})


def baseline(name: str = "b", **changes: object) -> Baseline:
    made = sample_report(layers=1).baselines[0]
    return made.model_copy(update={"name": name, **changes})


def test_operators_and_layers_add_up_to_the_case() -> None:
    found = case("shielded", "prefill", 128, layers=3)
    total = case_stages(found)
    for parts in (by_operator(found), [part for _, part, _ in by_layer(found)]):
        assert sum(part.stages.total_us for part in parts) == pytest.approx(total.total_us)
        assert sum(part.rpcs for part in parts) == found.rpcs == 12
        assert sum(part.bytes_sent for part in parts) == found.bytes_sent
        assert sum(part.bytes_received for part in parts) == found.bytes_received
    assert total.total_us + found.rest_us == pytest.approx(found.step_ms.median * 1e3)
    assert [layer for layer, _, _ in by_layer(found)] == [0, 1, 2, None]


def test_operators_stand_in_the_order_of_a_step() -> None:
    found = case("attention-in-tee", layers=1)
    strange = found.operators[0].model_copy(update={"operator": "dream"})
    found = found.model_copy(update={"operators": (strange, *reversed(found.operators))})
    names = [total.operator for total in by_operator(found)]
    assert names[:3] == ["embedding", "rms_norm", "qkv_proj"]
    assert names[-3:] == ["lm_head", "sample", "dream"]


def test_an_operator_placed_differently_in_different_layers_is_both() -> None:
    found = case("attention-in-tee", layers=2)
    moved = tuple(
        cost.model_copy(update={"place": "tee"})
        if (cost.operator, cost.layer) == ("o_proj", 0)
        else cost
        for cost in found.operators
    )
    places = {
        t.operator: t.place for t in by_operator(found.model_copy(update={"operators": moved}))
    }
    assert places["o_proj"] == "tee+gpu"
    assert places["qkv_proj"] == "gpu"
    assert places["attention"] == "tee"


def test_policies_are_compared_where_most_have_the_case() -> None:
    report = sample_report(layers=1)
    assert main_kind(report, "prefill") == (512, 1, 1)
    # Not eight sequences, and not micro-batches.
    assert main_kind(report, "decode") == (512, 1, 1)
    shorter = [policy_run(run.policy, lengths=(128,), layers=1) for run in report.policies[:2]]
    report = report.model_copy(update={"policies": (*shorter, report.policies[2])})
    assert main_kind(report, "prefill") == (128, 1, 1)
    assert main_kind(report.model_copy(update={"policies": ()}), "prefill") is None


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


def test_growth_is_fitted_for_length_and_batch() -> None:
    report = sample_report(("attention-in-tee",), lengths=(128, 256, 512), layers=2)
    found = {(g.phase, g.cost, g.against, g.scope): g for g in growth(report)}
    assert set(found) == {
        ("prefill", "step", "prompt tokens", "batch 1"),
        ("prefill", "attention", "prompt tokens", "batch 1"),
        ("decode", "step", "context tokens", "batch 1"),
        ("decode", "attention", "context tokens", "batch 1"),
        ("decode", "step", "batch", "128 context tokens"),
    }
    attention = found["prefill", "attention", "prompt tokens", "batch 1"]
    assert [x for x, _ in attention.points] == [128, 256, 512]
    assert attention.law is not None
    assert attention.law.exponent == pytest.approx(2, abs=0.05)
    batch = found["decode", "step", "batch", "128 context tokens"]
    assert batch.points == (
        (1, report.policies[0].cases[3].overhead_ms),
        (8, report.policies[0].cases[6].overhead_ms),
    )


def test_spans_that_overlap_are_busy_once() -> None:
    def span(start: float, length: float, stage: str = "tee") -> Span:
        return Span(lane=0, operator="o", layer=0, stage=stage, start_us=start, duration_us=length)

    assert busy_us([]) == 0
    assert busy_us([span(20, 5), span(0, 10), span(5, 10), span(6, 2)]) == 20
    stages = ("tee", "mask", "verify", "encode", "wire", "queue", "gpu", "decode", "unmask")
    owners = {stage: resource(span(0, 1, stage)) for stage in stages}
    assert [stage for stage, owner in owners.items() if owner == "wire"] == ["wire"]
    assert [stage for stage, owner in owners.items() if owner == "GPU"] == ["queue", "gpu"]
    assert resource(span(0, 1, "gpu_us")) == "GPU"


def test_a_step_has_whole_prompts_or_one_token_a_sequence() -> None:
    assert tokens_per_step(case("tsqp", "prefill", 128, 2, layers=1)) == 256
    assert tokens_per_step(case("tsqp", "decode", 128, 8, layers=1)) == 8


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (("prefill", 512), "prefill 512"),
        (("prefill", 512, 4), "prefill 4 x 512"),
        (("decode", 512), "decode at 512"),
        (("decode", 512, 8, 2), "decode 8 at 512, 2 micro"),
    ],
)
def test_names_of_cases(kind: tuple[str, int], name: str) -> None:
    assert case_name(*kind) == name  # type: ignore[arg-type]


def test_the_largest_parts_are_named() -> None:
    run = policy_run("shielded", layers=2)
    (cost,) = [c for c in run.cases[0].operators if (c.operator, c.layer) == ("o_proj", 1)]
    heavier = cost.model_copy(update={"stages": Stages(verify_us=9e6)})
    operators = tuple(heavier if c is cost else c for c in run.cases[0].operators)
    said = dominant(run, run.cases[0].model_copy(update={"operators": operators}))
    assert said.startswith("shielded, prefill 128: the largest stage is verify (99%)")
    assert "the largest operators are o_proj (99%) and " in said


def test_a_complete_report_lacks_nothing() -> None:
    assert missing(sample_report(layers=1)) == []


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "interrupted",
            [
                "The run is incomplete: interrupted by SIGINT.",
                "attention-in-tee lacks: decode, generation, timeline.",
                "No baseline was measured",
                "No ping-pong was measured",
            ],
        ),
        (
            "nothing",
            ["The run is incomplete: no service.", "No policy", "No baseline", "No ping-pong"],
        ),
        (
            "no baselines",
            [
                "tsqp lacks: timeline.",
                "attention-in-tee lacks: timeline.",
                "No baseline was measured",
            ],
        ),
        ("one policy", []),
        ("no timeline", ["attention-in-tee lacks: timeline."]),
        ("no cases", ["attention-in-tee lacks: prefill, decode, generation, timeline."]),
        ("tee-only", []),
    ],
)
def test_what_is_missing_is_said(name: str, sentences: list[str]) -> None:
    said = missing(partial_reports()[name])
    assert len(said) == len(sentences)
    for found, expected in zip(said, sentences, strict=True):
        assert found.startswith(expected)


def test_findings_name_the_fastest_and_the_ratios() -> None:
    said = list(findings(sample_report(layers=2)))
    fastest = [sentence for sentence in said if sentence.startswith("Decode at 512: ")]
    assert len(fastest) == 1
    assert fastest[0].startswith("Decode at 512: tsqp takes ")
    assert "attention-in-tee" in fastest[0]
    assert sum(sentence.startswith("The baseline published takes") for sentence in said) == 3
    # On a device that computes nothing, what computes is no baseline.
    assert not any("transformers" in sentence for sentence in said)
    short = list(findings(sample_report(layers=2), parts=False))
    assert [s for s in said if "the largest stage" not in s] == short
