"""The page of figures: it is fresh, and it hides nothing that is missing or missed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.record import RECORDINGS, RESULTS, six_figures, without_layers
from benchmarks.sections import GAINED, SECTIONS
from benchmarks.tables import benchmarks_page, main, read_results
from benchmarks.targets import OVERHEAD_TARGETS
from protocol.errors import SettingsError
from tests.unit.tsqp.bench.sample_report import POLICIES, sample_report, spread

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
MACHINE = {"processor": "AMD EPYC", "cores": 2}


def _published(report: Any, times_ms: dict[int, float]) -> Any:
    """Give the sample report the published client's times for these prompts."""
    (first, *_) = report.baselines
    others = tuple(
        b for b in report.baselines if b.name != "published" or b.new_tokens or b.tokens == 0
    )
    made = tuple(
        first.model_copy(update={"tokens": tokens, "step_ms": spread(ms)})
        for tokens, ms in times_ms.items()
    )
    return report.model_copy(update={"baselines": made + others})


def _bench(factor: float = 30.0) -> dict[str, Any]:
    """A recorded report in which the published client takes `factor` times our overhead."""
    names = (*POLICIES, "tee-only", "tee-only-int8")
    report = sample_report(names, lengths=(1, 128, 512), layers=2)
    run = next(run for run in report.policies if run.policy == "attention-in-tee")
    times_ms = {
        case.tokens: factor * case.overhead_ms for case in run.cases if case.phase == "prefill"
    }
    # Eight sequences beside one, at 128.
    cases = list(run.cases)
    cases += [
        next(c for c in run.cases if c.phase == "decode" and c.batch == 8).model_copy(
            update={"tokens": 128, "tokens_per_s": 80.0, "micro_batches": 1}
        )
    ]
    cases = [
        c.model_copy(update={"tokens_per_s": 20.0})
        if (c.phase, c.tokens, c.batch) == ("decode", 128, 1)
        else c
        for c in cases
    ]
    policies = tuple(
        p.model_copy(update={"cases": tuple(cases)}) if p is run else p for p in report.policies
    )
    made = _published(report, times_ms).model_copy(update={"policies": policies})
    shortened = six_figures(without_layers(made.model_dump(mode="json")))
    return _about() | shortened


def _about() -> dict[str, Any]:
    recorded = {
        "command": "tsqp bench --x",
        "created": "2026-02-03T00:00:00+00:00",
        "elapsed_s": 5,
        "exit_status": 0,
        "load_before": 0.25,
    }
    return {"recorded": recorded}


def _documents() -> dict[str, dict[str, Any]]:
    pong = {"transport": "unix", "payload_bytes": 4096, "p90_us": 1.0, "round_trips": 9}
    overlap = {
        "micro_batches": 2,
        "case": "prefill-512",
        "bound": "arithmetic",
        "transport": "unix",
        "null_ms": 500.0,
        "gpu_ms": [501.0, 502.0],
        "serial_ms": 1000.0,
        "overlapped_ms": 600.0,
        "ratio": 1000 / 600,
    }
    plan = {
        "shape": "s",
        "policy": "p",
        "gpu": "h100",
        "link_gbps": 10.0,
        "link_rtt_us": 100.0,
        "phase": "decode",
        "tokens": 128,
        "batch": 1,
        "micro_batches": 1,
        "predicted_ms": 11.0,
        "measured_ms": 10.0,
        "error": 0.1,
        "bottleneck": "TEE",
    }
    growth = {
        "cost": "decode step",
        "against": "layers",
        "at": "context 128",
        "points": [[4, 1.0], [8, 2.0]],
        "exponent": 1.0,
        "worst": 1.02,
        "may_exceed": False,
        "linear": True,
    }
    bench = _bench()
    return {
        **{f"bench_{name}": bench for name in ("null_tcp", "null_unix", "null_shm", "cpu_unix")},
        "calls": {**_about(), "machine": MACHINE, "results": {"client": 22.4, "service": 19.0}},
        **{
            name: {
                **_about(),
                "machine": MACHINE,
                "results": [
                    {**pong, "kind": "ours", "p50_us": 12.0},
                    {**pong, "kind": "raw", "p50_us": 10.0},
                    {**pong, "kind": "raw", "p50_us": 9.0, "transport": "tcp"},
                ],
            }
            for name in ("ping_pong", "ping_pong_spin")
        },
        "overlap": {
            **_about(),
            "machine": MACHINE,
            "results": [overlap, {**overlap, "bound": "memory", "case": "m", "ratio": 1.01}],
        },
        "growth": {
            **_about(),
            "machine": MACHINE,
            "growth": [growth, {**growth, "cost": "attention", "may_exceed": True}],
        },
        "plan": {
            **_about(),
            "machine": MACHINE,
            "tolerance": 0.25,
            "rows": [
                *({**plan, "case": str(number)} for number in range(5)),
                {**plan, "case": "5", "link_gbps": None, "fitted": True, "transport": "unix"},
            ],
        },
        "serving": {
            **_about(),
            "machine": MACHINE,
            "streams": {
                "engine_alone_tokens_per_s": 300.0,
                "one_stream_tokens_per_s": 40.0,
                "streams": 16,
                "streams_tokens_per_s": 288.0,
                "http_costs": 0.04,
                "http_costs_of_rounds": [0.01, 0.04, 0.05],
                "streams_by_one": 7.2,
            },
            "overload": {
                "at_capacity": {"clients": 16, "p95_inter_token_ms": 50.0, "refused": 0},
                "overloaded": {"clients": 64, "p95_inter_token_ms": 80.0, "refused": 9},
                "p95_ratio": 1.6,
            },
            "prefix": {"with_ms": 50.0, "without_ms": 500.0, "ratio": 0.1},
            "speculation": {
                "without": {"round_trips_per_token": 20.0, "accepted": 0.0, "pads_per_token": 1.0},
                "with": {"round_trips_per_token": 8.0, "accepted": 0.9, "pads_per_token": 1.1},
                "story_without": {"pads_per_token": 1.0, "accepted": 0.0},
                "story_with": {"pads_per_token": 1.4, "accepted": 0.5},
                "same_text": True,
                "fewer": 2.5,
            },
        },
        "memory": {
            "machine": MACHINE,
            "tee_runner_attention_in_tee_peak_bytes": 809_000_000,
            "embedding_and_lm_head_bytes": 525_000_000,
            "import_torch_peak_bytes": 229_000_000,
        },
        "verify_cost": {
            **_about(),
            "machine": MACHINE,
            "most_share": 0.15,
            "results": [
                {
                    "batch": 1,
                    "share": 0.107,
                    "check_ms": 2.5,
                    "tee_ms": 23.4,
                    "verified_ms": 31.0,
                    "believed_ms": 28.0,
                    "secrets_bytes": 29_000_000,
                }
            ],
        },
        "attestation": {
            **_about(),
            "machine": MACHINE,
            "rounds": 400,
            "verify_ms": 1.3,
            "handshakes": {
                "none": {"ms": 0.8, "ratio": 1.0},
                "SEV-SNP": {"ms": 0.9, "ratio": 1.06},
                "TDX": {"ms": 0.95, "ratio": 1.171},
                "simulated, appraised, and new evidence": {"ms": 2.0, "ratio": 2.5},
            },
        },
        "segments": {
            **_about(),
            "machine": MACHINE,
            "rtt_us": 20_000,
            "results": [
                {
                    "model": "llama-3.2-1b",
                    "policy": "clear-segment",
                    "token_ms": 25.0,
                    "prompt_ms": 26.0,
                    "ratio": 56.0,
                    "rpcs": 1.0,
                    "bytes": 261_000.0,
                }
            ],
        },
        "tensor_parallel": {
            **_about(),
            "machine": MACHINE,
            "results": [
                {
                    "rows": rows,
                    "operator": operator,
                    "one_us": one_us * rows,
                    "two_us": two_us * rows,
                    "half_us": 11_000.0 * rows,
                }
                for operator, one_us, two_us in (
                    ("a layer", 8000.0, 12_000.0),
                    ("o_proj", 1000.0, 1700.0),
                )
                for rows in (1, 4)
            ],
        },
        "failover_cost": {
            **_about(),
            "machine": MACHINE,
            "bookkeeping_us": 0.48,
            "results": [
                {
                    "work": "token",
                    "transport": "tcp",
                    "us": {"plain": 1234.0},
                    "ratios": {"plain again": 1.01, "one": 1.02, "two": 1.03},
                    "noise": 0.035,
                    "two_to_again": 1.021,
                    "ok": True,
                }
            ],
        },
    }


def _section(page: str, title: str) -> str:
    (found,) = re.findall(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE
    )
    return str(found)


def _title(key: str) -> str:
    (title,) = [section.title for section in SECTIONS if section.key == key]
    return title


def test_the_page_is_fresh() -> None:
    page = benchmarks_page(read_results(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == page, "stale: make docs"


def test_every_recording_is_shown_somewhere() -> None:
    shown = {name for section in SECTIONS for name in section.sources}
    assert shown == {recording.name for recording in RECORDINGS}


def test_nothing_recorded_is_said_of_every_target() -> None:
    page = benchmarks_page({})
    for section in SECTIONS:
        text = _section(page, section.title)
        assert "Not recorded yet:" in text
        assert all(f"`make bench ONLY={name}`" in text for name in section.sources)
    summary = _section(page, "Targets")
    (line,) = (line for line in summary.splitlines() if line.startswith("- "))
    assert line.startswith("- **Not recorded:** ")
    assert line.count("](#") == len((GAINED, *SECTIONS))


def test_reached_targets() -> None:
    page = benchmarks_page(_documents())
    summary = _section(page, "Targets")
    assert "Not recorded" not in summary
    all_reached = next(line for line in summary.splitlines() if "**All reached:**" in line)
    assert f"[{_title('rpc')}](#one-rpc-beside-a-raw-ping-pong) (1 of 1)" in all_reached
    overhead = _section(page, _title("overhead"))
    for transport, targets in OVERHEAD_TARGETS.items():
        for tokens in targets:
            name = "1 token" if tokens == 1 else f"{tokens} tokens"
            assert re.search(
                rf"\| {transport} \| {name} .*\| (29\.99|30\.00) \| >= [\d.]+ \| yes \|", overhead
            )
    assert "A request takes 22.4 Python calls (wanted <= 25)." in overhead
    assert "| unix | 4 KiB | 12.0 | 10.0 | 1.20 | 12.0 | 10.0 | 1.20 (<= 1.5) |" in page
    assert "| tcp | 4 KiB |" not in page
    assert "| unix | 20.0 | 80.0 | 4.00 | yes |" in page
    assert "| 1,000 | 600 | 1.66 | yes |" in page
    assert page.count("| h100, 10 Gbit/s, 100 us | decode at 128 |") == 5
    assert page.count("| h100, unix, by `--machine` | decode at 128 |") == 1
    assert "| 1,000 | 600 | 1.01 | no target |" in page
    assert (
        "| attention | layers | context 128 | 4: 1.00, 8: 2.00 | 1.00 | 2% | may exceed it |"
        in page
    )
    assert "| 4.0 / 1.0 / 5.0 | 4.00 | <= 10: yes |" in page
    assert "| 50.0 / 80.0 | 1.60 | <= 1.5: **no** |" in page
    # 809 MB less 525 MB, less 72 tokens of KV cache at 32 KiB.
    assert "| 525 MB | 2.36 MB | 282 MB | yes |" in page
    assert "| 10.70% | yes |" in page
    assert "| 1.021 | <= 1.035 | yes |" in page


def test_the_steps_of_a_planned_case_stand_side_by_side() -> None:
    documents = _documents()
    row = documents["plan"]["rows"][2]
    row.update(case="0", phase="prefill", measured_ms=8.0, error=-0.3, bottleneck="GPU")
    planned = _section(benchmarks_page(documents), _title("plan"))
    steps = "decode at 128 / prefill 128 | 11.0 / 11.0 | 10.0 / 8.00 | +10% / -30%"
    assert planned.count("| decode at 128 ") == 5
    assert f"| {steps} | TEE / GPU | yes / **no** |" in planned


def test_the_page_opens_with_what_was_gained() -> None:
    document = _bench()
    page = benchmarks_page(_documents())
    first = re.search(r"^## (.*)$", page, re.MULTILINE)
    assert first is not None
    assert first.group(1) == "What was gained"
    steps = {
        run["policy"]: case["step_ms"]["median"]
        for run in document["report"]["policies"]
        for case in run["cases"]
        if (case["phase"], case["tokens"], case["batch"]) == ("decode", 128, 1)
    }
    row = next(line for line in page.splitlines() if line.startswith("| decode at 128 | tcp |"))
    best_ms = min(steps["tee-only"], steps["tee-only-int8"])
    with_pads = best_ms / (steps["shielded"] + 12.5)
    assert f"| {best_ms / steps['shielded']:.2f} | {with_pads:.2f} |" in row
    assert row.endswith(" | 24.0 |")
    prompt = next(line for line in page.splitlines() if line.startswith("| prefill 512 | unix |"))
    assert "| no pads |" in prompt
    # The machine that answers at once is no accelerator, and the page says so there.
    assert "answers at once" in _section(page, "What was gained")
    assert "Not recorded yet" in _section(benchmarks_page({}), "What was gained")


def test_every_operator_of_two_ranks_is_shown_and_a_layer_alone_is_judged() -> None:
    section = _section(benchmarks_page(_documents()), _title("ranks"))
    assert "| operator | 1 row, ms | ratio | gain | 4 rows, ms | ratio | gain |" in section
    layer = "| a layer | 8.00 / 12.0 / 11.0 | 1.50 | 0.92 | 32.0 / 48.0 / 44.0 | 1.50 | 0.92 |"
    assert f"{layer} <= 1.6 | yes |" in section
    other = "| o_proj | 1.00 / 1.70 / 11.0 | 1.70 | 6.47 | 4.00 / 6.80 / 44.0 | 1.70 | 6.47 |"
    assert f"{other}  |  |" in section


def test_the_best_tee_only_is_what_offloading_is_judged_by() -> None:
    """Trusted CPU beside int8 in the TEE alone, and that beside the model's own floats."""
    documents = json.loads(json.dumps(_documents()))
    runs = {r["policy"]: r for r in documents["bench_null_shm"]["report"]["policies"]}
    for name, cpu_ms in (("shielded", 2.01), ("tee-only-int8", 10.0)):
        for case in runs[name]["cases"]:
            case["cpu_tee_ms"] = cpu_ms
    said = _section(benchmarks_page(documents), "What was gained")
    assert "CPU a token, shm: 0.21 (wanted <= 0.2)" in said
    unix = documents["bench_null_unix"]["report"]["policies"]
    for run in unix:
        for case in run["cases"]:
            case["step_ms"]["median"] = {"tee-only": 20.0, "tee-only-int8": 10.1}.get(
                run["policy"], 5.0
            )
    said = _section(benchmarks_page(documents), "What was gained")
    assert "tee-only / tee-only-int8, decode at 128: 1.98 (wanted >= 2)" in said
    assert "tee-only / tee-only-int8, prefill 512: 1.98 (wanted >= 1.5)" in said
    missed = next(line for line in said.splitlines() if line.startswith("**Not reached:**"))
    assert "decode at 128: 1.98" in missed
    assert "prefill 512" not in missed


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        (
            "rpc",
            lambda d: d["ping_pong_spin"]["results"][0].update(p50_us=15.1),
            "4 KiB, unix, spins: 1.51",
        ),
        (
            "overhead",
            lambda d: d["calls"]["results"].update(client=25.1),
            "Python calls of a request: 25.1",
        ),
        ("overlap", lambda d: d["overlap"]["results"][0].update(ratio=1.59), "in 2, unix: 1.59"),
        ("plan", lambda d: d["plan"]["rows"][2].update(error=-0.3), "5 of 6 within"),
        ("plan", lambda d: d["plan"]["rows"][2].update(case="0"), "5 cases, 6 figures"),
        ("growth", lambda d: d["growth"]["growth"][0].update(linear=False), "decode step against"),
        (
            "memory",
            lambda d: d["memory"].update(tee_runner_attention_in_tee_peak_bytes=830_000_000),
            "`tee-runner`, 72 tokens: 303 MB",
        ),
        (
            "verify",
            lambda d: d["verify_cost"]["results"][0].update(share=0.1504),
            "1 sequence: 15.04%",
        ),
        (
            "failover",
            lambda d: d["failover_cost"]["results"][0].update(two_to_again=1.041, ok=False),
            "token, tcp: 1.041 (wanted <= 1.035)",
        ),
        (
            "attestation",
            lambda d: d["attestation"]["handshakes"]["TDX"].update(ratio=1.301),
            "handshake, evidence: TDX: 1.31 (wanted <= 1.3)",
        ),
        (
            "segments",
            lambda d: d["segments"]["results"][0].update(ratio=19.99),
            "clear-segment, 1b: 19.99 (wanted >= 20)",
        ),
        (
            "ranks",
            lambda d: d["tensor_parallel"]["results"][0].update(two_us=12_900.0),
            "two ranks, a layer at one row: 1.62 (wanted <= 1.6)",
        ),
        ("overhead", lambda d: d.update(bench_null_unix=_bench(5.9)), "1 token, unix: 5."),
        (
            "together",
            lambda d: [
                case.update(tokens_per_s=79.9)
                for run in d["bench_null_tcp"]["report"]["policies"]
                for case in run["cases"]
                if case["batch"] == 8
            ],
            "tcp: 3.99",
        ),
        (
            "cpu",
            lambda d: [
                b["step_ms"].update(median=1e-3)
                for b in d["bench_cpu_unix"]["report"]["baselines"]
                if b["name"] == "transformers"
            ],
            "prefill 128: ",
        ),
    ],
)
def test_a_missed_target_is_said(
    key: str, change: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "REASONS", {key: "Because of the moon."})
    documents = json.loads(json.dumps(_documents()))
    before = _section(benchmarks_page(documents), _title(key)).count("**")
    change(documents)
    page = benchmarks_page(documents)
    text = _section(page, _title(key))
    (line,) = [line for line in text.splitlines() if line.startswith("**Not reached:**")]
    assert said in line
    assert line.endswith("Because of the moon.")
    judged = _section(page, "Targets").splitlines()
    missed = next(line for line in judged if line.startswith("- **Not all reached:**"))
    assert f"[{_title(key)}](#" in missed
    # Too few cases are no row's fault.
    assert text.count("**") > before or "cases" in said


def test_an_overhead_that_was_not_measurable_reaches_nothing() -> None:
    documents = _documents()
    document = _bench()
    for run in document["report"]["policies"]:
        for case in run["cases"]:
            if case["tokens"] == 1:
                case["overhead_ms"] = 0.0
    page = benchmarks_page(documents | {"bench_null_tcp": document})
    assert "| not measurable | >= 3 | **no** |" in page


def test_where_it_was_measured_and_how_to_repeat_it() -> None:
    page = benchmarks_page(_documents())
    assert "`tsqp bench --x` (recorded 2026-02-03; load of the minute before 0.2)" in page
    # What was recorded before all this has its command only.
    assert " Repeat with `python -m benchmarks.memory`.\n" in page
    assert "Machines:" in page
    alone = benchmarks_page({"memory": _documents()["memory"]})
    assert "Machine: processor AMD EPYC, cores 2." in alone


def test_tables_have_as_many_cells_in_every_row() -> None:
    table: list[int] = []
    for line in benchmarks_page(_documents()).splitlines():
        if not line.startswith("|"):
            table = []
            continue
        table.append(len(re.findall(r"(?<!\\)\|", line)))
        assert table[0] == table[-1], line


def test_links_lead_to_headings() -> None:
    page = benchmarks_page(_documents())
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("#")
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert links
    assert links <= headings


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    for text, got in (("{", "no JSON"), ("[]", "list")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=rf"memory\.json: got {got}"):
            read_results(tmp_path)


def test_the_module_writes_the_page(tmp_path: Path) -> None:
    main([str(tmp_path / "page.md")])
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert written == benchmarks_page(read_results(RESULTS))
    with pytest.raises(SettingsError):
        main([])
