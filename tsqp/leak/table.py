"""What a leakage report says, as tables on a terminal of 80 columns or more, by rich.

The page draws the same tables: `Grid` is text in cells. No rate is shown without its n, and none of
an attack that does not work where it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tsqp.bench.grids import Grid, Row
from tsqp.bench.units import figures, size, whole
from tsqp.cli.tables import definitions, table
from tsqp.leak.model import AttackRun, Control, Curve, PolicyLeak, Rate, Report, Score

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

NOTHING = "nothing crosses"
NONE = "-"
_NAME = 24
_COST = ("ms/token", "RPCs", "bytes")
_READ = ("read", "n", "95% interval", "chance")
_NOTE = (
    "read: tokens whose first guess is right, of n that the best attack tried, with Wilson's 95%"
    " interval, whose lower end is farthest above chance for the best. chance: what the same"
    " guesses get right in the other sessions. ms/token, RPCs, bytes: of one decoded token, by tsqp"
    " bench, without Embedding and LM head in the TEE."
)

# A verdict needs an interval that ends at most so far above chance, where most tokens were tried.
_CONCLUSIVE = 0.02

# ------------------------------------------------------------------------------------- words


def percent(share: float) -> str:
    """Render a share of one: `97.6%`; 0% and 100% are exact."""
    if share in (0, 1):
        return f"{share * 100:.0f}%"
    if share < 0.0005:
        return "<0.1%"
    return ">99.9%" if share >= 0.9995 else f"{share * 100:.1f}%"


def rate_words(rate: Rate) -> str:
    """Render a rate with its n: `97.6% of 4,096`; `-` where nothing was tried."""
    return NONE if rate.value is None else f"{percent(rate.value)} of {rate.n:,}"


def interval_words(rate: Rate) -> str:
    """Render the 95 % interval in percent: `97.1 to 98.0`."""
    return f"{rate.low * 100:.1f} to {rate.high * 100:.1f}" if rate.n else NONE


def count_words(rate: Rate) -> str:
    """Render so many of so many: `31 of 32`."""
    return f"{rate.hits:,} of {rate.n:,}" if rate.n else NONE


def control_words(control: Control | None) -> str:
    """Say what an attack read where it must work, of what it must read there."""
    if control is None:
        return "no control"
    if not control.rate.n:
        return f"control: nothing read at {control.policy}"
    read, n = percent(control.rate.value or 0.0), control.rate.n
    return f"control: {read} (n {n:,}) of {percent(control.published)} at {control.policy}"


def failed(policy: PolicyLeak) -> list[str]:
    """Name the attacks that apply and did not work: what they read means nothing."""
    return list(dict.fromkeys(run.attack for run in policy.runs if _meaningless(run)))


def verdict(policy: PolicyLeak) -> str:
    """Say in a few words what was read under a policy."""
    if policy.nothing is not None:
        return NOTHING
    names = f"attack did not work: {', '.join(failed(policy))}" if failed(policy) else ""
    if policy.best is not None and policy.above_chance:
        rate = policy.best[1].top1
        # It was read, whatever others did not manage.
        read = f"reads {percent(rate.value or 0.0)} (n {rate.n:,})"
        return f"{read}; {names}" if names else read
    if names:
        return names
    widest = _widest(policy)
    if widest is None and any(run.gave_up for run in policy.runs):
        return "every search gave up"
    if widest is None:
        return "no attack applies" if policy.runs else "not attacked"
    return _bounds(policy, widest)


def _bounds(policy: PolicyLeak, widest: Score) -> str:
    """Say how far above chance what was not read may be at most."""
    if policy.untried:
        count = len(policy.untried)
        return f"not tried: {count} place{'s'[: count != 1]}, such as {policy.untried[0]}"
    # Look-ups have the most tokens; what was searched leaves more open.
    most = max(score.top1.n for run in policy.runs for score in run.meaningful)
    broad = max(
        (one for run in policy.runs for one in run.meaningful if one.top1.n == most),
        key=lambda one: one.excess_high,
    )
    words = f"<= {_points(broad.excess_high)} pp above, n {broad.top1.n:,}"
    if widest.excess_high > broad.excess_high:
        words += f"; <= {_points(widest.excess_high)}, n {widest.top1.n:,}"
    if broad.excess_high > _CONCLUSIVE:
        return f"inconclusive ({words})"
    return f"not above chance ({words})"


def judged(policy: PolicyLeak) -> Score | None:
    """Return the best score; None where it would be low only because an attack did not work."""
    if policy.best is None or (failed(policy) and not policy.above_chance):
        return None
    return policy.best[1]


def facts(report: Report) -> str:
    """Return the run in a line."""
    setup = report.setup
    sampling = f"temperature {setup.temperature:g}" if setup.temperature else "greedy"
    public = f", attacked with {setup.public}" if setup.public != setup.model else ""
    return (
        f"{setup.model}{public}, {setup.dtype}, {setup.vocab_size:,} tokens of vocabulary:"
        f" {setup.sessions} sessions, {setup.prompt_tokens:,} tokens of prompts,"
        f" {setup.new_tokens} of each answer, {sampling}"
    )


def warnings(report: Report) -> list[str]:
    """Say what must be known before any figure is read, a sentence each."""
    found = [f"The run is incomplete: {report.incomplete}."] if report.incomplete else []
    if not report.setup.public_layers:
        found.append(
            f"{report.setup.public} has no linear weights: where those that are served are"
            " transformed, attacks that compare both are not tried."
        )
    found += [
        f"{policy.policy}: {run.attack} {_failure(run)}: what it read says nothing."
        for policy in report.policies
        for run in policy.runs
        if _meaningless(run)
    ]
    return list(dict.fromkeys(found))


def setup_pairs(report: Report) -> list[tuple[str, str]]:
    """Return what was attacked, and how."""
    setup = report.setup
    candidates = ""
    if setup.search_candidates is not None:
        candidates = f", {setup.search_candidates:,} candidates for each"
    return [
        ("model", f"{setup.model}, {setup.dtype}, hidden size {setup.hidden_size:,}"),
        ("attacker has", f"{setup.public}, its tokenizer, the policy and the code"),
        ("sessions", facts(report).partition(": ")[2]),
        (
            "searches",
            f"through {setup.search_sessions} of {setup.sessions} sessions, {setup.search_tokens}"
            f" tokens of each{candidates}; look-ups through all",
        ),
        ("seed", str(setup.seed)),
        ("machine", ", ".join(f"{name} {value}" for name, value in setup.machine.items())),
        ("measured", setup.created),
        ("command", setup.command),
    ]


def _points(share: float) -> str:
    """Render percentage points, rounded up: a bound must hold as it is printed."""
    tenths = max(0, -int(-share * 1000 // 1))
    return f"{tenths / 10:.1f}"


def _widest(policy: PolicyLeak) -> Score | None:
    """Return the score by which the policy may be furthest above chance."""
    scores = [score for run in policy.runs for score in run.meaningful]
    return max(scores, key=lambda score: score.excess_high, default=None)


def _meaningless(run: AttackRun) -> bool:
    """Whether an attack that applies did not work; one that gave no reading did not, either."""
    return run.refused is None and not run.worked and not run.gave_up


def _failure(run: AttackRun) -> str:
    outcome = "did not work" if run.scores else "gave no reading"
    return f"{outcome} ({control_words(run.control)})"


def _place(policy: PolicyLeak, run: AttackRun, score: Score) -> str:
    return f"{score.where}, service {run.service}" if policy.services > 1 else score.where


# ------------------------------------------------------------------------------------- grids


def summary_grid(report: Report) -> Grid:
    """Compare the policies, a row for each."""
    columns = ("policy", "verdict", "best attack", "where", *_READ, *_COST)
    rows = tuple(
        Row((one.policy, verdict(one), *_best_cells(one), *_cost_cells(one)))
        for one in report.policies
    )
    return Grid("Leakage", columns, rows, texts=4, note=_NOTE)


def _best_cells(policy: PolicyLeak) -> tuple[str, ...]:
    score = judged(policy)
    if score is None or policy.best is None:
        return (NONE,) * 6
    run, _ = policy.best
    return (run.attack, _place(policy, run, score), *_read_cells(score.top1), percent(score.chance))


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


def lengths_grid(report: Report) -> Grid | None:
    """Show of how many sessions the lengths are visible; None where nothing was attacked."""
    rows = []
    for one in report.policies:
        if one.lengths is None:
            seen = (NONE, NONE)
        else:
            prompt = one.lengths.prompt
            stays = "prefill stays"
            seen = (
                stays if prompt is None else count_words(prompt),
                count_words(one.lengths.answer),
            )
        rows.append(Row((one.policy, *seen)))
    if not any(one.lengths for one in report.policies):
        return None
    note = (
        "Sessions whose number of tokens follows from what crossed. No mask hides that; nor the"
        " time of each request."
    )
    columns = ("policy", "prompt length", "answer length")
    return Grid("Lengths, visible under every mask", columns, tuple(rows), note=note)


def attacks_grid(policy: PolicyLeak) -> Grid | None:
    """Show what each attack read at each place; None where none gave a reading."""
    columns = (
        *("attack", "where", "top-1", "top-5", "n", "95% interval", "chance"),
        *("prompt", "answer", "whole prompts"),
    )
    rows: list[Row] = []
    for run in policy.runs:
        if _meaningless(run):
            words = f"attack {_failure(run)}"
            rows.append(Row((run.attack, words, *(NONE,) * 8)))
        else:
            rows += [Row((run.attack, *_cells_of(policy, run, one))) for one in run.scores]
    if not rows:
        return None
    return Grid(f"{policy.policy}: every attack and place", columns, tuple(rows), texts=2)


def _cells_of(policy: PolicyLeak, run: AttackRun, score: Score) -> tuple[str, ...]:
    """Render a place; no rate where the attack does not work at that place of its control."""
    if score in run.meaningful:
        return _score_cells(policy, run, score)
    if score.gave_up:
        words = f"gave up, with {score.guessed:,} guesses for {score.top1.n:,} tokens"
        return (f"{_place(policy, run, score)}: {words}", *(NONE,) * 8)
    return (f"{_place(policy, run, score)}: did not work on its control", *(NONE,) * 8)


def _score_cells(policy: PolicyLeak, run: AttackRun, score: Score) -> tuple[str, ...]:
    return (
        _place(policy, run, score),
        NONE if score.top1.value is None else percent(score.top1.value),
        NONE if score.top5.value is None else percent(score.top5.value),
        f"{score.top1.n:,}",
        interval_words(score.top1),
        percent(score.chance),
        rate_words(score.prompt),
        rate_words(score.answer),
        count_words(score.whole),
    )


def work_grid(policy: PolicyLeak) -> Grid | None:
    """Show how each attack was checked and what it cost the attacker; None without attacks."""
    rows = []
    for run in policy.runs:
        if run.refused is not None:
            continue
        control = run.control
        rows.append(
            Row(
                (
                    f"{run.attack}, service {run.service}" if policy.services > 1 else run.attack,
                    NONE if control is None else control.policy,
                    NONE if control is None else rate_words(control.rate),
                    NONE if control is None else percent(control.published),
                    whole(run.compared) or "0",
                    whole(run.modelled) or "0",
                    figures(run.cpu_s) or "0",
                )
            )
        )
    if not rows:
        return None
    note = (
        "control: where the attack must read the share below 'must', or its rates mean nothing."
        " compared: candidates with something observed; modelled: token positions run through the"
        " public model."
    )
    columns = ("attack", "control", "read there", "must", "compared", "modelled", "CPU s")
    title = f"{policy.policy}: controls and work"
    return Grid(title, columns, tuple(rows), texts=2, note=note)


def refusals(policy: PolicyLeak) -> list[tuple[str, str]]:
    """Return why attacks found nothing to do, with those that say so."""
    reasons: dict[str, list[str]] = {}
    for run in policy.runs:
        if run.refused is not None:
            names = reasons.setdefault(run.refused, [])
            names += [] if run.attack in names else [run.attack]
    return [(reason, ", ".join(names)) for reason, names in reasons.items()]


def curve_grid(curve: Curve) -> Grid:
    """Show recovery against strength."""
    noise = () if curve.parameter == "sigma" else ("sigma",)
    rows = []
    for point in curve.points:
        if point.rate.n:
            read = (f"{point.attack}, {point.where}", *_read_cells(point.rate))
            chance = percent(point.chance)
        else:
            read, chance = ("no attack worked", *(NONE,) * 3), NONE
        rows.append(
            Row(
                (
                    f"{point.strength:.4g}",
                    *read,
                    chance,
                    *(f"{point.sigma:g}" for _ in noise),
                    f"{point.perplexity:.4g}",
                    f"{point.output_error:.2g}",
                )
            )
        )
    columns = (curve.parameter, "best attack", *_READ, *noise, "perplexity", "output error")
    note = (
        f"Perplexity without noise: {curve.plain_perplexity:.4g}. Output error: of logits, relative"
        " (root of the mean square). Searches go through one session, with the 256 most expected"
        " candidates for a token. A curve ends where no attack reads anything."
    )
    if noise:
        note += " Attacked place by place: who puts all places together may read more."
    title = f"{curve.policy}: recovery against {curve.parameter}"
    return Grid(title, columns, tuple(rows), texts=2, note=note)


# ------------------------------------------------------------------------------------ drawing


def show(report: Report, console: Console, *, details: bool = False) -> None:
    """Print the tables. `details`: with every attack and place, controls, work and refusals."""
    for part in parts(report, console.width, details=details):
        console.print(part)


def parts(report: Report, width: int, *, details: bool = False) -> Iterator[RenderableType]:
    """Yield what `show` prints, from the whole to its parts."""
    from rich.text import Text

    yield Text(facts(report), style="bold")
    yield from (Text(f"! {sentence}", style="yellow") for sentence in warnings(report))
    yield ""
    if not report.policies:
        yield Text("No policy was attacked.")
    else:
        grid = summary_grid(report)
        narrow = (
            grid.select("Leakage", ("policy", "verdict", *_COST), texts=2),
            _joined(grid, "Best attack of each policy", "best attack", "where"),
        )
        yield from _fitting(grid, narrow, width, least=150)
        yield from _drawn(lengths_grid(report))
    for curve in report.curves:
        grid = curve_grid(curve)
        harm = (curve.parameter, *(name for name in grid.columns[2:] if name not in _READ))
        narrow = (
            grid.select(grid.title, (curve.parameter, "best attack", *_READ), texts=2),
            grid.select(f"{curve.policy}: what it does to the output", harm),
        )
        yield from _fitting(grid, narrow, width, least=110)
    if details:
        for policy in report.policies:
            yield from _details(policy, width)
    yield Text("Setup", style="bold")
    yield definitions(setup_pairs(report))


def _details(policy: PolicyLeak, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    grid = attacks_grid(policy)
    if grid is not None:
        split = ("attack", "where", "prompt", "answer", "whole prompts")
        narrow = (
            grid.select(grid.title, grid.columns[:7], texts=2),
            grid.select(f"{policy.policy}: prompts and answers", split, texts=2),
        )
        yield from _fitting(grid, narrow, width, least=150)
    grid = work_grid(policy)
    if grid is not None:
        narrow = (
            grid.select(grid.title, ("attack", "control", "read there", "must"), texts=2),
            grid.select(f"{policy.policy}: work", ("attack", "compared", "modelled", "CPU s")),
        )
        yield from _fitting(grid, narrow, width, least=110)
    found = refusals(policy)
    if found:
        yield Text(f"{policy.policy}: attacks that find nothing to do", style="bold")
        yield from (Text(f"  {reason}: {names}") for reason, names in found)
        yield ""


def _fitting(
    grid: Grid, narrow: Sequence[Grid], width: int, *, least: int
) -> Iterator[RenderableType]:
    """Yield one table where there is room for it, its parts where there is not."""
    if width >= least:
        yield from _drawn(grid)
        return
    for part in narrow[:-1]:
        yield from _drawn(part, note=False)
    yield from _drawn(narrow[-1])


def _joined(grid: Grid, title: str, first: str, second: str) -> Grid:
    """Join two columns of text into the first of them, and leave out what was said before."""
    places = [grid.columns.index(name) for name in ("policy", first, second, *_READ)]
    rows = []
    for row in grid.rows:
        policy, one, other, *rest = (row.cells[place] for place in places)
        rows.append(Row((policy, one if other == NONE else f"{one}, {other}", *rest)))
    return Grid(title, ("policy", first, *_READ), tuple(rows), texts=2, note=grid.note)


def _drawn(grid: Grid | None, *, note: bool = True) -> Iterator[RenderableType]:
    """Yield title, table and note, each as wide as the terminal allows."""
    from rich.text import Text

    if grid is None:
        return
    columns = [(name, place >= grid.texts) for place, name in enumerate(grid.columns)]
    made = table("", columns, [row.cells for row in grid.rows])
    made.collapse_padding = True
    # Names are cited: they stay whole, unless they would leave no room for what is said of them.
    made.columns[0].no_wrap = max((len(row.cells[0]) for row in grid.rows), default=0) <= _NAME
    yield Text(grid.title, style="bold")
    yield made
    if note and grid.note:
        yield Text(grid.note, style="dim")
        yield ""
