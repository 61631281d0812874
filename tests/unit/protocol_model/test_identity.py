"""The digest tells models apart that differ, and equals for two copies of the same one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.model.checkpoint import EMBEDDING, INDEX_FILE, SINGLE_FILE, Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import model_digest
from tests.kit.model import SavedModel, make_model

Models = Callable[..., SavedModel]


@pytest.fixture
def copy(saved_model: Models, tmp_path: Path) -> Path:
    """A copy of the model to change."""
    directory = tmp_path / "copy"
    shutil.copytree(saved_model("qwen2").directory, directory)
    return directory


@pytest.fixture
def original(saved_model: Models) -> str:
    """The digest of the unchanged model."""
    return _digest(saved_model("qwen2").directory)


def _digest(directory: Path) -> str:
    return model_digest(read_config(directory), Checkpoint(directory))


def _change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_digest_is_64_hex_digits_and_repeats(copy: Path, original: str) -> None:
    assert len(original) == 64
    assert set(original) <= set("0123456789abcdef")
    assert _digest(copy) == original


def test_a_sharded_copy_has_the_same_digest(copy: Path, original: str) -> None:
    tensors = load_file(copy / SINGLE_FILE)
    (copy / SINGLE_FILE).unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        shard = f"model-{number % 3}.safetensors"
        weight_map[name] = shard
        held = load_file(copy / shard) if (copy / shard).exists() else {}
        save_file({**held, name: tensor}, copy / shard)
    (copy / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert _digest(copy) == original


def test_other_weights_have_another_digest(saved_model: Models, tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2", seed=1)
    assert _digest(tmp_path) != _digest(saved_model("qwen2").directory)


def test_the_same_embedding_in_another_dtype_has_another_digest(copy: Path, original: str) -> None:
    tensors = load_file(copy / SINGLE_FILE)
    tensors[EMBEDDING] = tensors[EMBEDDING].to(torch.bfloat16)
    save_file(tensors, copy / SINGLE_FILE)
    assert _digest(copy) != original


@pytest.mark.parametrize("row", [0, 5, 315])
def test_one_changed_sampled_row_changes_the_digest(copy: Path, original: str, row: int) -> None:
    tensors = load_file(copy / SINGLE_FILE)
    tensors[EMBEDDING][row, 7] += 1e-3
    save_file(tensors, copy / SINGLE_FILE)
    assert _digest(copy) != original


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-3},
        {"max_position_embeddings": 512},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
        {"tie_word_embeddings": True},
        {"architectures": ["MistralForCausalLM"]},
    ],
)
def test_another_configuration_has_another_digest(
    copy: Path, original: str, changes: dict[str, Any]
) -> None:
    _change_config(copy, **changes)
    assert _digest(copy) != original


@pytest.mark.parametrize(
    "changes",
    [{"eos_token_id": [7, 8]}, {"bos_token_id": None}, {"dtype": "bfloat16"}, {"use_cache": False}],
)
def test_what_does_not_change_the_forward_pass_does_not_change_the_digest(
    copy: Path, original: str, changes: dict[str, Any]
) -> None:
    _change_config(copy, **changes)
    assert _digest(copy) == original


def test_both_config_styles_have_the_same_digest(copy: Path, original: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"rope_theta": theta, "rope_scaling": None}
    (copy / "config.json").write_text(json.dumps(config))
    assert _digest(copy) == original
