"""What to conclude from a report, and what it lacks."""

from __future__ import annotations

import re

import pytest

from tsqp.lab.bench.compare import baseline_name
from tsqp.lab.bench.findings import dominant, findings, missing
from tsqp.lab.bench.model import Stages
from tsqp.lab.bench.units import duration, figures

from .sample_report import of_device, partial_reports, policy_run, sample_report


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
    clear, shielded = (run.cases[3].step_ms.median for run in sample_report(layers=2).policies[1:])
    assert clear < shielded
    assert f"; shielded {figures(shielded / clear)} times as long." in ranked[1]
    assert f"attention-in-tee takes {figures(clear)} ms a step" in ranked[1]
    computed = list(findings(of_device("cpu")))
    (one,) = [sentence for sentence in computed if sentence.startswith("Decode at 512: ")]
    assert one.startswith("Decode at 512: tsqp takes ")
    assert "at most" not in one
    assert "attention-in-tee" in one
    assert sum(sentence.startswith("The baseline published takes") for sentence in said) == 3
    baseline = sample_report(layers=2).baselines[0]
    (sentence,) = (s for s in said if f" for {baseline_name(baseline)}: " in s)
    assert sentence.startswith(
        f"The baseline published takes {duration(baseline.step_ms.median * 1e3)} for "
    )
    # On a device that computes nothing, what computes is no baseline.
    assert not any("transformers" in sentence for sentence in said)
    short = list(findings(sample_report(layers=2), parts=False))
    assert [s for s in said if "the largest stage" not in s] == short


def test_whether_offloading_wins_is_one_sentence_a_phase() -> None:
    report = sample_report(("attention-in-tee", "shielded", "tee-only"), layers=2)
    said = [s for s in findings(report) if s.startswith("Offloading beside tee-only, the fastest")]
    assert [re.findall(r" for (prefill|decode)", s) for s in said] == [["prefill"], ["decode"]]
    clear, shielded, alone = (run.cases[3].step_ms.median for run in report.policies)
    assert f"attention-in-tee wins, at most {alone / clear:.2f} times as fast; " in said[1]
    assert (
        f"shielded wins, at most {alone / shielded:.2f} times as fast (loses with its pads made on"
        f" the same cores: {alone / (shielded + 12.5):.2f} times)." in said[1]
    ), said[1]
    # Prompts use no pads up, and nothing is compared where every policy needs a service.
    assert "pads" not in said[0]
    assert not any("Offloading" in s for s in findings(sample_report(layers=2)))
