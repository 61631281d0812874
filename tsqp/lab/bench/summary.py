"""What a report has: its cases by operator, layer and stage; comparison with others, and growth."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tee_side.words import OPERATORS, PHASES, Phase
from tsqp.lab.bench.model import STAGES, Baseline, Case, OperatorCost, PolicyRun, Report, Stages

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
CaseKey = tuple[int, int, int]
Measured = tuple[PolicyRun, Case]


def case_key(case: Case) -> CaseKey:
    """Return what makes two cases of one phase comparable: tokens, batch, micro-batches."""
    return case.tokens, case.batch, case.micro_batches


def case_name(phase: Phase, tokens: int, batch: int = 1, micro_batches: int = 1) -> str:
    """Return a short name: `prefill 512`, `decode at 512`, `decode 8 at 512, 2 micro`."""
    name = phase if batch == 1 else f"{phase} {batch}"
    joint = " " if batch == 1 else " x "
    name += f"{joint}{tokens}" if phase == "prefill" else f" at {tokens}"
    return name + (f", {micro_batches} micro" if micro_batches > 1 else "")


def name_of(case: Case) -> str:
    """Return the short name of a case."""
    return case_name(case.phase, *case_key(case))


def kinds(report: Report) -> list[tuple[Phase, CaseKey]]:
    """Return each kind of case that some policy has: prefill first, then by batch and length."""
    found = {(case.phase, case_key(case)) for run in report.policies for case in run.cases}
    return sorted(
        found, key=lambda kind: (PHASES.index(kind[0]), kind[1][1], kind[1][2], kind[1][0])
    )


def find_case(run: PolicyRun, phase: Phase, key: CaseKey) -> Case | None:
    """Return a policy's case of that kind, None if it has none."""
    return next((c for c in run.cases if c.phase == phase and case_key(c) == key), None)


def main_kind(report: Report, phase: Phase) -> CaseKey | None:
    """Return the kind of case by which policies are compared, None if there is no case.

    The one that most policies have; of these, one sequence, undivided, and the longest.
    """
    counts = Counter(
        case_key(case) for run in report.policies for case in run.cases if case.phase == phase
    )
    if not counts:
        return None
    return max(counts, key=lambda key: (counts[key], -key[1], -key[2], key[0]))


def main_cases(report: Report, phase: Phase) -> list[Measured]:
    """Return the policies' cases of the main kind, those that have one."""
    key = main_kind(report, phase)
    if key is None:
        return []
    found = ((run, find_case(run, phase, key)) for run in report.policies)
    return [(run, case) for run, case in found if case is not None]


def in_order(operators: Iterable[str]) -> list[str]:
    """Return each of some operators once, in the order of a step; unknown ones come last."""
    names = dict.fromkeys(operators)
    return sorted(names, key=lambda name: _FLOW.index(name) if name in _FLOW else len(_FLOW))


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
        if own:
            name = "in no layer" if layer is None else f"layer {layer}"
            costs = [own[operator] for operator in in_order(own)]
            found.append((_total(name, costs), costs))
    return found


def _total(name: str, costs: Sequence[OperatorCost]) -> OperatorCost:
    places = {place for cost in costs for place in cost.place.split("+")}
    place = "+".join(sorted(places, reverse=True))
    whole: dict[str, Any] = {"operator": name, "layer": None, "place": place}
    for count in ("calls", "rpcs", "bytes_sent", "bytes_received"):
        whole[count] = math.fsum(getattr(cost, count) for cost in costs)
    return OperatorCost.model_validate(whole | {"stages": sum_stages(c.stages for c in costs)})


def sum_stages(stages: Iterable[Stages]) -> Stages:
    """Add up."""
    return sum(stages, Stages())


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


@dataclass(frozen=True)
class Comparison:
    """A policy beside a baseline. `ratio`: baseline / ours, None where they can't be compared."""

    policy: str
    ours_ms: float
    ratio: float | None


def comparable(report: Report, cases: Sequence[Case], baseline: Baseline) -> bool:
    """Say whether a baseline did the same work as these cases of a policy, at least one.

    One that was timed against a service that answers at once: as cases that all leave work to such
    a service. Others compute everything: as cases that do so themselves, or with a service that
    computes.
    """
    device = report.setup.device
    if not cases:
        return False
    if baseline.against == "null":
        return device == "null" and all(case.rpcs for case in cases)
    if not any(case.rpcs for case in cases):
        return True
    return bool(computes(device)) and (baseline.against == "none" or device.startswith("cpu"))


def compare(report: Report) -> list[tuple[Baseline, list[Comparison]]]:
    """Put beside each baseline the same case of each policy that has one.

    Against a service that answers at once, what is compared is the overhead; otherwise the step.
    A baseline of a prompt and more new tokens than one is compared with the generation, which did
    the same work if all cases did.
    """
    found = []
    for baseline in report.baselines:
        beside = []
        for run in report.policies:
            if (ours := _ours_ms(run, baseline)) is not None:
                same = comparable(report, _cases(run, baseline), baseline) and ours > 0
                ratio = baseline.step_ms.median / ours if same else None
                beside.append(Comparison(run.policy, ours, ratio))
        found.append((baseline, beside))
    return found


def is_generation(baseline: Baseline) -> bool:
    """Say whether a baseline timed a prompt and all its new tokens together."""
    return baseline.phase == "prefill" and baseline.new_tokens > 1


def _cases(run: PolicyRun, baseline: Baseline) -> Sequence[Case]:
    """Return a policy's cases that do what a baseline did: all of them for a whole request."""
    if is_generation(baseline):
        return run.cases
    case = find_case(run, baseline.phase, (baseline.tokens, 1, 1))
    return () if case is None else (case,)


def _ours_ms(run: PolicyRun, baseline: Baseline) -> float | None:
    if is_generation(baseline):
        lengths, made = (baseline.tokens, baseline.new_tokens), run.generation
        same = made is not None and (made.prompt_tokens, made.new_tokens) == lengths
        return made.total_ms if made is not None and same else None
    for case in _cases(run, baseline):
        against_nothing = baseline.against == "null" and case.rpcs
        return case.overhead_ms if against_nothing else case.step_ms.median
    return None


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

    def at(self, x: float) -> float:
        """Return the cost that the law predicts at `x`."""
        return float(self.factor * x**self.exponent)


def fit_exponent(points: Iterable[tuple[float, float]]) -> PowerLaw | None:
    """Fit log(cost) = log(factor) + exponent * log(x) by least squares.

    `points`: pairs of x and cost. None where no such line exists: fewer than two different x, or a
    number that has no logarithm. No point is left out silently.
    """
    pairs = list(points)
    if not all(0 < number < math.inf for pair in pairs for number in pair):
        return None
    xs = [math.log(x) for x, _ in pairs]
    ys = [math.log(cost) for _, cost in pairs]
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
