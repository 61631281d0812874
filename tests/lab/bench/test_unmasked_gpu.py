"""A decode step of the accelerator alone, with the CPU in its place: no CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from protocol.model.config import read_config
from tests.kit.model import SavedModel
from tsqp.lab.bench import unmasked_gpu
from tsqp.lab.bench.model import Baseline

Models = Callable[..., SavedModel]


def test_a_step_multiplies_by_every_weight_and_reads_the_cache(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(saved_model().directory)
    decoder = unmasked_gpu.Decoder(config, 7, torch.device("cpu"))
    shapes: list[tuple[int, ...]] = []
    seen: list[int] = []

    def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return rows @ weight.t()

    attention = unmasked_gpu.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        seen.append(k.shape[2])
        return attention(q, k, v, **given)

    monkeypatch.setattr(unmasked_gpu, "linear", linear)
    monkeypatch.setattr(unmasked_gpu, "scaled_dot_product_attention", attend)
    token = decoder.step()
    assert token.shape == (1,)
    assert torch.equal(token, decoder.step())
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    width = config.num_attention_heads * config.head_dim
    qkv = width + 2 * config.num_key_value_heads * config.head_dim
    layer = [(qkv, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner)]
    assert shapes[: len(shapes) // 2] == [*layer * layers, (config.vocab_size, hidden)]
    assert seen == [8] * 2 * layers


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
