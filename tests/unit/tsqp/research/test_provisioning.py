"""What the server gets, what it does not get, and that a failed run leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gpu_side.provision import PROVISION_FILE, Provision, read_provision
from protocol.errors import FeatureKeyError, MaskError, ModelError, TsqpError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, linear_tensors
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.weights import CPU, FusedLinear, load_linear
from tee_side.model.layers import load_tee_model
from tee_side.protect.masks.mask import FeatureMask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.randomness import Randomness
from tee_side.words import Operator
from tests.kit.model import SavedModel
from tsqp.lab.research import provisioning
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.feature_permutation import FeaturePermutation
from tsqp.lab.research.feature_rotation import FeatureRotation
from tsqp.lab.research.provisioning import provision

Models = Callable[..., SavedModel]
MASKS = [FeaturePermutation(), FeatureRotation(block=20)]
IDS = [mask.name for mask in MASKS]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where outputs go: an empty folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _left(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def _as_dtype(source: Path, directory: Path, dtype: torch.dtype) -> Path:
    """Copy a model and convert its weights."""
    shutil.copytree(source, directory)
    tensors = {name: t.to(dtype) for name, t in load_file(source / SINGLE_FILE).items()}
    save_file(tensors, directory / SINGLE_FILE)
    return directory


# --------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("mask", MASKS, ids=IDS)
def test_key_and_server_weights_give_the_plain_products(
    saved_model: Models, out: Path, mask: FeatureMask, kind: str, dtype: torch.dtype
) -> None:
    source = _as_dtype(saved_model(kind).directory, out / "model", dtype)
    provision(source, mask, out / "server", out / "key")
    config, plain, served = read_config(source), Checkpoint(source), Checkpoint(out / "server")
    norms = load_tee_model(config, plain, dtype).norms
    gains = [(n.input_layernorm, n.post_attention_layernorm) for n in norms]
    key = FeatureKey.load(out / "key")
    key.check(config, plain, mask)
    transforms = key.transforms(mask, config, gains)
    for (layer, operator), transform in transforms.items():
        original, transformed = (
            load_linear(checkpoint, config, layer, operator, dtype=torch.float32, device=CPU)
            for checkpoint in (plain, served)
        )
        x = torch.randn(4, original.weight.shape[1], generator=torch.Generator().manual_seed(layer))
        masked = transform.mask(x, Randomness())
        result = masked.unmask(transformed(masked.sent[0]))
        expected = x.double() @ original.weight.double().t()
        rounding = mask.tolerance if dtype == torch.float32 else 2**-7
        assert (result - expected).abs().max() <= rounding * expected.abs().max()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("mask", MASKS, ids=IDS)
def test_the_server_gets_no_original_tensor_and_nothing_but_linear_weights(
    saved_model: Models, out: Path, mask: FeatureMask, kind: str
) -> None:
    source = saved_model(kind).directory
    made = provision(source, mask, out / "server", out / "key")
    config = read_config(source)
    originals = list(load_file(source / SINGLE_FILE).values())
    found: dict[str, torch.Tensor] = {}
    for shard in sorted((out / "server").glob("*.safetensors")):
        found |= load_file(shard)
    expected = linear_tensors(config, FUSED_MODULES)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    for name, tensor in found.items():
        if name.endswith(".bias"):
            assert tensor.dtype == torch.float32
            assert not bool(tensor.any())
        else:
            assert not any(torch.equal(tensor, original) for original in originals), name
    assert made.weight_bytes == sum(tensor.nbytes for tensor in found.values())
    assert _left(out / "server") == [
        "config.json",
        *[f"model-{n}-of-00003.safetensors" for n in ("00001", "00002", "00003")],
        INDEX_FILE,
        PROVISION_FILE,
    ]
    assert _left(out) == ["key", "server"]


def test_weights_keep_the_models_dtype(saved_model: Models, out: Path) -> None:
    source = _as_dtype(saved_model("qwen2").directory, out / "model", torch.bfloat16)
    provision(source, FeatureRotation(), out / "server", out / "key")
    for shard in (out / "server").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(shard).values()} == {torch.bfloat16}


def test_marker_and_key_belong_together_and_name_the_model(saved_model: Models, out: Path) -> None:
    source, mask = saved_model().directory, FeatureRotation(block=20)
    made = provision(source, mask, out / "server", out / "key")
    key, config = FeatureKey.load(out / "key"), read_config(source)
    assert key == made.key
    assert (key.mask, key.options) == (mask.name, mask.model_dump())
    assert key.model_digest == model_digest(config, Checkpoint(source))
    assert key.linear_digest == linear_digest(config, Checkpoint(source))
    assert key.server_linear_digest == linear_digest(config, Checkpoint(out / "server"))
    assert key.server_linear_digest != key.linear_digest
    marker = read_provision(out / "server")
    assert marker == Provision(mask=mask.name, provision_id=key.provision_id)
    assert read_config(out / "server") == config
    seed = key.seed.encode()
    assert all(seed not in path.read_bytes() for path in (out / "server").iterdir())


def test_two_runs_have_different_keys_and_weights(saved_model: Models, out: Path) -> None:
    source = saved_model().directory
    first, second = (
        provision(source, FeatureRotation(), out / f"server{n}", out / f"key{n}").key
        for n in (1, 2)
    )
    assert first.seed != second.seed
    assert first.server_linear_digest != second.server_linear_digest


def test_others_may_read_the_servers_files_and_not_the_key(saved_model: Models, out: Path) -> None:
    before = os.umask(0o022)
    try:
        provision(saved_model().directory, FeaturePermutation(), out / "server", out / "key")
    finally:
        os.umask(before)
    assert (out / "server").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (out / "server").iterdir()} == {0o644}
    assert (out / "key").stat().st_mode & 0o777 == 0o600


def test_an_empty_directory_may_be_there_and_a_link_to_it(saved_model: Models, out: Path) -> None:
    (out / "real").mkdir()
    (out / "server").symlink_to("real")
    provision(saved_model().directory, FeaturePermutation(), out / "server", out / "key")
    assert read_provision(out / "real") is not None
    assert _left(out) == ["key", "real", "server"]


# ------------------------------------------------------------------------------------------- memory


def test_one_layer_is_in_memory_at_a_time(
    saved_model: Models, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, weakref.ref[torch.Tensor]]] = []
    seen: list[set[int]] = []

    def loading(*arguments: Any, **settings: Any) -> FusedLinear:
        alive = {layer for layer, tensor in made if tensor() is not None}
        seen.append(alive | {arguments[2]})
        linear = load_linear(*arguments, **settings)
        # Of the operator before, not even the float64 one is left.
        assert not [1 for _, t in made if (x := t()) is not None and x.dtype == torch.float64]
        made.append((arguments[2], weakref.ref(linear.weight)))
        return linear

    def saving(tensors: dict[str, torch.Tensor], path: Path, **settings: Any) -> None:
        layer = int(path.name.split("-")[1]) - 1
        made.extend((layer, weakref.ref(tensor)) for tensor in tensors.values())
        save_file(tensors, path, **settings)

    monkeypatch.setattr(provisioning, "load_linear", loading)
    monkeypatch.setattr(provisioning, "save_file", saving)
    provision(saved_model().directory, FeatureRotation(), out / "server", out / "key")
    assert seen == [{layer} for layer in range(3) for _ in FUSED_MODULES]


def test_progress_counts_layers(saved_model: Models, out: Path) -> None:
    calls: list[tuple[int, int]] = []
    provision(
        saved_model().directory,
        FeaturePermutation(),
        out / "server",
        out / "key",
        lambda done, total: calls.append((done, total)),
    )
    assert calls == [(1, 3), (2, 3), (3, 3)]


# ------------------------------------------------------------------------------ refused before work


class Half(FeaturePermutation):
    """Supports one operator only."""

    name: ClassVar[str] = "half"

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        return operator == "o_proj"


class Shouting(FeaturePermutation):
    """Has a name that the marker cannot hold."""

    name: ClassVar[str] = "LOUD mask"


def _refusal(
    source: Path, out: Path, error: type[TsqpError], **changes: Any
) -> tuple[TsqpError, list[str]]:
    """Provision with settings that are wrong; return the error and what it left."""
    before = _left(out)
    settings: dict[str, Any] = {
        "mask": FeaturePermutation(),
        "server_dir": out / "server",
        "key_path": out / "key",
    }
    with pytest.raises(error) as caught:
        provision(source, **{**settings, **changes})
    assert _left(out) == before
    return caught.value, before


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("a refusal must come before any work")

    monkeypatch.setattr(provisioning, "read_config", work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (Pad(), "a mask of kind additive"),
        (Half(), "no support for qkv_proj, gate_up_proj, down_proj"),
        (Shouting(), "this name"),
    ],
)
def test_a_mask_that_cannot_be_provisioned_is_refused(
    saved_model: Models, out: Path, mask: Any, got: str
) -> None:
    error, _ = _refusal(saved_model().directory, out, MaskError, mask=mask)
    assert (error.where, error.got) == (f"mask {mask.name}", got)


@pytest.mark.usefixtures("no_work")
def test_a_key_that_exists_is_refused_and_kept(saved_model: Models, out: Path) -> None:
    (out / "key").write_text("mine")
    _refusal(saved_model().directory, out, FeatureKeyError)
    assert (out / "key").read_text() == "mine"
    (out / "link").symlink_to("nowhere")
    _refusal(saved_model().directory, out, FeatureKeyError, key_path=out / "link")


@pytest.mark.usefixtures("no_work")
def test_a_server_directory_with_anything_in_it_is_refused(saved_model: Models, out: Path) -> None:
    (out / "server").mkdir()
    (out / "server" / ".hidden").touch()
    error, _ = _refusal(saved_model().directory, out, ModelError)
    assert error.where == str(out / "server")
    (out / "file").touch()
    _refusal(saved_model().directory, out, ModelError, server_dir=out / "file")
    (out / "link").symlink_to("nowhere/at/all")
    _refusal(saved_model().directory, out, ModelError, server_dir=out / "link")


@pytest.mark.usefixtures("no_work")
def test_a_key_in_the_servers_directory_is_refused(saved_model: Models, out: Path) -> None:
    (out / "server").mkdir()
    for key in (out / "server" / "key", out / "other" / ".." / "server" / "key", out / "server"):
        error, _ = _refusal(saved_model().directory, out, FeatureKeyError, key_path=key)
        assert "within the server's directory" in error.got


@pytest.mark.usefixtures("no_work")
def test_folders_that_are_not_there_are_refused(saved_model: Models, out: Path) -> None:
    source = saved_model().directory
    error, _ = _refusal(source, out, FeatureKeyError, key_path=out / "no" / "key")
    assert error.where == str(out / "no" / "key")
    error, _ = _refusal(source, out, ModelError, server_dir=out / "no" / "server")
    assert error.where == str(out / "no")


def test_an_incomplete_model_is_refused(saved_model: Models, out: Path) -> None:
    source = out / "model"
    shutil.copytree(saved_model().directory, source)
    tensors = load_file(source / SINGLE_FILE)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, source / SINGLE_FILE)
    error, _ = _refusal(source, out, ModelError)
    assert "model.layers.2.mlp.down_proj.weight" in error.where


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.down_proj.lora_A.weight"]
)
def test_a_model_with_a_tensor_too_many_is_refused(
    saved_model: Models, out: Path, name: str
) -> None:
    """What it adds to the products would be missing in those of the server's weights."""
    source = out / "model"
    shutil.copytree(saved_model().directory, source)
    tensors = load_file(source / SINGLE_FILE)
    save_file({**tensors, name: torch.ones(96)}, source / SINGLE_FILE)
    error, _ = _refusal(source, out, ModelError)
    assert name in str(error)


# ------------------------------------------------------------------------------------ failed midway


def _edited(source: Path, directory: Path, name: str, value: float) -> Path:
    shutil.copytree(source, directory)
    tensors = load_file(source / SINGLE_FILE)
    tensors[name].view(-1)[0] = value
    save_file(tensors, directory / SINGLE_FILE)
    return directory


def test_weights_that_overflow_once_they_are_transformed_are_named(
    saved_model: Models, out: Path
) -> None:
    """All that the model holds is finite; a rotation adds up what float16 then cannot hold."""
    source = _as_dtype(saved_model().directory, out / "model", torch.float16)
    tensors = load_file(source / SINGLE_FILE)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 60_000.0)
    save_file(tensors, source / SINGLE_FILE)
    error, _ = _refusal(source, out, ModelError, mask=FeatureRotation())
    assert error.where.endswith(f": {name}")
    assert error.got == "values that are not finite, transformed"
    assert error.expected == "weights that mask feature-rotation leaves within torch.float16"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
    ],
)
def test_a_tensor_that_cannot_be_transformed_is_named(
    saved_model: Models, out: Path, name: str
) -> None:
    source = _edited(saved_model().directory, out / "model", name, float("inf"))
    found, _ = _refusal(source, out, ModelError, mask=FeatureRotation())
    assert name in found.where


def test_a_run_that_is_ended_leaves_nothing(saved_model: Models, out: Path) -> None:
    def end(done: int, total: int) -> None:
        if done == 2:
            # Something is there by now, and under another name.
            (partial,) = out.iterdir()
            assert partial.name.startswith(".server.")
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        provision(saved_model().directory, FeaturePermutation(), out / "server", out / "key", end)
    assert _left(out) == []


def test_a_full_disk_leaves_nothing(
    saved_model: Models, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(provisioning, "save_file", full)
    error, _ = _refusal(saved_model().directory, out, ModelError)
    assert "No space left" in error.got


def test_the_key_is_there_before_the_directory(
    saved_model: Models, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[list[str]] = []
    rename = Path.rename

    def renaming(self: Path, target: Path) -> Path:
        before.append(_left(out))
        FeatureKey.load(out / "key")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renaming)
    provision(saved_model().directory, FeaturePermutation(), out / "server", out / "key")
    ((partial, *rest),) = before
    assert partial.startswith(".server.")
    assert rest == ["key"]


def test_a_directory_that_appears_meanwhile_is_kept_and_the_key_taken_back(
    saved_model: Models, out: Path
) -> None:
    def appear(done: int, total: int) -> None:
        (out / "server").mkdir(exist_ok=True)
        (out / "server" / "theirs").touch()

    with pytest.raises(ModelError, match="not empty"):
        provision(
            saved_model().directory, FeaturePermutation(), out / "server", out / "key", appear
        )
    assert _left(out) == ["server"]
    assert _left(out / "server") == ["theirs"]


def test_a_key_that_appears_meanwhile_is_kept_and_no_directory_made(
    saved_model: Models, out: Path
) -> None:
    def appear(done: int, total: int) -> None:
        (out / "key").write_text("theirs")

    with pytest.raises(FeatureKeyError):
        provision(
            saved_model().directory, FeaturePermutation(), out / "server", out / "key", appear
        )
    assert _left(out) == ["key"]
    assert (out / "key").read_text() == "theirs"


def test_the_index_lists_every_tensor_once(saved_model: Models, out: Path) -> None:
    source = saved_model().directory
    made = provision(source, FeaturePermutation(), out / "server", out / "key")
    index = json.loads((out / "server" / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(linear_tensors(read_config(source), FUSED_MODULES))
    assert index["metadata"] == {"total_size": made.weight_bytes}
