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
from protocol.integer import empty_weight, exact_product
from protocol.messages import FUSED_MODULES
from protocol.model import manifest, quantized
from protocol.model.checkpoint import SINGLE_FILE, Checkpoint, lm_head_name, module_name
from protocol.model.config import read_config
from protocol.model.quantized import (
    QuantizedLinear,
    load_quantized,
    quantize_rows,
)
from protocol.model.tensor_file import Entry, TensorFile
from tests.kit.model import SavedModel, make_model

Models = Callable[..., SavedModel]
CPU = torch.device("cpu")


def _by_hand(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in numpy float32."""
    exact = weight.float().numpy()
    scale = np.abs(exact).max(axis=1) / np.float32(127)
    scale[scale == 0] = 1
    return np.rint(exact / scale[:, None]).astype(np.int8), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_defined(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(40, 65, generator=generator) * torch.logspace(-3, 3, 40)[:, None]).to(
        dtype
    )
    integers, scale = quantize_rows(weight)
    expected, expected_scale = _by_hand(weight)
    assert (integers.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert np.array_equal(integers.numpy(), expected)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert (integers.abs().amax(dim=1) == 127).all()
    error = (integers * scale[:, None] - weight.float()).abs()
    assert (error <= scale[:, None] * 0.5001).all()


def test_halves_go_to_even_and_minus_128_never_occurs() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]])
    integers, scale = quantize_rows(weight)
    assert integers.tolist() == [[127, 0, 2, 2, 0, -2, -127]]
    assert scale.tolist() == [1.0]


def test_rows_without_a_usable_scale_are_zero() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-40, -1e-40], [1.0, 0.0]])
    integers, scale = quantize_rows(weight)
    assert integers.tolist() == [[0, 0], [0, 0], [127, 0]]
    assert scale.tolist() == [1.0, 1.0, float(np.float32(1) / np.float32(127))]


def test_the_largest_floats_are_quantised() -> None:
    largest = torch.finfo(torch.float32).max
    integers, scale = quantize_rows(torch.tensor([[largest, -largest, largest / 2]]))
    assert integers[0, :2].tolist() == [127, -127]
    assert bool(torch.isfinite(scale).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (2, 3)])
def test_weights_that_are_not_finite_are_refused(bad: float, place: tuple[int, int]) -> None:
    weight = torch.ones(3, 4)
    weight[place] = bad
    with pytest.raises(ModelError, match="q: got NaN or infinity, expected finite weights"):
        quantize_rows(weight, "q")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("block", [1, 1000, 2**21])
def test_a_fused_operator_is_the_quantised_rows_of_its_modules(
    saved_model: Models, kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 4 * block)
    directory = saved_model(kind).directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    tensors = load_file(directory / SINGLE_FILE)
    for operator, modules in FUSED_MODULES.items():
        linear = load_quantized(checkpoint, config, 1, operator)
        assert tuple(linear.rows) == modules
        stop = 0
        for module, rows in linear.rows.items():
            integers, scale = quantize_rows(tensors[f"{module_name(1, module)}.weight"])
            assert rows.start == stop
            stop = rows.stop
            assert torch.equal(linear.weight[rows], integers)
            assert torch.equal(linear.scale[rows], scale)
        assert linear.weight.shape == (stop, config.module_shape(modules[0])[1])


@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_head_is_quantised_whole(saved_model: Models, tied: bool) -> None:
    directory = saved_model("llama", tie_word_embeddings=tied).directory
    config = read_config(directory)
    head = load_quantized(Checkpoint(directory), config, 0, "lm_head")
    stored = load_file(directory / SINGLE_FILE)[lm_head_name(config)]
    integers, scale = quantize_rows(stored)
    assert torch.equal(head.weight, integers)
    assert torch.equal(head.scale, scale)
    elements = torch.arange(2 * config.hidden_size, dtype=torch.int32).view(2, -1)
    expected = elements.long() @ integers.long().t()
    assert torch.equal(exact_product(elements, head.weight).long(), expected)


def test_no_more_than_a_block_is_read_at_once(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved_model("llama").directory
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 480 * 4)
    read: list[int] = []
    whole = TensorFile.read_rows

    def counted(
        self: TensorFile, descriptor: int, entry: Entry, start: int, into: torch.Tensor
    ) -> None:
        whole(self, descriptor, entry, start, into)
        read.append(into.numel() // 4)

    monkeypatch.setattr(TensorFile, "read_rows", counted)
    load_quantized(Checkpoint(directory), read_config(directory), 0, "gate_up_proj")
    assert max(read) == 480
    assert sum(read) == 2 * 96 * 48


def test_a_file_that_has_shrunk_is_refused(saved_model: Models) -> None:
    directory = saved_model("llama").directory
    config = read_config(directory).model_copy(update={"intermediate_size": 97})
    with pytest.raises(ModelError, match="since the file was checked"):
        load_quantized(Checkpoint(directory), config, 0, "gate_up_proj")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    make_model(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][5, 7] = math.inf
    save_file(tensors, tmp_path / SINGLE_FILE)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    load_quantized(checkpoint, config, 1, "down_proj")
    with pytest.raises(ModelError, match=name) as info:
        load_quantized(checkpoint, config, 2, "down_proj")
    assert info.value.got == "NaN or infinity"


def _linear(weight: torch.Tensor, **rows: slice) -> QuantizedLinear:
    held = empty_weight(*weight.shape, CPU)
    return QuantizedLinear(held.copy_(weight), torch.ones(len(weight)), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [1, 2**21])
@pytest.mark.parametrize(
    ("weight", "squared"),
    [
        (torch.zeros(3, 4), 0),
        (torch.tensor([[3, 4], [-5, 12], [1, 1]]), 169),
        (torch.full((2, 131071), -127), 131071 * 127**2),
    ],
)
def test_the_largest_row_norm_is_exact(
    weight: torch.Tensor, squared: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_BLOCK_ELEMENTS", block)
    assert _linear(weight).max_row_norm() == math.sqrt(squared)
