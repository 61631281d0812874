"""Random models: complete, of the size that was announced, reproducible, and no two rows alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import EMBEDDING, Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from tests.kit.model import token_ids
from tsqp.lab.bench import random_model
from tsqp.lab.bench.random_model import required_bytes, write_random_model
from tsqp.lab.bench.shapes import find_shape

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _settings(name: str) -> dict[str, Any]:
    return {**find_shape(name).settings, **SMALL}


def _all(directory: Path) -> dict[str, torch.Tensor]:
    config, checkpoint = read_config(directory), Checkpoint(directory)
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
    return {name: checkpoint.rows(name, 0, shape[0]).clone() for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_what_is_written_is_a_whole_model(tmp_path: Path, name: str) -> None:
    size = write_random_model(tmp_path, _settings(name))
    config = read_config(tmp_path)
    Checkpoint(tmp_path).refuse_extra(config)
    tensors = _all(tmp_path)
    assert size == required_bytes(config) == sum(tensor.nbytes for tensor in tensors.values())
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < on_disk < size + 20_000
    for tensor_name, tensor in tensors.items():
        assert tensor.dtype is torch.bfloat16
        if "norm" in tensor_name:
            assert torch.equal(tensor, torch.ones_like(tensor))
        elif tensor.ndim == 2:
            deviation = float(tensor.float().std()) * tensor.shape[1] ** 0.5
            assert deviation == pytest.approx(1.0, abs=0.15)
            assert float(tensor.float().mean()) == pytest.approx(0.0, abs=0.03)


def test_without_linear_weights(tmp_path: Path) -> None:
    size = write_random_model(tmp_path, _settings("qwen2.5-0.5b"), linear=False)
    config, checkpoint = read_config(tmp_path), Checkpoint(tmp_path)
    checkpoint.require(light_tensors(config))
    assert not any(checkpoint.holds([name]) for name in linear_tensors(config, FUSED_MODULES))
    assert size == required_bytes(config, linear=False) < required_bytes(config)


def test_a_seed_gives_the_same_model_and_another_one_another(tmp_path: Path) -> None:
    written = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        write_random_model(tmp_path / folder, _settings("llama-3.2-1b"), seed)
        written.append(_all(tmp_path / folder))
    a, b, c = written
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a[Q_PROJ], c[Q_PROJ])
    assert not torch.equal(a[Q_PROJ], a[Q_PROJ.replace("1", "2")])


def test_no_two_rows_are_alike_where_the_block_is_used_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_model, "_BLOCK", 1009)
    write_random_model(tmp_path, _settings("llama-3.2-1b"))
    embedding = Checkpoint(tmp_path).rows(EMBEDDING, 0, 96)
    assert embedding.numel() > 3 * 1009
    assert len({tuple(row.tolist()) for row in embedding}) == 96


def test_shards_are_bounded_and_transformers_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(random_model, "_SHARD_BYTES", 20_000)
    write_random_model(tmp_path, _settings("llama-3.2-1b"))
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 25_000 for path in shards)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = Checkpoint(tmp_path).rows(Q_PROJ, 0, 32).float()
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, expected)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids(8, vocab_size=96)])).logits
    assert 0.05 < float(logits.std()) < 20


def test_settings_of_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_key_value_heads"):
        write_random_model(tmp_path, _settings("llama-3.2-1b") | {"num_key_value_heads": 3})
