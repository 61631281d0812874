"""The tables fit 80 columns, add up, and show what there is of a partial report."""

from __future__ import annotations

import re

import pytest

from tsqp.lab.bench.findings import dominant
from tsqp.lab.bench.model import Generation, Stages
from tsqp.lab.bench.table import render
from tsqp.lab.bench.tables import (
    Grid,
    Row,
    baselines_grid,
    growth_grid,
    layers_grid,
    memory_grid,
    operators_grid,
    ping_pong_grid,
    requests_grid,
    setup_pairs,
    steps_grid,
)

from .sample_report import case, partial_reports, sample_report, setup

PARTIAL = partial_reports()


def row(grid: Grid | None, first: str) -> dict[str, str]:
    assert grid is not None
    (found,) = [r for r in grid.rows if r.cells[0] == first]
    return dict(zip(grid.columns, found.cells, strict=True))


def under(grid: Grid | None, group: str, first: str) -> dict[str, str]:
    assert grid is not None
    heading = [r.cells[0] for r in grid.rows].index(group)
    found = next(r for r in grid.rows[heading + 1 : heading + 4] if r.cells[0] == first)
    return dict(zip(grid.columns, found.cells, strict=True))


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("name", ["complete", *PARTIAL])
def test_every_report_fits_80_columns(name: str, details: bool) -> None:
    report = sample_report() if name == "complete" else PARTIAL[name]
    text = render(report, details=details)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert report.setup.model in text
    for run in report.policies:
        assert run.policy in text
    if report.incomplete:
        assert f"! The run is incomplete: {report.incomplete}." in text


def test_the_whole_is_shown_before_its_parts() -> None:
    text = render(sample_report(layers=2))
    titles = (
        "Steps",
        "Traffic",
        "Processor time",
        "Whole requests",
        "Memory",
        "Growth",
        "Baselines",
        "Ping-pong",
        "tsqp, prefill 512: cost per operator, ms",
        "shielded, decode at 512: its stages, ms",
        "What the GPU side learns",
        "Setup",
    )
    places = [text.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    # Of each policy one prefill and one decode step; the others only when asked.
    assert "prefill 128: cost" not in text
    assert "decode 8 at 128, 2 micro: cost" in render(sample_report(layers=2), details=True)


def test_a_wider_terminal_is_used() -> None:
    text = render(sample_report(layers=2), width=160)
    assert 80 < max(map(len, text.splitlines())) <= 160


def test_a_policy_without_masks_has_no_columns_for_them() -> None:
    masked = operators_grid(case("shielded", layers=2), "t").columns
    assert {"mask", "verify", "unmask"} <= set(masked)
    clear = operators_grid(case("attention-in-tee", layers=2), "t").columns
    assert not {"mask", "verify", "unmask"} & set(clear)
    assert {"TEE", "encode", "wire", "queue", "GPU", "decode"} <= set(clear)


def test_operators_are_in_ms_and_layers_in_us() -> None:
    found = case("attention-in-tee", "prefill", 128, layers=2)
    grid = operators_grid(found, "t")
    sums = [c.stages.total_us for c in found.operators if c.operator == "qkv_proj"]
    shown = row(grid, "qkv_proj")
    assert float(shown["total"]) == pytest.approx(sum(sums) / 1e3, rel=0.01)
    assert (shown["where"], shown["calls"], shown["RPCs"]) == ("gpu", "2", "2")
    assert shown["sent"] == "1.05 MB"
    layers = layers_grid(found, "t", operators=True)
    assert float(under(layers, "layer 0", "qkv_proj")["total"]) == pytest.approx(sums[0], rel=0.01)
    plain = layers_grid(found, "t", operators=False)
    assert [r.cells[0] for r in plain.rows] == ["layer 0", "layer 1", "in no layer"]


def test_the_step_is_the_sum_of_the_operators_and_the_rest() -> None:
    found = case("attention-in-tee", "prefill", 512)
    shown = row(operators_grid(found, "t"), "step")
    assert float(shown["total"]) == pytest.approx(found.step_ms.median, rel=0.01)
    assert shown["RPCs"] == "64"
    assert row(operators_grid(found, "t"), "everything else")["total"] == "0.90"


def test_time_saved_by_overlap_is_not_called_a_rest() -> None:
    grid = operators_grid(case("shielded", batch=8, micro_batches=2), "t")
    assert float(row(grid, "done at the same time")["total"]) < 0
    assert "everything else" not in {r.cells[0] for r in grid.rows}


def test_steps_are_grouped_by_kind() -> None:
    report = sample_report(layers=2)
    grid = steps_grid(report)
    groups = [r.cells[0] for r in grid.rows if r.kind == "group"]
    assert groups == [
        "prefill 128",
        "prefill 512",
        "decode at 128",
        "decode at 512",
        "decode 8 at 128",
        "decode 8 at 128, 2 micro",
    ]
    found = report.policies[1].cases[4]
    shown = under(grid, "decode 8 at 128", "attention-in-tee")
    assert float(shown["step ms"]) == pytest.approx(found.step_ms.median, rel=0.01)
    assert float(shown["ms/token"]) == pytest.approx(found.step_ms.median / 8, rel=0.01)
    assert float(shown["overhead ms"]) == pytest.approx(found.overhead_ms, rel=0.01)
    # 57.3 kB a row and layer sent, 2 layers, 8 rows; a token is one of the rows.
    assert shown["sent"] == "459 kB"
    assert shown["sent/token"] == "57.3 kB"


def test_baselines_have_a_ratio_only_where_they_did_the_same() -> None:
    report = sample_report(layers=2)
    grid = baselines_grid(report)
    assert row(grid, "published, prefill 512")["ms"] == "7,900"
    shown = under(grid, "published, prefill 512", "attention-in-tee")
    overhead_ms = report.policies[1].cases[1].overhead_ms
    assert float(shown["ms"]) == pytest.approx(overhead_ms, rel=0.01)
    assert float(shown["baseline/policy"]) == pytest.approx(7900 / overhead_ms, rel=0.01)
    assert under(grid, "transformers, prefill 512", "shielded")["baseline/policy"] == ""
    assert grid is not None
    assert "The device (null) computes nothing" in grid.note


def test_ping_pong_is_ours_over_raw() -> None:
    report = sample_report(layers=1)
    grid = ping_pong_grid(report)
    assert grid is not None
    assert [r.cells[:2] for r in grid.rows[:3]] == [
        ("ipc", "4 KiB"),
        ("ipc", "64 KiB"),
        ("ipc", "1 MiB"),
    ]
    assert {r.cells[-1] for r in grid.rows} == {"1.20"}
    ours = tuple(p for p in report.ping_pong if p.kind == "ours")
    half = ping_pong_grid(report.model_copy(update={"ping_pong": ours}))
    assert half is not None
    assert {r.cells[-3:] for r in half.rows} == {("", "", "")}


def test_nothing_is_concluded_from_two_points() -> None:
    two = growth_grid(sample_report(("tsqp",), layers=2))
    assert two is not None
    assert {r.cells[2:] for r in two.rows if r.kind == "plain"} == {("two points", "", "", "2")}
    three = under(
        growth_grid(sample_report(("tsqp",), lengths=(128, 512, 2048), layers=2)),
        "tsqp",
        "prefill attention",
    )
    assert re.fullmatch(r"1\.\d\d", three["exponent"])
    assert re.fullmatch(r"0\.9\d\d", three["R2"])
    assert re.fullmatch(r"\d+%", three["worst"])


def test_whole_requests() -> None:
    report = sample_report(layers=1)
    run = report.policies[0]
    made = Generation(prompt_tokens=300, new_tokens=5, ttft_ms=80.0, tpot_ms=4.0, total_ms=96.0)
    given = report.model_copy(update={"policies": (run.model_copy(update={"generation": made}),)})
    assert row(requests_grid(given), run.policy) == {
        "policy": run.policy,
        "prompt": "300",
        "new": "5",
        "TTFT ms": "80.0",
        "TPOT ms": "4.00",
        "total ms": "96.0",
        # After the first one.
        "tokens/s": "250",
    }


def test_memory_beyond_what_must_be_there() -> None:
    shown = row(memory_grid(sample_report(layers=1)), "shielded")
    assert shown["TEE peak"] == "1.18 GB"
    assert shown["beyond embedding, LM head and KV cache"] == "580 MB"
    assert shown["GPU side peak"] == "610 MB"
    assert row(memory_grid(PARTIAL["tee-only"]), "tee-only")["GPU side peak"] == "no service"


def test_services_that_are_not_ours_have_no_figures() -> None:
    report = sample_report(("shielded",), layers=1)
    run = report.policies[0]
    given = run.model_copy(
        update={"cases": tuple(c.model_copy(update={"cpu_gpu_ms": None}) for c in run.cases)}
    )
    report = report.model_copy(
        update={"policies": (given,), "setup": setup(gpu_threads=None, spin_us=50, step_tokens=96)}
    )
    assert under(steps_grid(report), "prefill 128", "shielded")["GPU CPU ms"] == "not ours"
    pairs = dict(setup_pairs(report))
    assert pairs["threads"] == "TEE 2, GPU side not ours"
    assert pairs["spin"] == "50 us before blocking"
    assert pairs["tokens a step"] == "at most 96"


def test_pads_stand_beside_what_is_measured_without_them() -> None:
    report = sample_report(("attention-in-tee", "shielded"), layers=2)
    grid = steps_grid(report)
    step_ms = report.policies[1].cases[4].step_ms.median
    shown = under(grid, "decode 8 at 128", "shielded")
    assert (shown["pads ms"], shown["pads CPU ms/token"]) == ("100", "24.0")
    assert float(shown["tokens/s"]) == pytest.approx(8e3 / step_ms, rel=0.01)
    assert float(shown["sustained tokens/s"]) == pytest.approx(8e3 / (step_ms + 100), rel=0.01)
    clear = under(grid, "decode 8 at 128", "attention-in-tee")
    assert (clear["pads ms"], clear["pads CPU ms/token"]) == ("", "")
    assert clear["sustained tokens/s"] == clear["tokens/s"]
    assert "on the same cores, one after the other" in " ".join(render(report).split())


def test_overhead_is_that_of_rpcs() -> None:
    shown = under(steps_grid(PARTIAL["tee-only"]), "prefill 128", "tee-only")
    assert shown["overhead ms"] == ""
    assert shown["step ms"] != ""


def test_all_shares_are_of_the_whole_step() -> None:
    report = sample_report(("attention-in-tee",), layers=1)
    run = report.policies[0]
    only_wire = tuple(
        c.model_copy(update={"stages": Stages(wire_us=100.0 if c.operator == "o_proj" else 0.0)})
        for c in run.cases[0].operators
    )
    found = run.cases[0].model_copy(update={"operators": only_wire, "rest_us": 300.0})
    run = run.model_copy(update={"cases": (found,)})
    report = report.model_copy(update={"policies": (run,)})
    assert under(steps_grid(report), "prefill 128", run.policy)["largest stage"] == "wire 25%"
    grid = operators_grid(found, "t")
    assert row(grid, "o_proj")["share"] == "25%"
    assert row(grid, "everything else")["share"] == "75%"
    assert "what no operator accounts for" in grid.note
    said = dominant(run, found)
    assert "wire (25%)" in said
    assert said.endswith("; everything else is 75%.")


def test_warnings_come_first() -> None:
    lines = render(sample_report(layers=1)).splitlines()
    assert lines[2].startswith("! With device null nothing is computed at the service")


def test_policies_of_one_name_are_told_apart() -> None:
    text = render(sample_report(("tsqp", "tsqp"), layers=1))
    assert "tsqp (2), prefill 512: cost per operator, ms" in text
    shown = text.split("Steps", 1)[1].split("Traffic", 1)[0]
    assert shown.count("tsqp (2)") == 6
    assert shown.count("  tsqp  ") == 6


def test_what_was_not_measured_has_no_table() -> None:
    nothing = PARTIAL["nothing"]
    for make in (requests_grid, memory_grid, growth_grid, baselines_grid, ping_pong_grid):
        assert make(nothing) is None
    assert steps_grid(nothing).rows == ()


def test_columns_can_be_chosen() -> None:
    grid = Grid("g", ("a", "b", "c"), (Row(("x", "", "1")), Row(("y", "", ""), "total")))
    assert grid.without_empty().columns == ("a", "c")
    assert grid.without_empty(keep=("b",)).columns == ("a", "b", "c")
    chosen = grid.select("h", ("c", "a"))
    assert (chosen.title, chosen.rows) == ("h", (Row(("1", "x")), Row(("", "y"), "total")))
