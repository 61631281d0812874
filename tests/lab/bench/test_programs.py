"""`tsqp bench` with real processes: it counts what explain counts, and leaves nothing behind."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tee_side.policy.placement import load_policy
from tee_side.words import PROJECTIONS
from tests.kit.model import make_model, token_ids
from tests.kit.service import run, running_service
from tsqp.lab.bench.published_client import PublishedModel
from tsqp.lab.bench.results import PolicyRun, Report
from tsqp.lab.explain.explanation import explain
from tsqp.run.settings import model_directory

# Its processes have 240 s, of which two slow cores take half.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEMO = model_directory("demo")
PROMPT, CONTEXT = 12, 9


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
        assert sum(one.rpcs for one in case.operators) == case.rpcs
        assert {one.layer for one in case.operators} == {None, *range(5)}


def test_two_policies_and_baselines(tmp_path: Path) -> None:
    temporary, page, written = (tmp_path / name for name in ("tmp", "out.html", "out.json"))
    temporary.mkdir()
    words = f"bench demo --prefill {PROMPT} --context {CONTEXT} --batch 1,2 --repeats 3"
    words += " --decode-steps 3 --threads 1 --gpu-threads 1 --device null --transport unix"
    words += f" --policy attention-in-tee --policy shielded --json {written} --html {page}"
    result = run("tsqp", *words.split(), timeout_s=240, TMPDIR=str(temporary))
    assert result.returncode == 0, result.stderr
    # torch keeps a cache of its own.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torch")] == []
    assert "attention-in-tee" in result.stdout
    assert "data:image/svg+xml" in page.read_text(encoding="utf-8")
    report = Report.model_validate_json(written.read_text(encoding="utf-8"))
    assert report.incomplete is None
    clear, shielded, alone, whole = report.policies
    assert [one.policy for one in (clear, shielded)] == ["attention-in-tee", "shielded"]
    assert [one.policy for one in (alone, whole)] == ["tee-only", "tee-only-int8"]
    for found in report.policies:
        check_costs(found)
        assert found.generation is not None
        assert found.generation.prompt_tokens == PROMPT
        assert {one.phase for one in found.timelines} == {"prefill", "decode"}
        assert found.tee_peak_bytes > found.kv_bytes + found.vocabulary_bytes
    assert (clear.gpu_peak_bytes is None, alone.gpu_peak_bytes is None) == (False, True)
    masked = [one for one in shielded.cases[1].operators if one.place == "gpu"]
    assert masked
    assert all(min(one.stages.mask_us, one.stages.unmask_us) > 0 for one in masked)
    assert {one.operator for one in masked} <= set(PROJECTIONS)
    assert {one.name for one in report.baselines} == {"transformers", "published"}
    assert report.ping_pong


TOLERANCE = 1e-4


@torch.no_grad()
def test_it_equals_transformers_but_for_the_causal_mask(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2", num_hidden_layers=2)
    one, longer = torch.tensor([[17], [5]]), torch.tensor([token_ids(9), token_ids(9, seed=1)])
    with (
        running_service(tmp_path, "tcp://127.0.0.1:*", "--threads", "1") as service,
        closing(PublishedModel(service.endpoint)) as published,
    ):
        found, found_longer = published.forward(one), published.forward(longer)
    everywhere = torch.zeros(2, 1, 9, 9)  # added to the scores: nothing is masked
    expected_longer = model(longer, attention_mask=everywhere).logits[:, -1:]
    for ours, expected in ((found, model(one).logits), (found_longer, expected_longer)):
        assert float(expected.abs().max()) > 1.0
        torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert float((found_longer - model(longer).logits[:, -1:]).abs().max()) > 0.1
