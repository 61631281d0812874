"""What a leakage report says, as tables: for a terminal, and the same for pages.

No rate is shown without its n, and none of an attack that does not work where it must.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tsqp.lab.leak.model import AttackRun, Curve, LeakReport, PolicyLeak, Rate, Score
from tsqp.lab.leak.reconstruction import draw, panels
from tsqp.lab.leak.words import (
    NONE,
    count_words,
    facts,
    failure_words,
    interval_words,
    judged,
    meaningless,
    percent,
    rate_words,
    setup_pairs,
    verdict,
    warnings,
)
from tsqp.lab.report import Grid, Row, figures, size, terminal, whole
from tsqp.tables import definitions

if TYPE_CHECKING:
    from rich.console import Console

_READ = ("read", "n", "95% interval", "chance")
# Of the best attack; the tables of single policies have them, too.
PARTS = ("of prompts", "of answers", "whole prompts")
_NOTE = (
    "read: tokens whose first guess is right, of n that the best attack tried, with Wilson's 95%"
    " interval, which begins highest for the best. chance: what the same guesses get right in the"
    " other sessions. ms/token, RPCs, bytes: of one decoded token, by tsqp bench, without Embedding"
    " and LM head in the TEE."
)
_LENGTHS_NOTE = (
    "Sessions whose number of tokens follows from what crossed. No mask hides that, nor the time of"
    " each request."
)
_WORK_NOTE = (
    "control: where the attack must read the share below 'must', or its rates mean nothing."
    " compared: candidates with something observed; modelled: token positions run through the"
    " public model."
)
_CURVE_NOTE = (
    "Perplexity without noise: {plain:.4g}. Output error: of logits, relative (root of the mean"
    " square). Searches: {sessions} a place, through a session each, with the {candidates:,} most"
    " expected candidates for a token. A curve ends where no attack reads anything. Each place is"
    " attacked by itself: an attack on all places together may read more."
)


def summary_grid(report: LeakReport) -> Grid:
    """Compare the policies, a row for each."""
    grid = whole_summary(report)
    names = [name for name in grid.columns if name not in PARTS]
    return grid.select(grid.title, names, texts=grid.texts)


def whole_summary(report: LeakReport) -> Grid:
    """Return `summary_grid` with `PARTS`."""
    cost = ("ms/token", "RPCs", "bytes")
    columns = ("policy", "verdict", "best attack", "where", *_READ, *PARTS, *cost)
    rows = tuple(
        Row((one.title, verdict(one), *_best_cells(one), *_cost_cells(one)))
        for one in report.policies
    )
    return Grid("Leakage", columns, rows, texts=4, note=_NOTE)


def _best_cells(policy: PolicyLeak) -> tuple[str, ...]:
    score = judged(policy)
    if score is None or policy.best is None:
        return (NONE,) * 9
    run, _ = policy.best
    place, rate, chance = _place(policy, run, score), score.top1, percent(score.chance)
    return (run.attack, place, *_read_cells(rate), chance, *_part_cells(score))


def _place(policy: PolicyLeak, run: AttackRun, score: Score) -> str:
    return f"{score.where}, service {run.service}" if policy.apart else score.where


def _part_cells(score: Score) -> tuple[str, str, str]:
    return rate_words(score.prompt), rate_words(score.answer), count_words(score.whole)


def _read_cells(rate: Rate) -> tuple[str, str, str]:
    """Render a rate for three columns: read, n, interval."""
    if rate.value is None:
        return (NONE,) * 3
    return percent(rate.value), f"{rate.n:,}", interval_words(rate)


def _cost_cells(policy: PolicyLeak) -> tuple[str, str, str]:
    cost = policy.cost
    if cost is None:
        return (NONE,) * 3
    crossed = cost.bytes_sent + cost.bytes_received
    return figures(cost.overhead_ms) or "0", whole(cost.rpcs) or "0", size(crossed) or "0 B"


def lengths_grid(report: LeakReport) -> Grid:
    """Show of how many sessions the lengths are visible."""
    rows = []
    for one in report.policies:
        prompt, answer = NONE, NONE
        if one.lengths is not None:
            seen, answer = one.lengths.prompt, count_words(one.lengths.answer)
            prompt = "prefill stays" if seen is None else count_words(seen)
        rows.append(Row((one.title, prompt, answer)))
    columns = ("policy", "prompt length", "answer length")
    return Grid("Lengths, visible under every mask", columns, tuple(rows), note=_LENGTHS_NOTE)


def curve_grid(curve: Curve) -> Grid:
    """Show recovery against strength."""
    epsilon = curve.parameter != "sigma"
    sigma = ("sigma",) if epsilon else ()
    columns = (curve.parameter, "best attack", *_READ, *sigma, "perplexity", "output error")
    rows = []
    for point in curve.points:
        read: tuple[str, ...] = ("no attack worked", *(NONE,) * 4)
        if point.rate.n:
            attack = f"{point.attack}, {point.where}"
            read = (attack, *_read_cells(point.rate), percent(point.chance))
        strength = (f"{point.strength:.4g}", *read, *((f"{point.sigma:g}",) if epsilon else ()))
        rows.append(Row((*strength, f"{point.perplexity:.4g}", f"{point.output_error:.2g}")))
    note = _CURVE_NOTE.format(
        plain=curve.plain_perplexity,
        sessions=curve.search_sessions,
        candidates=curve.search_candidates,
    )
    title = f"{curve.policy}: recovery against {curve.parameter}"
    return Grid(title, columns, tuple(rows), texts=2, note=note)


def details_of(policy: PolicyLeak) -> list[Grid]:
    """Show what each attack read at each place, what it cost, and what found nothing to do."""
    title, texts = policy.title, 2
    grids = [
        Grid(
            f"{title}: every attack and place",
            ("attack", "where", "top-1", "top-5", "n", "95% interval", "chance", *PARTS),
            tuple(_attack_rows(policy)),
            texts,
        ),
        Grid(
            f"{title}: controls and work",
            ("attack", "control", "read there", "must", "compared", "modelled", "CPU s"),
            tuple(_work_row(policy, run) for run in policy.runs if run.refused is None),
            texts,
            _WORK_NOTE,
        ),
        Grid(
            f"{title}: attacks that find nothing to do",
            ("reason", "attacks"),
            tuple(Row((reason, ", ".join(names))) for reason, names in _refusals(policy).items()),
            texts,
        ),
    ]
    return [grid for grid in grids if grid.rows]


def _attack_rows(policy: PolicyLeak) -> Iterator[Row]:
    """Yield a row a place; no rate where the attack does not work at that place of its control."""
    for run in policy.runs:
        if meaningless(run):
            yield Row((run.attack, f"attack {failure_words(run)}", *(NONE,) * 8))
            continue
        for score in run.scores:
            place = _place(policy, run, score)
            cells: tuple[str, ...] = (NONE,) * 8
            if score in run.meaningful:
                rates = (
                    NONE if r.value is None else percent(r.value) for r in (score.top1, score.top5)
                )
                n, interval = f"{score.top1.n:,}", interval_words(score.top1)
                cells = (*rates, n, interval, percent(score.chance), *_part_cells(score))
            elif score.gave_up:
                place += f": gave up, with {score.guessed:,} guesses for {score.top1.n:,} tokens"
            else:
                place += ": did not work on its control"
            yield Row((run.attack, place, *cells))


def _work_row(policy: PolicyLeak, run: AttackRun) -> Row:
    control: tuple[str, ...] = (NONE,) * 3
    if run.control is not None:
        must = percent(run.control.published)
        control = (run.control.policy, rate_words(run.control.rate), must)
    name = f"{run.attack}, service {run.service}" if policy.apart else run.attack
    work = [whole(run.compared), whole(run.modelled), figures(run.cpu_s)]
    return Row((name, *control, *(one or "0" for one in work)))


def _refusals(policy: PolicyLeak) -> dict[str, dict[str, None]]:
    """Return why attacks found nothing to do, with those that say so."""
    reasons: dict[str, dict[str, None]] = {}
    for run in policy.runs:
        if run.refused is not None:
            reasons.setdefault(run.refused, {})[run.attack] = None
    return reasons


def show(report: LeakReport, console: Console, *, details: bool = False) -> None:
    """Print the tables, from the whole to its parts.

    `details`: with every attack and place, controls, work and refusals, and what was read.
    """
    from rich.text import Text

    console.print(Text(facts(report), style="bold"))
    for sentence in warnings(report):
        console.print(Text(f"! {sentence}", style="yellow"))
    console.print()
    grids = [summary_grid(report)] if report.policies else []
    grids += [lengths_grid(report)] if any(one.lengths for one in report.policies) else []
    grids += map(curve_grid, report.curves)
    for policy in report.policies if details else ():
        grids += details_of(policy)
    for grid in grids:
        for part in terminal(grid, console):
            console.print(part)
    if not report.policies:
        console.print("No policy was attacked.")
    console.print(Text("Setup", style="bold"))
    console.print(definitions(setup_pairs(report)))
    for panel in panels(report, ascii_only=console.options.ascii_only) if details else ():
        if panel.outcome:
            draw(panel, console)
