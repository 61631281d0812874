"""What the server gets, what it does not get, and that a failed run leaves nothing behind."""

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from gpu_side.weights import PROVISION_FILE, Provision, read_provision
from protocol.errors import FeatureKeyError, MaskError, ModelError, SettingsError, TsqpError
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_digest,
    linear_tensors,
    model_digest,
)
from protocol.model.config import read_config
from tee_side.protect.masks.mask import Pad
from tests.kit.model import Models
from tests.kit.rows import each_row
from tsqp.cli.model_files import provision as command
from tsqp.feature_key import FeatureKey
from tsqp.lab.research import feature_masks as masks
from tsqp.lab.research import provisioning
from tsqp.lab.research.provisioning import Provisioned, provision
from tsqp.mask_kinds import FeatureMask, SegmentMask

MASKS = [masks.FeaturePermutation(), masks.FeatureRotation(block=20)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _left(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def _served(source: Path, mask: Any, server: Path) -> tuple[Provisioned, dict[str, torch.Tensor]]:
    """Provision, and return what the server gets: the weights of its key, and no seed."""
    made = provision(source, mask, server, server.with_suffix(".key"))
    found = dict[str, torch.Tensor]()
    for shard in sorted(server.glob("*.safetensors")):
        found |= load_file(shard)
    assert made.weight_bytes == sum(tensor.nbytes for tensor in found.values())
    served = read_config(server), Checkpoint(server)
    assert made.key.server_linear_digest == linear_digest(*served)
    seed = made.key.seed.encode()
    assert all(seed not in path.read_bytes() for path in server.iterdir())
    return made, found


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_the_server_gets_no_original_tensor_and_nothing_but_linear_weights(
    saved_model: Models, out: Path, mask: FeatureMask
) -> None:
    source, server = saved_model("qwen2").directory, out / "server"
    made, found = _served(source, mask, server)
    config, key = read_config(source), FeatureKey.load(out / "server.key")
    originals = list(load_file(source / SINGLE_FILE).values())
    expected = linear_tensors(config)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    for name, tensor in found.items():
        if name.endswith(".bias"):
            assert tensor.dtype == torch.float32
            assert not bool(tensor.any())
        else:
            assert not any(torch.equal(tensor, original) for original in originals), name
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert _left(server) == ["config.json", *shards, INDEX_FILE, PROVISION_FILE]
    assert _left(out) == ["server", "server.key"]
    # Marker and key belong together and name the model.
    assert (key, key.mask, key.options) == (made.key, mask.name, mask.model_dump())
    assert key.model_digest == model_digest(config, Checkpoint(source))
    assert key.linear_digest == linear_digest(config, Checkpoint(source))
    marker = Provision(mask=mask.name, provision_id=key.provision_id)
    assert (read_provision(server), read_config(server)) == (marker, config)
    again = provision(source, mask, out / "server2", out / "key2").key
    assert again.seed != key.seed
    assert again.server_linear_digest != key.server_linear_digest


class Half(masks.FeaturePermutation):
    name: ClassVar[str] = "half"
    supports: ClassVar[Any] = "o_proj".__eq__


@pytest.mark.parametrize(
    ("changes", "error", "got"),
    [
        ({"mask": Pad()}, MaskError, "a mask of kind additive"),
        ({"mask": Half()}, MaskError, "no support for qkv_proj, gate_up_proj, down_proj"),
        ({"key_path": "mine"}, FeatureKeyError, "a file that exists"),
        ({"key_path": "link"}, FeatureKeyError, "a file that exists"),
        ({"server_dir": "full"}, ModelError, "files in it"),
        ({"server_dir": "mine"}, ModelError, "a file"),
        ({"server_dir": "link"}, ModelError, "no such directory to write to"),
        ({"key_path": "server"}, FeatureKeyError, "within the server's directory"),
        ({"key_path": "full/../server/key"}, FeatureKeyError, "within the server's directory"),
    ],
)
def test_what_cannot_be_provisioned_is_refused_before_any_work_and_nothing_is_overwritten(
    saved_model: Models,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: type[TsqpError],
    got: str,
) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("a refusal must come before any work")

    monkeypatch.setattr(provisioning.Checkpoint, "open", work)
    (out / "mine").write_text("mine")
    (out / "link").symlink_to("nowhere/at/all")
    (out / "full").mkdir()
    (out / "full" / ".hidden").touch()
    before = _left(out)
    usual = {"mask": masks.FeaturePermutation(), "server_dir": "server", "key_path": "key"}
    settings: dict[str, Any] = {
        name: out / value if isinstance(value, str) else value
        for name, value in {**usual, **changes}.items()
    }
    with pytest.raises(error) as caught:
        provision(saved_model().directory, **settings)
    assert got in str(caught.value)
    assert _left(out) == before
    assert (out / "mine").read_text() == "mine"


def test_a_run_that_is_ended_leaves_nothing(saved_model: Models, out: Path) -> None:
    def end(done: int, total: int) -> None:
        if done == 2:
            # Something is there by now, and under another name.
            (partial,) = out.iterdir()
            assert partial.name.startswith(".server.")
            raise SystemExit(143)

    def appear(done: int, total: int) -> None:
        (out / "server").mkdir(exist_ok=True)
        (out / "server" / "theirs").touch()

    given = saved_model().directory, masks.FeaturePermutation(), out / "server", out / "key"
    with pytest.raises(SystemExit):
        provision(*given, end)
    assert _left(out) == []
    # A directory that appears meanwhile is kept, and the key taken back.
    with pytest.raises(ModelError, match="not empty"):
        provision(*given, appear)
    assert (_left(out), _left(out / "server")) == (["server"], ["theirs"])


@each_row(
    ("option", "where", "got", "expected"),
    [
        ("block", "--option", "'block'", "KEY=VALUE"),
        ("block=1", "block of mask feature-rotation", "'1'", "greater than or equal to 2"),
        ("colour=1", "--option colour", "no option", "block, sigma, delta"),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, option: str, where: str, got: str, expected: str
) -> None:
    outputs = ("--server-dir", str(tmp_path / "server"), "--key", str(tmp_path / "key"))
    given = ["demo", "--mask", "feature-rotation", *outputs, "--option", option]
    error = CliRunner().invoke(command, given).exception
    assert isinstance(error, SettingsError)
    assert where in error.where
    assert got in error.got
    assert expected in error.expected
    assert list(tmp_path.iterdir()) == []


STIP, CLOAK = masks.SegmentPermutation(), masks.SegmentRotation()


@each_row(
    ("mask", "kind", "tied"),
    [
        (mask, kind, tied)
        for mask in (STIP, CLOAK)
        for kind, tied in (("llama", False), ("qwen3", True))
    ],
    str,
)
def test_the_server_gets_whole_layers_under_their_own_names_and_no_embedding(
    saved_model: Models, tmp_path: Path, mask: SegmentMask, kind: str, tied: bool
) -> None:
    biases = {} if kind == "qwen3" else {"attention_bias": True, "mlp_bias": True}
    source = saved_model(kind, tie_word_embeddings=tied, **biases).directory
    server = tmp_path / f"{mask.name}-{kind}-{tied}"
    made, found = _served(source, mask, server)
    config = read_config(source)
    H, K, C = config.heads
    norms = {n: s for n, s in light_tensors(config).items() if ".layers." in n}
    expected = norms | linear_tensors(config)
    if mask is STIP:
        heads = {"q_norm.weight": H, "k_norm.weight": K}
        for name in [n for n in norms if "_norm" in n]:
            expected[name] = (heads[name.split("self_attn.")[1]], C)
        for layer in range(config.num_hidden_layers):
            expected[f"model.layers.{layer}.self_attn.rope_order"] = (K, C // 2)
        expected[FINAL_NORM] = (config.hidden_size,)
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    assert made.holds == ("model" if mask is STIP else "layers")
    assert read_config(server).tie_word_embeddings == (tied and mask is CLOAK)
    assert read_config(server).model_copy(update={"tie_word_embeddings": tied}) == config
    marker = read_provision(server)
    assert marker is not None
    assert (marker.mask, marker.holds) == (mask.name, made.holds)
    assert marker.provision_id == made.key.provision_id
    # No tensor is the model's own but what a rotation leaves within a head or an MLP.
    originals = load_file(source / SINGLE_FILE)
    same = {n for n in found if n in originals and torch.equal(found[n], originals[n])}
    inner = {n for n in found if n.endswith((".bias", "q_norm.weight", "k_norm.weight"))}
    inner -= {n for n in found if n.endswith(("o_proj.bias", "down_proj.bias"))}
    assert same == (inner if mask is CLOAK else set())
    assert EMBEDDING not in found


MASK = masks.FeatureRotation(block=16)
SEED = "5e" * 32
OTHER = "d" * 64


def _key(**changes: Any) -> FeatureKey:
    fields: dict[str, Any] = {
        "mask": MASK.name,
        "options": MASK.model_dump(mode="json"),
        "seed": SEED,
        "model_digest": "a" * 64,
        "linear_digest": "b" * 64,
        "server_linear_digest": "c" * 64,
    }
    return FeatureKey.bind(**{**fields, **changes})


def _refusal(path: Path) -> FeatureKeyError:
    with pytest.raises(FeatureKeyError) as caught:
        FeatureKey.load(path)
    assert str(path) in caught.value.where
    assert SEED[:8] not in str(caught.value)
    return caught.value


@each_row("umask", [0, 0o777])
def test_a_saved_key_is_read_back_by_its_owner_alone(tmp_path: Path, umask: int) -> None:
    path, before = tmp_path / f"key-{umask}", os.umask(umask)
    try:
        _key().save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert FeatureKey.load(path) == _key()
    with pytest.raises(FeatureKeyError, match="File exists"):
        _key(seed="11" * 32).save(path)
    assert FeatureKey.load(path) == _key()
    # What is no key is refused, and a key that others may use.
    for content in ("\xff", "", "{", "[]", "[" * 5000, f'"{SEED}"'):
        path.write_text(content, encoding="latin-1")
        _refusal(path)
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        assert _refusal(path).got == f"mode {mode:04o}"


@each_row(
    ("changes", "where"),
    [
        ({"colour": SEED}, "colour"),
        *(({"seed": seed}, "seed") for seed in (SEED[:-2], SEED[:-1] + "\n", 3)),
        ({"options": {**MASK.model_dump(), "block": 32}}, "provision_id"),
        ({"options": {}}, "provision_id"),
        ({"seed": "5f" + SEED[2:]}, "provision_id"),
        ({"model_digest": OTHER}, "provision_id"),
        ({"linear_digest": OTHER}, "provision_id"),
        ({"server_linear_digest": OTHER}, "provision_id"),
        ({"provision_id": OTHER}, "provision_id"),
    ],
)
def test_a_changed_key_is_refused_by_the_field_that_does_not_fit(
    tmp_path: Path, changes: dict[str, Any], where: str
) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(json.dumps({**_key().model_dump(mode="json"), **changes}))
    error = _refusal(path)
    if where != "provision_id":
        assert error.where == f"{path}: {where}"
        return
    assert where in error.where
    assert error.got != error.expected
    assert error.got == changes.get("provision_id", _key().provision_id)


def test_the_key_of_other_weights_or_of_another_mask_is_refused_with_both(
    saved_model: Models,
) -> None:
    own = saved_model().directory
    config, checkpoint = given = read_config(own), Checkpoint(own)
    digests = {"model_digest": model_digest(*given), "linear_digest": linear_digest(*given)}
    key = _key(**digests)
    key.check(config, checkpoint, MASK)
    for field, digest in digests.items():
        with pytest.raises(FeatureKeyError, match=field) as caught:
            _key(**digests | {field: OTHER}).check(config, checkpoint, MASK)
        assert caught.value.got == OTHER
        assert digest in caught.value.expected
    for mask in (masks.FeatureRotation(block=8), masks.FeaturePermutation(block=16)):
        with pytest.raises(FeatureKeyError) as caught:
            key.check(config, checkpoint, mask)
        assert caught.value.got.startswith("feature-rotation block=16")
        assert caught.value.expected.startswith(f"{mask.name} block={mask.block}")
