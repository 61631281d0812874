"""The attacker's model is transformers': token by token, for many candidates side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.kit.leaks import VOCABULARY, make_begun_model
from tests.kit.model import SavedModel, make_model, token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak import public as public_module
from tsqp.lab.leak.public import Prefix, PublicModel
from tsqp.lab.leak.trace import Where

# A window that is shorter than the text; layers of both kinds; biases everywhere.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 4}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen3", {}),
]
TEXT = token_ids(6, vocab_size=VOCABULARY)
CANDIDATES = [7, 100, TEXT[-1]]


def prefix_of(public: PublicModel, ids: Sequence[int]) -> Prefix:
    prefix = public.nothing()
    for token_id in ids:
        prefix = public.extend(prefix, token_id)
    return prefix


def reference(model: transformers.PreTrainedModel, ids: Sequence[int]) -> dict[Where, torch.Tensor]:
    """Return transformers' input [T, I] of every linear operator, and of every layer."""
    inputs: dict[Where, torch.Tensor] = {}
    hooks = []

    def keep(where: Where) -> Any:
        return lambda _module, args: inputs.update({where: args[0][0]})

    for number, layer in enumerate(model.model.layers):
        modules = {
            "segment": layer.input_layernorm,
            "qkv_proj": layer.self_attn.q_proj,
            "o_proj": layer.self_attn.o_proj,
            "gate_up_proj": layer.mlp.gate_proj,
            "down_proj": layer.mlp.down_proj,
        }
        for operator, module in modules.items():
            hooks.append(module.register_forward_pre_hook(keep((number, operator))))
    with torch.inference_mode():
        model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return inputs


@each_row(("kind", "sizes"), KINDS, ids=lambda row: str(row[0]))
def test_states_are_those_of_transformers(tmp_path: Path, kind: str, sizes: dict[str, Any]) -> None:
    """Behind no token, a few, and more than the window has; logits of each position by `extend`."""
    folder = tmp_path / kind
    folder.mkdir()
    model = make_begun_model(folder, kind, **sizes)
    public = PublicModel(folder)
    embedding_VD = public.embedding_VD.clone()
    for before in (0, 3, len(TEXT)):
        prefix = prefix_of(public, TEXT[:before])
        states = public.states(prefix, CANDIDATES)
        for row, candidate in enumerate(CANDIDATES):
            ids = [*TEXT[:before], candidate]
            expected = reference(model.reference, ids)
            assert expected.keys() == states.inputs.keys()
            for where, ours_NI in states.inputs.items():
                assert torch.allclose(ours_NI[row], expected[where][-1], atol=2e-4), where
            logits_V = public.logits(states.hidden_ND)[row]
            assert torch.allclose(logits_V, model.logits(ids)[-1], atol=5e-4)
    assert torch.equal(public.dictionary_VD[CANDIDATES], states.inputs[0, "qkv_proj"])
    assert prefix.logits_V is not None
    assert torch.equal(public.likely(prefix), prefix.logits_V.argsort(descending=True))
    # Norms are computed in place, of a copy.
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


def test_what_was_asked_for_last_is_kept_as_far_as_there_is_room(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = PublicModel(model.directory)
    nothing = public.nothing()
    room = 3 * public.states(nothing, [0, 1]).nbytes
    monkeypatch.setattr(public_module, "_KEPT_BYTES", room)
    kept = {first: public.states(nothing, [first, 9], keep=True) for first in range(3)}
    # Asked for again, so that the second is the one that was not for the longest time.
    assert public.states(nothing, [0, 9]) is kept[0]
    kept[3] = public.states(nothing, [3, 9], keep=True)
    again = {first: public.states(nothing, [first, 9]) for first in kept}
    assert {first for first, one in again.items() if one is kept[first]} == {0, 2, 3}
    assert torch.equal(again[1].hidden_ND, kept[1].hidden_ND)
    assert public.states(prefix_of(public, [1]), [0, 9]) is not kept[0]
