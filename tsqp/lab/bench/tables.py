"""The tables of a report as text in cells: one source for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tsqp.lab.bench.compare import baseline_name, compare, computes
from tsqp.lab.bench.growth import Growth, growth
from tsqp.lab.bench.model import STAGES, Case, OperatorCost, PingPong, PolicyRun, Report, Stages
from tsqp.lab.bench.summary import (
    REST_MEANING,
    REST_NAME,
    STAGE_NAMES,
    OperatorTotal,
    by_layer,
    by_operator,
    case_name,
    case_stages,
    find_case,
    kinds,
    pads_ms,
    sustained_ms,
    tokens_per_step,
    whole_us,
)
from tsqp.lab.bench.units import figures, percent, size, whole


@dataclass(frozen=True)
class Row:
    """A row of cells. `group`: a heading over the rows below; `total`: the sum of those above."""

    cells: tuple[str, ...]
    kind: Literal["plain", "group", "total"] = "plain"


@dataclass(frozen=True)
class Grid:
    """A table. `texts`: how many columns from the left hold text; all others hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    texts: int = 1
    note: str = ""

    def select(self, title: str, names: Sequence[str], *, texts: int = 1) -> Grid:
        """Return some of the columns, in that order."""
        places = [self.columns.index(name) for name in names]
        rows = tuple(Row(tuple(row.cells[i] for i in places), row.kind) for row in self.rows)
        return Grid(title, tuple(names), rows, texts=texts, note=self.note)

    def without_empty(self, *, keep: Iterable[str] = ()) -> Grid:
        """Leave out columns of numbers that hold nothing, unless they are to be kept."""
        names = [
            name
            for place, name in enumerate(self.columns)
            if place < self.texts or name in keep or any(row.cells[place] for row in self.rows)
        ]
        return self.select(self.title, names, texts=self.texts)


STEP_COLUMNS = ("policy", "step ms", "low to high", "overhead ms", "ms/token", "tokens/s")
TRAFFIC_COLUMNS = (
    "policy",
    "RPCs",
    "sent",
    "received",
    "sent/token",
    "received/token",
)
CPU_COLUMNS = ("policy", "TEE CPU ms", "GPU CPU ms", "TEE CPU ms/token", "largest stage")
SUSTAINED_COLUMNS = (
    *("policy", "tokens/s", "pads ms", "sustained tokens/s"),
    *("TEE CPU ms/token", "pads CPU ms/token"),
)
SUSTAINED_NOTE = (
    "Sustained: a step and then the making of the pads that it used up, on the same cores, one"
    " after the other; pads made while a step waits for the service would take less. TEE CPU is"
    " without the making of pads, which stands beside it."
)


def steps_grid(report: Report) -> Grid:
    """Compare the policies, a group of rows for each kind of step."""
    columns = tuple(
        dict.fromkeys((*STEP_COLUMNS, *TRAFFIC_COLUMNS, *CPU_COLUMNS, *SUSTAINED_COLUMNS))
    )
    rows: list[Row] = []
    for phase, key in kinds(report):
        rows.append(Row((case_name(phase, *key), *[""] * (len(columns) - 1)), "group"))
        for run in report.policies:
            case = find_case(run, phase, key)
            if case is not None:
                rows.append(Row((run.policy, *_step_cells(run, case))))
    note = (
        "A step is a whole prompt, or one token of each sequence. Overhead is the step less"
        " Embedding and LM head computed in the TEE; none where a step makes no RPC. decode at N:"
        " contexts begin with N tokens and grow by one with each step that is measured."
    )
    return Grid("Steps", columns, tuple(rows), note=note)


def _step_cells(run: PolicyRun, case: Case) -> tuple[str, ...]:
    tokens = tokens_per_step(case)
    making_ms = pads_ms(run, case)
    stages = case_stages(case)
    share = max((getattr(stages, name), name) for name in STAGES) if stages.total_us else None
    return (
        figures(case.step_ms.median),
        f"{figures(case.step_ms.low)} to {figures(case.step_ms.high)}"
        if case.step_ms.runs > 1
        else "",
        figures(case.overhead_ms) if case.rpcs else "",
        figures(case.step_ms.median / tokens),
        figures(case.tokens_per_s),
        whole(case.rpcs),
        size(case.bytes_sent),
        size(case.bytes_received),
        size(case.bytes_sent / tokens),
        size(case.bytes_received / tokens),
        figures(case.cpu_tee_ms),
        NOT_OURS if case.cpu_gpu_ms is None else figures(case.cpu_gpu_ms),
        figures(case.cpu_tee_ms / tokens),
        f"{STAGE_NAMES[share[1]]} {percent(share[0] / whole_us(case))}" if share else "",
        figures(making_ms),
        figures(tokens / sustained_ms(run, case) * 1e3) if case.step_ms.median > 0 else "",
        figures(run.pads.cpu_ms) if run.pads and making_ms else "",
    )


def requests_grid(report: Report) -> Grid | None:
    """Show whole requests, measured without an observer; None if there was none."""
    rows = []
    for run in report.policies:
        made = run.generation
        if made is not None:
            cells = (
                run.policy,
                str(made.prompt_tokens),
                str(made.new_tokens),
                figures(made.ttft_ms),
                figures(made.tpot_ms),
                figures(made.total_ms),
                figures(1e3 / made.tpot_ms) if made.tpot_ms > 0 else "",
            )
            rows.append(Row(cells))
    if not rows:
        return None
    columns = ("policy", "prompt", "new", "TTFT ms", "TPOT ms", "total ms", "tokens/s")
    note = (
        "One request from prompt to last token, measured without an observer. TTFT: time to first"
        " token; TPOT: time per output token after it."
    )
    return Grid("Whole requests", columns, tuple(rows), note=note)


def memory_grid(report: Report) -> Grid | None:
    """Show the largest resident set of each process; None without a policy."""
    rows = []
    for run in report.policies:
        known = run.kv_bytes + run.vocabulary_bytes
        rest = run.tee_peak_bytes - known
        cells = (
            run.policy,
            size(run.tee_peak_bytes),
            size(run.vocabulary_bytes),
            size(run.kv_bytes),
            size(rest) if rest > 0 else "",
            "no service" if run.gpu_peak_bytes is None else size(run.gpu_peak_bytes),
        )
        rows.append(Row(cells))
    if not rows:
        return None
    columns = (
        "policy",
        "TEE peak",
        "embedding, LM head",
        "KV cache",
        "beyond embedding, LM head and KV cache",
        "GPU side peak",
    )
    note = "Largest resident set of each process. Beyond: the peak less the two columns before it."
    return Grid("Memory", columns, tuple(rows), note=note)


# Processes that ran before and go on running.
NOT_OURS = "not ours"
_COSTS = ("calls", "RPCs", "sent", "received")


def operators_grid(case: Case, title: str) -> Grid:
    """Show each operator of a case over all layers: traffic, and time by stage in ms."""
    stages = tuple(STAGE_NAMES[name] for name in STAGES)
    columns = ("operator", "where", *_COSTS, *stages, "total", "share")
    total = case_stages(case)
    done_us = whole_us(case)
    rows = [Row(_operator_cells(found, done_us)) for found in by_operator(case)]
    blank = ("",) * (len(_COSTS) + len(stages))
    share = percent(case.rest_us / done_us) if done_us and case.rest_us > 0 else ""
    rest = REST_NAME if case.rest_us >= 0 else "done at the same time"
    rows.append(Row((rest, "", *blank, figures(case.rest_us / 1e3), share)))
    rows.append(
        Row(
            (
                "step",
                "",
                "",
                whole(case.rpcs),
                size(case.bytes_sent),
                size(case.bytes_received),
                *_stage_cells(total),
                figures((total.total_us + case.rest_us) / 1e3),
                "",
            ),
            "total",
        )
    )
    note = "Times in ms of one step, run with an observer, all layers together. "
    note += (
        f"Shares are of the whole step; {REST_NAME}: {REST_MEANING}."
        if case.rest_us >= 0
        else "Shares are of all that was done, part of it at the same time."
    )
    return Grid(title, columns, tuple(rows), texts=2, note=note).without_empty(
        keep=("calls", "RPCs", "sent", "received", "total", "share")
    )


def layers_grid(case: Case, title: str, *, operators: bool) -> Grid:
    """Show each layer of a case, with its operators if asked: traffic, and time by stage in us."""
    stages = tuple(STAGE_NAMES[name] for name in STAGES)
    columns = ("layer", "where", *_COSTS, *stages, "total")
    rows: list[Row] = []
    for _, total, costs in by_layer(case):
        rows.append(Row(_cost_cells(total, 1.0), "group" if operators else "plain"))
        if operators:
            rows += [Row(_cost_cells(cost, 1.0)) for cost in costs]
    note = "Times in microseconds of one step, run with an observer."
    return Grid(title, columns, tuple(rows), texts=2, note=note).without_empty(
        keep=("calls", "RPCs", "sent", "received", "total")
    )


def _stage_cells(stages: Stages, unit_us: float = 1e3) -> tuple[str, ...]:
    return tuple(figures(getattr(stages, name) / unit_us) for name in STAGES)


def _operator_cells(found: OperatorTotal, done_us: float) -> tuple[str, ...]:
    share = percent(found.stages.total_us / done_us) if done_us else ""
    return *_cost_cells(found, 1e3), share


def _cost_cells(found: OperatorTotal | OperatorCost, unit_us: float) -> tuple[str, ...]:
    return (
        found.operator,
        found.place,
        whole(found.calls),
        whole(found.rpcs),
        size(found.bytes_sent),
        size(found.bytes_received),
        *_stage_cells(found.stages, unit_us),
        figures(found.stages.total_us / unit_us),
    )


def growth_grid(report: Report) -> Grid | None:
    """Show the fitted exponents; None if there are not two sizes of anything."""
    found = growth(report)
    if not found:
        return None
    columns = ("time of", "against", "exponent", "R2", "worst", "points")
    note = (
        "cost = factor x size^exponent, least squares over logarithms: 1 is linear, 0 does not"
        " grow. R2: share of the variance explained; worst: the point farthest from the line. Two"
        " points always fit, and tell nothing. Time is that of a step less Embedding and LM head in"
        " the TEE; context tokens are those with which decoding began."
    )
    rows: list[Row] = []
    for policy in dict.fromkeys(one.policy for one in found):
        rows.append(Row((policy, *[""] * (len(columns) - 1)), "group"))
        rows += [_growth_row(one) for one in found if one.policy == policy]
    return Grid("Growth", columns, tuple(rows), texts=2, note=note)


def _growth_row(found: Growth) -> Row:
    law = found.law
    fit = ("no fit", "", "")
    if len(found.points) == 2:
        fit = ("two points", "", "")
    elif law is not None:
        fit = (f"{law.exponent:.2f}", f"{law.r_squared:.3f}", f"{law.worst - 1:.0%}")
    against = f"{found.against}, {found.scope}"
    return Row((f"{found.phase} {found.cost}", against, *fit, str(len(found.points))))


def baselines_grid(report: Report) -> Grid | None:
    """Show baselines beside each policy's same step; None without a baseline."""
    if not report.baselines:
        return None
    rows: list[Row] = []
    for found in compare(report):
        baseline = found.baseline
        label = f"{baseline.name}, {baseline_name(baseline)}"
        cells = (
            label,
            figures(baseline.step_ms.median),
            "",
            whole(baseline.round_trips),
            size(baseline.bytes_sent + baseline.bytes_received),
        )
        if Row(cells, "group") not in rows:
            rows.append(Row(cells, "group"))
        if found.policy is None:
            rows.append(Row(("no policy has such a step", *[""] * 4)))
        else:
            ours = "" if found.ours_ms is None else figures(found.ours_ms)
            ratio = "" if found.ratio is None else figures(found.ratio)
            rows.append(Row((found.policy, ours, ratio, *[""] * 2)))
    columns = ("baseline and policy", "ms", "baseline/policy", "round trips", "bytes")
    note = (
        "Ratio: above 1 where the policy is faster. Against a service that"
        " answers at once, the policy's ms are its overhead; otherwise its step, or its whole"
        " request."
    )
    does = computes(report.setup.device)
    if not does:
        what = "computes nothing" if does is False else "is not known to compute"
        note += (
            f" The device ({report.setup.device}) {what}: steps that use it have no ratio to"
            " baselines that compute, nor have steps without an RPC to those that do not."
        )
    for name, dtype, description in dict.fromkeys(
        (b.name, b.dtype, b.description) for b in report.baselines
    ):
        note += f" {name}: {description}, {dtype}."
    return Grid("Baselines", columns, tuple(rows), texts=1, note=note)


def ping_pong_grid(report: Report) -> Grid | None:
    """Show one round trip, ours beside a raw one; None if none was measured."""
    if not report.ping_pong:
        return None
    keys = sorted({(p.transport, p.payload_bytes) for p in report.ping_pong})
    rows = []
    for transport, payload in keys:
        same = [
            p for p in report.ping_pong if (p.transport, p.payload_bytes) == (transport, payload)
        ]
        ours = next((p for p in same if p.kind == "ours"), None)
        raw = next((p for p in same if p.kind == "raw"), None)
        ratio = figures(ours.p50_us / raw.p50_us) if ours and raw and raw.p50_us else ""
        rows.append(
            Row((transport, _payload(payload), *_percentiles(ours), *_percentiles(raw), ratio))
        )
    columns = ("transport", "payload", "ours p50", "ours p90", "raw p50", "raw p90", "ours/raw")
    note = (
        "Round trips of one payload each way, in microseconds. Ours: as a Linear RPC; raw: the"
        " same frames, bounced by a process that does nothing else."
    )
    return Grid("Ping-pong", columns, tuple(rows), texts=1, note=note)


def _payload(payload: int) -> str:
    for factor, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if payload >= factor and payload % factor == 0:
            return f"{payload // factor} {unit}"
    return f"{payload} B"


def _percentiles(found: PingPong | None) -> tuple[str, str]:
    return ("", "") if found is None else (figures(found.p50_us), figures(found.p90_us))


def setup_pairs(report: Report) -> list[tuple[str, str]]:
    """Return what was measured, and on what."""
    setup = report.setup
    machine = ", ".join(f"{name} {value}" for name, value in setup.machine.items())
    served = NOT_OURS if setup.gpu_threads is None else str(setup.gpu_threads)
    return [
        ("model", f"{setup.model}, {setup.num_hidden_layers} layers, {setup.dtype}"),
        ("device", setup.device),
        ("transport", setup.transport + (f", modelled link {setup.link}" if setup.link else "")),
        ("kernels", setup.kernels),
        ("threads", f"TEE {setup.tee_threads}, GPU side {served}"),
        ("spin", f"{setup.spin_us:g} us before blocking" if setup.spin_us else "none"),
        ("tokens a step", "unknown" if not setup.step_tokens else f"at most {setup.step_tokens}"),
        ("machine", machine),
        ("measured", setup.created),
        ("command", setup.command),
    ]


def leakage_summaries(report: Report) -> list[tuple[str, str]]:
    """Return what the GPU side learns under each policy."""
    return [
        (run.policy, run.leakage_summary or "nothing leaves the TEE: the GPU side sees nothing")
        for run in report.policies
    ]


def facts(report: Report) -> str:
    """Return the run in a line."""
    setup = report.setup
    return (
        f"{setup.model}, {setup.dtype}, device {setup.device} over {setup.transport}"
        + (f" ({setup.link})" if setup.link else "")
        + f", {setup.tee_threads} threads in the TEE"
    )
