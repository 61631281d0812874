"""Int8 weights: the rounding, which both sides must agree on, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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


def _by_hand(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in numpy float32."""
    exact = weight.float().numpy()
    scale = np.abs(exact).max(axis=1) / np.float32(127)
    return np.rint(exact / scale[:, None]).astype(np.int8), scale


@each_row("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_defined(dtype: torch.dtype) -> None:
    weight = (torch.randn(40, 65) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    integers, scale = quantize_rows(weight)
    expected, expected_scale = _by_hand(weight)
    assert (integers.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert np.array_equal(integers.numpy(), expected)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert (integers.abs().amax(dim=1) == 127).all()
    error = (integers * scale[:, None] - weight.float()).abs()
    assert (error <= scale[:, None] * 0.5001).all()


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


def test_a_weight_that_is_not_finite_or_has_shrunk_is_named(directory: Path) -> None:
    config = read_config(directory)
    other = config.model_copy(update={"intermediate_size": 97})
    with pytest.raises(ModelError, match="since the file was checked"):
        load_quantized(Checkpoint(directory), other, 0, "gate_up_proj")
    tensors = load_file(directory / SINGLE_FILE)
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][5, 7] = math.inf
    save_file(tensors, directory / SINGLE_FILE)
    checkpoint = Checkpoint(directory)
    load_quantized(checkpoint, config, 1, "down_proj")
    with pytest.raises(ModelError, match=name) as info:
        load_quantized(checkpoint, config, 2, "down_proj")
    assert info.value.got == "NaN or infinity"


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
