"""What is needed is counted by policy, and too much of it is refused with the figures."""

from __future__ import annotations

import pytest

from protocol.errors import SettingsError
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.memory_need import PROCESS_BYTES, Need, check_memory, tee_need
from tsqp.lab.bench.shapes import find_shape

ONE_B = find_shape("llama-3.2-1b").config()
VOCABULARY = 128256 * 2048
LINEAR = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
OUTPUTS = 16 * (2048 + 2 * 512 + 2048 + 2 * 8192 + 2048)
HEAD = VOCABULARY + 4 * 128256


def _tee(policy: str, **settings: int) -> Need:
    return tee_need(ONE_B, load_policy(policy), tokens=1024, **settings)


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
    parts = _tee(policy).parts
    assert parts["embedding and LM head"] == vocabulary
    assert parts["linear weights"] == linear
    assert parts["process"] == PROCESS_BYTES


def test_too_little_memory_is_refused_with_the_figures() -> None:
    needs = [Need("a", {"x": 2 * 10**9, "y": 1, "z": 0}), Need("b", {"x": 10**8})]
    check_memory(needs, available_bytes=21 * 10**8 + 1)
    with pytest.raises(SettingsError) as refused:
        check_memory(needs, available_bytes=21 * 10**8)
    assert "got 2.1 GB available, expected at least 2.2 GB" in str(refused.value)
