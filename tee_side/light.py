"""The light operators as the forward pass calls them: with the layer, for reports, and by name."""

from __future__ import annotations

import torch

from tee_side import functional
from tee_side.batch import Chunk
from tee_side.sampling import Sampler
from tee_side.threads import large_attention, large_tensor


class LightOperators:
    """Computes what never leaves the TEE. Shape suffixes as in `tee_side.forward`."""

    def __init__(self, rms_norm_eps: float) -> None:
        self._eps = rms_norm_eps
        # Most steps leave all but one to others; what is large gets all of them.
        self._threads = torch.get_num_threads()

    def rms_norm(self, layer: int | None, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return functional.rms_norm(h, weight, self._eps)

    def rope(
        self, layer: int, x_TXC: torch.Tensor, cos_T1C: torch.Tensor, sin_T1c: torch.Tensor
    ) -> torch.Tensor:
        """Rotate every head by its position."""
        return functional.apply_rope(x_TXC, cos_T1C, sin_T1c)

    def kv_cache(
        self, layer: int, chunk: Chunk, k_TKC: torch.Tensor, v_TKC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a chunk's keys and values; return those of its whole context [K, S, C]."""
        return chunk.cache.append(layer, k_TKC, v_TKC, behind=chunk.behind)

    def attention(
        self,
        layer: int,
        q_THC: torch.Tensor,
        k_KSC: torch.Tensor,
        v_KSC: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Scores, softmax and values in one: [T, H * C]."""
        context = k_KSC.shape[1] if window is None else min(k_KSC.shape[1], window)
        with large_attention(q_THC.numel() * context, self._threads):
            return functional.attention(q_THC, k_KSC, v_KSC, window)

    def softmax(
        self, layer: int, scores: torch.Tensor, causal_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Turn scores into probabilities."""
        with large_tensor(scores, self._threads):
            return functional.softmax(scores, causal_mask)

    def silu_mul(self, layer: int, gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        with large_tensor(gate_TF, self._threads):
            return functional.silu_mul(gate_TF, up_TF)

    def residual(self, layer: int, h_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
        """Add to the residual stream in place."""
        return functional.residual(h_TD, y_TD)

    def sample(
        self, layer: int | None, sampler: Sampler, logits_V: torch.Tensor, ids: list[int]
    ) -> int:
        """Choose a token."""
        return sampler.sample(logits_V, ids)
