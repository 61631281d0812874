"""Operators that run in the TEE, with the weights that they need and no others."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.checkpoint import EMBEDDING, Checkpoint, lm_head_name
from protocol.model.config import ModelConfig
from protocol.model.weights import CPU, FusedLinear, load_linear, load_tensor
from tee_side.policy import Policy


class LocalOperators:
    """Computes in the TEE. Holds only the weights of operators that the policy keeps here."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, policy: Policy, dtype: torch.dtype
    ) -> None:
        self._embedding: torch.Tensor | None = None
        self._lm_head: torch.Tensor | None = None
        vocabulary = (config.vocab_size, config.hidden_size)
        if not policy.on_gpu("embedding"):
            self._embedding = load_tensor(checkpoint, EMBEDDING, vocabulary, dtype=dtype)
        if not policy.on_gpu("lm_head"):
            self._lm_head = self._embedding
            if self._lm_head is None or not config.tie_word_embeddings:
                name = lm_head_name(config)
                self._lm_head = load_tensor(checkpoint, name, vocabulary, dtype=dtype)
        here = [name for name in FUSED_MODULES if not policy.on_gpu(name)]
        self._linears: list[dict[LinearOperator, FusedLinear]] = [
            {
                name: load_linear(checkpoint, config, layer, name, dtype=dtype, device=CPU)
                for name in here
            }
            for layer in range(config.num_hidden_layers)
        ]

    def embedding(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Look up [T, D]."""
        return embedding(token_ids_T, _held(self._embedding))

    def qkv_proj(
        self, layer: int, h_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v as views of one product."""
        q, k, v = self._fused(layer, "qkv_proj", h_TD)
        return q, k, v

    def attn_scores(self, layer: int, q_KRC: torch.Tensor, k_KSC: torch.Tensor) -> torch.Tensor:
        """Q K^T."""
        return torch.matmul(q_KRC, k_KSC.transpose(1, 2))

    def attn_values(self, layer: int, p_KRS: torch.Tensor, v_KSC: torch.Tensor) -> torch.Tensor:
        """P V."""
        return torch.matmul(p_KRS, v_KSC)

    def o_proj(self, layer: int, out_TX: torch.Tensor) -> torch.Tensor:
        """Project the heads' outputs back to [T, D]."""
        return self._linears[layer]["o_proj"](out_TX)

    def gate_up_proj(self, layer: int, h_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate and up as views of one product."""
        gate, up = self._fused(layer, "gate_up_proj", h_TD)
        return gate, up

    def down_proj(self, layer: int, a_TF: torch.Tensor) -> torch.Tensor:
        """Project back to [T, D]."""
        return self._linears[layer]["down_proj"](a_TF)

    def lm_head(self, h_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V]."""
        return linear(h_ND, _held(self._lm_head))

    def _fused(
        self, layer: int, operator: LinearOperator, h_TD: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        fused = self._linears[layer][operator]
        sizes = [rows.stop - rows.start for rows in fused.rows.values()]
        parts: tuple[torch.Tensor, ...] = fused(h_TD).split(sizes, dim=-1)
        return parts


def _held(weight: torch.Tensor | None) -> torch.Tensor:
    """Narrow a weight that `place` never asks for unless the policy keeps its operator here."""
    if weight is None:
        raise LookupError("an operator was called in the TEE that the policy placed on the GPU")
    return weight
