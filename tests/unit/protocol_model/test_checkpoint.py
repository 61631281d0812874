"""Safetensors files: damage is found before a weight is read, and named by file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import read_config
from protocol.model.weights import load_tensor
from tests.kit.model import SavedModel
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]

DOWN = "model.layers.1.mlp.down_proj.weight"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.fixture
def directory(saved_model: Models, tmp_path: Path) -> Path:
    """A model of its own, in one file."""
    copy = tmp_path / "model"
    shutil.copytree(saved_model("llama").directory, copy)
    return copy


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The same model in two files and an index."""
    tensors = load_file(directory / SINGLE_FILE)
    (directory / SINGLE_FILE).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    _write_index(directory, weight_map)
    return directory


def _write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((directory / INDEX_FILE).read_text())["weight_map"]
    return weight_map


def _open_and_check(directory: Path) -> Checkpoint:
    """What the service does before it loads."""
    config, checkpoint = read_config(directory), Checkpoint(directory)
    checkpoint.require(light_tensors(config) | linear_tensors(config, FUSED_MODULES))
    checkpoint.refuse_extra(config)
    return checkpoint


def _refusal(directory: Path, *named: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _open_and_check(directory)
    text = str(caught.value)
    assert str(directory) in text
    assert all(name in caught.value.where for name in named), text
    assert ": got " in text
    assert ", expected " in text
    return caught.value


def _change(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, directory / SINGLE_FILE)


def test_a_model_in_one_file_is_accepted(directory: Path) -> None:
    checkpoint = _open_and_check(directory)
    names = list(load_file(directory / SINGLE_FILE))
    assert checkpoint.holds(names)
    assert not checkpoint.holds([*names, "model.layers.9.mlp.up_proj.weight"])


def test_a_sharded_model_holds_the_same_tensors(sharded: Path, saved_model: Models) -> None:
    single = saved_model("llama").directory
    shapes = light_tensors(read_config(single))
    both = _open_and_check(sharded), _open_and_check(single)
    for name in (EMBEDDING, FINAL_NORM):
        read = [load_tensor(c, name, shapes[name], dtype=torch.float32) for c in both]
        assert torch.equal(*read)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -1, -1000])
def test_a_truncated_file_is_refused_with_its_size(directory: Path, kept: int) -> None:
    path = directory / SINGLE_FILE
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    error = _refusal(directory, SINGLE_FILE)
    if 0 <= kept <= 100:  # not even the header is whole
        assert error.got.startswith(f"{kept} bytes that do not parse")
    else:
        assert error.got == f"{len(content[:kept])} bytes"
        assert error.expected.startswith(f"{len(content)}, ")


def test_a_file_with_trailing_bytes_is_refused(directory: Path) -> None:
    path = directory / SINGLE_FILE
    path.write_bytes(path.read_bytes() + b"x")
    _refusal(directory, SINGLE_FILE)


def test_a_file_with_a_damaged_header_is_refused(directory: Path) -> None:
    path = directory / SINGLE_FILE
    content = bytearray(path.read_bytes())
    content[8:12] = b"\x00\x00\x00\x00"
    path.write_bytes(content)
    _refusal(directory, SINGLE_FILE)


def test_a_header_that_claims_to_be_huge_is_refused(directory: Path) -> None:
    (directory / SINGLE_FILE).write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    _refusal(directory, SINGLE_FILE)


@pytest.mark.parametrize("name", [EMBEDDING, FINAL_NORM, DOWN, "lm_head.weight"])
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(
    directory: Path, name: str
) -> None:
    _change(directory, lambda tensors: tensors.pop(name))
    error = _refusal(directory, name)
    assert error.got == "no such tensor"
    assert error.expected.startswith("[")


@pytest.mark.parametrize("name", [EMBEDDING, FINAL_NORM, DOWN])
@pytest.mark.parametrize("how", ["transposed", "shorter", "longer", "deeper"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    directory: Path, name: str, how: str
) -> None:
    original = load_file(directory / SINGLE_FILE)[name]
    changed = {
        "transposed": original.t() if original.dim() == 2 else original[None],
        "shorter": original[:-1],
        "longer": torch.cat((original, original[:1])),
        "deeper": original[None],
    }[how]
    _change(directory, lambda tensors: tensors.update({name: changed}))
    error = _refusal(directory, SINGLE_FILE, name)
    assert error.got == f"shape {list(changed.shape)}"
    assert error.expected == f"{list(original.shape)}"


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.int64, "'I64'"),
        (torch.int8, "'I8'"),
        (torch.float64, "dtype F64"),
        (torch.bool, "'BOOL'"),
        (torch.float8_e4m3fn, "'F8_E4M3'"),
    ],
)
def test_a_tensor_of_another_dtype_is_named(directory: Path, dtype: torch.dtype, said: str) -> None:
    _change(directory, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(dtype)}))
    error = _refusal(directory, SINGLE_FILE, DOWN)
    assert error.got == said
    assert "BF16" in error.expected


def test_a_bias_that_the_configuration_does_not_explain_is_refused(directory: Path) -> None:
    _change(directory, lambda tensors: tensors.update({Q_BIAS: torch.zeros(96)}))
    error = _refusal(directory, SINGLE_FILE, Q_BIAS)
    assert error.got == "a tensor that config.json does not explain"


def test_a_layer_that_the_configuration_does_not_count_is_refused(directory: Path) -> None:
    name = "model.layers.3.input_layernorm.weight"
    _change(directory, lambda tensors: tensors.update({name: torch.ones(48)}))
    _refusal(directory, SINGLE_FILE, name)


def test_rope_buffers_of_old_checkpoints_are_allowed(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change(directory, lambda tensors: tensors.update({name: torch.ones(8)}))
    _open_and_check(directory)


def test_an_lm_head_beside_a_tied_embedding_is_allowed(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    _open_and_check(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "a.pth", "b.ckpt", "c.pkl"])
def test_pickled_weights_are_refused_by_their_name(directory: Path, name: str) -> None:
    (directory / SINGLE_FILE).rename(directory / name)
    error = _refusal(directory, name)
    assert "can run code" in error.got


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "plain pickle"])
def test_a_pickle_under_a_safetensors_name_is_refused_and_not_run(
    directory: Path, legacy: bool
) -> None:
    torch.save(
        {"a": torch.ones(2)},
        directory / SINGLE_FILE,
        _use_new_zipfile_serialization=not legacy,
    )
    error = _refusal(directory, SINGLE_FILE)
    assert error.got == "a pickle, which can run code when it is loaded"


def test_a_directory_without_weights_says_what_it_looked_for(directory: Path) -> None:
    (directory / SINGLE_FILE).unlink()
    error = _refusal(directory)
    assert error.where == str(directory)
    assert error.got.startswith("no weights among ")
    assert SINGLE_FILE in error.expected
    assert INDEX_FILE in error.expected


def test_weights_that_are_a_directory_are_refused(directory: Path) -> None:
    (directory / SINGLE_FILE).unlink()
    (directory / SINGLE_FILE).mkdir()
    _refusal(directory, SINGLE_FILE)


@each_row(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "..",
        ".",
        "",
        "a\0",
        "a\n",
        "\ud800",
        "x" * 256,
        7,
        None,
    ],
)
def test_an_index_that_points_outside_its_directory_is_refused(sharded: Path, file: object) -> None:
    shutil.copy(sharded / "a.safetensors", sharded.parent / "outside.safetensors")
    _write_index(sharded, {**_weight_map(sharded), DOWN: file})
    error = _refusal(sharded, INDEX_FILE, DOWN)
    assert error.expected == "the name of a file in the same directory"


def test_an_index_that_names_a_missing_file_is_refused_by_that_file(sharded: Path) -> None:
    _write_index(sharded, {**_weight_map(sharded), DOWN: "c.safetensors"})
    _refusal(sharded, "c.safetensors")


def test_an_index_that_names_a_tensor_its_file_lacks_is_refused(sharded: Path) -> None:
    weight_map = _weight_map(sharded)
    other = "b.safetensors" if weight_map[DOWN] == "a.safetensors" else "a.safetensors"
    _write_index(sharded, {**weight_map, DOWN: other})
    error = _refusal(sharded, other, DOWN)
    assert error.got == "no such tensor"


def test_an_index_that_names_a_tensor_no_file_has_is_refused(sharded: Path) -> None:
    _write_index(sharded, {**_weight_map(sharded), "model.extra.weight": "a.safetensors"})
    _refusal(sharded, "a.safetensors", "model.extra.weight")


def test_a_tensor_in_two_files_is_refused_by_both(sharded: Path) -> None:
    tensors = load_file(sharded / "b.safetensors")
    name = min(load_file(sharded / "a.safetensors"))
    save_file({**tensors, name: torch.ones(1)}, sharded / "b.safetensors")
    error = _refusal(sharded, "b.safetensors", name)
    assert error.got == "a tensor that a.safetensors holds too"


@pytest.mark.parametrize("weight_map", [None, [], {}, "a.safetensors"])
def test_an_index_without_a_map_is_refused(sharded: Path, weight_map: object) -> None:
    _write_index(sharded, weight_map)
    assert _refusal(sharded, INDEX_FILE).where.endswith(": weight_map")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    _refusal(sharded, INDEX_FILE)


def test_a_file_that_is_replaced_after_the_check_is_refused_when_it_is_read(
    directory: Path,
) -> None:
    checkpoint = _open_and_check(directory)
    (directory / SINGLE_FILE).unlink()
    (directory / SINGLE_FILE).write_bytes(b"")
    with pytest.raises(ModelError, match=EMBEDDING):
        load_tensor(checkpoint, EMBEDDING, (320, 48), dtype=torch.float32)


def test_a_tensor_that_shrinks_after_the_check_is_refused_when_it_is_read(
    directory: Path,
) -> None:
    checkpoint = _open_and_check(directory)
    (directory / SINGLE_FILE).unlink()
    save_file({EMBEDDING: torch.ones(1, 48)}, directory / SINGLE_FILE)
    with pytest.raises(ModelError, match=EMBEDDING):
        load_tensor(checkpoint, EMBEDDING, (320, 48), dtype=torch.float32)


def test_what_is_loaded_does_not_change_with_the_file(directory: Path) -> None:
    checkpoint = _open_and_check(directory)
    loaded = load_tensor(checkpoint, FINAL_NORM, (48,), dtype=torch.float32)
    before = loaded.clone()
    with (directory / SINGLE_FILE).open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    assert torch.equal(loaded, before)


def test_a_shard_that_holds_nothing_needed_may_be_missing(sharded: Path) -> None:
    config = read_config(sharded)
    light = light_tensors(config)
    Checkpoint(sharded).require(light)
    weight_map = _weight_map(sharded)
    _write_index(sharded, {**weight_map, "model.layers.0.mlp.up_proj.weight": "gone.safetensors"})
    checkpoint = Checkpoint(sharded)
    checkpoint.require(light)
    with pytest.raises(ModelError, match=r"gone\.safetensors: .*up_proj.weight: got no such file"):
        checkpoint.require(linear_tensors(config, ("gate_up_proj",)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_reader_hands_out_what_is_not_finite(
    directory: Path, dtype: torch.dtype, value: float
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN] = tensors[DOWN].to(dtype)
        tensors[DOWN][3, 5] = value

    _change(directory, spoil)
    checkpoint = _open_and_check(directory)
    for read in (
        lambda: checkpoint.rows(DOWN, 0, 48),
        lambda: checkpoint.rows(DOWN, 0, 48, 3),
        lambda: load_tensor(checkpoint, DOWN, (48, 96), dtype=torch.float32),
    ):
        with pytest.raises(ModelError) as caught:
            read()
        assert caught.value.where == f"{directory / SINGLE_FILE}: {DOWN}"
        assert caught.value.got == "NaN or infinity"


def test_the_largest_floats_are_read(directory: Path) -> None:
    largest = torch.finfo(torch.float32).max
    _change(directory, lambda tensors: tensors[DOWN].fill_(largest))
    assert (_open_and_check(directory).rows(DOWN, 0, 48) == largest).all()


@pytest.mark.parametrize("target", ["../outside", "nowhere"])
def test_a_shard_that_is_a_link_to_elsewhere_is_refused(sharded: Path, target: str) -> None:
    shutil.copy(sharded / "a.safetensors", sharded.parent / "outside")
    (sharded / "a.safetensors").unlink()
    (sharded / "a.safetensors").symlink_to(target)
    _refusal(sharded, "a.safetensors")
