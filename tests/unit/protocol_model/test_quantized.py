"""Int8 weights: the rounding, which both sides must agree on, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from protocol.errors import ModelError
from protocol.integer import empty_weight
from protocol.messages import FUSED_MODULES, Projection
from protocol.model import manifest, quantized
from protocol.model.checkpoint import SINGLE_FILE, Checkpoint, lm_head_name, module_name
from protocol.model.config import read_config
from protocol.model.quantized import (
    QuantizedLinear,
    load_head_scale,
    load_quantized,
    quantize_rows,
)
from tests.kit.model import SavedModel
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]


@each_row("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_defined(dtype: torch.dtype) -> None:
    weight = (torch.randn(40, 65) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    integers, scale = quantize_rows(weight)
    exact = weight.float().numpy()
    expected = np.abs(exact).max(axis=1) / np.float32(127)
    assert np.array_equal(scale.numpy(), expected)
    assert np.array_equal(integers.numpy(), np.rint(exact / expected[:, None]).astype(np.int8))


LARGEST = torch.finfo(torch.float32).max
THIRD = float(np.float32(1) / np.float32(127))


@each_row(
    ("row", "integers", "scale"),
    [
        # Halves go to even, and -128 never occurs.
        ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0], [127, 0, 2, 2, 0, -2, -127], 1.0),
        # Rows without a usable scale are zero.
        ([0.0, 0.0], [0, 0], 1.0),
        ([1e-40, -1e-40], [0, 0], 1.0),
        ([1.0, 0.0], [127, 0], THIRD),
        ([LARGEST, -LARGEST], [127, -127], float(np.float32(LARGEST) / np.float32(127))),
    ],
)
def test_a_row_has_a_scale_of_its_own(row: list[float], integers: list[int], scale: float) -> None:
    both = torch.tensor([row, [1.0] * len(row)])
    found, scales = quantize_rows(both)
    assert found.tolist() == [integers, [127] * len(row)]
    assert scales.tolist() == [scale, THIRD]
    for bad in (math.nan, math.inf, -math.inf):
        both[1, 1] = bad
        with pytest.raises(ModelError, match="q: got NaN or infinity, expected finite weights"):
            quantize_rows(both, "q")


@each_row(
    ("kind", "tied", "block"),
    [("llama", False, 1), ("qwen2", False, 1000), ("llama", True, 2**21), ("llama", False, 2**21)],
)
def test_an_operator_is_the_quantised_rows_of_its_modules(
    saved_model: Models, kind: str, tied: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 4 * block)
    directory = saved_model(kind, tie_word_embeddings=tied).directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    tensors = load_file(directory / SINGLE_FILE)
    names = {
        operator: [f"{module_name(1, module)}.weight" for module in modules]
        for operator, modules in FUSED_MODULES.items()
    }
    parts: dict[Projection, list[str]] = {**names, "lm_head": [lm_head_name(config)]}
    for operator, weights in parts.items():
        linear = load_quantized(checkpoint, config, 1, operator)
        integers, scale = quantize_rows(torch.cat([tensors[name] for name in weights]))
        assert torch.equal(linear.weight, integers)
        assert torch.equal(linear.scale, scale)
    assert torch.equal(load_head_scale(checkpoint, config), scale)


@each_row(
    ("weight", "squared"),
    [
        (torch.zeros(3, 4), 0),
        (torch.tensor([[3, 4], [-5, 12], [1, 1]]), 169),
        (torch.full((2, 131071), -127), 131071 * 127**2),
    ],
)
def test_the_largest_row_norm_is_exact(
    weight: torch.Tensor, squared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = empty_weight(*weight.shape, torch.device("cpu")).copy_(weight)
    linear = QuantizedLinear(held, torch.ones(len(weight)), {})
    for block in (1, 2**21):
        monkeypatch.setattr(quantized, "_BLOCK_ELEMENTS", block)
        assert linear.max_row_norm() == math.sqrt(squared)
