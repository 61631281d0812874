"""The key file: whom it is for, what it is bound to, and that a changed one fits nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import FeatureKeyError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from tee_side.protect.masks.mask import FeatureMask
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.feature_permutation import FeaturePermutation
from tsqp.lab.research.feature_rotation import FeatureRotation

Models = Callable[..., SavedModel]
MASK = FeatureRotation(block=16)
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    _key().save(tmp_path / "key")
    return tmp_path / "key"


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


def test_a_key_that_others_may_use_and_what_is_no_key_are_refused(path: Path) -> None:
    for content in ("", "{", "[]", "[" * 5000, f'"{SEED}"', "\xff"):
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
    path: Path, changes: dict[str, Any], where: str
) -> None:
    path.write_text(json.dumps({**_key().model_dump(mode="json"), **changes}))
    error = _refusal(path)
    if where != "provision_id":
        assert error.where == f"{path}: {where}"
        return
    assert where in error.where
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


def test_the_key_of_other_weights_or_of_another_mask_is_refused_with_both(
    saved_model: Models,
) -> None:
    own = saved_model().directory
    _check(_key_of(own), own)
    for field in ("model_digest", "linear_digest"):
        with pytest.raises(FeatureKeyError, match=field) as caught:
            _check(_key_of(own, **{field: OTHER}), own)
        assert caught.value.got == OTHER
        assert getattr(_key_of(own), field) in caught.value.expected
    for mask in (FeatureRotation(block=8), FeaturePermutation(block=16)):
        with pytest.raises(FeatureKeyError) as caught:
            _check(_key_of(own), own, mask)
        assert caught.value.got.startswith("feature-rotation block=16")
        assert caught.value.expected.startswith(f"{mask.name} block={mask.block}")
        with pytest.raises(FeatureKeyError):
            _key_of(own).transforms(mask, read_config(own), [])
