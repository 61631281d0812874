"""Vectors are what a model's own files say, as sentence-transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ModelError
from tee_side.engine.embedding import Embedding, read_embedding
from tests.kit.rows import each_row

QUERY = "Instruct: find\nQuery:"


def _files(directory: Path, kinds: str, pooling: dict[str, Any], **prompts: Any) -> Path:
    modules = [
        {"idx": index, "type": f"sentence_transformers.models.{kind}", "path": ""}
        for index, kind in enumerate(kinds.split())
    ]
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory


LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}


def test_files_say_how_texts_become_vectors(tmp_path: Path) -> None:
    assert read_embedding(tmp_path) == Embedding("last")
    assert read_embedding(tmp_path, "mean") == Embedding("mean")
    prompts = {"query": QUERY, "document": ""}
    _files(tmp_path, "Transformer Pooling Normalize", LAST, prompts=prompts)
    assert read_embedding(tmp_path) == Embedding("last", True, prompts, "", True)
    _files(
        tmp_path,
        "Transformer Pooling",
        {"pooling_mode": "mean"},
        default_prompt_name="query",
        prompts=prompts,
    )
    said = read_embedding(tmp_path)
    assert said == Embedding("mean", False, prompts, QUERY, True)
    pooled = torch.tensor([3.0, 4.0, 12.0])
    assert said.vector(pooled, 2).tolist() == [3.0, 4.0]
    assert torch.allclose(Embedding().vector(pooled, 2), torch.tensor([0.6, 0.8]))


@each_row(
    ("kinds", "pooling", "prompts", "said"),
    [
        ("Transformer Pooling Dense", LAST, {}, "modules.json: type: got Transformer, Pooling, De"),
        ("Transformer", LAST, {}, "expected Transformer, Pooling and perhaps Normalize"),
        ("Transformer Pooling", {"pooling_mode_cls_token": True}, {}, "got cls_token, expected"),
        ("Transformer Pooling", {}, {}, "1_Pooling/config.json: got none"),
        ("Transformer Pooling", LAST | {"include_prompt": False}, {}, "include_prompt: got False"),
        ("Transformer Pooling", LAST, {"default_prompt_name": "q"}, "default_prompt_name: got 'q'"),
        ("Transformer Pooling", LAST, {"default_prompt_name": ["q"]}, "default_prompt_name: got"),
        ("Transformer Pooling", LAST, {"prompts": ["q"]}, "prompts: got"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, kinds: str, pooling: dict[str, Any], prompts: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_embedding(_files(tmp_path, kinds, pooling, **prompts))
