"""Safetensors files: damage is found before a weight is read, and named by file and tensor."""

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
from protocol.messages import FUSED_MODULES
from protocol.model import files, weights
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
    lm_head_name,
    model_digest,
    module_name,
)
from protocol.model.config import read_config
from protocol.model.weights import (
    QuantizedLinear,
    load_linear,
    load_quantized,
    load_tensor,
    quantize_rows,
)
from tests.kit.model import Models
from tests.kit.rows import each_row

Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"
EXTRA = "a tensor that config.json does not explain"


def _open_and_check(directory: Path) -> Checkpoint:
    """What the service does before it loads."""
    config, checkpoint = read_config(directory), Checkpoint(directory)
    checkpoint.require(light_tensors(config) | linear_tensors(config))
    checkpoint.refuse_extra(config)
    return checkpoint


def _refusal(directory: Path, *named: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _open_and_check(directory)
    assert str(directory) in str(caught.value)
    assert all(name in caught.value.where for name in named), str(caught.value)
    return caught.value


def _change(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, directory / SINGLE_FILE)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_tensor_must_be_there_with_its_shape(
    saved_model: Models, tmp_path: Path, kind: str
) -> None:
    directory = shutil.copytree(saved_model(kind).directory, tmp_path / "model")
    tensors = load_file(directory / SINGLE_FILE)
    checkpoint = _open_and_check(directory)
    assert checkpoint.holds(tensors)
    assert not checkpoint.holds([*tensors, "model.layers.9.mlp.up_proj.weight"])
    config, changed = read_config(directory), dict(tensors)
    shapes = light_tensors(config) | linear_tensors(config)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # One of each sort; all of them are in one table.
    for name in [name for name in tensors if ".0." not in name and ".1." not in name]:
        del changed[name]
        save_file(changed, directory / SINGLE_FILE)
        error = _refusal(directory, SINGLE_FILE, name)
        assert (error.got, error.expected) == ("no such tensor", f"{list(shapes[name])}")
        for other in (tensors[name][:-1], tensors[name][None], tensors[name].t()):
            if other.shape != tensors[name].shape:
                save_file({**tensors, name: other.contiguous()}, directory / SINGLE_FILE)
                assert _refusal(directory, SINGLE_FILE, name).got == f"shape {list(other.shape)}"
        changed = dict(tensors)


@each_row(
    ("name", "tensor", "got"),
    [
        (DOWN, torch.ones(48, 96).to(torch.int64), "dtype I64"),
        (DOWN, torch.ones(48, 96).to(torch.int8), "dtype I8"),
        (DOWN, torch.ones(48, 96).to(torch.float64), "dtype F64"),
        (DOWN, torch.ones(48, 96).to(torch.bool), "dtype BOOL"),
        (DOWN, torch.ones(48, 96).to(torch.float8_e4m3fn), "dtype F8_E4M3"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(96), EXTRA),
        ("model.layers.2.other.weight", torch.ones(48), EXTRA),
        # Layers that predict tokens further ahead, and what a cache of few bits needs.
        ("model.layers.3.input_layernorm.weight", torch.ones(48), None),
        ("model.layers.0.self_attn.k_scale", torch.ones(1), None),
        ("model.layers.0.self_attn.k_proj.k_scale", torch.ones(1).to(torch.float8_e4m3fn), None),
        # RoPE buffers of old checkpoints mean nothing.
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8), None),
    ],
)
def test_a_tensor_of_another_dtype_or_of_no_use_is_named(
    saved_model: Models,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    tensor: torch.Tensor,
    got: str | None,
) -> None:
    shutil.copytree(saved_model("llama").directory, tmp_path, dirs_exist_ok=True)
    _change(tmp_path, lambda tensors: tensors.update({name: tensor}))
    if got is None:
        caplog.clear()
        _open_and_check(tmp_path)
        told = 0 if "inv_freq" in name else 1
        assert [text.count(": 1 tensors are left out") for text in caplog.messages] == [1] * told
    else:
        assert _refusal(tmp_path, SINGLE_FILE, name).got == got


def test_an_lm_head_beside_a_tied_embedding_is_allowed(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    _open_and_check(directory)
    _change(directory, lambda tensors: tensors.pop("lm_head.weight"))
    _open_and_check(directory)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_fused_modules_stand_side_by_side_with_their_biases(
    saved_model: Models, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As floats and as int8, which are read a block of rows at a time."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 4000)
    directory = saved_model(kind).directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    tensors = load_file(directory / SINGLE_FILE)
    assert FUSED_MODULES["qkv_proj"] == ("q_proj", "k_proj", "v_proj")
    assert FUSED_MODULES["gate_up_proj"] == ("gate_proj", "up_proj")
    for operator, modules in FUSED_MODULES.items():
        linear = load_linear(checkpoint, config, 1, operator, dtype=torch.float32, device=CPU)
        names = [module_name(1, module) for module in modules]
        whole = torch.cat([tensors[f"{name}.weight"] for name in names])
        assert torch.equal(linear.weight, whole)
        biased = kind == "qwen2" and operator == "qkv_proj"
        assert (linear.bias is not None) == biased
        if linear.bias is not None:
            assert torch.equal(linear.bias, torch.cat([tensors[f"{name}.bias"] for name in names]))
        for module, rows in linear.rows.items():
            assert rows.stop - rows.start == config.module_shape(module)[0]
        integers, scale = quantize_rows(whole)
        held = load_quantized(checkpoint, config, 1, operator)
        assert torch.equal(held.weight, integers)
        assert torch.equal(held.scale, scale)
    head = load_quantized(checkpoint, config, 1, "lm_head")
    integers, scale = quantize_rows(tensors[lm_head_name(config)])
    assert torch.equal(head.weight, integers)
    assert torch.equal(head.scale, scale)
    # A module without a bias has one of zeros beside one that has one.
    one = config.model_copy(update={"biased_modules": config.biased_modules & {"v_proj"}})
    mixed = load_linear(checkpoint, one, 1, "qkv_proj", dtype=torch.float32, device=CPU).bias
    assert (mixed is None) == (kind == "llama")
    assert mixed is None or (mixed[-24:].any() and not mixed[:-24].any())


def test_pickled_weights_are_refused_and_not_run(directory: Path) -> None:
    for zipped in (True, False):
        tensors = {"a": torch.ones(2)}
        torch.save(tensors, directory / SINGLE_FILE, _use_new_zipfile_serialization=zipped)
        error = _refusal(directory, SINGLE_FILE)
        assert error.got == "a pickle, which can run code when it is loaded"
    before = SINGLE_FILE
    for name in ("pytorch_model.bin", "model.pt", "a.pth", "b.ckpt", "c.pkl"):
        (directory / before).rename(directory / name)
        assert "can run code" in _refusal(directory, name).got
        before = name
    (directory / before).unlink()
    assert _refusal(directory).got.startswith("no weights among ")


def test_a_file_that_changes_after_the_check_is_refused_when_it_is_read(directory: Path) -> None:
    config, checkpoint = read_config(directory), _open_and_check(directory)
    shape = (config.vocab_size, config.hidden_size)
    loaded = load_tensor(checkpoint, EMBEDDING, shape, dtype=torch.float32)
    before = loaded.clone()
    with pytest.raises(ModelError, match="since the file was checked"):
        load_tensor(checkpoint, EMBEDDING, (1, config.hidden_size), dtype=torch.float32)
    (directory / SINGLE_FILE).unlink()
    (directory / SINGLE_FILE).write_bytes(b"")
    with pytest.raises(ModelError, match=EMBEDDING):
        load_tensor(checkpoint, EMBEDDING, shape, dtype=torch.float32)
    assert torch.equal(loaded, before)  # it is no mapping


@each_row("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(directory: Path, value: float) -> None:
    plain = load_file(directory / SINGLE_FILE)[DOWN]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        spoilt = plain.to(dtype)
        spoilt[3, 5] = torch.finfo(dtype).max
        _change(directory, lambda tensors, spoilt=spoilt: tensors.update({DOWN: spoilt}))
        assert _open_and_check(directory).rows(DOWN, 0, 48).max() == torch.finfo(dtype).max
        spoilt[3, 5] = value
        _change(directory, lambda tensors, spoilt=spoilt: tensors.update({DOWN: spoilt}))
        checkpoint = _open_and_check(directory)
        for rows in ((0, 48), (0, 48, 3)):
            with pytest.raises(ModelError, match=f"{DOWN}: got NaN or infinity"):
                checkpoint.rows(DOWN, *rows)
        with pytest.raises(ModelError, match=f"{DOWN}: got NaN or infinity"):
            load_tensor(checkpoint, DOWN, (48, 96), dtype=torch.float32)


def _mapped(directory: Path, **changes: Any) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] |= changes
    (directory / INDEX_FILE).write_text(json.dumps(index))


@each_row(
    "file",
    [
        *("../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "", "a\0"),
        *("a\n", "\ud800", "x" * 256, 7, None),
    ],
)
def test_an_index_that_points_outside_its_directory_is_refused(sharded: Path, file: object) -> None:
    shutil.copy(sharded / "a.safetensors", sharded.parent / "outside.safetensors")
    _mapped(sharded, **{DOWN: file})
    error = _refusal(sharded, INDEX_FILE, DOWN)
    assert error.expected == "the name of a file in the same directory"


def test_an_index_and_its_files_must_agree(sharded: Path) -> None:
    whole = (sharded / INDEX_FILE).read_bytes()
    files = json.loads(whole)["weight_map"]
    other = "b.safetensors" if files[DOWN] == "a.safetensors" else "a.safetensors"
    for changes, named, got in (
        ({DOWN: "c.safetensors"}, ("c.safetensors",), "no such file"),
        ({DOWN: other}, (other, DOWN), "no such tensor"),
        ({"model.extra": "a.safetensors"}, ("a.safetensors", "model.extra"), "no such tensor"),
    ):
        _mapped(sharded, **changes)
        assert _refusal(sharded, *named).got == got
        (sharded / INDEX_FILE).write_bytes(whole)
    for weight_map in (None, [], {}, "a.safetensors"):
        (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        assert _refusal(sharded, INDEX_FILE).where.endswith(": weight_map")
    for content in ("", "{", "[]"):
        (sharded / INDEX_FILE).write_text(content)
        _refusal(sharded, INDEX_FILE)
    (sharded / INDEX_FILE).write_bytes(whole)
    name = min(load_file(sharded / "a.safetensors"))
    tensors = load_file(sharded / "b.safetensors")
    save_file({**tensors, name: torch.ones(1)}, sharded / "b.safetensors")
    assert _refusal(sharded, "b.safetensors", name).got == "a tensor that a.safetensors holds too"


LARGEST = torch.finfo(torch.float32).max
THIRD = float(np.float32(1) / np.float32(127))


@each_row(
    ("row", "integers", "scale"),
    [
        # Halves go to even, and -128 never occurs.
        ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0], [127, 0, 2, 2, 0, -2, -127], 1.0),
        ([-127.0, 1.0], [-127, 1], 1.0),
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
    ("weight", "largest"),
    [
        (torch.zeros(3, 4), 0),
        (torch.tensor([[3, 4], [-5, 12], [1, 1]]), 17),
        (torch.full((2, 131071), -127), 131071 * 127),
    ],
)
def test_the_largest_sum_of_a_row_is_of_magnitudes_and_exact(
    weight: torch.Tensor, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = empty_weight(*weight.shape, torch.device("cpu")).copy_(weight)
    linear = QuantizedLinear(held, torch.ones(len(weight)), {})
    for block in (1, 2**21):
        monkeypatch.setattr(weights, "_BLOCK_ELEMENTS", block)
        assert linear.max_row_sum() == largest


LAYERS = ["sliding_attention"] * 3
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": LAYERS}


def _digest(directory: Path) -> str:
    return model_digest(read_config(directory), Checkpoint(directory))


@pytest.fixture
def copy(saved_model: Models, tmp_path: Path) -> Path:
    return shutil.copytree(saved_model("qwen2").directory, tmp_path, dirs_exist_ok=True)


def test_the_digest_of_shards_is_that_of_one_file(saved_model: Models, sharded: Path) -> None:
    assert _digest(sharded) == _digest(saved_model("llama").directory)


def test_other_weights_have_another_digest(copy: Path) -> None:
    digests = {_digest(copy)}
    # Copies: the library gives views of the file, which changes.
    tensors = {name: tensor.clone() for name, tensor in load_file(copy / SINGLE_FILE).items()}
    embedding, norm = tensors[EMBEDDING], tensors[FINAL_NORM].clone()
    changed = [embedding.clone() for _ in range(3)]
    for row, other in zip((0, 5, 315), changed, strict=True):
        other[row, 7] += 1e-3
    norm[17] += 1e-3
    zeros = torch.zeros_like(embedding)
    for name, tensor in (
        *((EMBEDDING, other) for other in changed),
        (FINAL_NORM, norm),
        (EMBEDDING, embedding.to(torch.bfloat16)),
        # The same bytes of another dtype.
        (EMBEDDING, zeros.half()),
        (EMBEDDING, zeros.bfloat16()),
    ):
        before = len(digests)
        save_file({**tensors, name: tensor}, copy / SINGLE_FILE)
        digests.add(_digest(copy))
        assert len(digests) == before + 1, (name, tensor.dtype)


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
    copy: Path, changes: dict[str, Any], same: bool
) -> None:
    original, whole = _digest(copy), (copy / "config.json").read_text()
    other = read_config(copy).model_copy(update={"biased_modules": frozenset(["q_proj"])})
    assert model_digest(other, Checkpoint(copy)) != original
    (copy / "config.json").write_text(json.dumps({**json.loads(whole), **changes}))
    assert (_digest(copy) == original) == same
    (copy / "config.json").write_text(whole)
