"""Segment masks: what a server makes of its directory is what transformers makes of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protocol.errors import FeatureKeyError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.identity import linear_digest, model_digest
from tee_side.protect.masks.mask import KeyedSegment, SegmentMask
from tee_side.protect.randomness import Randomness
from tests.kit.masks import rms_norm, run_head, run_layer, run_layers
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.privacy import gaussian_epsilon
from tsqp.lab.research.provisioning import provision
from tsqp.lab.research.segment_permutation import SegmentPermutation
from tsqp.lab.research.segment_rotation import SegmentRotation

Models = Callable[..., SavedModel]
Tensors = Mapping[str, torch.Tensor]
MASKS: list[SegmentMask] = [SegmentPermutation(), SegmentRotation(), SegmentRotation(block=10)]
# A feature each: grouped heads are in all of them.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, all biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, one head a group": ("llama", {"num_key_value_heads": 6}),
    "mistral, a window": ("mistral", {"sliding_window": 5}),
    "qwen2, biases of q, k and v": ("qwen2", {}),
    "qwen3, norms of q and k": ("qwen3", {}),
}
IDS_T = list(range(2, 320, 13))
KEY = b"k" * 32


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@each_row(("mask", "kind"), [(mask, kind) for mask in MASKS for kind in KINDS], str)
def test_masked_layers_and_head_are_transformers_own(
    saved_model: Models, tmp_path: Path, mask: SegmentMask, kind: str
) -> None:
    name, settings = KINDS[kind]
    model = saved_model(name, **settings)
    folder = tmp_path / f"{mask.name} {kind} {hash(mask)}"
    folder.mkdir()
    provision(model.directory, mask, folder / "server", folder / "key")
    config, plain = read_config(model.directory), load_file(model.directory / SINGLE_FILE)
    served, key = _weights(folder / "server"), FeatureKey.load(folder / "key")
    key.check(config, Checkpoint(model.directory), mask)
    keyed = key.segment(mask, config)

    embedded_TD = plain[EMBEDDING][IDS_T]
    masked = keyed.mask(embedded_TD, repeat(Randomness()))
    (sent,) = masked.sent
    reply_TD = run_layers(config, served, sent)
    expected = model.logits(IDS_T)
    if mask.hides_head:
        logits = keyed.unmask_logits(run_head(config, served, reply_TD))
    else:
        head = plain.get("lm_head.weight", plain[EMBEDDING])
        normed = rms_norm(masked.unmask(reply_TD), plain["model.norm.weight"], config)
        logits = normed @ head.t()
    assert torch.equal(sent, embedded_TD) is False
    assert (logits - expected).abs().max() <= mask.tolerance * expected.abs().max()


@pytest.mark.parametrize("mask", MASKS)
def test_a_segment_may_begin_and_end_at_any_layer(saved_model: Models, mask: SegmentMask) -> None:
    """The map is the same in front of every layer, and its layers are not."""
    config = read_config(saved_model("qwen2").directory)
    plain = {
        name: tensor.double()
        for name, tensor in load_file(saved_model("qwen2").directory / SINGLE_FILE).items()
    }
    keyed = mask.keyed(config, Randomness(KEY))
    h_TD = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    for layer in (2, 0):
        own = _own(plain, layer)
        masked = keyed.mask(h_TD, repeat(Randomness()))
        (sent,) = masked.sent
        result = masked.unmask(run_layer(config, layer, keyed.layer(layer, own), sent))
        expected = run_layer(config, layer, own, h_TD)
        assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


def _own(weights: Tensors, layer: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def test_replies_of_some_rows_are_unmasked_as_well(saved_model: Models) -> None:
    config = read_config(saved_model().directory)
    h_TD = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for mask in MASKS:
        masked = mask.keyed(config, Randomness(KEY)).mask(h_TD, repeat(Randomness()))
        (sent,) = masked.sent
        assert torch.allclose(masked.unmask(sent[[1, 4]]), h_TD[[1, 4]], atol=1e-6)


# ------------------------------------------------------------------------------- what is drawn


@pytest.fixture
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model("qwen3").directory)


def _counted(config: ModelConfig) -> dict[str, torch.Tensor]:
    """A layer whose tensors say where each of their values came from."""
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
    numbers = {n: torch.arange(math.prod(s)).double().view(s) for n, s in shapes.items()}
    return _own(numbers, 0)


def _stip(config: ModelConfig, key: bytes = KEY) -> KeyedSegment:
    return SegmentPermutation().keyed(config, Randomness(key))


def test_pairs_of_rope_stay_together_and_rope_order_names_them(config: ModelConfig) -> None:
    H, K, C = config.heads
    plain = _counted(config)
    made = _stip(config).layer(0, plain)
    order_Kc = made["self_attn.rope_order"].long()
    assert order_Kc.shape == (K, C // 2)
    assert all(sorted(row) == list(range(C // 2)) for row in order_Kc.tolist())
    for module, heads in (("q", H), ("k", K)):
        # Which channel of which head each row came from: every row's values name it.
        rows = made[f"self_attn.{module}_proj.weight"].amin(1) // config.hidden_size
        norm_XC = made[f"self_attn.{module}_norm.weight"]
        for head in range(heads):
            pairs_c = order_Kc[head * K // heads]
            expected_C = torch.cat((pairs_c, pairs_c + C // 2))
            assert torch.equal(rows.view(heads, C)[head], (expected_C + head * C).double())
            assert torch.equal(norm_XC[head], expected_C.double())


def test_what_can_be_shuffled_is_and_each_layer_by_itself(config: ModelConfig) -> None:
    plain = _counted(config)
    keyed = _stip(config)
    first, second = keyed.layer(0, plain), keyed.layer(1, plain)
    for name, tensor in plain.items():
        assert not torch.equal(first[name], tensor), name
        assert torch.equal(first[name], second[name]) == name.endswith("layernorm.weight"), name
        assert torch.equal(_stip(config).layer(0, plain)[name], first[name])
        assert not torch.equal(_stip(config, b"o" * 32).layer(0, plain)[name], first[name])
    assert not torch.equal(first["self_attn.rope_order"], second["self_attn.rope_order"])
    gate, up = (first[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(gate, up)
    # Of heads, only what is within them moves.
    C = config.head_dim
    values_OD = first["self_attn.v_proj.weight"]
    origin_O = values_OD.amin(1) // config.hidden_size
    assert torch.equal(origin_O // C, torch.arange(len(origin_O)) // C)
    assert not torch.equal(origin_O[:C] % C, origin_O[C : 2 * C] % C)


@pytest.mark.parametrize("mask", MASKS)
def test_a_module_is_transformed_the_same_alone(config: ModelConfig, mask: SegmentMask) -> None:
    """Provisioning has one in memory at a time, beside the norms."""
    keyed, plain = mask.keyed(config, Randomness(KEY)), _counted(config)
    together = keyed.layer(0, plain)
    norms = {name: tensor for name, tensor in plain.items() if "norm" in name}
    apart: dict[str, torch.Tensor] = {}
    for name in plain.keys() - norms.keys():
        apart |= keyed.layer(0, {**norms, name: plain[name]})
    assert apart.keys() == together.keys()
    assert all(torch.equal(apart[name], together[name]) for name in apart)


def test_the_head_keeps_its_dtype_and_shuffles_both_axes(config: ModelConfig) -> None:
    keyed = _stip(config)
    V, D = config.vocab_size, config.hidden_size
    norm_D = torch.arange(D).bfloat16()
    head_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = keyed.head(norm_D, head_VD)
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    ((order_D,),) = keyed.mask(torch.arange(float(D))[None], repeat(Randomness())).sent
    assert torch.equal(made["model.norm.weight"], norm_D[order_D.long()])
    columns_VD = made["lm_head.weight"][:, order_D.argsort()]
    assert not torch.equal(columns_VD, head_VD)
    assert torch.equal(keyed.unmask_logits(columns_VD.t()).t(), head_VD)


def test_under_the_cloak_norms_are_ones_and_heads_as_they_are(config: ModelConfig) -> None:
    plain = _counted(config)
    made = SegmentRotation().keyed(config, Randomness(KEY)).layer(0, plain)
    assert made.keys() == plain.keys()
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        assert torch.equal(made[name], torch.ones_like(plain[name]))
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        assert torch.equal(made[name], plain[name])


def test_only_a_key_of_the_mask_gives_the_map(saved_model: Models, config: ModelConfig) -> None:
    mask, directory = SegmentRotation(block=16), saved_model("qwen3").directory
    checkpoint = Checkpoint(directory)
    key = FeatureKey.bind(
        mask=mask.name,
        options=mask.model_dump(mode="json"),
        seed="ab" * 32,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint),
        server_linear_digest="cd" * 32,
    )
    h_TD = torch.ones(1, config.hidden_size)
    one, two = (
        key.segment(mask, config).mask(h_TD, repeat(Randomness())).sent[0] for _ in range(2)
    )
    assert torch.equal(one, two)
    for other in (SegmentRotation(block=8), SegmentPermutation()):
        for use in (
            lambda mask=other: key.segment(mask, config),
            lambda mask=other: key.check(config, checkpoint, mask),
        ):
            with pytest.raises(FeatureKeyError) as caught:
                use()
            assert caught.value.got.startswith("cloak-segment block=16")


# ------------------------------------------------------------------------------------------ noise


def test_noise_is_fresh_of_the_deviation_asked_for_and_rotated_with_the_rows(
    config: ModelConfig,
) -> None:
    keyed = SegmentRotation(sigma=0.5).keyed(config, Randomness(KEY))
    quiet = SegmentRotation().keyed(config, Randomness(KEY))
    h_TD = torch.randn(400, config.hidden_size, generator=torch.Generator().manual_seed(0))
    randomness = Randomness(KEY)
    (first,), (second,) = (keyed.mask(h_TD, repeat(randomness)).sent for _ in range(2))
    (rotated,) = quiet.mask(h_TD, repeat(randomness)).sent
    assert (first - rotated).std().item() == pytest.approx(0.5, rel=0.02)
    assert (first - rotated).mean().item() == pytest.approx(0, abs=0.02)
    assert not torch.equal(first, second)
    assert rotated.norm(dim=1) == pytest.approx(h_TD.norm(dim=1), rel=1e-5)


def test_epsilon_counts_rows_and_their_length() -> None:
    mask = SegmentRotation(sigma=4, delta=1e-6)
    assert mask.epsilon(2.0) == gaussian_epsilon(1.0, 1e-6)
    assert mask.epsilon(2.0, rows=9) == gaussian_epsilon(3.0, 1e-6)
    assert SegmentRotation().epsilon(2.0) == math.inf
    said = mask.statement(2.0)
    assert f"epsilon {mask.epsilon(2.0):.4g} at delta 1e-06 for one token" in said
    assert f"100 are epsilon {mask.epsilon(2.0, 100):.4g}" in said
    assert "from a later layer: none" in said


# -------------------------------------------------------------------------- what known_break says


def test_broken_rows_of_the_embedding_are_known_by_sorted_values_and_by_length(
    saved_model: Models,
) -> None:
    directory = saved_model().directory
    config, table_VD = read_config(directory), load_file(directory / SINGLE_FILE)[EMBEDDING]
    (shuffled,) = _stip(config).mask(table_VD[IDS_T], repeat(Randomness())).sent
    found = torch.cdist(shuffled.sort(1).values, table_VD.sort(1).values, p=1).argmin(1)
    assert found.tolist() == IDS_T
    (rotated,) = (
        SegmentRotation()
        .keyed(config, Randomness())
        .mask(table_VD[IDS_T], repeat(Randomness()))
        .sent
    )
    found = (rotated.norm(dim=1)[:, None] - table_VD.norm(dim=1)).abs().argmin(1)
    assert found.tolist() == IDS_T


def test_broken_public_weights_give_the_rotation(saved_model: Models) -> None:
    directory = saved_model().directory
    config, plain = read_config(directory), load_file(directory / SINGLE_FILE)
    keyed = SegmentRotation().keyed(config, Randomness())
    own = {name: tensor.double() for name, tensor in _own(plain, 0).items()}
    served = keyed.layer(0, own)["mlp.gate_proj.weight"]
    folded = own["mlp.gate_proj.weight"] * own["post_attention_layernorm.weight"]
    rotation_DD = torch.linalg.lstsq(folded, served).solution
    (sent,) = keyed.mask(plain[EMBEDDING][IDS_T].double(), repeat(Randomness())).sent
    assert torch.allclose(sent @ rotation_DD.t(), plain[EMBEDDING][IDS_T].double(), atol=1e-4)
