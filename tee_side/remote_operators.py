"""Operators that leave the TEE: hidden by a mask, asked for, checked for shape, and unmasked.

Every reply's dtype and shape must be what the TEE's own configuration implies. Whether the numbers
are right is not checked here (docs/limitations.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from protocol.channel import Channel, Exchange
from protocol.errors import MaskError, ReplyError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    FloatDtype,
    LinearOperator,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
    TensorReply,
)
from protocol.model.config import ModelConfig
from protocol.tensors import from_torch, short_name, to_torch
from tee_side.fused import FusedOperators
from tee_side.masking import HideLinear
from tee_side.masks.mask import Mask, Masked, MaskedProduct, RowMask, as_it_is
from tee_side.overlap import replies
from tee_side.randomness import Randomness
from tee_side.sites import Sites
from tee_side.threads import large_tensor
from tee_side.vocabulary import Operator

M = TypeVar("M", Masked, MaskedProduct)


class RemoteOperators(FusedOperators):
    """Asks one service, or several that get a share each, under one mask.

    `mask`: what `hide` hides the inputs of linear operators under, None for nothing; a row mask
    also hides token ids, attention and the LM head. `sites`: None where the service shall do all of
    it, bias included, in the clear. `without_factors`: computes a linear operator in the TEE when
    there is nothing to mask it with. `one_rpc_per_module`: q, k, v, gate and up travel alone, as in
    the published schema, instead of together with what shares their input.

    Raises the channels' errors, ReplyError for a wrong dtype or shape, and MaskError for a mask
    that sends, or returns, what it must not.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        mask: Mask | None,
        hide: HideLinear,
        sites: Sites | None = None,
        randomness: Randomness | None = None,
        without_factors: FusedOperators | None = None,
        one_rpc_per_module: bool = False,
    ) -> None:
        super().__init__(config)
        self._channels = channels
        self._config = config
        self._dtype = dtype
        self._hide = hide
        # For errors. What crosses in the clear is checked as what a mask made.
        self._mask_name = f"mask {mask.name}" if mask is not None else "no mask"
        self._sites = sites
        self._rows = mask if isinstance(mask, RowMask) else None
        self._randomness = randomness or Randomness()
        self._without_factors = without_factors
        self._one_rpc_per_module = one_rpc_per_module
        self._threads = torch.get_num_threads()
        # Pads and shares are passes over a tensor; others multiply, factorise or draw noise.
        self._heavy_mask = mask is not None and not mask.uniform

    def attention_stays(self, layer: int) -> bool:
        """Say that attention is asked for."""
        return False

    async def embedding(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Look up [T, D]. GPU sees: the token ids, as the mask leaves them."""
        config, rows = self._config, self._rows
        masked = self._mask_rows(
            "embedding",
            None,
            token_ids_T,
            lambda: (
                Masked((token_ids_T,), as_it_is)
                if rows is None
                else rows.mask_ids(token_ids_T, config.vocab_size, self._randomness)
            ),
        )
        (ids,) = masked.sent
        request = EmbeddingRequest(
            input_ids=from_torch(ids), dtype=cast(FloatDtype, short_name(self._dtype))
        )
        exchanges = await self._ask("embedding", None, [request])
        shape = (*ids.shape, config.hidden_size)
        outputs = self._verify("embedding", None, exchanges, shape, self._dtype)
        return self._unmask("embedding", None, masked, outputs)

    async def linear(
        self, layer: int, operator: LinearOperator, x_TI: torch.Tensor
    ) -> torch.Tensor:
        """Compute a linear operator. GPU sees: its input, as the mask leaves it."""
        encoded_TI = self._encode(layer, operator, x_TI)
        masked = self._mask(layer, operator, encoded_TI)
        if masked is None:
            # The others may be waiting for nothing but their turn to send.
            await replies(())
            return await self._compute_here(layer, operator, x_TI)
        outputs = await self._products(layer, operator, masked.sent)
        y_TO = self._unmask(operator, layer, masked, outputs)
        self._check_unmasked(operator, encoded_TI, y_TO)
        return self._decode(layer, operator, y_TO)

    async def attn_scores(
        self, layer: int, q_KRC: torch.Tensor, k_KSC: torch.Tensor
    ) -> torch.Tensor:
        """Q K^T. GPU sees: scaled queries and the sequence's whole key cache, masked."""
        return await self._matmul("attn_scores", layer, q_KRC, k_KSC.transpose(1, 2))

    async def attn_values(
        self, layer: int, p_KRS: torch.Tensor, v_KSC: torch.Tensor
    ) -> torch.Tensor:
        """P V. GPU sees: attention probabilities and the whole value cache, masked."""
        return await self._matmul("attn_values", layer, p_KRS, v_KSC)

    async def lm_head(self, h_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V]. GPU sees: the final hidden states, as the mask leaves them."""
        rows = self._rows
        masked = self._mask_rows(
            "lm_head",
            None,
            h_ND,
            lambda: (
                Masked((h_ND,), as_it_is) if rows is None else rows.mask(h_ND, self._randomness)
            ),
        )
        (sent_ND,) = masked.sent
        request = LMHeadRequest(hidden_states=from_torch(sent_ND))
        exchanges = await self._ask("lm_head", None, [request])
        shape = (*sent_ND.shape[:-1], self._config.vocab_size)
        outputs = self._verify("lm_head", None, exchanges, shape, sent_ND.dtype)
        return self._unmask("lm_head", None, masked, outputs)

    # The stages of a call, one method each: `tee_side.observed` times them.

    def _encode(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> torch.Tensor:
        """Return what the weight is multiplied by."""
        if self._sites is None:
            return x_TI
        with large_tensor(x_TI, self._threads):
            return self._sites.encode(layer, operator, x_TI)

    def _mask(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> Masked | None:
        """Hide it; None if there is nothing left to hide it with."""
        with large_tensor(x_TI, self._threads, self._heavy_mask):
            masked = self._hide(layer, operator, x_TI)
        if masked is not None:
            self._check_sent(operator, x_TI, masked)
        return masked

    def _mask_rows(
        self, operator: Operator, layer: int | None, largest: torch.Tensor, mask: Callable[[], M]
    ) -> M:
        """Hide what is no input of a linear operator; `largest`: of what is hidden."""
        with large_tensor(largest, self._threads, self._heavy_mask):
            return mask()

    async def _compute_here(
        self, layer: int, operator: LinearOperator, x_TI: torch.Tensor
    ) -> torch.Tensor:
        if self._without_factors is None:
            raise LookupError("no unmasking factors, and nothing to compute with instead")
        return await self._without_factors.linear(layer, operator, x_TI)

    async def _ask(
        self, operator: Operator, layer: int | None, requests: Sequence[Request]
    ) -> list[Exchange]:
        """Send one request a service, all before waiting for any."""
        waiting: list[tuple[Channel, int]] = []
        try:
            for channel, request in zip(self._channels, requests, strict=True):
                waiting.append((channel, channel.submit(request)))
        except BaseException:
            for channel, request_id in waiting:
                channel.abandon(request_id)
            raise
        return await replies(waiting)

    def _verify(
        self,
        operator: Operator,
        layer: int | None,
        exchanges: Sequence[Exchange],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Check every reply. Raises ReplyError."""
        return [
            _checked(operator, channel, exchange, shape, dtype)
            for channel, exchange in zip(self._channels, exchanges, strict=True)
        ]

    def _unmask(
        self,
        operator: Operator,
        layer: int | None,
        masked: Masked | MaskedProduct,
        outputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        with large_tensor(outputs[0], self._threads, self._heavy_mask):
            return masked.unmask(*outputs)

    def _decode(self, layer: int, operator: LinearOperator, y_TO: torch.Tensor) -> torch.Tensor:
        """Return the operator's output from the product."""
        if self._sites is None:
            return y_TO
        with large_tensor(y_TO, self._threads):
            return self._sites.decode(layer, operator, y_TO)

    def _check_sent(self, operator: LinearOperator, x_TI: torch.Tensor, masked: object) -> None:
        """Refuse what a mask must not send, before it is sent. Raises MaskError."""
        if not isinstance(masked, Masked) or not isinstance(masked.sent, tuple):
            got, expected = type(masked).__name__, "Masked((tensor,), unmask)"
        elif len(masked.sent) != len(self._channels):
            got, expected = f"{len(masked.sent)} tensors to send", f"{len(self._channels)} tensors"
        else:
            width = x_TI.shape[1]
            for sent in masked.sent:
                if sent.dtype != x_TI.dtype or sent.dim() != 2 or sent.shape[1] != width:
                    got = f"{short_name(sent.dtype)} {list(sent.shape)} to send"
                    expected = f"{short_name(x_TI.dtype)} [rows, {width}]"
                    break
            else:
                return
        raise MaskError(f"{self._mask_name}: {operator}", got=got, expected=expected)

    def _check_unmasked(
        self, operator: LinearOperator, x_TI: torch.Tensor, y_TO: torch.Tensor | None
    ) -> None:
        """Refuse a result that is not one. Raises MaskError."""
        shape, dtype = (x_TI.shape[0], self._widths[operator]), x_TI.dtype
        if y_TO is None or tuple(y_TO.shape) != shape or y_TO.dtype != dtype:
            raise MaskError(
                f"{self._mask_name}: {operator}",
                got="nothing from unmask"
                if y_TO is None
                else f"{short_name(y_TO.dtype)} {list(y_TO.shape)} from unmask",
                expected=f"{short_name(dtype)} {list(shape)}",
            )

    async def _products(
        self, layer: int, operator: LinearOperator, sent: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return each service's product with the fused weight, for what it was sent."""
        modules = FUSED_MODULES[operator]
        if not self._one_rpc_per_module or len(modules) == 1:
            return await self._product(layer, operator, modules, self._widths[operator], sent)
        parts = [
            await self._product(layer, operator, (module,), size, sent)
            for module, size in zip(modules, self._sizes[operator], strict=True)
        ]
        return [torch.cat(outputs, dim=-1) for outputs in zip(*parts, strict=True)]

    async def _product(
        self,
        layer: int,
        operator: LinearOperator,
        modules: tuple[ModuleName, ...],
        width: int,
        sent: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return each service's product with some modules, `width` outputs together."""
        (rows, _), dtype = sent[0].shape, sent[0].dtype
        requests: list[Request] = [
            RingLinearRequest(layer_idx=layer, module_names=modules, elements=from_torch(x_TI))
            if dtype is torch.int32
            else LinearRequest(
                layer_idx=layer,
                module_names=modules,
                hidden_states=from_torch(x_TI),
                bias=self._sites is None,
            )
            for x_TI in sent
        ]
        exchanges = await self._ask(operator, layer, requests)
        return self._verify(operator, layer, exchanges, (rows, width), dtype)

    async def _matmul(
        self, operator: Operator, layer: int, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        rows = self._rows

        masked = self._mask_rows(
            operator,
            layer,
            max(a, b, key=torch.numel),
            lambda: (
                MaskedProduct(a, b, as_it_is)
                if rows is None
                else rows.mask_product(a, b, self._randomness)
            ),
        )
        request = MatmulRequest(a=from_torch(masked.a), b=from_torch(masked.b))
        exchanges = await self._ask(operator, layer, [request])
        shape = (*masked.a.shape[:-1], masked.b.shape[-1])
        outputs = self._verify(operator, layer, exchanges, shape, masked.a.dtype)
        return self._unmask(operator, layer, masked, outputs)


def _checked(
    operator: Operator,
    channel: Channel,
    exchange: Exchange,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    reply = exchange.response
    name = short_name(dtype)
    if isinstance(reply, TensorReply):
        output = reply.output
        if output.dtype == name and output.shape == shape:
            return to_torch(output)
        got, expected = f"{output.dtype} {list(output.shape)}", f"{name} {list(shape)}"
    else:
        got, expected = type(reply).__name__, "a tensor"
    raise ReplyError(f"{operator} reply from {channel.endpoint}", got=got, expected=expected)
