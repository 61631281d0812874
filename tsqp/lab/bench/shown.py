"""What is shown of a report, on a terminal and on a page: the same tables, by rich and by jinja2.

The page needs nothing but itself: no network, no script.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from tee_side.words import PHASES
from tsqp.lab.bench.plots import plots, timelines
from tsqp.lab.bench.results import (
    STAGES,
    Case,
    OperatorCost,
    PolicyRun,
    Report,
    RequestTimes,
    Stages,
)
from tsqp.lab.bench.summary import (
    REST_MEANING,
    REST_NAME,
    STAGE_MEANINGS,
    STAGE_NAMES,
    baseline_name,
    by_layer,
    by_operator,
    case_stages,
    caveats,
    compare,
    dominant,
    findings,
    growth,
    kinds,
    main_cases,
    missing,
    name_of,
    pads_ms,
    sustained_ms,
    tokens_per_step,
    whole_us,
)
from tsqp.lab.report import Grid, Row, figures, grid, heading, page, percent, size, terminal, whole
from tsqp.tables import definitions

# Tables of steps: title, columns, note.
_STEPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "Steps",
        ("policy", "step ms", "low to high", "overhead ms", "ms/token", "tokens/s"),
        "A step is a whole prompt, or one token of each sequence. Overhead is the step less"
        " Embedding and LM head computed in the TEE; none where a step makes no RPC. decode at N:"
        " contexts begin with N tokens and grow by one with each step that is measured.",
    ),
    ("Traffic", ("policy", "RPCs", "sent", "received", "sent/token", "received/token"), ""),
    (
        "Processor time",
        ("policy", "TEE CPU ms", "GPU CPU ms", "TEE CPU ms/token", "largest stage"),
        "",
    ),
    (
        "With the making of pads",
        (
            *("policy", "tokens/s", "pads ms", "sustained tokens/s"),
            *("TEE CPU ms/token", "pads CPU ms/token"),
        ),
        "Sustained: a step and then the making of the pads that it used up, on the same cores, one"
        " after the other; pads made while a step waits for the service would take less. TEE CPU"
        " is without the making of pads, which stands beside it.",
    ),
)
# Processes that ran before and go on running.
_NOT_OURS = "not ours"
_COSTS = ("calls", "RPCs", "sent", "received", "total")
_STAGES = tuple(STAGE_NAMES[name] for name in STAGES)


# ------------------------------------------------------------------------------------- tables


def overview(report: Report) -> list[Grid]:
    """Return the tables that compare policies, those that hold anything."""
    made = [(run, run.generation) for run in report.policies if run.generation is not None]
    found = [
        *_steps(report),
        grid(
            "Whole requests",
            _REQUESTS,
            made,
            "One request from prompt to last token, measured without an observer. TTFT: time to"
            " first token; TPOT: time per output token after it.",
        ),
        grid(
            "Memory",
            _MEMORY,
            report.policies,
            "Largest resident set of each process. Beyond: the peak less the two columns before"
            " it.",
        ),
        *(_growth(report), _baselines(report), _ping_pong(report)),
    ]
    return [one for one in found if one.rows]


def _steps(report: Report) -> Iterator[Grid]:
    for title, columns, note in _STEPS:
        rows: list[Row] = []
        for pairs in kinds(report):
            rows.append(heading(name_of(pairs[0][1]), columns))
            for run, case in pairs:
                cells = _step(run, case)
                rows.append(Row(tuple(cells[name] for name in columns)))
        yield Grid(title, columns, tuple(rows), note=note)


def _step(run: PolicyRun, case: Case) -> dict[str, str]:
    tokens, making_ms, stages = tokens_per_step(case), pads_ms(run, case), case_stages(case)
    took, sustained = case.step_ms, sustained_ms(run, case)
    largest_us, largest = max((getattr(stages, name), name) for name in STAGES)
    return {
        "policy": run.policy,
        "step ms": figures(took.median),
        "low to high": f"{figures(took.low)} to {figures(took.high)}" if took.runs > 1 else "",
        "overhead ms": figures(case.overhead_ms) if case.rpcs else "",
        "ms/token": figures(took.median / tokens),
        "tokens/s": figures(case.tokens_per_s),
        "RPCs": whole(case.rpcs),
        "sent": size(case.bytes_sent),
        "received": size(case.bytes_received),
        "sent/token": size(case.bytes_sent / tokens),
        "received/token": size(case.bytes_received / tokens),
        "TEE CPU ms": figures(case.cpu_tee_ms),
        "GPU CPU ms": _NOT_OURS if case.cpu_gpu_ms is None else figures(case.cpu_gpu_ms),
        "TEE CPU ms/token": figures(case.cpu_tee_ms / tokens),
        "largest stage": f"{STAGE_NAMES[largest]} {percent(largest_us / whole_us(case))}"
        if largest_us
        else "",
        "pads ms": figures(making_ms),
        "sustained tokens/s": figures(tokens / sustained * 1e3) if sustained > 0 else "",
        "pads CPU ms/token": figures(run.pads.cpu_ms) if run.pads and making_ms else "",
    }


_REQUESTS: dict[str, Callable[[tuple[PolicyRun, RequestTimes]], str]] = {
    "policy": lambda of: of[0].policy,
    "prompt": lambda of: str(of[1].prompt_tokens),
    "new": lambda of: str(of[1].new_tokens),
    "TTFT ms": lambda of: figures(of[1].ttft_ms),
    "TPOT ms": lambda of: figures(of[1].tpot_ms),
    "total ms": lambda of: figures(of[1].total_ms),
    "tokens/s": lambda of: figures(1e3 / of[1].tpot_ms) if of[1].tpot_ms > 0 else "",
}
_MEMORY: dict[str, Callable[[PolicyRun], str]] = {
    "policy": lambda run: run.policy,
    "TEE peak": lambda run: size(run.tee_peak_bytes),
    "embedding, LM head": lambda run: size(run.vocabulary_bytes),
    "KV cache": lambda run: size(run.kv_bytes),
    "beyond": lambda run: size(max(0, run.tee_peak_bytes - run.kv_bytes - run.vocabulary_bytes)),
    "GPU side peak": lambda run: (
        "no service" if run.gpu_peak_bytes is None else size(run.gpu_peak_bytes)
    ),
}


def operators_grid(case: Case, title: str) -> Grid:
    """Show each operator of a case over all layers: traffic, and time by stage in ms."""
    done_us, total = whole_us(case), case_stages(case)
    rows = [
        Row(_cost(one, 1e3, percent(one.stages.total_us / done_us or 0.0)))
        for one in by_operator(case)
    ]
    rest = percent(case.rest_us / done_us) if case.rest_us > 0 else ""
    name = REST_NAME if case.rest_us >= 0 else "done at the same time"
    blank = ("",) * len(STAGES)
    rows.append(Row((name, "", *blank[:4], figures(case.rest_us / 1e3), rest, *blank)))
    crossed = (whole(case.rpcs), size(case.bytes_sent), size(case.bytes_received))
    step = figures((total.total_us + case.rest_us) / 1e3)
    rows.append(Row(("step", "", "", *crossed, step, "", *_spent(total, 1e3)), "total"))
    columns = ("operator", "where", *_COSTS, "share", *_STAGES)
    note = (
        "Times in ms of one step, run with an observer, all layers together. Shares are of all that"
        " was done, part of it at the same time where micro-batches overlap."
        f" {REST_NAME}: {REST_MEANING}."
    )
    return Grid(title, columns, tuple(rows), 2, note).without_empty(keep=_COSTS)


def layers_grid(case: Case, title: str, *, operators: bool) -> Grid:
    """Show each layer of a case, with its operators if asked: traffic, and time by stage in us."""
    rows: list[Row] = []
    for total, costs in by_layer(case):
        rows.append(Row(_cost(total, 1.0), "group" if operators else "plain"))
        rows += [Row(_cost(one, 1.0)) for one in costs if operators]
    note = "Times in microseconds of one step, run with an observer."
    columns = ("layer", "where", *_COSTS, *_STAGES)
    return Grid(title, columns, tuple(rows), 2, note).without_empty(keep=_COSTS)


def _spent(stages: Stages, unit_us: float) -> tuple[str, ...]:
    return tuple(figures(getattr(stages, name) / unit_us) for name in STAGES)


def _cost(found: OperatorCost, unit_us: float, *share: str) -> tuple[str, ...]:
    """Return the cells of an operator: up to its total, its share, and those of its stages."""
    crossed = (whole(found.rpcs), size(found.bytes_sent), size(found.bytes_received))
    total = figures(found.stages.total_us / unit_us)
    about = (found.operator, found.place, whole(found.calls))
    return (*about, *crossed, total, *share, *_spent(found.stages, unit_us))


def _growth(report: Report) -> Grid:
    columns = ("time of", "against", "exponent", "R2", "worst", "points")
    rows: list[Row] = []
    for policy, found in groupby(growth(report), key=lambda one: one.policy):
        rows.append(heading(policy, columns))
        for one in found:
            law, count = one.law, len(one.points)
            fit = ("two points" if count == 2 else "no fit", "", "")
            if law is not None and count > 2:
                fit = (f"{law.exponent:.2f}", f"{law.r_squared:.3f}", f"{law.worst - 1:.0%}")
            against = f"{one.against}, {one.scope}"
            rows.append(Row((f"{one.phase} {one.cost}", against, *fit, str(count))))
    return Grid(
        "Growth",
        columns,
        tuple(rows),
        texts=2,
        note="cost = factor x size^exponent, least squares over logarithms: 1 is linear, 0 does not"
        " grow. R2: share of the variance explained; worst: the point farthest from the line. Two"
        " points always fit, and tell nothing. Time is that of a step less Embedding and LM head in"
        " the TEE; context tokens are those with which decoding began.",
    )


def _baselines(report: Report) -> Grid:
    columns = ("baseline and policy", "ms", "baseline/policy", "round trips", "bytes")
    rows: list[Row] = []
    for one, beside in compare(report):
        crossed = size(one.bytes_sent + one.bytes_received)
        name, took = f"{one.name}, {baseline_name(one)}", figures(one.step_ms.median)
        rows.append(Row((name, took, "", whole(one.round_trips), crossed), "group"))
        for policy, ours_ms, ratio in beside:
            rows.append(Row((policy, figures(ours_ms), figures(ratio or 0.0), "", "")))
        if not beside:
            rows.append(Row(("no policy has such a step", "", "", "", "")))
    about = (f" {one.name}: {one.description}, {one.dtype}." for one in report.baselines)
    note = (
        "Ratio: above 1 where the policy is faster. Against a service that answers at once, the"
        " policy's ms are its overhead; otherwise its step, or its whole request. No ratio where"
        " only one of the two computes."
    )
    return Grid("Baselines", columns, tuple(rows), note=note + "".join(dict.fromkeys(about)))


def _ping_pong(report: Report) -> Grid:
    columns = ("transport", "payload", "ours p50", "ours p90", "raw p50", "raw p90", "ours/raw")
    rows = []
    ordered = sorted(report.ping_pong, key=attrgetter("transport", "payload_bytes"))
    for (name, payload), pongs in groupby(ordered, attrgetter("transport", "payload_bytes")):
        of = {f"{one.kind} {p}": getattr(one, f"{p}_us") for one in pongs for p in ("p50", "p90")}
        cells = [figures(of.get(column, 0.0)) for column in columns[2:6]]
        raw = of.get("raw p50")
        ratio = figures(of.get("ours p50", 0.0) / raw) if raw else ""
        rows.append(Row((name, f"{payload / 1024:g} KiB", *cells, ratio)))
    return Grid(
        "Ping-pong",
        columns,
        tuple(rows),
        note="Round trips of one payload each way, in microseconds. Ours: as a Linear RPC; raw: the"
        " same frames, bounced by a process that does nothing else.",
    )


# ---------------------------------------------------------------------------- terminal and page


def _contents(report: Report) -> dict[str, Any]:
    """Return what a terminal and a page both show, by the names that the page has for it."""
    setup = report.setup
    machine = ", ".join(f"{name} {value}" for name, value in setup.machine.items())
    served = _NOT_OURS if setup.gpu_threads is None else str(setup.gpu_threads)
    return {
        "facts": f"{setup.model}, {setup.dtype}, device {setup.device} over {setup.transport}"
        + (f" ({setup.link})" if setup.link else "")
        + f", {setup.tee_threads} threads in the TEE",
        "caveats": [*caveats(report)],
        "missing": [*missing(report)],
        "findings": [*findings(report)],
        "overview": overview(report),
        "leakage_summaries": [
            (run.policy, run.leakage_summary or "nothing leaves the TEE: the GPU side sees nothing")
            for run in report.policies
        ],
        "setup": [
            ("model", f"{setup.model}, {setup.num_hidden_layers} layers, {setup.dtype}"),
            ("device", setup.device),
            (
                "transport",
                setup.transport + (f", modelled link {setup.link}" if setup.link else ""),
            ),
            ("kernels", setup.kernels),
            ("threads", f"TEE {setup.tee_threads}, GPU side {served}"),
            ("spin", f"{setup.spin_us:g} us before blocking" if setup.spin_us else "none"),
            ("tokens a step", f"at most {setup.step_tokens}" if setup.step_tokens else "unknown"),
            ("machine", machine),
            ("measured", setup.created),
            ("command", setup.command),
        ],
    }


def show(report: Report, console: Console, *, details: bool = False) -> None:
    """Print a report. `details`: every case and its layers, not one of each phase and policy."""
    contents = _contents(report)
    console.print(Text(contents["facts"], style="bold"))
    console.print()
    for sentence in (*contents["caveats"], *contents["missing"]):
        console.print(Text(f"! {sentence}", style="yellow"))
    shares = (dominant(*pair) for phase in PHASES for pair in main_cases(report, phase))
    for sentence in (*contents["findings"], *shares):
        console.print(f"* {sentence}")
    console.print()
    grids = contents["overview"]
    chosen = [case for phase in PHASES for _, case in main_cases(report, phase)]
    for run in report.policies:
        for case in run.cases:
            if case.operators and (details or case in chosen):
                title = f"{run.policy}, {name_of(case)}"
                grids.append(operators_grid(case, f"{title}: cost per operator, ms"))
                if details:
                    grids.append(layers_grid(case, f"{title}: cost per layer, us", operators=False))
    for one in grids:
        for part in terminal(one, console):
            console.print(part)
    for title, pairs in (
        ("What the GPU side learns", contents["leakage_summaries"]),
        ("Setup", contents["setup"]),
    ):
        console.print(Text(title, style="bold"))
        console.print(definitions(pairs))
        console.print()


def render_html(report: Report) -> str:
    """Return the page. Needs matplotlib (extra `bench`): see `report.check_installed`.

    Operators of each layer are listed for the cases by which policies are compared; for the others
    each layer as a whole, to keep the page small. The JSON document has all of them.
    """
    chosen = [case for phase in PHASES for _, case in main_cases(report, phase)]
    policies = []
    for run in report.policies:
        cases = []
        for case in run.cases:
            if case.operators:
                operators = operators_grid(case, "Per operator")
                layers = layers_grid(case, "Per layer", operators=case in chosen)
                cases.append({"name": name_of(case), "operators": operators, "layers": layers})
        policies.append({"name": run.policy, "summary": run.summary, "cases": cases})
    return page(
        "bench",
        program="tsqp bench",
        report=report,
        pictures=plots(report),
        timelines=timelines(report),
        policies=policies,
        stages=[
            *((STAGE_NAMES[name], meaning) for name, meaning in STAGE_MEANINGS.items()),
            (REST_NAME, REST_MEANING),
        ],
        rest=REST_MEANING,
        **_contents(report),
    )
