"""Every architecture through a real gpu-service process, under every policy that needs one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.engine.engine import EngineSettings
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.e2e.reference import greedy
from tests.kit.model import ARCHITECTURES, make_model
from tests.kit.service import running_service

PROMPT = [1, 17, 5, 290, 33, 8, 120, 64, 9]
TOKENS = 32
# A window that is smaller than the text, where the architecture has one.
OVERRIDES = {"mistral": {"sliding_window": 16}}


# Of its weights the service sees most in this one: biases, too.
ALWAYS = "qwen2"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == ALWAYS else pytest.mark.slow)
        for kind in ARCHITECTURES
    ],
)
def test_greedy_tokens_and_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_model(tmp_path, kind, **OVERRIDES.get(kind, {}))
    token_ids, expected = greedy(reference, PROMPT, TOKENS)
    with running_service(tmp_path, f"ipc://{tmp_path}/s", "--threads", "1") as service:
        for policy in ("tsqp", "attention-in-tee"):
            settings = RunnerSettings(
                tmp_path,
                load_policy(policy),
                (service.endpoint,),
                dtype="float32",
                engine=EngineSettings(step_tokens=4),
            )
            with Runner(settings) as runner:
                generation = runner.generate(PROMPT, max_new_tokens=TOKENS, with_text=False)
                logits = torch.stack([sampled.logits_V for sampled in generation.steps()])
            assert generation.result().token_ids == token_ids
            assert (logits - expected).abs().max().item() < 1e-4
