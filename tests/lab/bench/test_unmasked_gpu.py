"""A decode step of the accelerator alone, with the CPU in its place: no CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from tests.kit.model import SavedModel
from tsqp.lab.bench import unmasked_gpu
from tsqp.lab.bench.model import Baseline

Models = Callable[..., SavedModel]


def test_it_prints_a_baseline_for_each_context(saved_model: Models, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    given = [str(saved_model().directory), "--device", "cpu", "--context", "3,5", "--steps", "2"]
    unmasked_gpu.main([*given, "--json", str(path)])
    found = TypeAdapter(list[Baseline]).validate_json(path.read_text(encoding="utf-8"))
    assert [(b.name, b.phase, b.tokens, b.step_ms.runs) for b in found] == [
        ("unmasked", "decode", 3, 2),
        ("unmasked", "decode", 5, 2),
    ]
    assert found[0].step_ms.median > 0
