"""The attacker's model is transformers', with what is public beside a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.kit.leaks import VOCABULARY, make_begun_model
from tests.kit.model import token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak.public import PublicModel

# Windows that are shorter than the text; layers of both kinds; biases everywhere.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen3", {}),
]


@each_row(("kind", "sizes"), KINDS, ids=lambda row: str(row[0]))
def test_token_by_token_it_says_what_the_model_says(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """For candidates side by side, too; the embedding stays as it is."""
    folder = tmp_path / kind
    folder.mkdir()
    model, ids = make_begun_model(folder, kind, **sizes), token_ids(9, vocab_size=VOCABULARY)
    public = PublicModel(folder)
    embedding_VD, prefix = public.embedding_VD.clone(), public.nothing()
    for read, token_id in enumerate(ids):
        states = public.states(prefix, [7, token_id])
        prefix = public.extend(prefix, token_id)
        logits_V = model.logits(ids[: read + 1])[-1]
        assert prefix.logits_V is not None
        assert torch.allclose(prefix.logits_V, logits_V, atol=5e-4)
        assert torch.allclose(public.logits(states.hidden_ND)[1], logits_V, atol=5e-4)
        assert torch.equal(public.likely(prefix), prefix.logits_V.argsort(descending=True))
    assert prefix.token_ids == tuple(ids)
    assert torch.equal(public.embedding_VD, embedding_VD)
