"""The page of measured figures, from what is recorded in benchmarks/results.

`python -m benchmarks.tables FILE` writes docs/benchmarks.md; a test fails when that file is stale.
Whether a target is reached is worked out here, from the figures; what is missing or missed is said.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory import PROMPT, SHAPE
from benchmarks.record import RECORDINGS, RESULTS
from protocol.errors import SettingsError
from tsqp.bench.grids import STEP_COLUMNS, Grid, operators_grid, steps_grid
from tsqp.bench.memory_need import kv_bytes
from tsqp.bench.model import Baseline, Case, PolicyRun, Report
from tsqp.bench.summary import case_name, dominant, find_case
from tsqp.bench.units import figures, percent, size

POLICY = "attention-in-tee"
OVERHEAD_TARGETS = {"tcp": {1: 4.0, 128: 10.0, 512: 15.0}, "unix": {1: 7.0, 128: 10.0, 512: 15.0}}
NEW_TOKENS_AFTER = 64
RPC_TARGET = 1.3
CPU_TARGET = 1.15
TOGETHER, TOGETHER_TARGET = 8, 4.0
OVERLAP_TARGET = 1.6
MEMORY_TARGET_BYTES = 300e6
# That benchmarks.memory generates.
_MEMORY_NEW_TOKENS = 8

# Why a target is missed and what the floor is, by the key of its section; shown only then.
REASONS: Mapping[str, str] = {
    "overhead": (
        "Where one token's time goes, over a Unix stream with both sides spinning, on a quiet"
        " machine: light operators 3.1 ms (some 65 calls of torch a layer, each 3 to 5 us where"
        " other code has run in between, twice to five times what it takes in a loop of its own),"
        " headers and checks 1.3 ms, sending and the service 2.5 ms, and about 3 ms of Python"
        " around 64 requests. The floor of the transport is 64 raw round trips; the rest is the"
        " interpreter, and more of it can go only with less Python in a request. For prompts it"
        " is attention (200 of 415 ms at 512 tokens) and copies through the socket."
    ),
    "rpc": (
        "A request costs about 25 us of Python at either end (messages, checks, bookkeeping), of"
        " which headers are 8 us together: no more than a raw round trip over ZeroMQ, and three"
        " times one over a Unix stream. From 1 MiB on, copies count more than that."
    ),
    "overlap": (
        "Segments of the TEE and of the accelerator are unequally long (attention in the TEE meets"
        " the smallest products of the accelerator), so that turns leave both idle: played through"
        " with measured segments, two parts reach at most 1.5, three 1.6, four 1.8. The rest is"
        " what parts cost each other here, where the service runs on the TEE's own processor. A"
        " decode step is half LM head, which does not overlap."
    ),
    "memory": (
        "The benchmark's process also holds its own measurements, and buffers of 512-token steps."
    ),
}

Documents = Mapping[str, Mapping[str, Any]]
# From left to right: cells of one row.
Cells = Sequence[str]


@dataclass(frozen=True)
class Check:
    """One figure against its target. `ok`: None where there is only something to state."""

    what: str
    wanted: str
    reached: str
    ok: bool | None


@dataclass(frozen=True)
class Section:
    """A part of the page. `sources`: names of recordings; `build`: what to say of them."""

    key: str
    title: str
    sources: tuple[str, ...]
    about: str
    build: Callable[[Documents], tuple[list[Check], list[str]]]


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what is recorded, by name. Raises SettingsError for a file that is no JSON object."""
    found = {}
    for recording in RECORDINGS:
        path = folder / f"{recording.name}.json"
        if not path.exists():
            continue
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingsError(str(path), got=f"no JSON ({error})", expected="JSON") from None
        if not isinstance(document, dict):
            raise SettingsError(str(path), got=type(document).__name__, expected="a JSON object")
        found[recording.name] = document
    return found


def markdown(columns: Cells, rows: Iterable[Cells], *, texts: int = 1) -> str:
    """Render a table; all columns after the first `texts` hold numbers."""
    rule = ["---" if place < texts else "---:" for place in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (columns, rule, *rows)
    )


def grid_markdown(grid: Grid) -> str:
    """Render a table of a report; headings and totals are bold."""
    rows = [
        row.cells if row.kind == "plain" else [f"**{cell}**" if cell else "" for cell in row.cells]
        for row in grid.rows
    ]
    return markdown(grid.columns, rows, texts=grid.texts)


def at_least(what: str, value: float | None, target: float) -> Check:
    """Compare a ratio that is to be large; None: it could not be worked out.

    It is rounded down, so that one that misses the target does not read as the target.
    """
    ok = value is not None and value >= target
    return Check(what, f">= {target:g}", _hundredths(value, math.floor), ok)


def at_most(what: str, value: float | None, target: float) -> Check:
    """Compare a ratio that is to be small, as `at_least` does; it is rounded up."""
    ok = value is not None and value <= target
    return Check(what, f"<= {target:g}", _hundredths(value, math.ceil), ok)


def _hundredths(value: float | None, rounding: Callable[[float], int] = round) -> str:
    if value is None:
        return "not measurable"
    # 1.2 is a little more in binary, and still not 1.21.
    return f"{rounding(round(value * 100, 6)) / 100:.2f}"


def _divided(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None and a > 0 and b > 0 else None


def _verdict(check: Check) -> str:
    return "" if check.ok is None else "yes" if check.ok else "**no**"


# ------------------------------------------------------------------------------- the sections


def _report(documents: Documents, name: str) -> Report:
    return Report.model_validate(documents[name]["report"])


def _run_of(report: Report) -> PolicyRun | None:
    return next((run for run in report.policies if run.policy == POLICY), None)


def _case(report: Report, phase: Any, tokens: int, batch: int = 1) -> Case | None:
    run = _run_of(report)
    return find_case(run, phase, (tokens, batch, 1)) if run else None


def _baseline(
    report: Report, name: str, phase: str, tokens: int, new_tokens: int | None = None
) -> Baseline | None:
    return next(
        (
            b
            for b in report.baselines
            if (b.name, b.phase, b.tokens) == (name, phase, tokens)
            and (new_tokens is None or b.new_tokens == new_tokens)
        ),
        None,
    )


def _ms(value: float | None) -> str:
    return "" if value is None else figures(value) or "0"


def _overhead(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows, notes = [], [], []
    for transport, targets in OVERHEAD_TARGETS.items():
        report = _report(documents, f"bench_null_{transport}")
        for tokens, target in targets.items():
            published = _baseline(report, "published", "prefill", tokens, 0)
            ours = _case(report, "prefill", tokens)
            theirs_ms = published.step_ms.median if published else None
            ours_ms = ours.overhead_ms if ours else None
            ratio = _divided(theirs_ms, ours_ms)
            check = at_least(f"{_tokens(tokens)}, {transport}", ratio, target)
            checks.append(check)
            cells = (transport, _tokens(tokens), _ms(theirs_ms), _ms(ours_ms))
            rows.append((*cells, check.reached, check.wanted, _verdict(check)))
        notes += _floor(report, transport)
    columns = (
        *("transport", "forward of", "published ms", f"{POLICY} ms"),
        *("ratio", "wanted", "reached"),
    )
    return checks, [markdown(columns, rows, texts=2), *notes]


def _tokens(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _floor(report: Report, transport: str) -> list[str]:
    """Say what the round trips of one token would take with nothing of ours in them."""
    names = {"tcp": "zeromq-tcp", "unix": "unix"}
    raw = [p for p in report.ping_pong if (p.transport, p.kind) == (names[transport], "raw")]
    case = _case(report, "prefill", 1)
    if not raw or case is None:
        return []
    smallest = min(raw, key=lambda p: p.payload_bytes)
    floor_ms = case.rpcs * smallest.p50_us / 1e3
    return [
        f"The floor of {transport}: {case.rpcs:.0f} round trips at {figures(smallest.p50_us)} us"
        f" (raw, {smallest.payload_bytes // 1024} KiB each way) are {figures(floor_ms)} ms of the"
        f" {_ms(case.overhead_ms)} ms that one token takes."
    ]


def _after(documents: Documents) -> tuple[list[Check], list[str]]:
    report, new = _report(documents, "bench_after_512"), NEW_TOKENS_AFTER
    published = _baseline(report, "published", "decode", 512, new)
    prompt, decode = _case(report, "prefill", 512), _case(report, "decode", 512)
    theirs_ms = published.step_ms.median * new if published else None
    # The prompt's own step says the first token.
    ours_ms = prompt.overhead_ms + (new - 1) * decode.overhead_ms if prompt and decode else None
    ratio = _divided(theirs_ms, ours_ms)
    rows = [
        (
            *(_ms(theirs_ms), _ms(prompt.overhead_ms if prompt else None)),
            *(_ms(decode.overhead_ms if decode else None), _ms(ours_ms), _hundredths(ratio)),
        )
    ]
    columns = ("published ms", f"{POLICY}: prompt ms", "each further token ms", "all ms", "ratio")
    what = f"{new} tokens after 512"
    return [Check(what, "state it", _hundredths(ratio), None)], [markdown(columns, rows, texts=0)]


def _rpc(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["ping_pong"]["results"]
    checks, rows = [], []
    for one in found:
        if one["kind"] != "raw":
            continue
        key = (one["transport"], one["payload_bytes"])
        ours = next(
            (p for p in found if (p["transport"], p["payload_bytes"], p["kind"]) == (*key, "ours")),
            None,
        )
        label = f"{one['payload_bytes'] // 1024} KiB, {one['transport']}"
        if ours is None:
            rows.append((*_payload(one), "", figures(one["p50_us"]), "", "no such transport"))
            continue
        check = at_most(label, _divided(ours["p50_us"], one["p50_us"]), RPC_TARGET)
        checks.append(check)
        us = (figures(ours["p50_us"]), figures(one["p50_us"]))
        rows.append((*_payload(one), *us, check.reached, _verdict(check)))
    columns = ("transport", "payload", "ours p50 us", "raw p50 us", "ours/raw", "<= 1.3")
    return checks, [markdown(columns, rows, texts=2)]


def _payload(one: Mapping[str, Any]) -> tuple[str, str]:
    return one["transport"], f"{one['payload_bytes'] // 1024} KiB"


def _cpu(documents: Documents) -> tuple[list[Check], list[str]]:
    report = _report(documents, "bench_cpu")
    checks, rows = [], []
    for phase, tokens in (("prefill", 128), ("prefill", 512), ("decode", 128)):
        theirs, ours = (
            _baseline(report, "transformers", phase, tokens),
            _case(report, phase, tokens),
        )
        theirs_ms = theirs.step_ms.median if theirs else None
        ours_ms = ours.step_ms.median if ours else None
        what = case_name("prefill" if phase == "prefill" else "decode", tokens)
        check = at_most(what, _divided(ours_ms, theirs_ms), CPU_TARGET)
        checks.append(check)
        rows.append((what, _ms(theirs_ms), _ms(ours_ms), check.reached, _verdict(check)))
    columns = ("step", "transformers ms", f"{POLICY} ms", "ratio", f"<= {CPU_TARGET:g}")
    return checks, [markdown(columns, rows)]


def _together(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    for transport in OVERHEAD_TARGETS:
        report = _report(documents, f"bench_null_{transport}")
        one, many = _case(report, "decode", 128), _case(report, "decode", 128, TOGETHER)
        rates = [case.tokens_per_s if case else None for case in (one, many)]
        check = at_least(transport, _divided(rates[1], rates[0]), TOGETHER_TARGET)
        checks.append(check)
        shown = [_ms(rate) for rate in rates]
        rows.append((transport, *shown, check.reached, _verdict(check)))
    columns = (
        *("transport", "1 sequence, tokens/s", f"{TOGETHER} sequences, tokens/s"),
        *("ratio", f">= {TOGETHER_TARGET:g}"),
    )
    return checks, [markdown(columns, rows)]


def _overlap(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    for one in documents["overlap"]["results"]:
        label = f"{one['case']} in {one['micro_batches']}, {one['transport']}"
        if one["bound"] == "arithmetic":
            check = at_least(label, one["ratio"], OVERLAP_TARGET)
        else:
            # Overlap cannot help where the second micro-batch costs the accelerator as much again.
            check = Check(label, "no target", _hundredths(one["ratio"]), None)
        checks.append(check)
        rows.append(
            (
                *(one["case"], one["transport"], str(one["micro_batches"])),
                figures(one["null_ms"]),
                *(f"{figures(gpu)}" for gpu in one["gpu_ms"]),
                *(figures(one["serial_ms"]), figures(one["overlapped_ms"])),
                *(check.reached, _verdict(check) or "no target"),
            )
        )
    columns = (
        *("case", "transport", "parts", "TEE ms", "GPU ms", "GPU ms cut"),
        *("undivided ms", "cut ms", "ratio", f">= {OVERLAP_TARGET:g}"),
    )
    return checks, [markdown(columns, rows, texts=2)]


def _memory(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["memory"]
    tokens = len(PROMPT.split(",")) + _MEMORY_NEW_TOKENS
    config = SHAPE.config()
    cache = kv_bytes(config, tokens=tokens, sequences=1, itemsize=2)
    measured = [
        (
            f"`tee-runner`, {tokens} tokens",
            found["tee_runner_attention_in_tee_peak_bytes"],
            found["embedding_and_lm_head_bytes"],
            cache,
        )
    ]
    if "bench_null_tcp" in documents:
        run = _run_of(_report(documents, "bench_null_tcp"))
        if run is not None:
            sizes = (run.tee_peak_bytes, run.vocabulary_bytes, run.kv_bytes)
            measured.append(("`tsqp bench`, prompts of 512, 8 sequences", *sizes))
    checks, rows = [], []
    for what, peak, vocabulary, kv in measured:
        rest = peak - vocabulary - kv
        ok = rest <= MEMORY_TARGET_BYTES
        checks.append(Check(what, f"<= {size(MEMORY_TARGET_BYTES)}", size(rest), ok))
        rows.append((what, *map(size, (peak, vocabulary, kv, rest)), _verdict(checks[-1])))
    columns = ("process", "peak", "embedding and LM head", "KV cache", "beyond", "<= 300 MB")
    note = (
        f"Of what is beyond, {size(found['import_torch_peak_bytes'])} are an interpreter that has"
        " only imported torch."
    )
    return checks, [markdown(columns, rows), note]


def _plan(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["plan"]
    tolerance = found["tolerance"]
    rows, off = [], []
    for one in found["rows"]:
        ok = abs(one["error"]) <= tolerance
        off += [] if ok else [one]
        link = f"{one['link_gbps']:g} Gbit/s, {one['link_rtt_us']:g} us"
        name = case_name(one["phase"], one["tokens"], one["batch"], one["micro_batches"])
        rows.append(
            (
                *(f"{one['shape']}, {one['policy']}", f"{one['gpu']}, {link}", name),
                *(figures(one["predicted_ms"]), figures(one["measured_ms"])),
                *(f"{one['error']:+.0%}", one["bottleneck"], "yes" if ok else "**no**"),
            )
        )
    cases = len({one["case"] for one in found["rows"]})
    within, count = len(rows) - len(off), len(rows)
    worst = max((abs(one["error"]) for one in found["rows"]), default=math.inf)
    wanted = f"within {percent(tolerance)}, 6 cases"
    check = Check(
        f"{cases} cases, {count} figures",
        wanted,
        f"{within} of {count} within, largest error {worst:.0%}",
        not off and cases >= 6,
    )
    columns = ("what", "accelerator and link", "step", "predicted ms", "measured ms", "error")
    return [check], [markdown((*columns, "bottleneck", "within"), rows, texts=3)]


def _growth(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    for one in documents["growth"]["growth"]:
        exponent = one["exponent"]
        shown = "no fit" if exponent is None else f"{exponent:.2f}"
        what = f"{one['cost']} against {one['against']}"
        ok = None if one["may_exceed"] else bool(one["linear"])
        check = Check(what, "" if one["may_exceed"] else "at most linear", shown, ok)
        checks.append(check)
        points = ", ".join(f"{count}: {figures(ms)}" for count, ms in one["points"])
        fit = "" if one["worst"] is None else f"{one['worst'] - 1:.0%}"
        verdict = _verdict(check) or "may exceed it"
        rows.append((one["cost"], one["against"], one["at"], points, shown, fit, verdict))
    columns = ("cost", "against", "at", "size: ms", "exponent", "farthest point off")
    return checks, [markdown((*columns, "at most linear"), rows, texts=4)]


def _time(documents: Documents) -> tuple[list[Check], list[str]]:
    report = _report(documents, "bench_null_tcp")
    parts = ["Policies side by side:", grid_markdown(_without_spread(steps_grid(report)))]
    run = _run_of(report)
    for phase, tokens in (("prefill", 512), ("decode", 128)):
        case = _case(report, phase, tokens)
        if run is None or case is None:
            continue
        parts += [f"### {case_name('prefill' if phase == 'prefill' else 'decode', tokens)}"]
        parts += [dominant(run, case), grid_markdown(operators_grid(case, ""))]
    return [], parts


def _without_spread(grid: Grid) -> Grid:
    names = [name for name in STEP_COLUMNS if name != "low to high"]
    return grid.select(grid.title, [*names, "RPCs", "sent", "received", "TEE CPU ms"])


SECTIONS: tuple[Section, ...] = (
    Section(
        "overhead",
        "Overhead beside the published client",
        ("bench_null_tcp", "bench_null_unix"),
        "Both against a service that answers at once, so that what is left is each client's own"
        " cost. The published client speaks ZeroMQ over TCP in either run.",
        _overhead,
    ),
    Section(
        "after-512",
        "64 tokens after a prompt of 512",
        ("bench_after_512",),
        "Overhead again, over ZeroMQ. The published client has no KV cache: each new token runs all"
        " tokens before it once more. A few of its 64 passes are run, the others interpolated.",
        _after,
    ),
    Section(
        "rpc",
        "One RPC beside a raw ping-pong",
        ("ping_pong",),
        "Ours: a Linear from tensor to tensor, with all checks. Raw: the same frames on the same"
        " transport, bounced by a process that does nothing else. In turns, in short blocks.",
        _rpc,
    ),
    Section(
        "cpu",
        "A whole run beside transformers",
        ("bench_cpu",),
        "The service computes, on the CPU that the TEE side runs on; bfloat16 and equally many"
        " threads on both. Whole steps, LM head and all.",
        _cpu,
    ),
    Section(
        "together",
        "Eight sequences decoding together",
        ("bench_null_tcp", "bench_null_unix"),
        "Tokens of all sequences together, whole steps, a service that answers at once, 128 tokens"
        " behind each.",
        _together,
    ),
    Section(
        "overlap",
        "Overlap of micro-batches",
        ("overlap",),
        "A step undivided, and cut so that the TEE works on one part while the accelerator works"
        " on another. The accelerator is a model made to take as long for the step as the TEE does"
        " against a service that answers at once. In `memory` cases it reads the weights again for"
        " each part, so the GPU's time doubles and there is nothing to win.",
        _overlap,
    ),
    Section(
        "memory",
        "Memory of the TEE side",
        ("memory",),
        "Largest resident set, beyond Embedding, LM head and KV cache.",
        _memory,
    ),
    Section(
        "plan",
        "What `tsqp plan` predicts",
        ("plan",),
        "Prediction from three layers, and measurement of the whole model against a service and a"
        " link that are modelled.",
        _plan,
    ),
    Section(
        "growth",
        "Growth with layers, context, prompt and batch",
        ("growth",),
        "cost = factor x size^exponent, fitted over logarithms; overhead, a service that answers at"
        " once. Up to 1.05 counts as linear. Only attention of a prompt may exceed it.",
        _growth,
    ),
    Section(
        "time",
        "Where the time goes",
        ("bench_null_tcp",),
        f"Over ZeroMQ, a service that answers at once; operators under `{POLICY}`, all layers"
        " together. `tsqp bench --html FILE` draws this, `--details` prints every layer.",
        _time,
    ),
)

_HEAD = """\
# Benchmarks

`make docs` writes this page from benchmarks/results; `make bench` measures it all again (about 20
minutes on two cores; nothing else should run). `make bench ONLY=NAME` repeats one recording. For a
machine and a policy of your own: `tsqp bench`, which also writes a page with plots.
"""

_METHOD = """\
## How it is measured

- Figures are medians. Ratios are of two things measured in the same run, most of them in turns:
  milliseconds belong to the machine, ratios less so.
- Models are random weights in the shape of a published one (here Llama-3.2-1B, bfloat16, unless a
  table says otherwise). Each policy and each baseline runs in a process of its own.
- A *step* is a whole prompt, or one token of each sequence. *Overhead* is a step less Embedding and
  LM head computed in the TEE: what a fast accelerator cannot take away. The published client has
  the service do these two, which a service that answers at once does for nothing; with them, the
  comparison would be of matrix products.
- Steps are timed without an observer. Where their time goes is measured in further steps.
"""


def _repeat(documents: Documents, names: Sequence[str]) -> list[str]:
    """Say how to repeat recordings, and when they were made."""
    lines = []
    commands = {recording.name: recording.shown for recording in RECORDINGS}
    for name in names:
        about = documents.get(name, {}).get("recorded", {})
        made = (
            f" (recorded {about['created'][:10]}; load of the minute before"
            f" {about['load_before']:.1f})"
            if about
            else ""
        )
        lines.append(f"- `{about.get('command', commands[name])}`{made}")
    return ["Repeat with:", "\n".join(lines)]


def _summary(checked: Sequence[tuple[Section, list[Check] | None]]) -> str:
    rows = []
    for section, checks in checked:
        link = f"[{section.title}](#{_anchor(section.title)})"
        if checks is None:
            rows.append((link, "", "", "", "not recorded"))
            continue
        rows += [
            (link if not place else "", check.what, check.wanted, check.reached, _verdict(check))
            for place, check in enumerate(checks)
        ]
    return markdown(("target", "case", "wanted", "measured", "reached"), rows, texts=2)


def _anchor(title: str) -> str:
    kept = (letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return "".join(kept).replace(" ", "-")


def _machines(documents: Documents) -> list[str]:
    """Name each machine once, with the recordings made on it if there are several."""
    found: dict[str, list[str]] = {}
    for name, document in documents.items():
        report = document.get("report")
        machine = report["setup"]["machine"] if report else document["machine"]
        text = ", ".join(f"{key} {value}" for key, value in machine.items())
        found.setdefault(text.replace("_", " "), []).append(name)
    if len(found) == 1:
        return [f"Machine: {next(iter(found))}."]
    lines = [f"- {text}: {', '.join(names)}" for text, names in found.items()]
    return ["Machines:", "\n".join(lines)] if lines else []


def benchmarks_page(documents: Documents) -> str:
    """Return the text of docs/benchmarks.md."""
    checked: list[tuple[Section, list[Check] | None]] = []
    bodies: list[str] = []
    for section in SECTIONS:
        bodies += [f"## {section.title}", section.about]
        missing = [name for name in section.sources if name not in documents]
        if missing:
            only = " ".join(f"`make bench ONLY={name}`" for name in missing)
            bodies.append(f"Not recorded yet: {only}.")
            checked.append((section, None))
            continue
        checks, parts = section.build(documents)
        checked.append((section, checks))
        bodies += parts
        missed = [check for check in checks if check.ok is False]
        if missed:
            what = "; ".join(f"{c.what}: {c.reached}, wanted {c.wanted}" for c in missed)
            bodies.append(f"**Not reached:** {what}. {REASONS.get(section.key, '')}".rstrip())
        bodies += _repeat(documents, section.sources)
    targets = [(section, checks) for section, checks in checked if checks is None or checks]
    head = [_HEAD.rstrip(), "## Targets", _summary(targets), _METHOD.rstrip()]
    return "\n\n".join([*head, *_machines(documents), *bodies]) + "\n"


def main(arguments: list[str]) -> None:
    """Write the page to the file that is named. Raises SettingsError."""
    if len(arguments) != 1:
        raise SettingsError("python -m benchmarks.tables", got=repr(arguments), expected="one file")
    Path(arguments[0]).write_text(benchmarks_page(read_results(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
