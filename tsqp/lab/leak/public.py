"""What everybody has: the weights, the tokenizer, and the code of this project.

Shape suffixes: N candidates for one token, I in_features, D hidden size, V vocabulary size, H query
heads, K key/value heads, G query heads a key/value head, C head dim, S tokens before, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

from gpu_side.segment_kernels import finish
from protocol.errors import ModelError
from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.checkpoint import (
    EMBEDDING,
    Checkpoint,
    linear_tensors,
    lm_head_name,
)
from protocol.model.config import read_config
from protocol.model.forward import Layer, Norm, Ops, bound, capped, forward, staying
from protocol.model.weights import CPU, FusedLinear, NormTensors, load_linear, load_tensor
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model import local_ops
from tee_side.model.operators import TeeModel, load_tee_model
from tee_side.protect.sites import IntegerSites
from tee_side.words import Operator

# What is remembered of what the public model computed.
_KEPT_BYTES = 2**29
# The TEE's operators, but for those that write to what is kept here.
_MATHS = SimpleNamespace(
    rms_norm=local_ops.rms_norm,
    layer_norm=local_ops.layer_norm,
    apply_rope=local_ops.apply_rope,
    activate=local_ops.activate,
    residual=lambda h, y, scale=1.0: torch.add(h, y, alpha=scale),
)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens that an attacker believes it has read, with their keys and values [2, K, S, C].

    `logits_V`: what the public model says comes next; None for no tokens.
    """

    token_ids: tuple[int, ...]
    cached: tuple[torch.Tensor, ...]
    logits_V: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class States:
    """What the public model computes for candidates behind a prefix.

    `inputs`: of every linear operator, [N, I], and of each layer, as a segment from there on gets
    them; `hidden_ND`: behind the last layer; `cached`: keys and values of the candidates alone,
    [2, N, K, C] a layer.
    """

    inputs: dict[tuple[int | None, Operator], torch.Tensor]
    hidden_ND: torch.Tensor
    cached: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        held = (*self.inputs.values(), self.hidden_ND, *self.cached)
        return sum(tensor.nbytes for tensor in held)


class PublicModel:
    """The public model, in float32. `directory`: weights and tokenizer.

    `served`: a model whose linear weights a service holds in the clear, None where it does not. An
    attacker there has these, whatever else is public: linear weights are those of `served`, with
    its biases; embedding, norms, LM head and tokenizer stay those of `directory`.

    Whether the linear weights are there decides how deep an attack can look: `has_layers`.
    Raises ModelError.
    """

    def __init__(self, directory: Path, served: Path | None = None) -> None:
        self.directory = directory
        self.config, self.checkpoint = Checkpoint.open(directory)
        self._linear_config, self._linear_checkpoint = self.config, self.checkpoint
        if served is not None:
            self._linear_config, self._linear_checkpoint = read_config(served), Checkpoint(served)
        # The weights of an operator, float32.
        self.linear: Callable[[int, LinearOperator], FusedLinear] = cache(
            partial(
                load_linear,
                self._linear_checkpoint,
                self._linear_config,
                dtype=torch.float32,
                device=CPU,
            )
        )
        # How an input would become integers: the scale of a row follows from the row.
        self.integers = IntegerSites(
            self._linear_config, self._linear_checkpoint, {}, torch.float32
        )
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], States] = {}
        self._kept_bytes = 0

    @property
    def has_layers(self) -> bool:
        """Whether the attacker has the linear weights, too."""
        return self._linear_checkpoint.holds(linear_tensors(self._linear_config))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ModelError."""
        return Tokenizer(self.directory)

    @property
    def first_id(self) -> int | None:
        """What the tokenizer puts in front of every text; None if there is nothing or no tokenizer.

        None also for a token that the model does not have.
        """
        try:
            front = self.tokenizer.encode("")
        except ModelError:
            return None
        return front[0] if front and front[0] < self.config.vocab_size else None

    @cached_property
    def light(self) -> TeeModel:
        """Norms and RoPE."""
        return load_tee_model(self.config, self.checkpoint, torch.float32)

    @cached_property
    def embedding_VD(self) -> torch.Tensor:
        """The embedding, float32."""
        return self._vocabulary(EMBEDDING)

    @cached_property
    def lm_head_VD(self) -> torch.Tensor:
        """The LM head, float32."""
        name = lm_head_name(self.config)
        return self.embedding_VD if name == EMBEDDING else self._vocabulary(name)

    def _vocabulary(self, name: str) -> torch.Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return load_tensor(self.checkpoint, name, shape, dtype=torch.float32)

    @cached_property
    def dictionary_VD(self) -> torch.Tensor:
        """What the first layer's qkv_proj gets for each token, wherever it stands: [V, D]."""
        return self.entered(torch.float32)

    def entered(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the first layer's qkv_proj gets for each token, computed in a dtype."""
        h_VD = self.embedding_VD.to(dtype, copy=True)
        h_VD *= torch.tensor(self.config.embedding_scale, dtype=dtype)
        norm = self.light.light[0].norms.get("input_layernorm")
        if norm is None:
            return h_VD
        bias = None if norm.bias is None else norm.bias.to(dtype)
        own = NormTensors(norm.weight.to(dtype), bias)
        return self._norm(h_VD, own)

    def _norm(self, h: torch.Tensor, norm: NormTensors) -> torch.Tensor:
        function = getattr(local_ops, f"{self.config.table.norm}_norm")
        normed: torch.Tensor = function(h, norm, self.config.norm_eps)
        return normed

    @cached_property
    def layers(self) -> list[Layer]:
        """What is computed between the linear operators, float32."""
        return [
            Layer(**bound(light, self.config, index, _MATHS))
            for index, light in enumerate(self.light.light)
        ]

    # ----------------------------------------------------------------- the public model, running

    def nothing(self) -> Prefix:
        """Return the prefix of no tokens."""
        _, K, C = self.config.heads
        empty = tuple(torch.empty(2, K, 0, C) for _ in range(self.config.num_hidden_layers))
        return Prefix((), empty, None)

    def states(self, prefix: Prefix, candidates: Sequence[int], *, keep: bool = False) -> States:
        """Run candidates for the next token through all layers, side by side.

        Equal to a forward pass of prefix and candidate for each. `keep`: whether the same may be
        asked again, by a search at another place or by another attack, so that it is remembered as
        far as there is room. Do not write to what is returned.
        """
        key = (prefix.token_ids, tuple(candidates))
        known = self._kept.pop(key, None)
        states = self._run(prefix, candidates) if known is None else known
        if keep or known is not None:
            # Behind all others: what was asked for longest ago goes first.
            self._kept[key] = states
            self._kept_bytes += states.nbytes if known is None else 0
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
        return states

    def _run(self, prefix: Prefix, candidates: Sequence[int]) -> States:
        inputs: dict[tuple[int | None, Operator], torch.Tensor] = {}
        cached = []

        def noted(layer: int, operator: Operator, compute: Norm) -> Norm:
            def noting(x_NI: torch.Tensor) -> torch.Tensor:
                inputs[layer, operator] = x_NI
                return compute(x_NI)

            return noting

        async def attention(
            layer: Layer, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, _: None
        ) -> torch.Tensor:
            # A copy, or what is remembered would hold the queries as well.
            cached.append(torch.stack([k_NKC, v_NKC]))
            # Each candidate's, over the prefix and itself: [N, H * C].
            N, G = len(q_NHC), H // K
            window = config.sliding_windows[layer.index]
            start = 0 if window is None else max(0, position - window + 1)
            k_KSC, v_KSC = prefix.cached[layer.index][:, :, start:].unbind()
            q_KNGC = (
                (q_NHC * config.score_scale)
                .reshape(N, K, G, C)
                .transpose(0, 1)
                .reshape(K, N * G, C)
            )
            before_KNS = q_KNGC @ k_KSC.transpose(1, 2)
            own_KN1 = (q_KNGC.view(K, N, G, C) * k_NKC.transpose(0, 1)[:, :, None]).sum(-1)
            scores = torch.cat([before_KNS, own_KN1.reshape(K, N * G, 1)], dim=-1)
            scores = capped(scores, 1.0, config.score_cap).softmax(-1)
            out_KNC = scores[..., :-1] @ v_KSC
            own_KNGC = v_NKC.transpose(0, 1)[:, :, None].expand(K, N, G, C).reshape(K, N * G, C)
            out_KNC = out_KNC + scores[..., -1:] * own_KNGC
            return out_KNC.view(K, N, G * C).transpose(0, 1).reshape(N, H * C)

        config, position = self.config, len(prefix.token_ids)
        H, K, C = config.heads
        layers = self.layers
        calls: dict[str, Any] = {
            name: [staying(noted(n, name, self.linear(n, name))) for n in range(len(layers))]
            for name in FUSED_MODULES
        }
        entered = [
            replace(one, attention_norm=noted(one.index, "segment", one.attention_norm))
            for one in layers
        ]
        embedding = staying(lambda ids_N: self.embedding_VD[ids_N])
        ops: Ops[Layer, None] = Ops(embedding=embedding, attention=attention, **calls)
        ropes = self.light.rope.of([(position, position + 1, position + 1)])
        entering, scale = torch.as_tensor(candidates), config.embedding_scale
        hidden_ND = finish(forward(entering, entered, ropes, ops, None, scale=scale))
        return States(inputs, hidden_ND, tuple(cached))

    def extend(self, prefix: Prefix, token_id: int) -> Prefix:
        """Take a token as read."""
        states = self.states(prefix, [token_id], keep=True)
        # Behind what was cached, in every layer, the one candidate's [2, 1, K, C].
        cached = tuple(
            torch.cat([before, own.transpose(1, 2)], dim=2)
            for before, own in zip(prefix.cached, states.cached, strict=True)
        )
        logits_V = self.logits(states.hidden_ND)[0]
        return Prefix((*prefix.token_ids, token_id), cached, logits_V)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of states behind the last layer."""
        logits_NV = linear(self._norm(hidden_ND.clone(), self.light.final_norm), self.lm_head_VD)
        return capped(logits_NV, self.config.logit_scale, self.config.logit_cap)

    def likely(self, prefix: Prefix) -> torch.Tensor:
        """Return all token ids, those that the public model expects first.

        With no token read, that is the one that every text begins with; the others are in order.
        """
        if prefix.logits_V is not None:
            return prefix.logits_V.argsort(descending=True)
        ids_V, first = torch.arange(self.config.vocab_size), self.first_id
        if first is not None:
            ids_V[: first + 1] = ids_V[: first + 1].roll(1)
        return ids_V
