"""`tsqp bench` with real processes: it counts what explain counts, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tee_side.policy.placement import load_policy
from tee_side.words import PROJECTIONS
from tests.kit.service import run
from tsqp.cli.program import model_directory
from tsqp.lab.bench.model import Case, PolicyRun, Report
from tsqp.lab.explain.explanation import explain

# Its processes have 240 s, of which two slow cores take half.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEMO = model_directory("demo")
LAYERS = 5
PROMPT, CONTEXT = 12, 9
TINY = (
    *("--prefill", str(PROMPT), "--context", str(CONTEXT), "--batch", "1,2"),
    *("--repeats", "3", "--decode-steps", "3", "--threads", "1"),
)
OURS = ("--gpu-threads", "1", "--device", "null")


def bench(folder: Path, *arguments: str) -> Report:
    """Run it to its end; the temporary folder and the report are in `folder`."""
    (folder / "tmp").mkdir()
    paths = {name: str(folder / f"out.{name}") for name in ("json", "html", "trace")}
    files = [word for name, path in paths.items() for word in (f"--{name}", path)]
    temporary = folder / "tmp"
    given = ("bench", "demo", *TINY, *arguments, *files)
    result = run("tsqp", *given, timeout_s=240, TMPDIR=str(temporary))
    assert result.returncode == 0, result.stderr
    # torch keeps a cache of its own.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torch")] == []
    assert "attention-in-tee" in result.stdout
    assert "data:image/svg+xml" in Path(paths["html"]).read_text(encoding="utf-8")
    assert json.loads(Path(paths["trace"]).read_text(encoding="utf-8"))["traceEvents"]
    return Report.model_validate_json(Path(paths["json"]).read_text(encoding="utf-8"))


def check_costs(found: PolicyRun) -> None:
    """Check the cases' RPCs and bytes against what `tsqp explain` counts for the same steps."""
    policy = load_policy(found.policy)
    told = explain(DEMO, policy, context=CONTEXT, prompt_tokens=PROMPT, step_tokens=512)
    prefill, decode, two = found.cases
    assert [(c.phase, c.tokens, c.batch) for c in found.cases] == [
        ("prefill", PROMPT, 1),
        ("decode", CONTEXT, 1),
        ("decode", CONTEXT, 2),
    ]
    assert (prefill.rpcs, decode.rpcs) == (told.prefill.rpcs, told.decode.rpcs)
    assert two.rpcs == decode.rpcs
    for case, cost in ((prefill, told.prefill), (decode, told.decode)):
        # But for numbers in headers: ids, times.
        assert case.bytes_sent == pytest.approx(cost.bytes_sent, abs=4 * cost.rpcs)
        assert case.bytes_received == pytest.approx(cost.bytes_received, abs=6 * cost.rpcs)
    for case in found.cases:
        check_stages(case)


def check_stages(case: Case) -> None:
    cost = {(one.operator, one.layer): one for one in case.operators}
    for layer in range(LAYERS):
        for operator in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            one = cost[operator, layer]
            if one.place == "gpu":
                assert one.rpcs == 1
                # A reply that compiled code takes is decoded while it is received.
                assert min(one.stages.encode_us, one.stages.wire_us) > 0
            else:
                assert one.rpcs == 0
                assert one.stages.tee_us > 0
        for operator in ("rms_norm", "rope", "attention", "residual", "silu_mul"):
            assert cost[operator, layer].stages.tee_us > 0
    for operator in ("embedding", "lm_head", "sample"):
        assert cost[operator, None].stages.total_us > 0
    assert sum(one.rpcs for one in case.operators) == case.rpcs


def test_two_policies_and_baselines(tmp_path: Path) -> None:
    report = bench(
        tmp_path,
        *OURS,
        *("--policy", "attention-in-tee", "--policy", "shielded"),
        *("--transport", "unix"),
    )
    assert report.incomplete is None
    alone = ["tee-only", "tee-only-int8"]
    assert [one.policy for one in report.policies] == ["attention-in-tee", "shielded", *alone]
    clear, shielded, alone, _ = report.policies
    for found in report.policies:
        check_costs(found)
        assert found.generation is not None
        assert found.generation.prompt_tokens == PROMPT
        assert {one.phase for one in found.timelines} == {"prefill", "decode"}
        assert found.tee_peak_bytes > found.kv_bytes + found.vocabulary_bytes
    assert clear.gpu_peak_bytes is not None
    assert alone.gpu_peak_bytes is None
    masked = [one for one in shielded.cases[1].operators if one.place == "gpu"]
    assert masked
    assert all(min(one.stages.mask_us, one.stages.unmask_us) > 0 for one in masked)
    assert {one.operator for one in masked} <= set(PROJECTIONS)
    assert {one.name for one in report.baselines} == {"transformers", "published"}
    assert report.ping_pong
