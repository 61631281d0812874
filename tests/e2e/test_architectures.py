"""Every architecture through a real gpu-service process, under every policy that needs one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.policy import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.support import ARCHITECTURES, make_model, running_service

PROMPT = [1, 17, 5, 290, 33, 8, 120, 64, 9]
TOKENS = 64
# A window that is smaller than the text, where the architecture has one.
OVERRIDES = {"mistral": {"sliding_window": 16}}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_and_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = make_model(tmp_path, kind, **OVERRIDES.get(kind, {}))
    ids = torch.tensor([PROMPT])
    want = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with running_service(tmp_path, f"ipc://{tmp_path}/s", "--threads", "1") as service:
        for policy in ("tsqp", "attention-in-tee"):
            settings = RunnerSettings(
                tmp_path, load_policy(policy), (service.endpoint,), dtype="float32", step_tokens=4
            )
            with Runner(settings) as runner:
                generation = runner.generate(PROMPT, max_new_tokens=TOKENS, with_text=False)
                logits = torch.stack([sampled.logits_V for sampled, _ in generation.steps()])
            assert generation.result().token_ids == want.sequences[0, len(PROMPT) :].tolist()
            assert (logits - torch.cat(want.logits)).abs().max().item() < 1e-4
