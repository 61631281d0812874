"""Model directories to change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE
from tests.kit.model import SavedModel


@pytest.fixture
def directory(saved_model: Callable[..., SavedModel], tmp_path: Path) -> Path:
    return shutil.copytree(saved_model("llama").directory, tmp_path / "model")


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The same model in two files and an index."""
    tensors = load_file(directory / SINGLE_FILE)
    (directory / SINGLE_FILE).unlink()
    weight_map = {name: "ab"[at % 2] + ".safetensors" for at, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(held, directory / shard)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
