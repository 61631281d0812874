"""What a leakage report says, in tables and in words: for a terminal, and the same for pages.

No rate is shown without its n, and none of an attack that does not work where it must.
"""

from collections.abc import Iterator

from tsqp.lab.leak.model import AttackRun, Curve, LeakReport, PolicyLeak, Rate, Score
from tsqp.lab.report import Grid, Row, figures, size, whole

NOTHING = "nothing crosses"
NONE = "-"
# A verdict needs an interval that ends at most so far above chance, where most tokens were tried.
_CONCLUSIVE = 0.02
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


def summary_grid(report: LeakReport, *, parts: bool = False) -> Grid:
    """Compare the policies, a row for each. `parts`: with `PARTS`."""
    columns = (
        *("policy", "verdict", "best attack", "where", *_READ, *PARTS),
        *("ms/token", "RPCs", "bytes"),
    )
    rows = tuple(
        Row((one.title, verdict(one), *_best_cells(one), *_cost_cells(one)))
        for one in report.policies
    )
    names = [name for name in columns if parts or name not in PARTS]
    return Grid("Leakage", columns, rows, note=_NOTE).select("Leakage", names, texts=4)


def _best_cells(policy: PolicyLeak) -> tuple[str, ...]:
    score = judged(policy)
    if score is None or policy.best is None:
        return (NONE,) * 9
    run, _ = policy.best
    read = _read_cells(score.top1, score.chance)
    return (run.attack, _place(policy, run, score), *read, *_part_cells(score))


def _place(policy: PolicyLeak, run: AttackRun, score: Score) -> str:
    return f"{score.where}, service {run.service}" if policy.apart else score.where


def _part_cells(score: Score) -> tuple[str, str, str]:
    return rate_words(score.prompt), rate_words(score.answer), count_words(score.whole)


def _read_cells(rate: Rate, chance: float) -> tuple[str, ...]:
    """Render a rate and its chance for the columns of `_READ`."""
    n = f"{rate.n:,}" if rate.n else NONE
    interval = f"{rate.low * 100:.1f} to {rate.high * 100:.1f}" if rate.n else NONE
    return percent(rate.value), n, interval, percent(chance)


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
            read = (f"{point.attack}, {point.where}", *_read_cells(point.rate, point.chance))
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
    # Why attacks found nothing to do, with those that say so.
    reasons: dict[str, dict[str, None]] = {}
    for run in policy.runs:
        if run.refused is not None:
            reasons.setdefault(run.refused, {})[run.attack] = None
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
            tuple(Row((reason, ", ".join(names))) for reason, names in reasons.items()),
            texts,
        ),
    ]
    return [grid for grid in grids if grid.rows]


def _attack_rows(policy: PolicyLeak) -> Iterator[Row]:
    """Yield a row a place; no rate where the attack does not work at that place of its control."""
    for run in policy.runs:
        if run.failed:
            yield Row((run.attack, f"attack {failure_words(run)}", *(NONE,) * 8))
            continue
        for score in run.scores:
            place = _place(policy, run, score)
            cells: tuple[str, ...] = (NONE,) * 8
            if score in run.meaningful:
                read, *others = _read_cells(score.top1, score.chance)
                cells = (read, percent(score.top5.value), *others, *_part_cells(score))
            elif score.gave_up:
                place += f": gave up, with {score.guessed:,} guesses for {score.top1.n:,} tokens"
            else:
                place += ": did not work on its control"
            yield Row((run.attack, place, *cells))


def _work_row(policy: PolicyLeak, run: AttackRun) -> Row:
    made, control = run.control, (NONE,) * 3
    if made is not None:
        control = (made.policy, rate_words(made.rate), percent(made.published))
    name = f"{run.attack}, service {run.service}" if policy.apart else run.attack
    work = [whole(run.compared), whole(run.modelled), figures(run.cpu_s)]
    return Row((name, *control, *(one or "0" for one in work)))


# -------------------------------------------------------------------------------------------- words


def percent(share: float | None) -> str:
    """Render a share of one: `97.6%`; 0% and 100% are exact; `-` of none."""
    if share is None:
        return NONE
    if share in (0, 1):
        return f"{share * 100:.0f}%"
    if share < 0.0005:
        return "<0.1%"
    return ">99.9%" if share >= 0.9995 else f"{share * 100:.1f}%"


def rate_words(rate: Rate) -> str:
    """Render a rate with its n: `97.6% of 4,096`; `-` where nothing was tried."""
    return NONE if rate.value is None else f"{percent(rate.value)} of {rate.n:,}"


def count_words(rate: Rate) -> str:
    """Render so many of so many: `31 of 32`."""
    return f"{rate.hits:,} of {rate.n:,}" if rate.n else NONE


def failed(policy: PolicyLeak) -> list[str]:
    """Name the attacks that apply and did not work: what they read means nothing."""
    return list(dict.fromkeys(run.attack for run in policy.runs if run.failed))


def verdict(policy: PolicyLeak) -> str:
    """Say in a few words what was read under a policy."""
    if policy.nothing is not None:
        return NOTHING if policy.adversary == "service" else policy.nothing
    names = f"attack did not work: {', '.join(failed(policy))}" if failed(policy) else ""
    if policy.best is not None and policy.above_chance:
        rate = policy.best[1].top1
        # It was read, whatever others did not manage.
        read = f"reads {percent(rate.value)} (n {rate.n:,})"
        return f"{read}; {names}" if names else read
    if names:
        return names
    scores = [score for _, score in policy.scored]
    widest = max(scores, key=lambda score: score.excess_high, default=None)
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
    _, broad = max(policy.scored, key=lambda one: (one[1].top1.n, one[1].excess_high))
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


def facts(report: LeakReport) -> str:
    """Return the run in a line."""
    setup = report.setup
    sampling = f"temperature {setup.temperature:g}" if setup.temperature else "greedy"
    public = f", attacked with {setup.public}" if setup.public != setup.model else ""
    return (
        f"{setup.model}{public}, {setup.dtype}, {setup.vocab_size:,} tokens of vocabulary:"
        f" {setup.sessions} sessions, {setup.prompt_tokens:,} tokens of prompts,"
        f" {setup.new_tokens} of each answer, {sampling}"
    )


def warnings(report: LeakReport) -> list[str]:
    """Say what must be known before any figure is read, a sentence each."""
    found = [f"The run is incomplete: {report.incomplete}."] if report.incomplete else []
    if not report.setup.public_layers:
        found.append(
            f"{report.setup.public} has no linear weights: where those that are served are"
            " transformed, attacks that compare both are not tried."
        )
    found += [
        f"{policy.title}: {run.attack} {failure_words(run)}: what it read says nothing."
        for policy in report.policies
        for run in policy.runs
        if run.failed
    ]
    return list(dict.fromkeys(found))


def setup_pairs(report: LeakReport) -> list[tuple[str, str]]:
    """Return what was attacked, and how."""
    setup = report.setup
    noise = "under noise " if setup.search_candidates is None else ""
    most = setup.search_candidates or setup.noisy_candidates
    candidates = "" if most is None else f", {noise}{most:,} candidates for each"
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


def failure_words(run: AttackRun) -> str:
    """Say how an attack failed, and what its control read."""
    outcome, control = "did not work" if run.scores else "gave no reading", run.control
    if control is None:
        return f"{outcome} (no control)"
    said = f"nothing read at {control.policy}"
    if control.rate.n:
        read, must = percent(control.rate.value), percent(control.published)
        said = f"{read} (n {control.rate.n:,}) of {must} at {control.policy}"
    return f"{outcome} (control: {said})"


def above(report: LeakReport, share: float) -> list[str]:
    """Say what is not below a share of tokens beyond chance, a sentence a policy.

    Colluding services are left out: no policy promises anything against them.
    """
    return [
        f"policy {found.title}: got {_obstacles(found, share)}, expected at most {share:g} above"
        " chance"
        for found in report.policies
        if found.nothing is None
        and found.adversary != "colluding services"
        and not (found.excess_high is not None and found.excess_high <= share)
    ]


def _obstacles(found: PolicyLeak, share: float) -> str:
    """Name attacks that failed, places that none tried, and what is read."""
    if found.excess_high is None:
        return "no attack that applies"
    obstacles = []
    if names := failed(found):
        obstacles.append(f"attacks that did not work on their control ({', '.join(names)})")
    if found.untried:
        obstacles.append(f"places that no attack tried ({', '.join(found.untried)})")
    if not found.scored and not obstacles:
        obstacles.append("searches that all gave up")
    for run, score in sorted(found.scored, key=lambda one: -one[1].excess_high)[:1]:
        if score.excess_high > share:
            obstacles.append(
                f"{score.top1.hits:,} of {score.top1.n:,} tokens read by {run.attack} at"
                f" {score.where}, an interval that ends {score.excess_high:.3g} above chance"
            )
    return " and ".join(obstacles)
