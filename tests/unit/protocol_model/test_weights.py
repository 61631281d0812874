"""Int8 weights, which both sides must round alike, and digests that tell models apart."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from protocol.integer import empty_weight
from protocol.messages import FUSED_MODULES, Projection
from protocol.model import manifest, quantized
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    SINGLE_FILE,
    Checkpoint,
    lm_head_name,
    module_name,
)
from protocol.model.config import read_config
from protocol.model.identity import model_digest
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


LAYERS = ["sliding_attention"] * 3
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": LAYERS}


@pytest.fixture
def copy(saved_model: Models, tmp_path: Path) -> Path:
    """A copy of a model to change."""
    return shutil.copytree(saved_model("qwen2").directory, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def original(saved_model: Models) -> str:
    """The digest of the unchanged model."""
    return _digest(saved_model("qwen2").directory)


def _digest(directory: Path) -> str:
    return model_digest(read_config(directory), Checkpoint(directory))


def test_the_digest_of_shards_is_that_of_one_file(saved_model: Models, sharded: Path) -> None:
    assert _digest(sharded) == _digest(saved_model("llama").directory)


@each_row(
    "change",
    [
        *(lambda tensors, row=row: tensors[EMBEDDING][row, 7].add_(1e-3) for row in (0, 5, 315)),
        lambda tensors: tensors[FINAL_NORM][17].add_(1e-3),
        lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].to(torch.bfloat16)}),
    ],
)
def test_other_weights_have_another_digest(
    copy: Path, original: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = load_file(copy / SINGLE_FILE)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, copy / SINGLE_FILE)
    assert _digest(copy) != original
    save_file(before, copy / SINGLE_FILE)
    assert _digest(copy) == original


@each_row(
    ("changes", "same"),
    [
        ({"rms_norm_eps": 1e-3}, False),
        ({"max_position_embeddings": 512}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, False),
        (WINDOWS, False),
        ({"tie_word_embeddings": True}, False),
        ({"architectures": ["MistralForCausalLM"]}, False),
        # What does not change the forward pass.
        ({"eos_token_id": [7, 8], "dtype": "bfloat16", "use_cache": False}, True),
        ({"rope_parameters": None, "rope_theta": 10000.0}, True),
    ],
)
def test_a_configuration_has_another_digest_where_it_computes_otherwise(
    copy: Path, original: str, changes: dict[str, Any], same: bool
) -> None:
    whole = (copy / "config.json").read_text()
    other = read_config(copy).model_copy(update={"biased_modules": frozenset(["q_proj"])})
    assert model_digest(other, Checkpoint(copy)) != original
    (copy / "config.json").write_text(json.dumps({**json.loads(whole), **changes}))
    assert (_digest(copy) == original) == same
    (copy / "config.json").write_text(whole)


def test_the_same_bytes_of_another_dtype_have_another_digest(copy: Path) -> None:
    tensors, digests = load_file(copy / SINGLE_FILE), set()
    for dtype in (torch.float16, torch.bfloat16):
        zeros = torch.zeros(tensors[EMBEDDING].shape, dtype=dtype)
        save_file({**tensors, EMBEDDING: zeros}, copy / SINGLE_FILE)
        digests.add(_digest(copy))
    assert len(digests) == 2
