"""RoPE: cos and sin of positions, for every `rope_type` that the supported models use.

Frequencies are equal to `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS` of the same names.
`dynamic` and `longrope` depend on how long the sequence is; the others ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from protocol.model.config import ModelConfig, RopeType

# Positions by which a table grows.
_STEP = 1024


class Rope:
    """cos and sin of the positions of a step, computed in float32.

    With `dynamic` and `longrope` the frequencies depend on how long the sequence has become. As in
    transformers, keys that are already cached keep the rotation they were written with. With the
    others they are kept for all positions so far: to compute those of a token takes 0.17 ms.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._by_length = config.rope.rope_type in ("dynamic", "longrope")
        self._kept = self._table(0, _STEP, 1)

    def of(self, parts: Iterable[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos [T, 1, C] and half of sin [T, 1, C / 2], its two halves being the same.

        `parts`: the rows of each sequence, from `start` to `end - 1`, and its length.
        """
        tables = [self._of_part(*part) for part in parts]
        if len(tables) == 1:
            return tables[0]
        cos_T1C, sin_T1c = (torch.cat(column) for column in zip(*tables, strict=True))
        return cos_T1C, sin_T1c

    def _of_part(self, start: int, end: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._by_length:
            return self._table(start, end, length)
        if self._kept[0].shape[0] < end:
            self._kept = self._table(0, end + -end % _STEP, length)
        cos_P1C, sin_P1c = self._kept
        return cos_P1C[start:end], sin_P1c[start:end]

    def _table(self, start: int, end: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq_c, scaling = rope_frequencies(self._config, length)
        positions_T = torch.arange(start, end, dtype=torch.float32)
        angles_T1c = torch.outer(positions_T, inv_freq_c).unsqueeze(1)
        cos_T1c, sin_T1c = (
            (x * scaling).to(self._device, self._dtype)
            for x in (angles_T1c.cos(), angles_T1c.sin())
        )
        return cos_T1c.repeat(1, 1, 2), sin_T1c


def rope_frequencies(config: ModelConfig, sequence_length: int = 1) -> tuple[torch.Tensor, float]:
    """Return (`inv_freq`, `attention_scaling`) for a sequence of `sequence_length` tokens.

    `inv_freq`: float32 [head_dim / 2]. cos and sin are to be multiplied by `attention_scaling`.
    """
    return _FREQUENCIES[config.rope.rope_type](config, sequence_length)


def _given(value: float | None) -> float:
    """Narrow a parameter that `RopeParameters` has checked to be there for this rope_type."""
    return 1.0 if value is None else value


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim


def _plain(config: ModelConfig, growth: float = 1.0) -> torch.Tensor:
    """Return the frequencies of the first RoPE, of a base that has grown so many times."""
    return 1.0 / ((config.rope.rope_theta * growth) ** _exponents(config.head_dim))


def _dynamic_ntk(config: ModelConfig, sequence_length: int) -> torch.Tensor:
    """NTK-aware scaling: the base grows once the sequence exceeds the trained context."""
    trained, dim = config.max_position_embeddings, config.head_dim
    factor = _given(config.rope.factor)
    length = max(sequence_length, trained)
    growth = (factor * length / trained) - (factor - 1)
    return _plain(config, growth ** (dim / (dim - 2)))


def _stretch(config: ModelConfig) -> tuple[float, int]:
    """Return the context extension factor and the context length before it."""
    original = config.rope.original_max_position_embeddings or config.max_position_embeddings
    factor = config.rope.factor
    return (config.max_position_embeddings / original if factor is None else factor), original


def _yarn(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp in between."""
    rope, dim = config.rope, config.head_dim
    factor, original = _stretch(config)

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
    wavelengths = rope.rope_theta ** _exponents(dim)
    return (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept, scaling


def _longrope(config: ModelConfig, sequence_length: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): one factor per dimension, another set for long sequences."""
    rope = config.rope
    factor, original = _stretch(config)
    scaling = rope.attention_factor
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = rope.long_factor if sequence_length > original else rope.short_factor
    extension = torch.tensor(factors, dtype=torch.float32)
    return 1.0 / (extension * rope.rope_theta ** _exponents(config.head_dim)), scaling


def _llama3(config: ModelConfig) -> torch.Tensor:
    """Llama 3.1: divide long wavelengths by `factor`, keep short ones, blend in between."""
    rope, inv_freq = config.rope, _plain(config)
    factor, low, high = map(_given, (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    original = rope.original_max_position_embeddings or 8192
    wavelengths = 2 * math.pi / inv_freq
    scaled = torch.where(wavelengths > original / low, inv_freq / factor, inv_freq)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / factor + blend * scaled
    between = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(between, blended, scaled)


_Frequencies: TypeAlias = Callable[[ModelConfig, int], tuple[torch.Tensor, float]]
_FREQUENCIES: dict[RopeType, _Frequencies] = {
    "default": lambda config, _: (_plain(config), 1.0),
    "linear": lambda config, _: (_plain(config) / _given(config.rope.factor), 1.0),
    "dynamic": lambda config, length: (_dynamic_ntk(config, length), 1.0),
    "yarn": lambda config, _: _yarn(config),
    "longrope": _longrope,
    "llama3": lambda config, _: (_llama3(config), 1.0),
}
