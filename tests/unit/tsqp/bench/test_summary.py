"""Which cases are compared, and what they add up to."""

from __future__ import annotations

import pytest

from tsqp.lab.bench.summary import (
    by_layer,
    by_operator,
    case_name,
    case_stages,
    distinct,
    fastest_alone,
    main_cases,
    main_kind,
    pads_ms,
    sustained_ms,
    tokens_per_step,
)

from .sample_report import case, policy_run, sample_report, spread


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


def test_policies_of_one_name_are_told_apart() -> None:
    report = sample_report(("tsqp", "shielded", "tsqp", "tsqp"), layers=1)
    names = ["tsqp", "shielded", "tsqp (2)", "tsqp (3)"]
    assert [run.policy for run in distinct(report).policies] == names
    assert distinct(distinct(report)) == distinct(report)


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


def test_pads_are_made_for_each_token_of_a_phase_that_uses_them() -> None:
    run = policy_run("shielded", layers=1)
    found = {(c.phase, c.batch): (pads_ms(run, c), sustained_ms(run, c)) for c in run.cases}
    step_ms = {(c.phase, c.batch): c.step_ms.median for c in run.cases}
    assert found["prefill", 1] == (0, step_ms["prefill", 1])
    assert found["decode", 1] == (12.5, step_ms["decode", 1] + 12.5)
    assert found["decode", 8] == (100, step_ms["decode", 8] + 100)
    clear = policy_run("attention-in-tee", layers=1)
    assert {pads_ms(clear, c) for c in clear.cases} == {0}


def test_what_offloads_is_beside_the_fastest_that_never_does() -> None:
    report = sample_report(("shielded", "tee-only", "tsqp"), layers=1)
    slow, fast = report.policies[1], policy_run("tee-only", layers=1)
    quick = tuple(c.model_copy(update={"step_ms": spread(1.0)}) for c in fast.cases)
    fast = fast.model_copy(update={"policy": "quick", "cases": quick})
    # `shielded` computes prompts itself, as of other policies, and still needs a service.
    alone = tuple(
        c.model_copy(update={"rpcs": 0.0}) if c.phase == "prefill" else c
        for c in report.policies[0].cases
    )
    shielded = report.policies[0].model_copy(update={"cases": alone})
    report = report.model_copy(update={"policies": (shielded, slow, fast, report.policies[2])})
    found = fastest_alone(main_cases(report, "prefill"))
    assert found is not None
    (best, _), sent = found
    assert best.policy == "quick"
    assert [run.policy for run, _ in sent] == ["shielded", "tsqp"]
    assert fastest_alone(main_cases(sample_report(layers=1), "prefill")) is None
