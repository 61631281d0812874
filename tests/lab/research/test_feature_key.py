"""The key file: whom it is for, what it is bound to, and that a changed one fits nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from protocol.errors import FeatureKeyError
from protocol.model.checkpoint import SINGLE_FILE, Checkpoint
from protocol.model.config import ModelConfig, read_config
from protocol.model.identity import linear_digest, model_digest
from tee_side.protect.masks.mask import FeatureMask
from tests.kit.model import SavedModel
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.feature_permutation import FeaturePermutation
from tsqp.lab.research.feature_rotation import FeatureRotation

Models = Callable[..., SavedModel]
MASK = FeatureRotation(block=16)
SEED = "5e" * 32


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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A key that was saved."""
    _key().save(tmp_path / "key")
    return tmp_path / "key"


def _refusal(path: Path) -> FeatureKeyError:
    with pytest.raises(FeatureKeyError) as caught:
        FeatureKey.load(path)
    assert str(path) in caught.value.where
    assert SEED[:8] not in str(caught.value)
    return caught.value


def _rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_saved_key_is_read_back(path: Path) -> None:
    assert FeatureKey.load(path) == _key()


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_a_key_is_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        _key().save(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o7777 == 0o600


def test_nothing_is_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(FeatureKeyError, match="File exists"):
        _key(seed="11" * 32).save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644])
def test_a_key_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    error = _refusal(path)
    assert error.got == f"mode {mode:04o}"
    assert error.expected.startswith("0600")


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 5000, f'"{SEED}"', "\xff"])
def test_what_is_no_key_is_refused(path: Path, content: str) -> None:
    path.write_text(content, encoding="latin-1")
    _refusal(path)


def test_an_unknown_field_is_named(path: Path) -> None:
    _rewrite(path, colour=SEED)
    assert _refusal(path).where == f"{path}: colour"


@pytest.mark.parametrize("seed", [SEED[:-2], SEED + "00", SEED[:-1] + "G", SEED[:-1] + "\n", 3])
def test_a_malformed_seed_is_refused_and_not_quoted(path: Path, seed: object) -> None:
    _rewrite(path, seed=seed)
    assert _refusal(path).where == f"{path}: seed"


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "feature-permutation"},
        {"options": {**MASK.model_dump(), "block": 32}},
        {"options": {}},
        {"seed": "5f" + SEED[2:]},
        {"model_digest": "d" * 64},
        {"linear_digest": "d" * 64},
        {"server_linear_digest": "d" * 64},
        {"provision_id": "d" * 64},
    ],
)
def test_a_changed_key_no_longer_fits_itself(path: Path, changes: dict[str, Any]) -> None:
    _rewrite(path, **changes)
    error = _refusal(path)
    assert "provision_id" in error.where
    assert error.got != error.expected
    assert error.got == changes.get("provision_id", _key().provision_id)


def _key_of(directory: Path, **changes: Any) -> FeatureKey:
    config, checkpoint = read_config(directory), Checkpoint(directory)
    digests = {
        "model_digest": model_digest(config, checkpoint),
        "linear_digest": linear_digest(config, checkpoint),
    }
    return _key(**{**digests, **changes})


def _check(key: FeatureKey, directory: Path, mask: FeatureMask = MASK) -> None:
    key.check(read_config(directory), Checkpoint(directory), mask)


def test_the_key_of_another_model_is_refused_with_both_digests(saved_model: Models) -> None:
    own, other = saved_model().directory, saved_model(rms_norm_eps=1e-3).directory
    _check(_key_of(own), own)
    with pytest.raises(FeatureKeyError, match="model_digest") as caught:
        _check(_key_of(other), own)
    assert caught.value.got == _key_of(other).model_digest
    assert _key_of(own).model_digest in caught.value.expected


def test_other_linear_weights_are_refused_where_there_are_any(
    saved_model: Models, tmp_path: Path
) -> None:
    own = saved_model().directory
    key = _key_of(own, linear_digest="d" * 64)
    with pytest.raises(FeatureKeyError, match="linear_digest") as caught:
        _check(key, own)
    assert caught.value.got == "d" * 64
    assert _key_of(own).linear_digest in caught.value.expected
    light = tmp_path / "light"
    shutil.copytree(own, light)
    tensors = load_file(light / SINGLE_FILE)
    save_file({n: t for n, t in tensors.items() if "_proj" not in n}, light / SINGLE_FILE)
    _check(key, light)


@pytest.mark.parametrize("mask", [FeatureRotation(block=8), FeaturePermutation(block=16)])
def test_another_mask_or_option_is_refused_with_both(
    saved_model: Models, mask: FeatureMask
) -> None:
    own = saved_model().directory
    for use in (
        lambda: _check(_key_of(own), own, mask),
        lambda: _key_of(own).transforms(mask, read_config(own), []),
    ):
        with pytest.raises(FeatureKeyError) as caught:
            use()
        assert caught.value.got.startswith("feature-rotation block=16")
        assert caught.value.expected.startswith(f"{mask.name} block={mask.block}")


@pytest.fixture
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model().directory)


def test_randomness_is_of_the_site_and_the_key() -> None:
    def drawn(key: FeatureKey) -> bytes:
        return bytes(key.randomness(1, "o_proj").bytes(16))

    assert drawn(_key()) == drawn(_key())
    assert drawn(_key()) != drawn(_key(seed="11" * 32))
