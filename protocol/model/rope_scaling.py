"""RoPE scalings, by which a model reads more tokens than it was first trained with.

Their frequencies are equal to those of `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS` of
the same names. `dynamic` and `longrope` depend on how long the sequence is; the others ignore it.
A run whose model has none does not import them.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from protocol.model.config import ModelConfig, RopeParameters, RopeType

# Frequencies, and what cos and sin are multiplied by: see `protocol.model.forward`.
Tensor: TypeAlias = torch.Tensor
Scaled: TypeAlias = tuple[Tensor, float]


def _given(value: float | None) -> float:
    """Narrow a parameter that `RopeParameters` has checked to be there for this rope_type."""
    return 1.0 if value is None else value


def _linear(_c: ModelConfig, rope: RopeParameters, _length: int, exponents_c: Tensor) -> Scaled:
    """Positions that are as many times denser."""
    return 1.0 / rope.rope_theta**exponents_c / _given(rope.factor), 1.0


def _dynamic_ntk(
    config: ModelConfig, rope: RopeParameters, sequence_length: int, exponents_c: Tensor
) -> Scaled:
    """NTK-aware scaling: the base grows once the sequence exceeds the trained context.

    With `alpha`, as Hunyuan has it, always, and by a factor that no length changes.
    """
    trained, dim = config.max_position_embeddings, config.rotary_dim(rope)
    factor = _given(rope.factor)
    growth = rope.alpha
    if growth is None:
        growth = (factor * max(sequence_length, trained) / trained) - (factor - 1)
    base = rope.rope_theta * growth ** (dim / (dim - 2))
    return 1.0 / base**exponents_c, 1.0


def _stretch(config: ModelConfig, rope: RopeParameters) -> tuple[float, int]:
    """Return the context extension factor and the context length before it."""
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    factor = rope.factor
    return (config.max_position_embeddings / original if factor is None else factor), original


def _yarn(config: ModelConfig, rope: RopeParameters, _length: int, exponents_c: Tensor) -> Scaled:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp in between."""
    dim = config.rotary_dim(rope)
    factor, original = _stretch(config, rope)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    scaling = rope.attention_factor
    if scaling is None and rope.mscale and rope.mscale_all_dim:
        scaling = magnitude(factor, rope.mscale) / magnitude(factor, rope.mscale_all_dim)
    elif scaling is None:
        scaling = magnitude(factor)

    def dimension_of(rotations: float) -> float:
        wavelengths = original / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast or 32), dimension_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    wavelengths = rope.rope_theta**exponents_c
    return (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept, scaling


def _longrope(
    config: ModelConfig, rope: RopeParameters, sequence_length: int, exponents_c: Tensor
) -> Scaled:
    """LongRoPE (arXiv 2402.13753): one factor per dimension, another set for long sequences."""
    factor, original = _stretch(config, rope)
    scaling = rope.attention_factor
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = rope.long_factor if sequence_length > original else rope.short_factor
    extension = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (extension * rope.rope_theta**exponents_c), scaling


def _llama3(_c: ModelConfig, rope: RopeParameters, _length: int, exponents_c: Tensor) -> Scaled:
    """Llama 3.1: divide long wavelengths by `factor`, keep short ones, blend in between."""
    inv_freq = 1.0 / rope.rope_theta**exponents_c
    factor, low, high = map(_given, (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    original = rope.original_max_position_embeddings or 8192
    wavelengths = 2 * math.pi / inv_freq
    scaled = torch.where(wavelengths > original / low, inv_freq / factor, inv_freq)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / factor + blend * scaled
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, scaled), 1.0


# Of a sequence of so many tokens, by the exponents of the base [c].
SCALINGS: Mapping[RopeType, Callable[[ModelConfig, RopeParameters, int, Tensor], Scaled]] = {
    "linear": _linear,
    "dynamic": _dynamic_ntk,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
