"""What is needed is counted by policy, and too much of it is refused with the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.memory_need import (
    PROCESS_BYTES,
    Need,
    available_memory,
    check_memory,
    gpu_need,
    tee_need,
    whole_model_need,
)
from tsqp.lab.bench.random_model import required_bytes
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
        ("attention-in-tee", 2 * VOCABULARY, 0),
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


def test_pads_are_counted_for_the_rows_of_a_step() -> None:
    weight, outputs = VOCABULARY, OUTPUTS + 128256
    assert _tee("attention-in-tee").parts["pads"] == 0
    assert _tee("shielded").parts["pads"] == 128 * 4 * outputs + weight
    assert _tee("shielded", sequences=200).parts["pads"] == 200 * 4 * outputs + weight
    assert _tee("shielded-prefill").parts["pads"] == 512 * 4 * outputs + weight


def test_a_service_holds_what_its_device_and_arithmetic_say() -> None:
    floats = gpu_need(ONE_B, ["float"], device="cpu", tokens=512)
    both = gpu_need(ONE_B, ["float", "int8", "float"], device="cpu", tokens=512)
    assert floats.parts["float weights"] == 2 * LINEAR
    head = ONE_B.vocab_size * (ONE_B.hidden_size + 4)  # of its own, although ONE_B's is tied
    assert both.total - floats.total == LINEAR + 4 * OUTPUTS + head
    null = gpu_need(ONE_B, ["float", "int8"], device="null", tokens=512)
    assert set(null.parts) == {"process", "temporaries"}
    alone = whole_model_need(ONE_B, "transformers", tokens=512)
    matrices = alone.parts["embedding and LM head"] + alone.parts["linear weights"]
    assert 0 < required_bytes(ONE_B) - matrices < 1_000_000  # the norms


def test_too_little_memory_is_refused_with_the_figures() -> None:
    needs = [Need("a", {"x": 2 * 10**9, "y": 1, "z": 0}), Need("b", {"x": 10**8})]
    check_memory(needs, available_bytes=21 * 10**8 + 1)
    with pytest.raises(SettingsError) as refused:
        check_memory(needs, available_bytes=21 * 10**8)
    assert str(refused.value) == (
        "memory: got 2.1 GB available, expected at least 2.2 GB:"
        " 2.1 GB for a (x 2.0 GB, y 1 MB); 100 MB for b (x 100 MB)"
    )


def test_available_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       9000 kB\nMemAvailable:   5000 kB\n", encoding="ascii"
    )
    assert available_memory(tmp_path) == 5000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n", encoding="ascii")
    assert available_memory(tmp_path) == 5000 * 1024
    (group / "memory.max").write_text("2000000\n", encoding="ascii")
    (group / "memory.current").write_text("1500000\n", encoding="ascii")
    stat = "anon 9\ninactive_file 300000\nactive_file 100000\nworkingset_refault_file 77\n"
    (group / "memory.stat").write_text(stat, encoding="ascii")
    assert available_memory(tmp_path) == 900_000
