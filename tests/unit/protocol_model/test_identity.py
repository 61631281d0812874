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

from protocol.model.checkpoint import EMBEDDING, FINAL_NORM, SINGLE_FILE, Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import model_digest
from tests.kit.model import SavedModel
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]


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
    digest = _digest(saved_model("llama").directory)
    assert len(digest) == 64
    assert set(digest) <= set("0123456789abcdef")
    assert _digest(sharded) == digest


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
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] * 3,
            },
            False,
        ),
        ({"tie_word_embeddings": True}, False),
        ({"architectures": ["MistralForCausalLM"]}, False),
        # What does not change the forward pass; and both styles of one setting.
        ({"eos_token_id": [7, 8]}, True),
        ({"bos_token_id": None}, True),
        ({"dtype": "bfloat16"}, True),
        ({"use_cache": False}, True),
        ({"rope_parameters": None, "rope_theta": 10000.0}, True),
    ],
)
def test_a_configuration_has_another_digest_where_it_computes_otherwise(
    copy: Path, original: str, changes: dict[str, Any], same: bool
) -> None:
    whole = (copy / "config.json").read_text()
    (copy / "config.json").write_text(json.dumps({**json.loads(whole), **changes}))
    assert (_digest(copy) == original) == same
    (copy / "config.json").write_text(whole)


def test_biases_are_part_of_a_configuration(copy: Path, original: str) -> None:
    other = read_config(copy).model_copy(update={"biased_modules": frozenset(["q_proj"])})
    assert model_digest(other, Checkpoint(copy)) != original
