"""Tables fit, no rate is without its n, and an attack that does not work is never a low rate."""

from __future__ import annotations

import re
from io import BytesIO, TextIOWrapper

import pytest

from tsqp.lab.leak.model import Control, Rate, Report
from tsqp.lab.leak.table import attacks_grid, curve_grid, lengths_grid, refusals, show, summary_grid
from tsqp.lab.leak.words import (
    control_words,
    interval_words,
    percent,
    rate_words,
    verdict,
    warnings,
)

from .reports import (
    control,
    curve,
    epsilon_curve,
    policy,
    refused,
    report,
    run,
    sample,
    score,
    setup,
    shielded,
    tee_only,
    unjudged,
)


def shown(made: Report, width: int = 80, *, details: bool = False, encoding: str = "utf-8") -> str:
    from rich.console import Console

    output = BytesIO()
    file = TextIOWrapper(output, encoding=encoding)
    console = Console(file=file, width=width, markup=False, highlight=False, force_terminal=False)
    show(made, console, details=details)
    file.flush()
    return output.getvalue().decode(encoding)


def cells(made: Report, name: str) -> dict[str, str]:
    grid = summary_grid(made)
    (found,) = [row.cells for row in grid.rows if row.cells[0] == name]
    return dict(zip(grid.columns, found, strict=True))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("width", [80, 120, 160])
def test_every_table_fits_and_nothing_is_cut_off(width: int, details: bool, encoding: str) -> None:
    text = shown(sample(), width, details=details, encoding=encoding)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for one in sample().policies:
        assert re.search(rf"^\W*{re.escape(one.policy)}\b", text, re.MULTILINE)


def test_numbers_and_attacks_stay_whole_at_80_columns() -> None:
    text = shown(sample(), details=True)
    assert "98.8 to 99.4" in text
    assert "vocabulary-features" in text
    assert "attention-in-tee  97.7% of 512" in text
    long = shown(report(policy("policy-" * 9, run("vocabulary-features", score(4000)))))
    assert max(map(len, long.splitlines())) <= 80
    assert "\u2026" not in long
    assert "97.1 to 98.1" in long


def test_a_wide_terminal_gets_one_table() -> None:
    assert "Best attack of each policy" in shown(sample(), 80)
    assert "Best attack of each policy" in shown(sample(), 120)
    wide = shown(sample(), 160)
    assert "Best attack of each policy" not in wide
    line = next(line for line in wide.splitlines() if line.startswith(" stip "))
    words = "reads 99.1% (n 4,096) vocabulary-features layer 0 qkv_proj 99.1% 4,096 98.8 to 99.4"
    assert " ".join(line.split()) == f"stip {words} 0.4% 2.30 24 30.7 kB"


def test_verdicts() -> None:
    assert verdict(tee_only()) == "nothing crosses"
    # 17 of 4,096 with a chance of 0.4 %: the upper end is 0.663 %, the bound is rounded up.
    assert verdict(shielded()) == "not above chance (<= 0.3 pp above, n 4,096)"
    assert verdict(policy("p", run("a", score(4096)))) == "reads 100% (n 4,096)"
    assert verdict(policy("p", refused("a"), refused("b"))) == "no attack applies"
    assert verdict(policy("p")) == "not attacked"


def test_a_bound_is_of_every_place_and_has_that_places_n() -> None:
    few = score(0, n=40, where="layer 1 qkv_proj", chance=0.0)
    made = policy("p", run("a", score(15), few))
    assert verdict(made) == "not above chance (<= 0.3 pp above, n 4,096; <= 8.8, n 40)"


def test_a_bound_that_leaves_much_open_is_no_conclusion() -> None:
    made = policy("p", run("a", score(0, n=8, chance=0.0)))
    assert verdict(made) == "inconclusive (<= 32.5 pp above, n 8)"


def test_what_was_not_tried_is_named() -> None:
    made = policy("p", run("a", score(15)))
    made = made.model_copy(update={"untried": ("layer 1 o_proj (in the clear)",)})
    assert verdict(made) == "not tried: 1 place, such as layer 1 o_proj (in the clear)"


def test_an_attack_that_did_not_work_is_no_low_rate() -> None:
    made = unjudged()
    assert made.best is not None  # another attack found nothing, and works
    assert verdict(made) == "attack did not work: row-space"
    row = cells(report(made), "row-mix")
    assert [row[name] for name in ("best attack", "where", "read", "n", "95% interval")] == [
        "-"
    ] * 5
    text = shown(report(made), 160, details=True)
    words = "did not work (control: 11.9% (n 512) of 95.0% at attention-in-tee)"
    assert f"! row-mix: row-space {words}" in text
    grid = attacks_grid(made)
    assert grid is not None
    (failed,) = [row.cells for row in grid.rows if row.cells[0] == "row-space"]
    assert failed[1] == f"attack {words}"
    assert set(failed[2:]) == {"-"}
    # 3 of 4,096, which it read here.
    assert "0.1%" not in text
    assert "not above chance" not in text


def test_what_is_read_stands_whatever_another_attack_did_not_manage() -> None:
    made = policy("p", run("a", score(2048)), run("b", score(3), worked=False))
    assert verdict(made) == "reads 50.0% (n 4,096); attack did not work: b"
    assert cells(report(made), "p")["read"] == "50.0%"


def test_an_attack_without_a_reading_has_not_worked_either() -> None:
    silent = run("a")
    made = policy("p", silent)
    assert verdict(made) == "attack did not work: a"
    (warning,) = warnings(report(made))
    assert warning.startswith("p: a gave no reading (control: 97.7% (n 512) of 95.0%")


def test_an_attack_that_works_here_needs_no_control() -> None:
    made = policy("p", run("a", score(4000), worked=False))
    assert verdict(made) == "reads 97.7% (n 4,096)"
    assert warnings(report(made)) == []


def test_controls_say_what_they_read_of_how_many() -> None:
    assert control_words(None) == "no control"
    assert control_words(control("a")) == "control: 97.7% (n 512) of 95.0% at attention-in-tee"
    nothing = Control(attack="a", policy="q", where=None, rate=Rate(hits=0, n=0), published=0.9)
    assert control_words(nothing) == "control: nothing read at q"


def test_no_rate_without_its_n() -> None:
    """Each percentage of tokens has its n in its cell or its row."""
    for grid in (summary_grid(sample()), curve_grid(curve()), curve_grid(epsilon_curve())):
        for row in grid.rows:
            found = dict(zip(grid.columns, row.cells, strict=True))
            assert ("%" in found["read"]) == (found["n"] not in ("-", "0")), row
            assert "%" not in found.get("verdict", "") or "(n " in found["verdict"]
    for one in sample().policies:
        grid = attacks_grid(one)
        for row in grid.rows if grid else ():
            found = dict(zip(grid.columns, row.cells, strict=True)) if grid else {}
            assert ("%" in found["top-1"]) == (found["n"] != "-")
            for name in ("prompt", "answer"):
                assert re.fullmatch(r"-|[\d.<>]+% of [\d,]+", found[name])


def test_a_rate_of_nothing_is_no_rate() -> None:
    assert rate_words(Rate(hits=0, n=0)) == "-"
    assert interval_words(Rate(hits=0, n=0)) == "-"
    # Prefill stayed: no token of a prompt was tried.
    stayed = score(15).model_copy(update={"prompt": Rate(hits=0, n=0)})
    grid = attacks_grid(policy("p", run("a", stayed)))
    assert grid is not None
    assert dict(zip(grid.columns, grid.rows[0].cells, strict=True))["prompt"] == "-"


@pytest.mark.parametrize(
    ("share", "words"),
    [(0, "0%"), (1, "100%"), (0.00001, "<0.1%"), (0.99999, ">99.9%"), (0.976, "97.6%")],
)
def test_only_none_and_all_are_round(share: float, words: str) -> None:
    assert percent(share) == words


def test_costs_that_were_not_measured_are_dashes() -> None:
    row = cells(report(policy("p", run("a", score(9)), cost_ms=None)), "p")
    assert [row[name] for name in ("ms/token", "RPCs", "bytes")] == ["-"] * 3
    row = cells(report(policy("p", run("a", score(9)), cost_ms=2.5)), "p")
    assert [row[name] for name in ("ms/token", "RPCs", "bytes")] == ["2.50", "24", "30.7 kB"]


def test_the_service_is_named_where_there_are_several() -> None:
    assert cells(sample(), "two-server (service)")["where"] == "layer 0 qkv_proj, service 2"


def test_lengths_are_visible() -> None:
    made = shielded()
    stays = made.model_copy(
        update={"lengths": made.lengths and made.lengths.model_copy(update={"prompt": None})}
    )
    grid = lengths_grid(report(tee_only(), stays))
    assert grid is not None
    assert [row.cells for row in grid.rows] == [
        ("tee-only", "-", "-"),
        ("shielded", "prefill stays", "32 of 32"),
    ]
    assert lengths_grid(report(tee_only())) is None


def test_refusals_are_a_line_for_each_reason() -> None:
    made = policy(
        "p", refused("a", "integers"), refused("b", "layer 0 stays"), refused("c", "integers")
    )
    assert refusals(made) == [("integers", "a, c"), ("layer 0 stays", "b")]
    text = shown(report(made), details=True)
    assert "  integers: a, c\n" in text
    assert "integers: a, c" not in shown(report(made))


def test_an_incomplete_report_says_so_first() -> None:
    text = shown(report(tee_only(), incomplete="KeyboardInterrupt; not attacked: shielded"))
    warning = "! The run is incomplete: KeyboardInterrupt; not attacked: shielded."
    assert text.index(warning) < text.index("Leakage")
    empty = shown(report(incomplete="KeyboardInterrupt"), details=True)
    assert "No policy was attacked." in empty
    assert setup().command in empty


def test_a_strength_at_which_no_attack_worked_has_no_rate() -> None:
    grid = curve_grid(epsilon_curve())
    first, *_, last = (dict(zip(grid.columns, row.cells, strict=True)) for row in grid.rows)
    assert (first["best attack"], first["read"], first["chance"]) == ("no attack worked", "-", "-")
    assert (last["epsilon"], last["sigma"], last["read"]) == ("inf", "0", "97.9%")
    assert "sigma" not in curve_grid(curve()).columns[1:]
