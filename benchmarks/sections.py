"""The parts of the page of figures, from what is recorded: what is checked, and what is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.markdown import Cells, markdown
from benchmarks.memory import PROMPT, SHAPE
from benchmarks.targets import (
    CALLS_TARGET,
    CPU_TARGET,
    HANDSHAKE_TARGET,
    HTTP_TARGET_PERCENT,
    MEMORY_TARGET_BYTES,
    OVERHEAD_TARGETS,
    OVERLAP_TARGET,
    OVERLOAD_TARGET,
    PREFIX_TARGET,
    RANKS_TARGET,
    RPC_BYTES,
    RPC_TARGETS,
    SEGMENT_TARGET,
    SPECULATION_TARGET,
    STREAMS_TARGET,
    TEE_ONLY_TARGETS,
    TOGETHER,
    TOGETHER_TARGET,
    TRANSPORTS,
    TRUSTED_CPU_TARGET,
    VERIFY_TARGET_MS,
    Check,
    at_least,
    at_most,
    divided,
    hundredths,
    verdict,
)
from tee_side.words import Phase
from tsqp.lab.bench.memory_need import kv_bytes
from tsqp.lab.bench.model import Baseline, Case, PolicyRun, Report
from tsqp.lab.bench.summary import case_name, dominant, find_case, sustained_ms, tokens_per_step
from tsqp.lab.report import figures, percent, size

POLICY = "attention-in-tee"
# That benchmarks.memory generates.
_MEMORY_NEW_TOKENS = 8

OFFLOADING = "shielded"
# Without a service: in the model's floats, and by the kernels of what offloads.
ALONE, ALONE_INT8 = "tee-only", "tee-only-int8"
GAINED_STEPS: tuple[tuple[Phase, int, int], ...] = (
    ("decode", 128, 1),
    ("decode", 128, TOGETHER),
    ("prefill", 512, 1),
)

Documents = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A part of the page. `sources`: names of recordings; `build`: what to say of them."""

    key: str
    title: str
    sources: tuple[str, ...]
    about: str
    build: Callable[[Documents], tuple[list[Check], list[str]]]


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


def _beside(cases: Mapping[tuple[str, ...], Sequence[Cells]]) -> list[Cells]:
    """Return a row for each case: what was measured more than once for it stands side by side."""
    return [
        (*case, *(" / ".join(cells) for cells in zip(*measured, strict=True)))
        for case, measured in cases.items()
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else figures(value) or "0"


def _gained(documents: Documents) -> tuple[list[Check], list[str]]:
    """Compare whole steps of policies that offload with the better of those that do not."""
    checks, rows = [], []
    for transport in TRANSPORTS:
        runs = {r.policy: r for r in _report(documents, f"bench_null_{transport}").policies}
        steps = GAINED_STEPS[:1] if transport == "tcp" else GAINED_STEPS
        for phase, tokens, batch in steps:
            found = {name: find_case(run, phase, (tokens, batch, 1)) for name, run in runs.items()}
            ms = {name: case.step_ms.median for name, case in found.items() if case}
            cpu = {
                name: case.cpu_tee_ms / tokens_per_step(case)
                for name, case in found.items()
                if case
            }
            best_ms = min((ms[name] for name in (ALONE, ALONE_INT8) if name in ms), default=None)
            offloads = found.get(OFFLOADING)
            with_pads_ms = sustained_ms(runs[OFFLOADING], offloads) if offloads else None
            made = runs[OFFLOADING].pads if offloads else None
            uses = made is not None and phase in made.phases
            rows.append(
                (
                    *(case_name(phase, tokens, batch), transport),
                    *(_ms(ms.get(name)) for name in (ALONE, ALONE_INT8, OFFLOADING)),
                    hundredths(divided(best_ms, ms.get(OFFLOADING))),
                    hundredths(divided(best_ms, with_pads_ms)) if uses else "no pads",
                    *(_ms(ms.get(POLICY)), hundredths(divided(best_ms, ms.get(POLICY)))),
                    *(_ms(cpu.get(name)) for name in (ALONE_INT8, OFFLOADING)),
                    _ms(made.cpu_ms) if made and uses else "",
                )
            )
            if (phase, batch) == ("decode", 1):
                share = divided(cpu.get(OFFLOADING), cpu.get(ALONE_INT8))
                checks.append(at_most(f"CPU a token, {transport}", share, TRUSTED_CPU_TARGET))
            if batch == 1 and transport == "unix":
                what = f"{ALONE} / {ALONE_INT8}, {case_name(phase, tokens)}"
                ratio = divided(ms.get(ALONE), ms.get(ALONE_INT8))
                checks.append(at_least(what, ratio, TEE_ONLY_TARGETS[phase, tokens]))
    columns = (
        *("step", "transport", f"{ALONE} ms", f"{ALONE_INT8} ms", f"{OFFLOADING} ms"),
        *("times faster", "with its pads", f"{POLICY} ms", "times faster"),
        *(f"CPU ms/token, {ALONE_INT8}", OFFLOADING, "its pads"),
    )
    said = "; ".join(f"{one.what}: {one.reached} (wanted {one.wanted})" for one in checks)
    return checks, [markdown(columns, rows, texts=2), f"{said}."]


def _overhead(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows, floors = [], [], []
    for transport, targets in OVERHEAD_TARGETS.items():
        report = _report(documents, f"bench_null_{transport}")
        for tokens, target in targets.items():
            published = _baseline(report, "published", "prefill", tokens, 0)
            ours = _case(report, "prefill", tokens)
            theirs_ms = published.step_ms.median if published else None
            ours_ms = ours.overhead_ms if ours else None
            ratio = divided(theirs_ms, ours_ms)
            check = at_least(f"{_tokens(tokens)}, {transport}", ratio, target)
            checks.append(check)
            cells = (transport, _tokens(tokens), _ms(theirs_ms), _ms(ours_ms))
            rows.append((*cells, check.reached, check.wanted, verdict(check)))
        floors += _floor(report, transport)
    calls = documents["calls"]["results"]["client"]
    ok = calls <= CALLS_TARGET
    checks.append(Check("Python calls of a request", f"<= {CALLS_TARGET}", f"{calls:.1f}", ok))
    floors.append(f"A request takes {calls:.1f} Python calls (wanted <= {CALLS_TARGET}).")
    columns = (
        *("transport", "forward of", "published ms", f"{POLICY} ms"),
        *("ratio", "wanted", "reached"),
    )
    return checks, [markdown(columns, rows, texts=2), " ".join(floors)]


def _tokens(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _floor(report: Report, transport: str) -> list[str]:
    """Say what the round trips of one token would take with nothing of ours in them."""
    name = "zeromq-tcp" if transport == "tcp" else transport
    raw = [p for p in report.ping_pong if (p.transport, p.kind) == (name, "raw")]
    case = _case(report, "prefill", 1)
    if not raw or case is None:
        return []
    smallest = min(raw, key=lambda p: p.payload_bytes)
    floor_ms = case.rpcs * smallest.p50_us / 1e3
    return [
        f"Floor of {transport}: {case.rpcs:.0f} round trips at {figures(smallest.p50_us)} us"
        f" (raw, {smallest.payload_bytes // 1024} KiB each way) are {figures(floor_ms)} ms of the"
        f" {_ms(case.overhead_ms)} ms that one token takes."
    ]


def _rpc(documents: Documents) -> tuple[list[Check], list[str]]:
    checks: list[Check] = []
    rows: dict[tuple[str, int], list[str]] = {}
    for name, waits in (("ping_pong", "blocks"), ("ping_pong_spin", "spins")):
        found = {
            (one["transport"], one["payload_bytes"], one["kind"]): one["p50_us"]
            for one in documents[name]["results"]
        }
        for transport, payload_bytes, kind in found:
            key = (transport, payload_bytes)
            # A bare TCP socket has nothing of ours beside it.
            if kind != "raw" or (*key, "ours") not in found:
                continue
            payload = f"{payload_bytes // 1024} KiB"
            cells = rows.setdefault(key, [transport, payload])
            ours_us, raw_us = found[(*key, "ours")], found[(*key, "raw")]
            ratio = divided(ours_us, raw_us)
            mark = hundredths(ratio)
            target = RPC_TARGETS.get(transport)
            if target is not None and (waits, payload_bytes) == ("spins", RPC_BYTES):
                check = at_most(f"{payload}, {transport}, {waits}", ratio, target)
                checks.append(check)
                mark = f"{check.reached} ({check.wanted})"
                mark = mark if check.ok else f"**{mark}**"
            cells += [figures(ours_us), figures(raw_us), mark]
    columns = ["transport", "payload"]
    for waits in ("blocks", "spins"):
        columns += [f"ours, {waits}", f"raw, {waits}", "ours/raw"]
    return checks, [markdown(columns, rows.values(), texts=2)]


def _cpu(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    steps = (("prefill", 128), ("prefill", 512), ("decode", 128))
    report = _report(documents, "bench_cpu_unix")
    for phase, tokens in steps:
        theirs, ours = (
            _baseline(report, "transformers", phase, tokens),
            _case(report, phase, tokens),
        )
        theirs_ms = theirs.step_ms.median if theirs else None
        ours_ms = ours.step_ms.median if ours else None
        what = case_name("prefill" if phase == "prefill" else "decode", tokens)
        check = at_most(what, divided(ours_ms, theirs_ms), CPU_TARGET)
        checks.append(check)
        cells = (what, _ms(theirs_ms), _ms(ours_ms))
        rows.append((*cells, check.reached, verdict(check)))
    columns = ("step", "transformers ms", f"{POLICY} ms", "ratio", f"<= {CPU_TARGET:g}")
    return checks, [markdown(columns, rows)]


def _together(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    for transport in TRANSPORTS:
        report = _report(documents, f"bench_null_{transport}")
        one, many = _case(report, "decode", 128), _case(report, "decode", 128, TOGETHER)
        rates = [case.tokens_per_s if case else None for case in (one, many)]
        check = at_least(transport, divided(rates[1], rates[0]), TOGETHER_TARGET)
        checks.append(check)
        shown = [_ms(rate) for rate in rates]
        rows.append((transport, *shown, check.reached, verdict(check)))
    columns = (
        *("transport", "1 sequence, tokens/s", f"{TOGETHER} sequences, tokens/s"),
        *("ratio", f">= {TOGETHER_TARGET:g}"),
    )
    return checks, [markdown(columns, rows)]


def _overlap(documents: Documents) -> tuple[list[Check], list[str]]:
    checks: list[Check] = []
    cases: dict[tuple[str, ...], list[Cells]] = {}
    for one in documents["overlap"]["results"]:
        label = f"{one['case']} in {one['micro_batches']}, {one['transport']}"
        if one["bound"] == "arithmetic":
            check = at_least(label, one["ratio"], OVERLAP_TARGET)
        else:
            # Overlap cannot help where the second micro-batch costs the accelerator as much again.
            check = Check(label, "no target", hundredths(one["ratio"]), None)
        checks.append(check)
        times_ms = (one["null_ms"], *one["gpu_ms"], one["serial_ms"], one["overlapped_ms"])
        judged = (check.reached, verdict(check) or "no target")
        measured = (one["transport"], *map(figures, times_ms), *judged)
        cases.setdefault((one["case"], str(one["micro_batches"])), []).append(measured)
    columns = (
        *("case", "parts", "transport", "TEE ms", "GPU ms", "GPU ms cut"),
        *("undivided ms", "cut ms", "ratio", f">= {OVERLAP_TARGET:g}"),
    )
    return checks, [markdown(columns, _beside(cases), texts=3)]


def _serving(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["serving"]
    streams, overload = found["streams"], found["overload"]
    prefix, guessed = found["prefix"], found["speculation"]
    count, of_rounds = streams["streams"], streams["http_costs_of_rounds"]
    costs = (streams["http_costs"], of_rounds[0], of_rounds[-1])
    checks = [
        at_most(f"HTTP layer at {count} streams, %", 100 * costs[0], HTTP_TARGET_PERCENT),
        at_least(f"{count} streams to one", streams["streams_by_one"], STREAMS_TARGET),
        at_most("95 % between tokens, overloaded", overload["p95_ratio"], OVERLOAD_TARGET),
        at_most("first token of a second turn", prefix["ratio"], PREFIX_TARGET),
        at_least("round trips saved by speculation", guessed["fewer"], SPECULATION_TARGET),
    ]
    rates = [streams[f"{name}_tokens_per_s"] for name in ("engine_alone", "streams", "one_stream")]
    p95 = [overload[name]["p95_inter_token_ms"] for name in ("at_capacity", "overloaded")]
    trips = [guessed[name]["round_trips_per_token"] for name in ("without", "with")]
    measured = [
        (
            f"HTTP's cost at {count} streams, %: by medians, least and most of {len(of_rounds)}"
            " rounds",
            *(f"{100 * cost:.1f}" for cost in costs),
        ),
        (f"tokens/s: engine alone, {count} streams, one stream", *map(figures, rates)),
        (
            "95 % of times between tokens, ms: at capacity, four times the clients",
            *map(figures, p95),
        ),
        ("first token behind 1,000 tokens, ms: computed, reused", *_times(prefix)),
        ("round trips a token of a repetitive text: without, with", *map(figures, trips)),
    ]
    rows = [
        (what, " / ".join(numbers), *_of(check))
        for (what, *numbers), check in zip(measured, checks, strict=True)
    ]
    without = guessed["story_without"]["pads_per_token"]
    return checks, [
        markdown(("what", "measured", "ratio", "wanted"), rows, texts=1),
        f"Of the guesses {_taken(guessed['with'])}; of those in a story that does not repeat itself"
        f" {_taken(guessed['story_with'])} (without guesses: {without:.2f}).",
    ]


def _taken(guessed: Mapping[str, float]) -> str:
    return (
        f"{100 * guessed['accepted']:.0f} % were taken, at {guessed['pads_per_token']:.2f} pads a"
        " token"
    )


def _times(prefix: Mapping[str, float]) -> tuple[str, str]:
    return figures(prefix["without_ms"]), figures(prefix["with_ms"])


def _of(check: Check) -> tuple[str, str]:
    return check.reached, f"{check.wanted}: {verdict(check)}"


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
        rows.append((what, *map(size, (peak, vocabulary, kv, rest)), verdict(checks[-1])))
    columns = ("process", "peak", "embedding and LM head", "KV cache", "beyond", "<= 300 MB")
    note = (
        f"Importing torch alone takes {size(found['import_torch_peak_bytes'])} of what is beyond."
    )
    return checks, [markdown(columns, rows), note]


def _plan(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["plan"]
    tolerance = found["tolerance"]
    cases: dict[str, dict[tuple[str, ...], list[Cells]]] = {}
    off = []
    for one in found["rows"]:
        ok = abs(one["error"]) <= tolerance
        off += [] if ok else [one]
        gbps = one["link_gbps"]
        link = f"{'any' if gbps is None else f'{gbps:g}'} Gbit/s, {one['link_rtt_us']:g} us"
        if one.get("fitted"):
            link = f"{one['transport']}, by `--machine`"
        name = case_name(one["phase"], one["tokens"], one["batch"], one["micro_batches"])
        about = (f"{one['shape']}, {one['policy']}", f"{one['gpu']}, {link}")
        step = (name, figures(one["predicted_ms"]), figures(one["measured_ms"]))
        judged = (f"{one['error']:+.0%}", one["bottleneck"], "yes" if ok else "**no**")
        cases.setdefault(one["case"], {}).setdefault(about, []).append((*step, *judged))
    count = len(found["rows"])
    within = count - len(off)
    worst = max((abs(one["error"]) for one in found["rows"]), default=math.inf)
    wanted = f"within {percent(tolerance)}, 6 cases"
    check = Check(
        f"{len(cases)} cases, {count} figures",
        wanted,
        f"{within} of {count} within, largest error {worst:.0%}",
        not off and len(cases) >= 6,
    )
    rows = [row for steps in cases.values() for row in _beside(steps)]
    columns = ("what", "accelerator and link", "steps", "predicted ms", "measured ms", "error")
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
        reached = verdict(check) or "may exceed it"
        rows.append((one["cost"], one["against"], one["at"], points, shown, fit, reached))
    columns = ("cost", "against", "at", "size: ms", "exponent", "farthest point off")
    return checks, [markdown((*columns, "at most linear"), rows, texts=4)]


def _verify(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["verify_cost"]
    target = found["most_share"]
    checks, rows = [], []
    for one in found["results"]:
        batch, share = one["batch"], one["share"]
        what = "1 sequence" if batch == 1 else f"{batch} sequences"
        check = Check(what, f"<= {percent(target)}", f"{share:.2%}", share <= target)
        checks.append(check)
        names = ("verified_ms", "believed_ms", "tee_ms", "check_ms")
        times = [figures(one[name]) for name in names]
        rows.append((what, *times, size(one["secrets_bytes"]), check.reached, verdict(check)))
    columns = ("decoding", "a step, ms", "without checks", "of the TEE", "in the checks themselves")
    return checks, [markdown((*columns, "secrets", "share", f"<= {percent(target)}"), rows)]


def _attestation(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["attestation"]
    took = f"{found['verify_ms']:.2f} ms"
    ok = found["verify_ms"] <= VERIFY_TARGET_MS
    checks = [Check("verification, SEV-SNP", f"<= {VERIFY_TARGET_MS:g} ms", took, ok)]
    rows = [(checks[0].what, took, "", checks[0].wanted, verdict(checks[0]))]
    for evidence, one in found["handshakes"].items():
        what, cells = f"handshake, evidence: {evidence}", (f"{one['ms']:.2f} ms", "", "", "")
        if evidence in ("SEV-SNP", "TDX"):
            check = at_most(what, one["ratio"], HANDSHAKE_TARGET)
            checks.append(check)
            cells = (cells[0], check.reached, check.wanted, verdict(check))
        elif evidence != "none":
            cells = (cells[0], hundredths(one["ratio"]), "", "")
        rows.append((what, *cells))
    return checks, [markdown(("what", "time", "ratio", "wanted", "reached"), rows)]


def _failover(documents: Documents) -> tuple[list[Check], list[str]]:
    found = documents["failover_cost"]
    checks, rows = [], []
    for one in found["results"]:
        what = f"{one['work']}, {one['transport']}"
        check = Check(
            what,
            f"<= {1 + one['noise']:.3f}",
            f"{one['two_to_again']:.3f}",
            one["ok"],
        )
        checks.append(check)
        ways = [f"{one['ratios'][way]:.3f}" for way in ("plain again", "one", "two")]
        rows.append(
            (
                *(one["work"], one["transport"], figures(one["us"]["plain"])),
                *(*ways, check.reached, check.wanted, verdict(check)),
            )
        )
    columns = (
        *("work", "transport", "plain, us", "plain again", "one service", "two"),
        *("two to plain again", "noise", "reached"),
    )
    said = (
        "Bookkeeping for an RPC that can be sent again:"
        f" {figures(found['bookkeeping_us'])} us, around a channel that answers at once."
    )
    return checks, [markdown(columns, rows, texts=2), said]


def _segments(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    for one in documents["segments"]["results"]:
        wanted = ("", "")
        if (one["model"], one["policy"]) == ("llama-3.2-1b", "clear-segment"):
            check = at_least("clear-segment, 1b", one["ratio"], SEGMENT_TARGET)
            checks.append(check)
            wanted = (check.wanted, verdict(check))
        times = (figures(one["prompt_ms"]), figures(one["token_ms"]), hundredths(one["ratio"]))
        sent = (f"{one['rpcs']:.0f}", size(one["bytes"]))
        rows.append((one["model"], one["policy"], *sent, *times, *wanted))
    columns = ("model", "policy", "RPCs a token", "bytes", "prompt of 128, ms", "a token, ms")
    return checks, [markdown((*columns, "times faster", "wanted", "reached"), rows, texts=2)]


def _ranks(documents: Documents) -> tuple[list[Check], list[str]]:
    checks, rows = [], []
    found = documents["tensor_parallel"]["results"]
    for operator in dict.fromkeys(one["operator"] for one in found):
        cells, wanted = [operator], ("", "")
        for one in (one for one in found if one["operator"] == operator):
            times = [one[name] for name in ("one_us", "two_us", "half_us")]
            ratio, gain = times[1] / times[0], times[2] / times[1]
            if (one["rows"], operator) == (1, "a layer"):
                check = at_most("two ranks, a layer at one row", ratio, RANKS_TARGET)
                checks.append(check)
                wanted = (check.wanted, verdict(check))
            cells.append(" / ".join(_ms(time / 1e3) for time in times))
            cells += [hundredths(ratio), hundredths(gain)]
        rows.append((*cells, *wanted))
    columns = ["operator"]
    for count in dict.fromkeys(one["rows"] for one in found):
        columns += [f"{count} row{'s' * (count > 1)}, ms", "ratio", "gain"]
    return checks, [markdown((*columns, "wanted", "reached"), rows)]


def _time(documents: Documents) -> tuple[list[Check], list[str]]:
    report = _report(documents, "bench_null_tcp")
    parts: list[str] = []
    run = _run_of(report)
    prompt, token = _case(report, "prefill", 512), _case(report, "decode", 128)
    if run is not None and prompt is not None:
        parts += [dominant(run, prompt)]
    if run is not None and token is not None:
        parts += [dominant(run, token)]
    return [], parts


_NULL = tuple(f"bench_null_{transport}" for transport in TRANSPORTS)

# What the page opens with.
GAINED = Section(
    "gained",
    "What was gained",
    _NULL,
    "Steps that offload linear layers, beside the TEE alone, Llama-3.2-1B's shape (`shielded` at"
    " decode only). *Times faster* is against the better of `tee-only` (the model's floats) and"
    " `tee-only-int8` (the same kernels as `shielded`); *with its pads*: a step and then the making"
    " of its pads on the same cores. CPU is the TEE side's, of all threads, waiting included; the"
    " making of pads stands beside it. The service answers at once: these ratios are the most that"
    " an accelerator on this machine can give.",
    _gained,
)

SECTIONS: tuple[Section, ...] = (
    Section(
        "overhead",
        "Overhead beside the published client",
        (*_NULL, "calls"),
        "Both clients against a service that answers at once, which leaves each client's own cost."
        " The published client speaks ZeroMQ over TCP in every run. Python calls are those of the"
        " demo model under `shielded`.",
        _overhead,
    ),
    Section(
        "rpc",
        "One RPC beside a raw ping-pong",
        ("ping_pong", "ping_pong_spin"),
        "Median microseconds. Ours: a Linear from tensor to tensor, with all checks. Raw: the same"
        " frames on the same transport, echoed by a process. Measured in turns, in short blocks."
        " Both ends block, or poll for 300 us first; targets are for 4 KiB, bold where missed.",
        _rpc,
    ),
    Section(
        "cpu",
        "A whole run beside transformers",
        ("bench_cpu_unix",),
        "The service computes on the TEE side's CPU, in bfloat16 with equally many threads, over a"
        " Unix stream. Whole steps, LM head included.",
        _cpu,
    ),
    Section(
        "together",
        "Eight sequences decoding together",
        _NULL,
        "Tokens of all sequences together: whole steps, a service that answers at once, 128 tokens"
        " of context each.",
        _together,
    ),
    Section(
        "overlap",
        "Overlap of micro-batches",
        ("overlap",),
        "A step undivided, and cut so that the TEE works on one part while a modelled accelerator"
        " works on another. The model takes as long for the step as the TEE does against a service"
        " that answers at once. In `memory` cases it reads the weights again for each part, so its"
        " time doubles and overlap cannot gain.",
        _overlap,
    ),
    Section(
        "serving",
        "Serving",
        ("serving",),
        "`tee-runner serve` at the 1b shape, `attention-in-tee`, a service that answers at once, on"
        " a Unix socket; prompts of 32 tokens, answers of 128. The client runs on the same cores;"
        " the engine alone and the server take turns. Ratio of the second row: 16 streams to one."
        " Speculation: the demo model under `shielded`, a text that a grammar makes repeat itself."
        " The processor has AVX-512. On two cores with AVX2 alone (2026-11-26) 16 streams gave 1.42"
        " times the tokens of one, 35.4 and 24.9 a second: of a step's 450 ms, torch takes 392 for"
        " the LM head's 16 rows in bfloat16, and 26 for one row. The other ratios were 0.8 %, 1.05,"
        " 0.07 and 3.06 there.",
        _serving,
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
        "Prediction from three layers, and measurement of the whole model against a modelled"
        " service and link. By `--machine`: round trips and speeds are those that"
        " `tsqp plan --fit` measured before.",
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
        "verify",
        "Verified results",
        ("verify_cost",),
        "How much longer a decoded token takes under `shielded` with checks than without, in turns,"
        " with pads made ahead, as a share of the TEE side's time for it.",
        _verify,
    ),
    Section(
        "failover",
        "A second service that stands in, while all is well",
        ("failover_cost",),
        "A plain channel, one service without a stand-in, and two that stand in for each other, in"
        " turns, as multiples of the plain channel in the same round. Noise is what another plain"
        " channel to the same service differs by, in all but two of ten blocks.",
        _failover,
    ),
    Section(
        "segments",
        "One call a step",
        ("segments",),
        "Segments beside one call an operator, over a modelled link of 20 ms round trip: the 1b"
        " shape against a modelled H100, the demo model against a service that computes.",
        _segments,
    ),
    Section(
        "ranks",
        "Two ranks beside one process",
        ("tensor_parallel",),
        "`gpu-service --tensor-parallel 2` on the cores of one process, the 1b shape in int8, over"
        " a Unix stream: one process / two ranks / one process with half the cores. Ratio: what the"
        " exchange costs. Gain: of one process with one rank's cores to two ranks, as where the"
        " second brings its own; the crossover is where it passes 1. The target is on the ratio of"
        " a layer's operators together at one row, and single ones may be above it.",
        _ranks,
    ),
    Section(
        "attestation",
        "Proof before the prompt",
        ("attestation",),
        "A verified report of SEV-SNP, and handshakes in turns with one without evidence.",
        _attestation,
    ),
    Section(
        "time",
        "Where the time goes",
        ("bench_null_tcp",),
        f"Over ZeroMQ, a service that answers at once; operators of a decoded token under"
        f" `{POLICY}`, all layers together. `tsqp bench --html FILE` draws the whole table.",
        _time,
    ),
)
