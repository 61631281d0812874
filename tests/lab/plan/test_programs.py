"""`tsqp plan` with real processes: it asks for what the whole model would, and says all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tee_side.policy.placement import load_policy
from tee_side.words import OPERATORS
from tests.kit.model import SavedModel
from tsqp.cli.main import command
from tsqp.lab.explain.explanation import explain
from tsqp.lab.plan.model import PARTS, PlanReport

pytestmark = pytest.mark.slow

PROMPT, CONTEXT = 40, 30


def test_layers_that_differ_under_pads(
    saved_model: Callable[..., SavedModel], tmp_path: Path
) -> None:
    # More layers than are measured.
    model = saved_model(num_hidden_layers=5).directory
    lines = [f'{name} = "tee"' for name in OPERATORS if name != "o_proj"]
    lines += [
        'o_proj = [{ place = "gpu", mask = "pad", verify = "none", layers = "0-1" },'
        ' { place = "tee", layers = "2-" }]'
    ]
    path = tmp_path / "layered.toml"
    head = 'name = "layered"\nsummary = ""\narithmetic = "int8"\n[operators]\n'
    path.write_text(head + "\n".join(lines))
    words = f"plan {model} --gpu h100 --tee-cores 1 --transport unix --link 10,100 --json"
    words += f" --prompt-tokens {PROMPT} --context {CONTEXT} --policy {path}"
    result = CliRunner().invoke(command, words.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = PlanReport.model_validate_json(result.stdout)
    found, alone = report.policies
    assert alone.policy == "tee-only-int8"
    # RPCs and bytes are those that `tsqp explain` counts of the whole model.
    sizes: dict[str, Any] = {"context": CONTEXT, "prompt_tokens": PROMPT, "step_tokens": 512}
    told = explain(model, load_policy(str(path)), **sizes)
    assert (found.policy, found.decode.rpcs) == (told.policy, 2)
    assert (found.prefill.rpcs, found.decode.rpcs) == (told.prefill.rpcs, told.decode.rpcs)
    assert found.decode.bytes_sent == pytest.approx(told.decode.bytes_sent, rel=0.01)
    assert found.decode.bytes_received == pytest.approx(told.decode.bytes_received, rel=0.01)
    for prediction in (found.prefill, found.decode):
        assert [part.name for part in prediction.parts] == list(PARTS)
    assert found.ttft_ms == pytest.approx(found.prefill.total_us / 1e3)
    busy = {part.name: part.busy_us for part in found.decode.parts}
    assert busy["link latency"] == pytest.approx(200)
    assert min(busy["masks and checks"], busy["TEE weights"]) > 0
    assert found.pads is not None
    assert (found.pads.phases, alone.pads) == (("prefill", "decode"), None)
