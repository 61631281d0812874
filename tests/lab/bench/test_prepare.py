"""What a benchmark needs on disk and in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import load_quantized
from tee_side.policy.placement import load_policy
from tee_side.protect.calibration import CALIBRATION_FILE, Calibration
from tests.kit.model import SavedModel
from tsqp.lab.bench import prepare
from tsqp.lab.bench.memory_need import PROCESS_BYTES, tee_need
from tsqp.lab.bench.shapes import find_shape

Models = Callable[..., SavedModel]


def test_a_hollow_model_is_one_for_which_zeros_are_right(
    saved_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own embedding, norms and scales of inputs; the other weights are zeros."""
    monkeypatch.setattr(prepare, "in_fresh_process", lambda function, *given: function(*given))
    model = saved_model("qwen2", num_hidden_layers=2)
    given = tmp_path / "given"
    shutil.copytree(model.directory, given)
    shutil.copy(model.calibration, given / CALIBRATION_FILE)
    made = prepare.hollow(given, tmp_path)
    config = read_config(made)
    source, hollow = Checkpoint(given), Checkpoint(made)
    hollow.require(light_tensors(config) | linear_tensors(config, FUSED_MODULES))
    hollow.refuse_extra(config)
    light, head = light_tensors(config), "lm_head.weight"
    zeros = {head: light.pop(head)} | linear_tensors(config, FUSED_MODULES)
    for name, shape in light.items():
        assert torch.equal(hollow.rows(name, 0, shape[0]), source.rows(name, 0, shape[0]))
    for name, shape in zeros.items():
        assert not hollow.rows(name, 0, shape[0]).any()
    digests = model_digest(config, hollow), linear_digest(config, hollow)
    scales = Calibration.load(made / CALIBRATION_FILE, config, *digests)
    for layer in range(config.num_hidden_layers):
        for operator in FUSED_MODULES:
            weights = load_quantized(hollow, config, layer, operator)
            scales.check_weights((layer, operator), weights.scale, weights.max_row_norm())


ONE_B = find_shape("llama-3.2-1b").config()
VOCABULARY = 128256 * 2048
LINEAR = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
OUTPUTS = 16 * (2048 + 2 * 512 + 2048 + 2 * 8192 + 2048)
HEAD = VOCABULARY + 4 * 128256


@pytest.mark.parametrize(
    ("policy", "vocabulary", "linear"),
    [
        ("tee-only", 2 * VOCABULARY, 2 * LINEAR),
        ("tsqp", 0, 0),
        ("quantized-clear", 2 * VOCABULARY, HEAD),
        ("shielded", 2 * VOCABULARY, LINEAR + 4 * OUTPUTS + HEAD),
        ("shielded-prefill", 2 * VOCABULARY, 0),
    ],
)
def test_weights_that_stay(policy: str, vocabulary: int, linear: int) -> None:
    parts = tee_need(ONE_B, load_policy(policy), tokens=1024).parts
    assert parts["embedding and LM head"] == vocabulary
    assert parts["linear weights"] == linear
    assert parts["process"] == PROCESS_BYTES
