"""Segment masks: what they shuffle, the noise they add, and as broken as they say.

That logits are transformers' own: tests/equivalence/test_segments.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat

import pytest
import torch

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import light_tensors, linear_tensors
from protocol.model.config import ModelConfig, read_config
from tee_side.protect.masks.mask import KeyedSegment
from tee_side.protect.randomness import Randomness
from tests.kit.model import SavedModel
from tsqp.lab.research.segment_permutation import SegmentPermutation
from tsqp.lab.research.segment_rotation import SegmentRotation

Models = Callable[..., SavedModel]
KEY = b"k" * 32


@pytest.fixture
def config(saved_model: Models) -> ModelConfig:
    return read_config(saved_model("qwen3").directory)


def _stip(config: ModelConfig, key: bytes = KEY) -> KeyedSegment:
    return SegmentPermutation().keyed(config, Randomness(key))


def test_what_can_be_shuffled_is_and_each_layer_by_itself(config: ModelConfig) -> None:
    # A layer whose tensors say where each of their values came from.
    shapes, prefix = (
        light_tensors(config) | linear_tensors(config, FUSED_MODULES),
        "model.layers.0.",
    )
    own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    plain = {n: torch.arange(math.prod(s)).double().view(s) for n, s in own.items()}
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
