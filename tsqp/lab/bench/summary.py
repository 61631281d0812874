"""Which cases of a report are compared, and what they add up to by operator, layer and stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tee_side.words import PHASES, Phase
from tsqp.lab.bench.model import STAGES, Case, OperatorCost, PolicyRun, Report, Stages

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


def distinct(report: Report) -> Report:
    """Return the report with policies that have one name told apart: `stip`, `stip (2)`."""
    names: list[str] = []
    for run in report.policies:
        name, number = run.policy, 2
        while name in names:
            name, number = f"{run.policy} ({number})", number + 1
        names.append(name)
    runs = zip(report.policies, names, strict=True)
    return report.model_copy(
        update={"policies": tuple(run.model_copy(update={"policy": name}) for run, name in runs)}
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


def fastest_alone(pairs: Iterable[Measured]) -> tuple[Measured, list[Measured]] | None:
    """Return of one kind of case the fastest policy that needs no service, and those that do.

    None where no policy does without, or a step took no time.
    """
    alone: list[Measured] = []
    sent: list[Measured] = []
    for run, case in pairs:
        if case.step_ms.median <= 0:
            return None
        (sent if any(one.rpcs for one in run.cases) else alone).append((run, case))
    return (min(alone, key=lambda pair: pair[1].step_ms.median), sent) if alone else None


@dataclass(frozen=True)
class OperatorTotal:
    """An operator over all layers. `place`: `tee`, `gpu`, or both where layers differ."""

    operator: str
    place: str
    calls: float
    rpcs: float
    bytes_sent: float
    bytes_received: float
    stages: Stages


def by_operator(case: Case) -> list[OperatorTotal]:
    """Add up the layers of each operator, in the order of a step."""
    names = dict.fromkeys(cost.operator for cost in case.operators)
    order = [name for name in _FLOW if name in names]
    order += [name for name in names if name not in _FLOW]
    return [_total(name, [c for c in case.operators if c.operator == name]) for name in order]


def by_layer(case: Case) -> list[tuple[int | None, OperatorTotal, list[OperatorCost]]]:
    """Return each layer (None last: what belongs to none), its total and its operators."""
    layers = sorted({c.layer for c in case.operators if c.layer is not None})
    found = []
    for layer in (*layers, None):
        costs = [c for c in case.operators if c.layer == layer]
        costs.sort(key=lambda c: _FLOW.index(c.operator) if c.operator in _FLOW else len(_FLOW))
        if costs:
            name = "in no layer" if layer is None else f"layer {layer}"
            found.append((layer, _total(name, costs), costs))
    return found


def _total(name: str, costs: Sequence[OperatorCost]) -> OperatorTotal:
    return OperatorTotal(
        operator=name,
        place="+".join(sorted({cost.place for cost in costs}, reverse=True)),
        calls=math.fsum(cost.calls for cost in costs),
        rpcs=math.fsum(cost.rpcs for cost in costs),
        bytes_sent=math.fsum(cost.bytes_sent for cost in costs),
        bytes_received=math.fsum(cost.bytes_received for cost in costs),
        stages=sum_stages(cost.stages for cost in costs),
    )


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


def largest_stage(stages: Stages) -> str:
    """Return the name of the stage that took longest, as a field of Stages."""
    return max(STAGES, key=lambda name: float(getattr(stages, name)))


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
