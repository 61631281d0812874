"""What a report says: cases by operator, layer and stage, comparisons, growth, and conclusions."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tee_side.words import OPERATORS, PHASES, Phase
from tsqp.lab.bench.results import STAGES, Baseline, Case, OperatorCost, PolicyRun, Report, Stages
from tsqp.lab.report import duration, figures, percent

STAGE_NAMES: dict[str, str] = {name: name.removesuffix("_us") for name in STAGES} | {
    "gpu_us": "GPU",
    "tee_us": "TEE",
}
# What a reader must know to read the columns.
STAGE_MEANINGS: dict[str, str] = {
    "tee_us": "the operator computed in the TEE, or scaling and rounding around a remote product",
    "mask_us": "hiding what is sent",
    "verify_us": "checking what came back",
    "encode_us": "building the request",
    "wire_us": "the round trip less what the service says it spent",
    "queue_us": "waiting in the service, by its own claim",
    "gpu_us": "computing in the service, by its own claim",
    "decode_us": "reading the reply",
    "unmask_us": "taking the mask off the reply",
}
# What is in a step beside its operators.
REST_NAME = "everything else"
REST_MEANING = (
    "what no operator accounts for: building requests, Python between operators, and the observer"
    " itself"
)
# The order in which a step meets its operators.
_FLOW: tuple[str, ...] = (
    "embedding",
    "rms_norm",
    "qkv_proj",
    "rope",
    "kv_cache",
    "attention",
    "attn_scores",
    "softmax",
    "attn_values",
    "o_proj",
    "residual",
    "gate_up_proj",
    "silu_mul",
    "down_proj",
    "lm_head",
    "sample",
)
Measured = tuple[PolicyRun, Case]


def case_name(phase: Phase, tokens: int, batch: int = 1, micro_batches: int = 1) -> str:
    """Return a short name: `prefill 512`, `decode at 512`, `decode 8 at 512, 2 micro`."""
    name = phase if batch == 1 else f"{phase} {batch}"
    joint = " " if batch == 1 else " x "
    name += f"{joint}{tokens}" if phase == "prefill" else f" at {tokens}"
    return name + (f", {micro_batches} micro" if micro_batches > 1 else "")


def name_of(case: Case) -> str:
    """Return the short name of a case."""
    return case_name(case.phase, case.tokens, case.batch, case.micro_batches)


def find_case(run: PolicyRun, phase: Phase, key: tuple[int, int, int]) -> Case | None:
    """Return a policy's case of so many tokens, sequences and micro-batches, None without one."""
    cases = {(c.phase, c.tokens, c.batch, c.micro_batches): c for c in run.cases}
    return cases.get((phase, *key))


def kinds(report: Report) -> list[list[Measured]]:
    """Return the cases of each kind: prefill first, then by batch and length."""
    found: dict[tuple[int, int, int, int], list[Measured]] = {}
    for run in report.policies:
        for case in run.cases:
            key = (PHASES.index(case.phase), case.batch, case.micro_batches, case.tokens)
            found.setdefault(key, []).append((run, case))
    return [found[key] for key in sorted(found)]


def main_cases(report: Report, phase: Phase) -> list[Measured]:
    """Return the cases of the kind by which policies are compared.

    The one that most policies have; of these, one sequence, undivided, and the longest.
    """

    def rank(pairs: list[Measured]) -> tuple[int, int, int, int]:
        _, case = pairs[0]
        return len(pairs), -case.batch, -case.micro_batches, case.tokens

    return max((k for k in kinds(report) if k[0][1].phase == phase), key=rank, default=[])


def in_order(operators: Iterable[str]) -> list[str]:
    """Return each of some operators once, in the order of a step; unknown ones come last."""
    return sorted(
        dict.fromkeys(operators),
        key=lambda name: _FLOW.index(name) if name in _FLOW else len(_FLOW),
    )


def by_operator(case: Case) -> list[OperatorCost]:
    """Add up the layers of each operator, in the order of a step."""
    return [
        _total(name, [cost for cost in case.operators if cost.operator == name])
        for name in in_order(cost.operator for cost in case.operators)
    ]


def by_layer(case: Case) -> list[tuple[OperatorCost, list[OperatorCost]]]:
    """Return the total and the operators of each layer, last of what belongs to none."""
    found = []
    for layer in (*sorted({c.layer for c in case.operators if c.layer is not None}), None):
        own = {c.operator: c for c in case.operators if c.layer == layer}
        if costs := [own[operator] for operator in in_order(own)]:
            name = "in no layer" if layer is None else f"layer {layer}"
            found.append((_total(name, costs), costs))
    return found


def _total(name: str, costs: Sequence[OperatorCost]) -> OperatorCost:
    places = {place for cost in costs for place in cost.place.split("+")}
    place: Any = "+".join(sorted(places, reverse=True))
    counts = {
        count: math.fsum(getattr(cost, count) for cost in costs)
        for count in ("calls", "rpcs", "bytes_sent", "bytes_received")
    }
    stages = sum_stages(cost.stages for cost in costs)
    return OperatorCost(operator=name, layer=None, place=place, stages=stages, **counts)


def sum_stages(stages: Iterable[Stages]) -> Stages:
    """Add up."""
    added = list(stages)
    return Stages(**{name: sum(getattr(one, name) for one in added) for name in STAGES})


def case_stages(case: Case) -> Stages:
    """Return where the time of a whole case went."""
    return sum_stages(cost.stages for cost in case.operators)


def whole_us(case: Case) -> float:
    """Return of what all shares are taken: everything that was done in a step.

    That is the step itself, or more where micro-batches did several things at the same time.
    """
    return case_stages(case).total_us + max(case.rest_us, 0.0)


def pads_ms(run: PolicyRun, case: Case) -> float:
    """Return what making the pads of a step takes, in milliseconds; 0 if it uses none up."""
    if run.pads is None or case.phase not in run.pads.phases:
        return 0.0
    return run.pads.token_ms * tokens_per_step(case)


def sustained_ms(run: PolicyRun, case: Case) -> float:
    """Return what a step takes with the making of its pads, one after the other."""
    return case.step_ms.median + pads_ms(run, case)


def tokens_per_step(case: Case) -> int:
    """Return how many tokens a step handles: whole prompts, or one for each sequence."""
    return case.tokens * case.batch if case.phase == "prefill" else case.batch


# --------------------------------------------------------------------------------- comparison

# What a policy may leave to the service: whether the TEE computes it differs between policies.
_PLACED: tuple[str, ...] = (*OPERATORS, "attention")


def computes(device: str) -> bool | None:
    """Say whether a device computes anything: `null` and `model:X` do not; None if unknown."""
    kind = device.partition(":")[0]
    return {"null": False, "model": False, "cpu": True, "cuda": True}.get(kind)


def alike(report: Report, cases: Sequence[Measured]) -> list[list[Measured]]:
    """Group one kind of case by what may be ranked by time: all, where the service computes.

    Where it does not, only policies whose TEE computes the same: what a policy leaves to the
    service costs it nothing there.
    """
    if computes(report.setup.device) is not False:
        return [list(cases)] if cases else []
    groups: dict[object, list[Measured]] = {}
    for number, (run, case) in enumerate(cases):
        here = frozenset(
            (cost.operator, cost.layer)
            for cost in case.operators
            if cost.place == "tee" and cost.operator in _PLACED
        )
        # What was not split into operators is known to be like nothing else.
        groups.setdefault(here if case.operators else number, []).append((run, case))
    return list(groups.values())


def comparable(report: Report, cases: Sequence[Case], baseline: Baseline) -> bool:
    """Say whether a baseline did the same work as these cases of a policy, at least one.

    One that was timed against a service that answers at once: as cases that all leave work to such
    a service. Others compute everything: as cases that do so themselves, or with a service that
    computes.
    """
    device = report.setup.device
    if baseline.against == "null":
        return device == "null" and all(case.rpcs for case in cases)
    if not any(case.rpcs for case in cases):
        return True
    return bool(computes(device)) and (baseline.against == "none" or device.startswith("cpu"))


def is_generation(baseline: Baseline) -> bool:
    """Say whether a baseline timed a prompt and all its new tokens together."""
    return baseline.phase == "prefill" and baseline.new_tokens > 1


def compare(report: Report) -> list[tuple[Baseline, list[tuple[str, float, float | None]]]]:
    """Put beside each baseline what the same case of each policy that has one took, in ms.

    Behind the policy's name and time stands baseline / ours, None where they can't be compared.
    Against a service that answers at once, what is compared is the overhead; otherwise the step.
    A baseline of a prompt and more new tokens than one is compared with the generation, which did
    the same work if all cases did.
    """
    found = []
    for baseline in report.baselines:
        beside = []
        for run in report.policies:
            cases, ours_ms = _same_work(run, baseline)
            if cases:
                same = comparable(report, cases, baseline) and ours_ms > 0
                ratio = baseline.step_ms.median / ours_ms if same else None
                beside.append((run.policy, ours_ms, ratio))
        found.append((baseline, beside))
    return found


def _same_work(run: PolicyRun, baseline: Baseline) -> tuple[Sequence[Case], float]:
    """Return the cases, none or more, in which a policy did what a baseline did, and their ms."""
    if is_generation(baseline):
        lengths, made = (baseline.tokens, baseline.new_tokens), run.generation
        if made is None or (made.prompt_tokens, made.new_tokens) != lengths:
            return (), 0.0
        return run.cases, made.total_ms
    case = find_case(run, baseline.phase, (baseline.tokens, 1, 1))
    if case is None:
        return (), 0.0
    overhead = baseline.against == "null" and case.rpcs
    return (case,), case.overhead_ms if overhead else case.step_ms.median


def baseline_name(baseline: Baseline) -> str:
    """Return the kind of step that a baseline timed."""
    if is_generation(baseline):
        return f"{baseline.tokens} + {baseline.new_tokens} new"
    name = case_name(baseline.phase, baseline.tokens)
    return f"{name} (mean of {baseline.new_tokens})" if baseline.new_tokens > 1 else name


# ------------------------------------------------------------------------------------- growth


@dataclass(frozen=True)
class PowerLaw:
    """`factor * x ** exponent`, and how well it fits.

    `r_squared`: share of the variance of log(cost) that it explains, 1 for a perfect fit (always
    so for two points, which say nothing about the fit). `worst`: by which factor the point that is
    farthest off lies above or below the line, at least 1.
    """

    exponent: float
    factor: float
    r_squared: float
    worst: float


def fit_exponent(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Fit log(cost) = log(factor) + exponent * log(x) by least squares.

    `points`: pairs of x and cost. None where no such line exists: fewer than two different x, or a
    number that has no logarithm. No point is left out silently.
    """
    if not all(0 < number < math.inf for pair in points for number in pair):
        return None
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(cost) for _, cost in points]
    if len(set(xs)) < 2:
        return None
    exponent, offset = statistics.linear_regression(xs, ys)
    misses = [y - offset - exponent * x for x, y in zip(xs, ys, strict=True)]
    variance, unexplained = statistics.pvariance(ys), statistics.fmean(miss**2 for miss in misses)
    # A cost that does not change at all is fitted perfectly by a flat line.
    r_squared = 1.0 - unexplained / variance if variance > 1e-18 else 1.0
    worst = math.exp(max(map(abs, misses)))
    return PowerLaw(exponent, math.exp(offset), r_squared, worst)


@dataclass(frozen=True)
class Growth:
    """How one cost of one policy grows. `points`: pairs of x and cost, by x.

    `scope`: which cases they are from: their batch, or their tokens.
    """

    policy: str
    phase: Phase
    cost: str
    against: str
    scope: str
    points: tuple[tuple[float, float], ...]
    law: PowerLaw | None


_LENGTH: dict[Phase, str] = {"prefill": "prompt tokens", "decode": "context tokens"}
# What is quadratic in a prompt's length; everything else should be linear.
ATTENTION = ("attention", "attn_scores", "softmax", "attn_values")


def growth(report: Report) -> list[Growth]:
    """Return how time grows with prompt, context and batch, wherever there are two sizes.

    Time is that of a step less Embedding and LM head in the TEE (`overhead_ms`), in ms; beside it,
    attention alone (scores, softmax and values).
    """
    found: dict[tuple[str, Phase, str, str, str], list[tuple[float, float]]] = {}
    for run in report.policies:
        for case in sorted(run.cases, key=lambda c: (PHASES.index(c.phase), c.batch, c.tokens)):
            phase, length = case.phase, _LENGTH[case.phase]
            micro = f", {case.micro_batches} micro" if case.micro_batches > 1 else ""
            attention = [c.stages for c in case.operators if c.operator in ATTENTION]
            of_length = (length, f"batch {case.batch}{micro}")
            of_batch = ("batch", f"{case.tokens} {length}{micro}")
            for cost, where, x, ms in (
                ("step", of_length, case.tokens, case.overhead_ms),
                ("attention", of_length, case.tokens, sum_stages(attention).total_us / 1e3),
                ("step", of_batch, case.batch, case.overhead_ms),
            ):
                key = (run.policy, phase, cost, *where)
                found.setdefault(key, []).append((float(x), ms))
    return [
        Growth(*key, tuple(points), fit_exponent(points))
        for key, points in found.items()
        if len(points) > 1 and any(cost for _, cost in points)
    ]


# ---------------------------------------------------------------------------------- sentences


def caveats(report: Report) -> Iterator[str]:
    """Say what must be known before any figure is read, a sentence each."""
    device = report.setup.device
    if computes(device) is False and any(c.rpcs for run in report.policies for c in run.cases):
        served = (
            "nothing is computed at the service: tokens/s are an upper bound"
            if device == "null"
            else "the service computes nothing and takes the time that was described to it:"
            " tokens/s are modelled"
        )
        yield (
            f"With device {device} {served}, and policies that compute in the TEE what others"
            " leave to the service are not comparable with those."
        )
    names = [run.policy for run in report.policies if uses_pads(run)]
    if names:
        text = (
            f"{', '.join(names)}: pads are made ahead, and making them is not counted in times and"
            " tokens/s, but in sustained ones"
        )
        if computes(device) is False:
            text += "; the factors of these pads are zeros, which cost as much to use"
        yield f"{text}."


def at_most(report: Report) -> str:
    """Return what to say before a speed that needs a service; empty where that computed."""
    kind = report.setup.device.partition(":")[0]
    return {"null": "at most ", "model": "a modelled "}.get(kind, "")


def uses_pads(run: PolicyRun) -> bool:
    """Say whether a policy uses up pads that were made ahead, by what it says that it discloses."""
    said = run.leakage_summary or ""
    alone = "uniform random numbers" in said and "collude" not in said
    return (alone or re.search(r"\bunder [^;]*\bpad\b", said) is not None) and any(
        case.rpcs for case in run.cases
    )


def missing(report: Report) -> Iterator[str]:
    """Say what a report lacks, a sentence each; nothing if it is complete."""
    if report.incomplete:
        yield f"The run is incomplete: {report.incomplete}."
    if not report.policies:
        yield "No policy was measured."
    for run in report.policies:
        phases = {case.phase for case in run.cases}
        parts: dict[str, object] = {phase: phase in phases for phase in PHASES} | {
            "generation": run.generation,
            "timeline": run.timelines,
        }
        if not all(parts.values()):
            lacking = ", ".join(name for name, there in parts.items() if not there)
            yield f"{run.policy} lacks: {lacking}."
    if not report.baselines:
        yield "No baseline was measured: ratios to other systems are missing."
    if not report.ping_pong:
        yield "No ping-pong was measured: the floor of the transport is unknown."


def findings(report: Report) -> Iterator[str]:
    """Say what to conclude, a sentence each, from the cases by which policies are compared."""
    for phase in PHASES:
        pairs = main_cases(report, phase)
        for same in alike(report, pairs):
            ranked = sorted(same, key=lambda pair: pair[1].step_ms.median)
            best, case = ranked[0]
            pads = " (making pads not counted)" if uses_pads(best) and case.rpcs else ""
            text = (
                f"{name_of(case).capitalize()}: {best.policy} takes"
                f" {duration(case.step_ms.median * 1e3)} a step,"
                f" {at_most(report) if case.rpcs else ''}{figures(case.tokens_per_s) or '0'}"
                f" tokens/s{pads}"
            )
            others = [
                f"{run.policy} {figures(other.step_ms.median / case.step_ms.median)} times as long"
                for run, other in ranked[1:]
                if case.step_ms.median > 0
            ]
            yield text + (f"; {', '.join(others)}." if others else ".")
        yield from _offloading(report, pairs)
    for baseline, beside in compare(report):
        ratios = [
            f"{figures(ratio)} times {name}" for name, _, ratio in beside if ratio is not None
        ]
        if ratios:
            yield (
                f"The baseline {baseline.name} takes {duration(baseline.step_ms.median * 1e3)} for"
                f" {baseline_name(baseline)}: {', '.join(ratios)}."
            )


def _offloading(report: Report, pairs: Sequence[Measured]) -> Iterator[str]:
    """Say whether each policy with a service wins against the fastest that never needs one.

    Nothing where no policy does without a service, or a step took no time.
    """
    alone = [pair for pair in pairs if not any(one.rpcs for one in pair[0].cases)]
    if not alone or min(case.step_ms.median for _, case in pairs) <= 0:
        return
    best, case = min(alone, key=lambda pair: pair[1].step_ms.median)
    alone_ms = case.step_ms.median
    said = []
    for run, other in (pair for pair in pairs if pair not in alone):
        ratio = alone_ms / other.step_ms.median
        sustained = alone_ms / sustained_ms(run, other)
        text = f"{run.policy} {_outcome(ratio)}, {at_most(report)}{ratio:.2f} times as fast"
        if sustained < ratio:
            text += f" ({_outcome(sustained)} with its pads made on the same cores:"
            text += f" {sustained:.2f} times)"
        said.append(text)
    if said:
        yield (
            f"Offloading beside {best.policy}, the fastest without a service"
            f" ({duration(alone_ms * 1e3)} for {name_of(case)}): {'; '.join(said)}."
        )


def _outcome(ratio: float) -> str:
    return "wins" if ratio > 1 else "loses"


def dominant(run: PolicyRun, case: Case) -> str:
    """Say which stage and which operator of a case cost most."""
    stages = case_stages(case)
    operators = by_operator(case)
    if not operators or stages.total_us <= 0:
        return f"{run.policy}, {name_of(case)}: not split into operators."
    whole = whole_us(case)
    stage = max(STAGES, key=lambda name: float(getattr(stages, name)))
    largest = sorted(operators, key=lambda op: -op.stages.total_us)[:2]
    names = " and ".join(f"{op.operator} ({percent(op.stages.total_us / whole)})" for op in largest)
    return (
        f"{run.policy}, {name_of(case)}: the largest stage is {STAGE_NAMES[stage]}"
        f" ({percent(getattr(stages, stage) / whole)}), the largest operators are {names}"
        + (f"; {REST_NAME} is {percent(case.rest_us / whole)}." if case.rest_us > 0 else ".")
    )
