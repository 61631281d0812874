"""What a report says: which cases are compared, with what, and what it lacks."""

from __future__ import annotations

import re

import pytest

from tee_side.vocabulary import Phase
from tsqp.bench.model import Baseline, Report, Span, Stages, Timeline
from tsqp.bench.summary import (
    baseline_name,
    between_us,
    busy_us,
    by_layer,
    by_operator,
    case_name,
    case_stages,
    caveats,
    compare,
    distinct,
    dominant,
    findings,
    growth,
    main_kind,
    missing,
    resource,
    tokens_per_step,
    uses_pads,
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


def test_what_must_be_known_first() -> None:
    first, second = caveats(of_device("null"))
    assert first.startswith("With device null nothing is computed at the service: tokens/s are an")
    assert second.startswith("shielded: pads are made ahead, and making them is not counted")
    assert "factors of these pads are zeros" in second
    assert "tokens/s are modelled" in caveats(of_device("model:h100"))[0]
    (pads,) = caveats(of_device("cpu"))
    assert "zeros" not in pads
    assert caveats(sample_report(("tee-only",), layers=1)) == []
    assert len(caveats(sample_report(("tsqp",), layers=1))) == 1


@pytest.mark.parametrize(
    ("said", "pads"),
    [
        ("the GPU sees uniform random numbers, lengths and timing", True),
        ("each GPU service sees uniform random numbers, as long as the two do not collude", False),
        ("the GPU sees hidden states in the clear - bad; activations under pad", True),
        ("the GPU sees activations under row-mix, pad, not known to be broken", True),
        ("the GPU sees activations under float-noise, which is broken; padding", False),
    ],
)
def test_pads_are_known_by_what_they_disclose(said: str, pads: bool) -> None:
    run = policy_run("p", layers=1).model_copy(update={"disclosure": f"policy p: {said}"})
    assert uses_pads(run) == pads
    # Without a round trip none is used.
    kept = policy_run("tee-only", layers=1).model_copy(update={"disclosure": run.disclosure})
    assert not uses_pads(kept)


def test_policies_of_one_name_are_told_apart() -> None:
    report = sample_report(("tsqp", "shielded", "tsqp", "tsqp"), layers=1)
    names = ["tsqp", "shielded", "tsqp (2)", "tsqp (3)"]
    assert [run.policy for run in distinct(report).policies] == names
    assert distinct(distinct(report)) == distinct(report)


def test_what_is_between_operators() -> None:
    def span(lane: int, start: float, length: float, stage: str = "tee") -> Span:
        return Span(
            lane=lane, operator="o", layer=0, stage=stage, start_us=start, duration_us=length
        )

    def between(*spans: Span, lane: int = 0) -> list[tuple[float, float]]:
        return between_us(Timeline(phase="decode", tokens=1, batch=1, spans=spans), lane)

    # The wire's time is nobody's gap, nor is what comes after the last span.
    alone = (span(0, 5, 5), span(0, 10, 20, "wire"), span(0, 35, 5))
    assert between(*alone) == [(0, 5), (30, 35)]
    # Another lane's operator takes the TEE, its wire does not.
    second = (span(1, 32, 2), span(1, 36, 30, "wire"), span(1, 70, 1))
    assert between(*alone, *second) == [(0, 5), (30, 32), (34, 35)]
    assert between(*alone, *second, lane=1) == [(34, 35), (66, 70)]
    assert between() == []


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
    ranked = [sentence for sentence in said if sentence.startswith("Decode at 512: ")]
    # Nobody computed what tsqp left to the service, and the others do in the TEE.
    assert len(ranked) == 2
    assert re.fullmatch(r"Decode at 512: tsqp takes .* a step, at most .* tokens/s\.", ranked[0])
    assert ranked[1].startswith("Decode at 512: attention-in-tee takes ")
    assert re.search("; shielded .* times as long", ranked[1])
    computed = list(findings(of_device("cpu")))
    (one,) = [sentence for sentence in computed if sentence.startswith("Decode at 512: ")]
    assert one.startswith("Decode at 512: tsqp takes ")
    assert "at most" not in one
    assert "attention-in-tee" in one
    assert sum(sentence.startswith("The baseline published takes") for sentence in said) == 3
    # On a device that computes nothing, what computes is no baseline.
    assert not any("transformers" in sentence for sentence in said)
    short = list(findings(sample_report(layers=2), parts=False))
    assert [s for s in said if "the largest stage" not in s] == short
