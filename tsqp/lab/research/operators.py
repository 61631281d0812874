"""Embedding, attention products and float LM head as remote operators, for the baselines.

They use the core's call plan and `carry_out`. Each hides its operands under a row mask or sends
them in the clear, and checks results where the policy says so. Shape suffixes as in
`protocol.model.forward`; B heads, and M, J, N for the product [B, M, J] x [B, J, N].
"""

from collections.abc import Awaitable, Callable
from functools import cached_property, lru_cache, partial
from typing import Literal, cast

import torch

from protocol.errors import PolicyError
from protocol.messages import EmbeddingRequest, FloatDtype, LMHeadRequest, MatmulRequest
from protocol.model.checkpoint import EMBEDDING, light_tensors
from protocol.model.config import ModelConfig
from protocol.model.forward import capped
from protocol.model.weights import load_tensor
from protocol.prepared import Payloads, PreparedRequest
from protocol.tensors import WireTensor, short_name
from tee_side.model.local_ops import causal_mask
from tee_side.model.operators import TeeLayer
from tee_side.observer import timed
from tee_side.protect.masking import MaskRules
from tee_side.protect.masks.mask import Mask, Masked, as_it_is
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import Weights
from tee_side.protect.verification import UNVERIFIED, ResultCheck, Unverified
from tee_side.remote.call import MAX_PREPARED, CallPlan, CallSettings, RunParts, carry_out
from tee_side.words import PRODUCTS, Operator, Phase, Site
from tsqp.lab.research.float_check import (
    EmbeddingCheck,
    FloatSecrets,
    ProductCheck,
    Tolerance,
)
from tsqp.mask_kinds import MaskedProduct, RowMask

Tensor = torch.Tensor

RowsCall = Callable[[Tensor], Awaitable[Tensor]]
ProductCall = Callable[[tuple[Tensor, Tensor]], Awaitable[Tensor]]

# Which layer it is beside makes no difference.
_HEAD: Site = (0, "lm_head")
# Elements of keys or values of one layer: 1,024 tokens of 8 heads of 64.
_LARGEST_CONVERTED = 2**19


class _Remote:
    """What is the same for all of them; see `RegisteredOperator`."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts


class RemoteEmbedding(_Remote):
    """Looks token ids up at a service. GPU sees: the token ids, as the mask leaves them."""

    @cached_property
    def _check(self) -> EmbeddingCheck:
        # By the table itself: a lookup has nothing to be checked with that is smaller.
        parts, shape = self._parts, light_tensors(self._parts.config)[EMBEDDING]
        return EmbeddingCheck(load_tensor(parts.checkpoint, EMBEDDING, shape, dtype=parts.dtype))

    def bind(
        self, layer: int, phase: Phase, settings: CallSettings, randomness: Randomness
    ) -> RowsCall:
        """See `RegisteredOperator.bind`: int64 [T] -> [T, D]."""
        parts, placed = self._parts, self._parts.policy.at("embedding", 0, phase)
        check = UNVERIFIED if placed.verify == "none" else self._check
        return rows_call(
            "embedding", parts.config, parts.dtype, layer, placed.mask, check, settings, randomness
        )


class RemoteLMHead(_Remote):
    """Computes logits at a service. GPU sees: final hidden states, as the mask leaves them."""

    @cached_property
    def _secrets(self) -> FloatSecrets:
        parts = self._parts
        return FloatSecrets.draw(
            _HEAD, Weights(parts.config, parts.checkpoint, parts.dtype), Randomness()
        )

    def bind(
        self, layer: int, phase: Phase, settings: CallSettings, randomness: Randomness
    ) -> RowsCall:
        """See `RegisteredOperator.bind`: [N, D] -> [N, V]."""
        parts, placed = self._parts, self._parts.policy.at("lm_head", 0, phase)
        verified = placed.verify != "none"
        check = self._secrets.under(placed.mask) if verified else UNVERIFIED
        return rows_call(
            "lm_head", parts.config, parts.dtype, layer, placed.mask, check, settings, randomness
        )


class RemoteAttention(_Remote):
    """Attention whose products are computed at a service, one or both of them.

    GPU sees: scaled queries and all keys; probabilities and all values; as the mask leaves them.
    """

    def bind(
        self, layer: int, phase: Phase, settings: CallSettings, randomness: Randomness
    ) -> Callable[..., Awaitable[Tensor]]:
        """See `tee_side.model.operators.RemoteAttention`."""
        scores, values = (
            self._product(operator, layer, phase, settings, randomness) for operator in PRODUCTS
        )
        config = self._parts.config
        (H, K, C), scale, cap = config.heads, config.score_scale, config.score_cap
        G = H // K

        timed_softmax = timed(softmax, settings.observer, "softmax", layer)

        async def attend(layer: TeeLayer, q_THC: Tensor, k_KSC: Tensor, v_KSC: Tensor) -> Tensor:
            # The G query heads that share a key/value head stand below each other: no copy of K
            # and V. Scaling q, not the scores, keeps float16 in range wherever it is computed.
            T, S = q_THC.shape[0], k_KSC.shape[1]
            q_KGTC = (q_THC * scale).view(T, K, G, C).permute(1, 2, 0, 3)
            scores_KRS = await scores((q_KGTC.reshape(K, G * T, C), k_KSC.transpose(1, 2)))
            mask_TS = causal_mask(T, S, layer.window)
            probs_KGTS = timed_softmax(capped(scores_KRS.view(K, G, T, -1), 1.0, cap), mask_TS)
            out_KRC = await values((probs_KGTS.view(K, G * T, -1), v_KSC))
            return out_KRC.view(K, G, T, C).permute(2, 0, 1, 3).reshape(T, H * C)

        return attend

    def _product(
        self,
        operator: Operator,
        layer: int,
        phase: Phase,
        settings: CallSettings,
        randomness: Randomness,
    ) -> ProductCall:
        placement = self._parts.policy.at(operator, layer, phase)
        if placement.place != "tee":
            tolerance = Tolerance.of(self._parts.dtype, placement.mask)
            verified = placement.verify != "none"
            check = ProductCheck(tolerance, Randomness()) if verified else UNVERIFIED
            return product_call(operator, layer, placement.mask, check, settings, randomness)
        compute = timed(product, settings.observer, operator, layer)

        async def call(operands: tuple[Tensor, Tensor]) -> Tensor:
            return compute(operands)

        return call


# ------------------------------------------------------------------- operators of one row a token


def rows_call(
    operator: Literal["embedding", "lm_head"],
    config: ModelConfig,
    dtype: torch.dtype,
    layer: int,
    mask: Mask | None,
    check: ResultCheck | Unverified,
    settings: CallSettings,
    randomness: Randomness,
) -> RowsCall:
    """Return what the service of a layer computes of one row a token.

    An embedding, int64 [T] -> [T, D], or an LM head, [N, D] -> [N, V].
    """
    rows, rules = _row_mask(mask), MaskRules(mask)
    name, looked_up = cast("FloatDtype", short_name(dtype)), operator == "embedding"
    width = config.hidden_size if looked_up else config.vocab_size

    def hide(x: Tensor) -> Masked:
        if rows is None:
            masked = Masked((x,), as_it_is)
        elif looked_up:
            masked = rows.mask_ids(x, config.vocab_size, randomness)
        else:
            masked = rows.mask(x, randomness)
        rules.check_sent(operator, x, masked)
        return masked

    @lru_cache(MAX_PREPARED)
    def requests(shape: tuple[int, ...], sent: torch.dtype) -> tuple[PreparedRequest, ...]:
        wire = WireTensor(short_name(sent), tuple(shape), b"")
        message = (
            EmbeddingRequest(input_ids=wire, dtype=name)
            if looked_up
            else LMHeadRequest(hidden_states=wire)
        )
        return (PreparedRequest(message, (shape[0], width), name),)

    plan = CallPlan(
        operator=operator,
        layer=None,
        channels=tuple(settings.channels_at(layer)[:1]),
        encode=lambda x: (x, None),
        hide=hide,
        requests=requests,
        rules=rules,
        shape=lambda x: (len(x), width),
        check=check,
        decode=lambda y, _: y,
        timeout_s=settings.timeout_s,
        clock=settings.clock(operator, None),
    )
    return partial(carry_out, plan)


# ------------------------------------------------------------------------------ attention products


def product_call(
    operator: Operator,
    layer: int,
    mask: Mask | None,
    check: ResultCheck | Unverified,
    settings: CallSettings,
    randomness: Randomness,
) -> ProductCall:
    """Return a product of two operands [B, M, J] and [B, J, N] at a service: [B, M, N]."""
    rows = _row_mask(mask)
    rules = MaskRules(mask)

    def hide(operands: tuple[Tensor, Tensor]) -> Masked:
        masked = (
            MaskedProduct(*operands, as_it_is)
            if rows is None
            else rows.mask_product(*operands, randomness)
        )
        _check_product(rules, operator, *operands, masked)
        return Masked((Payloads((masked.a, masked.b)),), masked.unmask)

    @lru_cache(MAX_PREPARED)
    def requests(
        shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
    ) -> tuple[PreparedRequest, ...]:
        dtype, (a, b) = short_name(dtypes[0]), shapes
        message = MatmulRequest(a=WireTensor(dtype, a, b""), b=WireTensor(dtype, b, b""))
        return (PreparedRequest(message, (*a[:-1], b[-1]), dtype),)

    plan = CallPlan(
        operator=operator,
        layer=layer,
        channels=tuple(settings.channels_at(layer)[:1]),
        encode=lambda operands: (operands, None),
        hide=hide,
        requests=requests,
        rules=rules,
        shape=lambda operands: (*operands[0].shape[:-1], operands[1].shape[-1]),
        check=check,
        decode=lambda y, _: y,
        timeout_s=settings.timeout_s,
        clock=settings.clock(operator, layer),
    )
    return partial(carry_out, plan)


def _check_product(
    rules: MaskRules, operator: Operator, a_BMJ: Tensor, b_BJN: Tensor, masked: object
) -> None:
    """Refuse operands that must not cross, before they are sent.

    The product has as many batches, at most as many rows as may cross, and no more columns. Raises
    MaskError.
    """
    if not isinstance(masked, MaskedProduct):
        rules.refuse(operator, type(masked).__name__, "MaskedProduct(a, b, unmask)")
    a, b = masked.a, masked.b
    rows, columns = rules.most_rows(a_BMJ.shape[1]), b_BJN.shape[2]
    fits = (
        (a.dtype, b.dtype) == (a_BMJ.dtype, b_BJN.dtype)
        and (a.dim(), b.dim()) == (3, 3)
        and a.shape[0] == b.shape[0] == a_BMJ.shape[0]
        and a.shape[2] == b.shape[1]
        and a.shape[1] <= rows
        and b.shape[2] <= columns
    )
    if not fits:
        rules.refuse(
            operator,
            f"{short_name(a.dtype)} {list(a.shape)} and {short_name(b.dtype)} {list(b.shape)}"
            " to send",
            f"{short_name(a_BMJ.dtype)} [{a_BMJ.shape[0]}, rows, J] and"
            f" [{a_BMJ.shape[0]}, J, columns], at most {rows} rows and {columns} columns",
        )


def product(operands: tuple[Tensor, Tensor]) -> Tensor:
    """Multiply both in the TEE, where the policy keeps one product and the other one leaves."""
    a, b = operands
    # Half precision in float32 where that is cheaper, rounded once: its kernels are
    # compiled for every shape, and in decode the context's is new in each step.
    if a.dtype is torch.float32 or b.numel() > _LARGEST_CONVERTED:
        return torch.matmul(a, b)
    return torch.matmul(a.float(), b.float()).to(a.dtype)


def softmax(scores: Tensor, causal_mask: Tensor | None) -> Tensor:
    """Softmax over the last axis in float32, cast back; hidden keys get probability 0."""
    scores32 = scores.to(torch.float32)
    if causal_mask is not None:
        scores32 = scores32.masked_fill(causal_mask, float("-inf"))
    return scores32.softmax(-1).to(scores.dtype)


# ------------------------------------------------------------------------------------------ shared


def _row_mask(mask: Mask | None) -> RowMask | None:
    if mask is None or isinstance(mask, RowMask):
        return mask
    raise PolicyError(f"mask {mask.name}", got=type(mask).__name__, expected="a RowMask")
