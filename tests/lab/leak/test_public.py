"""The attacker's model is transformers', with what is public beside a service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.kit.leaks import VOCABULARY, make_begun_model
from tests.kit.model import SavedModel, make_model, token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak.public import PublicModel

# Windows that are shorter than the text; layers of both kinds; biases everywhere.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 4}),
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


def test_beside_a_service_linear_weights_are_the_services(
    model: SavedModel, public: PublicModel, tmp_path: Path
) -> None:
    """And embedding, norms, LM head and scales are not: those were not given to it."""
    sizes = {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
    served = make_model(tmp_path, seed=1, attention_bias=True, **sizes)
    beside = PublicModel(model.directory, served=tmp_path)
    found, expected = beside.linear(1, "o_proj"), served.model.layers[1].self_attn.o_proj
    assert torch.equal(found.weight, expected.weight)
    assert found.bias is not None
    assert torch.equal(found.bias, expected.bias)
    assert torch.equal(beside.lm_head_VD, public.lm_head_VD)
    assert torch.equal(beside.dictionary_VD, public.dictionary_VD)
    assert beside.input_scale((1, "o_proj")) == public.input_scale((1, "o_proj"))


@each_row(("front", "first"), [([5, 7], 5), ([], None), ([128], None)])
def test_a_text_begins_with_what_the_tokenizer_puts_in_front(
    model: SavedModel, tmp_path: Path, front: list[int], first: int | None
) -> None:
    """Unless that is nothing, or a token that the model lacks."""
    folder = tmp_path / str(front)
    shutil.copytree(model.directory, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (bos,) = content["post_processor"]["special_tokens"].values()
    bos |= {"ids": front, "tokens": [bos["id"]] * len(front)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    public = PublicModel(folder)
    assert public.first_id == first
    others = [one for one in range(VOCABULARY) if one != first]
    expected = others if first is None else [first, *others]
    assert public.likely(public.nothing()).tolist() == expected
