"""What memory a policy needs; that too much is refused: tests/lab/plan/test_run.py."""

from __future__ import annotations

import pytest

from tee_side.policy.placement import load_policy
from tsqp.lab.bench.memory_need import PROCESS_BYTES, tee_need
from tsqp.lab.bench.shapes import find_shape

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
