"""Plots are well-formed SVG, with the colours and the words of what was measured."""

from __future__ import annotations

import sys
from xml.etree import ElementTree as ET

import pytest

from protocol.errors import SettingsError
from tsqp.lab.bench.model import STAGES, Report, Span, Timeline
from tsqp.lab.bench.plot_style import REST_COLOUR, STAGE_COLOURS, WIDTH, Plot, check_installed
from tsqp.lab.bench.plots import growth_plot, plots, side_by_side, stage_bars
from tsqp.lab.bench.timeline_plot import timeline_plot, timelines

from .sample_report import partial_reports, policy_run, sample_report, setup, timeline

PARTIAL = partial_reports()


def checked(plot: Plot | None) -> Plot:
    assert plot is not None
    root = ET.fromstring(plot.svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert plot.caption
    assert plot.caption == plot.caption.strip()
    return plot


def stages_of(plot: Plot) -> set[str]:
    return {name for name in STAGES if STAGE_COLOURS[name] in plot.svg}


def says(plot: Plot, text: str) -> bool:
    """Whether the text is drawn: matplotlib leaves it in a comment beside its outlines."""
    return f"<!-- {text} -->" in plot.svg


def test_stages_have_colours_of_their_own() -> None:
    assert tuple(STAGE_COLOURS) == STAGES
    assert len(set(STAGE_COLOURS.values())) == len(STAGES)


def test_bars_have_the_stages_that_took_time() -> None:
    clear = {"tee_us", "encode_us", "wire_us", "queue_us", "gpu_us", "decode_us"}
    plot = checked(stage_bars(sample_report(("attention-in-tee",), layers=2), "prefill"))
    assert stages_of(plot) == clear
    masked = checked(stage_bars(sample_report(("shielded",), layers=2), "prefill"))
    assert stages_of(masked) == set(STAGES)
    assert stages_of(checked(stage_bars(PARTIAL["tee-only"], "decode"))) == {"tee_us"}


def test_bars_show_every_operator_of_every_policy() -> None:
    report = sample_report(layers=2)
    plot = checked(stage_bars(report, "decode"))
    assert plot.title == "Where the time goes: decode at 512"
    for run in report.policies:
        assert any(says(plot, f"{run.policy}: {n}") for n in _durations(report))
        for cost in run.cases[0].operators:
            assert says(plot, cost.operator)
    # Each policy's own sentence.
    assert len(plot.caption.splitlines()) >= 3


def _durations(report: Report) -> list[str]:
    from tsqp.lab.bench.units import duration

    return [duration(c.step_ms.median * 1e3) for run in report.policies for c in run.cases]


def test_a_vocabulary_that_dwarfs_the_rest_is_cut_off_and_said_to_be() -> None:
    plot = checked(stage_bars(sample_report(("attention-in-tee",), layers=4), "decode"))
    assert says(plot, "26.9, cut off")
    assert "cut off" in plot.caption
    whole = checked(stage_bars(sample_report(("attention-in-tee",)), "prefill"))
    assert "cut off" not in whole.caption
    assert "cut off" not in whole.svg


def test_policies_stand_side_by_side() -> None:
    report = sample_report(layers=2)
    plot = checked(side_by_side(report))
    for run in report.policies:
        assert says(plot, run.policy)
    assert says(plot, "prefill 512: tokens/s")
    assert says(plot, "decode at 512: tokens/s")
    assert says(plot, "upper bound")
    # Without a computing service, only what the TEE computes alike is ranked.
    ranked = max(report.policies[1:], key=lambda run: run.cases[1].tokens_per_s)
    assert plot.caption.startswith(
        f"Prefill 512: {ranked.policy} is the fastest of attention-in-tee and shielded, which"
    )
    computed = report.model_copy(update={"setup": setup(device="cpu")})
    plot = checked(side_by_side(computed))
    assert not says(plot, "upper bound")
    fastest = max(report.policies, key=lambda run: run.cases[1].tokens_per_s)
    assert plot.caption.startswith(f"Prefill 512: {fastest.policy} is the fastest, ")


def test_a_speed_with_pads_is_said_to_be_without_making_them() -> None:
    alone = checked(side_by_side(sample_report(("shielded",), layers=2)))
    assert alone.caption.count("tokens/s (making pads not counted).") == 2
    clear = checked(side_by_side(sample_report(("tsqp",), layers=2)))
    assert "pads" not in clear.caption


def test_nothing_alike_has_no_fastest() -> None:
    report = sample_report(("tsqp", "tee-only"), layers=2)
    plot = checked(side_by_side(report))
    assert "is the fastest," not in plot.caption
    assert "fastest of" not in plot.caption
    assert "so none is called the fastest" in plot.caption
    assert says(plot, "no RPC: all in the TEE")
    assert not says(checked(side_by_side(sample_report(layers=2))), "no RPC: all in the TEE")


def test_fewer_panels_are_narrower_and_not_larger() -> None:
    lengths = (128, 512, 2048)
    fewer = checked(growth_plot(sample_report(("tsqp",), lengths=lengths, batches=(1,), layers=2)))
    whole = checked(
        growth_plot(sample_report(("tsqp",), lengths=lengths, batches=(1, 4, 8), layers=2))
    )
    assert fewer.width < whole.width == WIDTH
    for plot in (fewer, whole):
        assert f'width="{plot.width * 72:g}pt"' in plot.svg


def test_growth_states_exponents_and_the_quality_of_the_fit() -> None:
    report = sample_report(("tsqp", "attention-in-tee"), lengths=(128, 512, 2048), layers=2)
    plot = checked(growth_plot(report))
    assert "<!-- tsqp: n^1." in plot.svg
    assert ", R2 0.9" in plot.svg
    assert says(plot, "published (baseline)")
    # It computes, the device does not.
    assert not says(plot, "transformers (baseline)")
    assert "Prefill time grows faster than its prompt tokens" in plot.caption
    assert "Decode time grows no faster than its context tokens" in plot.caption


def test_two_sizes_are_no_chart() -> None:
    assert growth_plot(sample_report(lengths=(128,), batches=(1,), layers=2)) is None
    assert growth_plot(sample_report(("tsqp",), lengths=(128, 512), layers=2)) is None
    assert sum(plot.title == "Cost against size" for plot in plots(sample_report(layers=2))) == 0


def test_the_caption_praises_no_policy_for_what_others_move_as_well() -> None:
    def caption(*policies: str) -> str:
        return checked(side_by_side(sample_report(policies, layers=2))).caption

    assert "tee-only moves nothing" in caption("attention-in-tee", "tee-only")
    assert "attention-in-tee moves the least" in caption("attention-in-tee", "tsqp")
    assert "move" not in caption("tee-only")
    # In prefill `shielded` computes in the TEE, as `tee-only` does.
    nothing = [line for line in caption("shielded", "tee-only").splitlines() if "move" in line]
    assert all("moves the least" not in line for line in nothing)


def test_a_timeline_has_a_lane_for_each_micro_batch() -> None:
    run = policy_run("shielded", layers=6)
    one = checked(timeline_plot(run, timeline("shielded", layers=6)))
    assert says(one, "TEE")
    assert not says(one, "TEE 1")
    assert says(one, "layers 2 and 3")
    two = checked(timeline_plot(run, timeline("shielded", batch=8, micro_batches=2, layers=6)))
    for name in ("TEE 0", "TEE 1", "wire 0", "wire 1", "GPU 0", "GPU 1"):
        assert says(two, name)
    assert "They overlap" in two.caption
    assert "They overlap" not in one.caption


def test_the_caption_of_a_timeline_says_who_was_busy() -> None:
    def span(stage: str, start: float, length: float) -> Span:
        return Span(
            lane=0, operator="o_proj", layer=0, stage=stage, start_us=start, duration_us=length
        )

    spans = (span("tee", 0, 10), span("wire", 10, 80), span("gpu", 90, 10))
    run = policy_run("tsqp", layers=1)
    plot = checked(timeline_plot(run, Timeline(phase="decode", tokens=1, batch=1, spans=spans)))
    assert plot.caption == (
        "Of 100 us: TEE 10%, wire 80%, GPU 10%. The wire is what to shorten first."
    )
    assert not says(plot, "between operators")


def test_what_is_between_operators_is_drawn_and_said() -> None:
    spans = tuple(
        Span(lane=0, operator="o_proj", layer=0, stage=stage, start_us=start, duration_us=length)
        for stage, start, length in (("tee", 30, 10), ("wire", 60, 10), ("gpu", 70, 10))
    )
    run = policy_run("tsqp", layers=1)
    plot = checked(timeline_plot(run, Timeline(phase="decode", tokens=1, batch=1, spans=spans)))
    assert says(plot, "between operators")
    assert REST_COLOUR in plot.svg
    assert plot.caption == (
        "Of 80.0 us: TEE 12%, between operators 62%, wire 12%, GPU 12%. What is between operators"
        " is what to shorten first."
    )


def test_an_empty_timeline_is_not_drawn() -> None:
    assert timelines(PARTIAL["empty timeline"]) == []
    assert timelines(PARTIAL["no timeline"]) == []
    complete = timelines(sample_report(("tsqp", "shielded"), layers=2))
    assert [(policy, len(found)) for policy, found in complete] == [("tsqp", 3), ("shielded", 3)]


def test_very_many_spans_do_not_make_a_very_large_picture() -> None:
    spans = tuple(
        Span(lane=0, operator="o_proj", layer=n, stage="tee", start_us=2.0 * n, duration_us=1)
        for n in range(20_000)
    )
    run = policy_run("tsqp", layers=1)
    plot = timeline_plot(run, Timeline(phase="decode", tokens=1, batch=1, spans=spans))
    assert len(checked(plot).svg) < 400_000


@pytest.mark.parametrize("name", ["nothing", "no cases", "no operators", "no time at all"])
def test_partial_reports_have_the_plots_that_they_can_have(name: str) -> None:
    made = [checked(plot).title for plot in plots(PARTIAL[name])]
    empty = {"nothing", "no cases"}
    assert bool(made) == (name not in empty)
    assert any(title.startswith("Where the time goes") for title in made) == (
        name not in {*empty, "no operators"}
    )


def test_names_are_text_and_no_mathematics() -> None:
    report = sample_report(("a$_b$", "shielded"), layers=2)
    assert says(checked(side_by_side(report)), "a$_b$")


def test_equal_reports_give_equal_plots() -> None:
    first, second = (
        checked(stage_bars(sample_report(("tsqp",), layers=2), "prefill")).svg for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("missing", ["matplotlib", "matplotlib.figure"])
def test_without_matplotlib_it_is_said_before_the_run(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_installed("--html")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SettingsError, match=rf"--html: got no module {missing}, expected .*bench"):
        check_installed("--html")
