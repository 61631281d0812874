"""Safetensors files: damage is found before a weight is read, and named by file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from protocol.messages import FUSED_MODULES, ModuleName
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
    module_name,
)
from protocol.model.config import read_config
from protocol.model.weights import load_linear, load_tensor
from tests.kit.model import SavedModel
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]
Tensors = dict[str, torch.Tensor]

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"
EXTRA = "a tensor that config.json does not explain"


def _open_and_check(directory: Path) -> Checkpoint:
    """What the service does before it loads."""
    config, checkpoint = read_config(directory), Checkpoint(directory)
    checkpoint.require(light_tensors(config) | linear_tensors(config, FUSED_MODULES))
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


# --------------------------------------------------------------------- which tensors, and how


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
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
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
                error = _refusal(directory, SINGLE_FILE, name)
                assert error.got == f"shape {list(other.shape)}"
        changed = dict(tensors)


@each_row(
    ("name", "tensor", "got"),
    [
        (DOWN, torch.ones(48, 96).to(torch.int64), "'I64'"),
        (DOWN, torch.ones(48, 96).to(torch.int8), "'I8'"),
        (DOWN, torch.ones(48, 96).to(torch.float64), "dtype F64"),
        (DOWN, torch.ones(48, 96).to(torch.bool), "'BOOL'"),
        (DOWN, torch.ones(48, 96).to(torch.float8_e4m3fn), "'F8_E4M3'"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(96), EXTRA),
        ("model.layers.3.input_layernorm.weight", torch.ones(48), EXTRA),
        # RoPE buffers of old checkpoints mean nothing.
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8), None),
    ],
)
def test_a_tensor_of_another_dtype_or_of_no_use_is_named(
    saved_model: Models, tmp_path: Path, name: str, tensor: torch.Tensor, got: str | None
) -> None:
    shutil.copytree(saved_model("llama").directory, tmp_path, dirs_exist_ok=True)
    _change(tmp_path, lambda tensors: tensors.update({name: tensor}))
    if got is None:
        _open_and_check(tmp_path)
    else:
        assert _refusal(tmp_path, SINGLE_FILE, name).got == got


def test_an_lm_head_beside_a_tied_embedding_is_allowed(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    _open_and_check(directory)
    _change(directory, lambda tensors: tensors.pop("lm_head.weight"))
    _open_and_check(directory)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_fused_modules_stand_side_by_side_with_their_biases(saved_model: Models, kind: str) -> None:
    directory = saved_model(kind).directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    tensors = load_file(directory / SINGLE_FILE)
    fused: dict[str, list[ModuleName]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "o_proj": ["o_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "down_proj": ["down_proj"],
    }
    assert fused == {operator: list(modules) for operator, modules in FUSED_MODULES.items()}
    for operator, modules in FUSED_MODULES.items():
        linear = load_linear(checkpoint, config, 1, operator, dtype=torch.float32, device=CPU)
        names = [module_name(1, module) for module in modules]
        whole = torch.cat([tensors[f"{name}.weight"] for name in names])
        assert torch.equal(linear.weight, whole)
        biased = kind == "qwen2" and operator == "qkv_proj"
        assert (linear.bias is not None) == biased
        if linear.bias is not None:
            assert torch.equal(linear.bias, torch.cat([tensors[f"{name}.bias"] for name in names]))
        hidden = torch.ones(2, whole.shape[1])
        expected = torch.nn.functional.linear(hidden, whole, linear.bias)
        for module, rows in linear.rows.items():
            assert rows.stop - rows.start == config.module_shape(module)[0]
        assert torch.equal(linear(hidden), expected)
    # A module without a bias has one of zeros beside one that has one.
    one = config.model_copy(update={"biased_modules": config.biased_modules & {"v_proj"}})
    mixed = load_linear(checkpoint, one, 1, "qkv_proj", dtype=torch.float32, device=CPU).bias
    assert (mixed is None) == (kind == "llama")
    assert mixed is None or (mixed[-24:].any() and not mixed[:-24].any())


# ------------------------------------------------------------------------------ damaged files


@each_row(
    ("damage", "got"),
    [
        *((lambda c, n=n: c[:n], f"{n} bytes that do not parse") for n in (0, 1, 7, 8, 100)),
        (lambda c: c[:-1], "{} bytes"),
        (lambda c: c[:-1000], "{} bytes"),
        (lambda c: c + b"x", "{} bytes"),
        (lambda c: c[:8] + bytes(4) + c[12:], "JSONDecodeError"),
        (lambda c: (2**63 - 1).to_bytes(8, "little") + b"{}", f"{2**63 - 1}"),
    ],
)
def test_a_damaged_file_is_refused(
    saved_model: Models, tmp_path: Path, damage: Callable[[bytes], bytes], got: str
) -> None:
    shutil.copytree(saved_model("llama").directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / SINGLE_FILE
    content = damage(path.read_bytes())
    path.write_bytes(content)
    assert _refusal(tmp_path, SINGLE_FILE).got.startswith(got.format(len(content)))


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
    error = _refusal(directory)
    assert error.got.startswith("no weights among ")
    assert error.expected == f"{SINGLE_FILE} or {INDEX_FILE}"
    (directory / SINGLE_FILE).mkdir()
    _refusal(directory, SINGLE_FILE)


def test_a_file_that_changes_after_the_check_is_refused_when_it_is_read(directory: Path) -> None:
    config, checkpoint = read_config(directory), _open_and_check(directory)
    shape = (config.vocab_size, config.hidden_size)
    loaded = load_tensor(checkpoint, EMBEDDING, shape, dtype=torch.float32)
    before = loaded.clone()
    with pytest.raises(ModelError, match="since the file was checked"):
        load_tensor(checkpoint, EMBEDDING, (1, config.hidden_size), dtype=torch.float32)
    for content in (b"", (directory / SINGLE_FILE).read_bytes()[:-1]):
        (directory / SINGLE_FILE).unlink()
        (directory / SINGLE_FILE).write_bytes(content)
        with pytest.raises(ModelError, match=EMBEDDING):
            load_tensor(checkpoint, EMBEDDING, shape, dtype=torch.float32)
    assert torch.equal(loaded, before)  # it is no mapping


@each_row("value", [float("nan"), float("inf"), -float("inf")])
def test_no_reader_hands_out_what_is_not_finite(directory: Path, value: float) -> None:
    plain = load_file(directory / SINGLE_FILE)[DOWN]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        spoilt = plain.to(dtype)
        for worst in (torch.finfo(dtype).max, value):
            spoilt[3, 5] = worst
            _change(directory, lambda tensors, spoilt=spoilt: tensors.update({DOWN: spoilt}))
            checkpoint = _open_and_check(directory)
            readers: list[Callable[[], torch.Tensor]] = [
                lambda c=checkpoint: c.rows(DOWN, 0, 48),
                lambda c=checkpoint: c.rows(DOWN, 0, 48, 3),
                lambda c=checkpoint: load_tensor(c, DOWN, (48, 96), dtype=torch.float32),
            ]
            for read in readers:
                if worst is not value:
                    assert read().max() == worst
                    continue
                with pytest.raises(ModelError) as caught:
                    read()
                assert caught.value.where == f"{directory / SINGLE_FILE}: {DOWN}"
                assert caught.value.got == "NaN or infinity"


# --------------------------------------------------------------------------------------- shards


def test_a_sharded_model_holds_the_same_tensors(sharded: Path, saved_model: Models) -> None:
    single = saved_model("llama").directory
    shapes = light_tensors(read_config(single))
    both = _open_and_check(sharded), _open_and_check(single)
    for name in (EMBEDDING, FINAL_NORM):
        read = [load_tensor(c, name, shapes[name], dtype=torch.float32) for c in both]
        assert torch.equal(*read)


def _mapped(directory: Path, **changes: Any) -> None:
    """Write other files of tensors to the index."""
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"] |= changes
    (directory / INDEX_FILE).write_text(json.dumps(index))


@each_row(
    "file",
    [
        *(
            "../outside.safetensors",
            "/etc/passwd",
            "sub/a.safetensors",
            "..",
            ".",
            "",
            "a\0",
            "a\n",
        ),
        *("\ud800", "x" * 256, 7, None),
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


def test_a_shard_that_holds_nothing_needed_may_be_missing(sharded: Path) -> None:
    _mapped(sharded, **{"model.layers.0.mlp.up_proj.weight": "gone.safetensors"})
    config, checkpoint = read_config(sharded), Checkpoint(sharded)
    checkpoint.require(light_tensors(config))
    with pytest.raises(ModelError, match=r"gone\.safetensors: .*up_proj.weight: got no such file"):
        checkpoint.require(linear_tensors(config, ("gate_up_proj",)))
    shutil.copy(sharded / "a.safetensors", sharded.parent / "outside")
    for target in ("../outside", "nowhere"):
        (sharded / "a.safetensors").unlink()
        (sharded / "a.safetensors").symlink_to(target)
        _refusal(sharded, "a.safetensors")
