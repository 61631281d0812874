"""The attacker's model is transformers': token by token, for many candidates side by side."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from protocol.errors import CalibrationError
from tests.kit.model import ARCHITECTURES, SavedModel, make_model, token_ids
from tests.unit.tsqp.leak.leaks import Models
from tsqp.cli.program import model_directory
from tsqp.lab.leak import public as public_module
from tsqp.lab.leak.public import Prefix, PublicModel, States
from tsqp.lab.leak.trace import Where

# A window that is shorter than the text; layers of both kinds; biases everywhere.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {},
}
TEXT = token_ids(9)
CANDIDATES = [7, 300, TEXT[-1], 0]


@pytest.fixture
def model(saved_model: Models, request: pytest.FixtureRequest) -> SavedModel:
    kind = getattr(request, "param", "llama")
    return saved_model(kind.partition("-")[0], **KINDS[kind], num_hidden_layers=2)


def prefix_of(public: PublicModel, ids: Sequence[int]) -> Prefix:
    prefix = public.nothing()
    for token_id in ids:
        prefix = public.extend(prefix, token_id)
    return prefix


def reference(
    model: transformers.PreTrainedModel, ids: Sequence[int]
) -> tuple[dict[Where, torch.Tensor], torch.Tensor]:
    """Return transformers' input [T, I] of every linear operator, and hidden states [T, D]."""
    inputs: dict[Where, torch.Tensor] = {}
    hooks = []

    def keep(where: Where) -> Any:
        def hook(_module: object, args: tuple[torch.Tensor, ...]) -> None:
            inputs[where] = args[0][0]

        return hook

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
    hidden: list[torch.Tensor] = []
    hooks.append(
        model.model.norm.register_forward_pre_hook(lambda _m, args: hidden.append(args[0][0]))
    )
    with torch.inference_mode():
        model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return inputs, hidden[0]


def test_every_architecture_is_tried() -> None:
    assert {kind.partition("-")[0] for kind in KINDS} == set(ARCHITECTURES)


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_states_are_those_of_transformers(model: SavedModel) -> None:
    """Behind no token, a few, and more than the window has."""
    public = PublicModel(model.directory)
    for before in (0, 3, len(TEXT)):
        ids = TEXT[:before]
        states = public.states(prefix_of(public, ids), CANDIDATES)
        for row, candidate in enumerate(CANDIDATES):
            inputs, hidden_TD = reference(model.reference, [*ids, candidate])
            assert inputs.keys() == states.inputs.keys()
            for where, ours_NI in states.inputs.items():
                assert torch.allclose(ours_NI[row], inputs[where][-1], atol=2e-4), where
            assert torch.allclose(states.hidden_ND[row], hidden_TD[-1], atol=2e-4)


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_token_by_token_equals_a_whole_forward_pass(model: SavedModel) -> None:
    """Logits of every position, by `extend`."""
    public = PublicModel(model.directory)
    prefix, found = public.nothing(), []
    for token_id in TEXT:
        prefix = public.extend(prefix, token_id)
        assert prefix.logits_V is not None
        found.append(prefix.logits_V)
    assert prefix.token_ids == tuple(TEXT)
    assert prefix.tokens == len(TEXT)
    assert torch.allclose(torch.stack(found), model.logits(TEXT), atol=5e-4)
    heads = (2, len(TEXT), 16 if model.reference.config.model_type != "qwen2" else 8)
    assert {k.shape for k in (*prefix.keys, *prefix.values)} == {heads}


def test_a_prefix_is_not_changed_by_what_follows(model: SavedModel) -> None:
    public = PublicModel(model.directory)
    prefix = prefix_of(public, TEXT[:3])
    before = [tensor.clone() for tensor in (*prefix.keys, *prefix.values)]
    longer = public.extend(prefix, 5)
    assert (prefix.tokens, longer.tokens) == (3, 4)
    assert all(map(torch.equal, before, (*prefix.keys, *prefix.values)))


def test_the_dictionary_is_the_first_layers_input(model: SavedModel) -> None:
    """For every token, to the last bit, and in float32 wherever it stands."""
    public = PublicModel(model.directory)
    every = list(range(public.vocab_size))
    for ids in ([], TEXT[:4]):
        states = public.states(prefix_of(public, ids), every)
        assert torch.equal(states.inputs[0, "qkv_proj"], public.dictionary_VD)
    assert public.dictionary_VD.dtype == torch.float32
    inputs, _ = reference(model.reference, every[:200])
    assert torch.allclose(public.dictionary_VD[:200], inputs[0, "qkv_proj"], atol=1e-5)


def test_the_embedding_stays_as_it_is(model: SavedModel) -> None:
    """Norms are computed in place, of a copy."""
    public = PublicModel(model.directory)
    _ = public.dictionary_VD
    public.states(public.nothing(), CANDIDATES)
    weight = model.reference.get_input_embeddings().weight
    assert torch.equal(public.embedding_VD, weight)
    states = public.states(public.nothing(), CANDIDATES)
    hidden_ND = states.hidden_ND.clone()
    public.logits(states.hidden_ND)
    assert torch.equal(states.hidden_ND, hidden_ND)


@pytest.mark.parametrize("model", ["llama", "llama-tied"], indirect=True)
def test_the_lm_head_is_the_models(model: SavedModel) -> None:
    public = PublicModel(model.directory)
    assert torch.equal(public.lm_head_VD, model.reference.get_output_embeddings().weight)


def test_what_is_likely_comes_first(model: SavedModel) -> None:
    public = PublicModel(model.directory)
    assert public.likely(public.nothing()).tolist() == list(range(320))
    likely = public.likely(prefix_of(public, TEXT))
    assert_descending(likely, model.logits(TEXT)[-1])


def assert_descending(ids: torch.Tensor, logits_V: torch.Tensor) -> None:
    """All ids, by their logits: two of them that are 5e-7 apart came the other way round (AVX2)."""
    assert sorted(ids.tolist()) == list(range(len(logits_V)))
    assert (logits_V[ids].diff() <= 1e-6).all()


def beginning_with(model: SavedModel, folder: Path, ids: list[int]) -> PublicModel:
    """Return a model whose tokenizer puts these in front of every text."""
    shutil.copytree(model.directory, folder)
    content = json.loads((model_directory("demo") / "tokenizer.json").read_text(encoding="utf-8"))
    (bos,) = content["post_processor"]["special_tokens"].values()
    bos |= {"ids": ids, "tokens": [bos["id"]] * len(ids)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return PublicModel(folder)


@pytest.mark.parametrize("first", [0, 5, 319])
def test_a_text_begins_with_what_the_tokenizer_puts_in_front(
    model: SavedModel, tmp_path: Path, first: int
) -> None:
    public = beginning_with(model, tmp_path / "model", [first, 7])
    assert public.first_id == first
    others = [one for one in range(320) if one != first]
    assert public.likely(public.nothing()).tolist() == [first, *others]
    likely = public.likely(prefix_of(public, TEXT))
    assert_descending(likely, model.logits(TEXT)[-1])


@pytest.mark.parametrize("front", [[], [320]])
def test_no_text_begins_with_nothing_or_with_what_the_model_lacks(
    model: SavedModel, tmp_path: Path, front: list[int]
) -> None:
    public = beginning_with(model, tmp_path / "model", front)
    assert public.tokenizer.encode("") == front
    assert public.first_id is None
    assert public.likely(public.nothing()).tolist() == list(range(320))


# ------------------------------------------------------------------------ another model's weights


def without_linears(model: SavedModel, folder: Path) -> Path:
    """Return a directory that has everything of a model but its linear weights."""
    shutil.copytree(model.directory, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if "_proj" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def served_at(folder: Path, **overrides: Any) -> SavedModel:
    """Return a model that a service holds, with other weights than the one that is public."""
    return SavedModel(folder, make_model(folder, seed=1, num_hidden_layers=2, **overrides))


def test_linear_weights_are_those_that_a_service_holds(model: SavedModel, tmp_path: Path) -> None:
    """And embedding, norms and LM head are not: those were not given to it."""
    served = served_at(tmp_path / "served")
    mixed = copy.deepcopy(model.reference)
    theirs = dict(served.reference.named_parameters())
    with torch.no_grad():
        for name, parameter in mixed.named_parameters():
            if "_proj" in name:
                parameter.copy_(theirs[name])
    public = PublicModel(model.directory, model.calibration, served.directory)
    states = public.states(prefix_of(public, TEXT[:-1]), TEXT[-1:])
    inputs, hidden_TD = reference(mixed, TEXT)
    for where, ours_1I in states.inputs.items():
        assert torch.allclose(ours_1I[0], inputs[where][-1], atol=2e-4), where
    assert torch.allclose(states.hidden_ND[0], hidden_TD[-1], atol=2e-4)
    head = model.reference.get_output_embeddings().weight
    assert torch.equal(public.lm_head_VD, head)
    # Scales are the attacker's own file's, checked against the attacker's own model.
    own = PublicModel(model.directory, model.calibration)
    assert public.input_scale((1, "o_proj")) == own.input_scale((1, "o_proj"))


def test_biases_are_those_that_a_service_holds(model: SavedModel, tmp_path: Path) -> None:
    served = served_at(tmp_path / "served", attention_bias=True)
    assert PublicModel(model.directory).linear(1, "o_proj").bias is None
    found = PublicModel(model.directory, served=served.directory).linear(1, "o_proj").bias
    expected = served.reference.get_submodule("model.layers.1.self_attn.o_proj").bias
    assert found is not None
    assert torch.equal(found, expected)


def test_a_service_decides_whether_there_are_linear_weights(
    model: SavedModel, tmp_path: Path
) -> None:
    light = without_linears(model, tmp_path / "light")
    served = served_at(tmp_path / "served")
    assert not PublicModel(light).has_layers
    assert PublicModel(light, served=served.directory).has_layers
    assert not PublicModel(model.directory, served=light).has_layers


# --------------------------------------------------------------------------------- what is kept


def held(states: Sequence[States]) -> int:
    """Return the memory behind all tensors of some states, what they are cut from included."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for one in states
        for tensor in (*one.inputs.values(), one.hidden_ND, *one.keys, *one.values)
    }
    return sum(found.values())


def test_what_may_be_asked_again_is_kept(model: SavedModel) -> None:
    public = PublicModel(model.directory)
    nothing = public.nothing()
    kept = public.states(nothing, [1, 2], keep=True)
    assert public.states(nothing, [1, 2]) is kept
    assert public.states(nothing, [2, 1]) is not kept
    assert public.states(prefix_of(public, [1]), [1, 2]) is not kept
    assert public.states(nothing, [3]) is not public.states(nothing, [3])


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
    # And the others are computed as before.
    assert torch.equal(again[1].hidden_ND, kept[1].hidden_ND)


def test_what_is_kept_takes_no_more_memory_than_there_is_room_for(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = PublicModel(model.directory)
    nothing = public.nothing()
    room = 4 * public.states(nothing, [0, 1]).nbytes
    monkeypatch.setattr(public_module, "_KEPT_BYTES", room)
    asked = [public.states(nothing, [first, 9], keep=True) for first in range(20)]
    kept = [one for first, one in enumerate(asked) if public.states(nothing, [first, 9]) is one]
    assert 2 <= len(kept) <= 4
    assert held(kept) <= room


# ------------------------------------------------------------------------------ what is not there


def test_scales_are_those_of_the_calibration(model: SavedModel) -> None:
    public = PublicModel(model.directory, model.calibration)
    scale = public.input_scale((0, "qkv_proj"))
    rows = torch.tensor([[0.0, 1.4 * scale, -2.6 * scale]])
    assert public.encode((0, "qkv_proj"), rows).tolist() == [[0, 1, -3]]
    assert public.encode((0, "qkv_proj"), rows).dtype == torch.int32
    with pytest.raises(CalibrationError):
        PublicModel(model.directory).input_scale((0, "qkv_proj"))


def test_a_model_without_tokenizer_says_so(model: SavedModel) -> None:
    public = PublicModel(model.directory)
    assert not public.has_tokenizer
    assert public.first_id is None
    assert public.has_layers
    assert public.vocab_size == 320
