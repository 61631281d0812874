"""Operators that leave the TEE: hidden by a mask, asked for, unmasked, and verified.

Every reply's dtype and shape must be what the TEE's own configuration implies. Where the policy
says so, the numbers are checked, too: of the plain input against the plain result, whatever the
mask is. `tee_side.answers` and `tee_side.liars` say what follows where either is wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, NotRequired, Required, TypeAlias, TypedDict, TypeVar, cast

import torch

from protocol.channel import Channel, Exchange
from protocol.errors import ReplyError, VerificationError
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
)
from protocol.model.config import ModelConfig
from protocol.tensors import from_torch, short_name
from tee_side.answers import Answer, Asked, Deadline, open_replies
from tee_side.fused import FusedOperators
from tee_side.liars import Refused, distrust_liars
from tee_side.mask_rules import MaskRules
from tee_side.masking import HideLinear
from tee_side.masks.mask import Mask, Masked, MaskedProduct, RowMask, as_it_is
from tee_side.overlap import replies
from tee_side.randomness import Randomness
from tee_side.sites import Sites
from tee_side.threads import large_tensor
from tee_side.verifier import Unverified, Verifier
from tee_side.vocabulary import Operator

M = TypeVar("M", Masked, MaskedProduct)

# The services of a layer, one for each share; a mask uses the first `mask.services` of them. The
# embedding goes where layer 0 is, the LM head where the last one is.
ChannelsAt: TypeAlias = Callable[[int], Sequence[Channel]]


# What services answered, and the tensors that a result is unmasked from: one a service.
Answered: TypeAlias = tuple[list[Answer], list[torch.Tensor]]

# Says whether a result is right.
Check: TypeAlias = Callable[[Verifier, torch.Tensor], bool]


class Plain(NamedTuple):
    """What a result has to look like once it is unmasked."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RemoteSettings(TypedDict):
    """What `RemoteOperators` take by name."""

    mask: Required[Mask | None]
    hide: Required[HideLinear]
    verifier: Required[Verifier | Unverified]
    sites: NotRequired[Sites | None]
    randomness: NotRequired[Randomness | None]
    without_factors: NotRequired[FusedOperators | None]
    one_rpc_per_module: NotRequired[bool]
    timeout_s: NotRequired[float | None]


class RemoteOperators(FusedOperators):
    """Asks one service, or several that get a share each, under one mask.

    `mask`: what `hide` hides the inputs of linear operators under, None for nothing; a row mask
    also hides token ids, attention and the LM head. `verifier`: what results are checked with, or
    `UNVERIFIED`. `sites`: None where the service shall do all of it, bias included, in the clear
    and unchecked. `without_factors`: computes a linear operator in the TEE when there is nothing to
    mask it with. `one_rpc_per_module`: q, k, v, gate and up travel alone, as in the published
    schema, instead of together with what shares their input. `timeout_s`: after which nobody else
    is asked for what was refused; None to give each the channel's own deadline.

    Raises the channels' errors, ReplyError for a wrong dtype or shape, VerificationError for a
    wrong result where nobody else is left to ask, and MaskError for a mask that sends, or returns,
    what it must not.
    """

    def __init__(
        self,
        channels_at: ChannelsAt,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        mask: Mask | None,
        hide: HideLinear,
        verifier: Verifier | Unverified,
        sites: Sites | None = None,
        randomness: Randomness | None = None,
        without_factors: FusedOperators | None = None,
        one_rpc_per_module: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(config)
        self._channels_at = channels_at
        self._rules = MaskRules(mask)
        self._config = config
        self._dtype = dtype
        self._hide = hide
        self._verifier = verifier
        self._sites = sites
        self._rows = mask if isinstance(mask, RowMask) else None
        self._randomness = randomness or Randomness()
        self._without_factors = without_factors
        self._one_rpc_per_module = one_rpc_per_module
        self._timeout_s = timeout_s
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
        self._rules.check_sent("embedding", token_ids_T, masked)
        (ids,) = masked.sent
        request = EmbeddingRequest(
            input_ids=from_torch(ids), dtype=cast(FloatDtype, short_name(self._dtype))
        )
        shape = (*ids.shape, config.hidden_size)
        asked = Asked("embedding", None, (request,), shape, self._dtype)
        return await self._result(
            "embedding",
            None,
            lambda deadline: self._answers(asked, deadline),
            masked,
            Plain((*token_ids_T.shape, config.hidden_size), self._dtype),
            lambda verifier, y_TD: verifier.embedding(token_ids_T, y_TD),
        )

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
        sent = masked.sent

        def check(verifier: Verifier, y_TO: torch.Tensor) -> bool:
            return verifier.linear(layer, operator, encoded_TI, y_TO, sent)

        y_TO = await self._result(
            operator,
            layer,
            lambda deadline: self._products(layer, operator, sent, deadline),
            masked,
            Plain((encoded_TI.shape[0], self._widths[operator]), encoded_TI.dtype),
            check,
        )
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
        self._rules.check_sent("lm_head", h_ND, masked)
        (sent_ND,) = masked.sent
        request = LMHeadRequest(hidden_states=from_torch(sent_ND))
        shape = (*sent_ND.shape[:-1], self._config.vocab_size)
        asked = Asked("lm_head", None, (request,), shape, sent_ND.dtype)
        return await self._result(
            "lm_head",
            None,
            lambda deadline: self._answers(asked, deadline),
            masked,
            Plain((*h_ND.shape[:-1], self._config.vocab_size), h_ND.dtype),
            lambda verifier, y_NV: verifier.lm_head(h_ND, y_NV, sent_ND),
        )

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
            self._rules.check_sent(operator, x_TI, masked)
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
        self, asked: Asked, channels: Sequence[Channel], left_s: float | None
    ) -> list[Exchange]:
        """Send one request a service, all before waiting for any. `left_s`: as `submit` has it."""
        waiting: list[tuple[Channel, int]] = []
        try:
            for channel, request in zip(channels, asked.requests, strict=True):
                waiting.append((channel, channel.submit(request, left_s)))
        except BaseException:
            for channel, request_id in waiting:
                channel.abandon(request_id)
            raise
        return await replies(waiting)

    def _open(
        self, asked: Asked, channels: Sequence[Channel], exchanges: Sequence[Exchange]
    ) -> list[torch.Tensor] | ReplyError:
        """Check the form of every reply, as `open_replies` does."""
        return open_replies(asked, channels, exchanges)

    def _verify(
        self,
        operator: Operator,
        layer: int | None,
        y: torch.Tensor,
        check: Check,
        verifier: Verifier,
    ) -> bool:
        """Check the numbers of a result."""
        with large_tensor(y, self._threads):
            return check(verifier, y)

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

    def _channels(self, operator: Operator, layer: int | None) -> Sequence[Channel]:
        """Return whom to ask: one service a share."""
        if layer is None:
            layer = 0 if operator == "embedding" else self._config.num_hidden_layers - 1
        return self._channels_at(layer)[: self._rules.services]

    async def _answers(self, asked: Asked, deadline: Deadline) -> Answered:
        """Ask every service for one tensor, until what they send is of the right form."""
        channels = self._channels(asked.operator, asked.layer)
        while True:
            exchanges = await self._ask(asked, channels, deadline.left_s(asked.operator))
            deadline.begun = True
            outputs = self._open(asked, channels, exchanges)
            if not isinstance(outputs, ReplyError):
                return list(map(Answer, channels, asked.requests, exchanges, outputs)), outputs
            deadline.ask_again(outputs)

    async def _result(
        self,
        operator: Operator,
        layer: int | None,
        ask: Callable[[Deadline], Awaitable[Answered]],
        masked: Masked | MaskedProduct,
        plain: Plain,
        check: Check,
    ) -> torch.Tensor:
        """Ask until the result is right, and return it unmasked. No other result is used."""
        deadline = Deadline(self._timeout_s)
        while True:
            answers, outputs = await ask(deadline)
            y = self._unmask(operator, layer, masked, outputs)
            self._rules.check_unmasked(operator, y, plain.shape, plain.dtype)
            refused = self._refused(operator, layer, y, check, answers, deadline)
            if refused is None:
                return y
            deadline.ask_again(refused)

    def _refused(
        self,
        operator: Operator,
        layer: int | None,
        y: torch.Tensor,
        check: Check,
        answers: Sequence[Answer],
        deadline: Deadline,
    ) -> VerificationError | None:
        """Return what a result was refused with; None where it may be used.

        That is where it was verified, or the policy believes it. Raises as `distrust_liars` does.
        """
        verifier = self._verifier
        if isinstance(verifier, Unverified) or self._verify(operator, layer, y, check, verifier):
            return None
        return distrust_liars(Refused(operator, layer, answers, verifier, deadline, self._rules))

    async def _products(
        self,
        layer: int,
        operator: LinearOperator,
        sent: Sequence[torch.Tensor],
        deadline: Deadline,
    ) -> Answered:
        """Return all answers, and each service's product with the fused weight."""
        modules = FUSED_MODULES[operator]
        if not self._one_rpc_per_module or len(modules) == 1:
            width = self._widths[operator]
            return await self._product(layer, operator, modules, width, sent, deadline)
        parts = [
            await self._product(layer, operator, (module,), size, sent, deadline)
            for module, size in zip(modules, self._sizes[operator], strict=True)
        ]
        of_services = zip(*(outputs for _, outputs in parts), strict=True)
        return (
            [answer for answers, _ in parts for answer in answers],
            [torch.cat(outputs, dim=-1) for outputs in of_services],
        )

    async def _product(
        self,
        layer: int,
        operator: LinearOperator,
        modules: tuple[ModuleName, ...],
        width: int,
        sent: Sequence[torch.Tensor],
        deadline: Deadline,
    ) -> Answered:
        """Return each service's product with some modules, `width` outputs together."""
        (rows, _), dtype = sent[0].shape, sent[0].dtype
        requests: tuple[Request, ...] = tuple(
            RingLinearRequest(layer_idx=layer, module_names=modules, elements=from_torch(x_TI))
            if dtype is torch.int32
            else LinearRequest(
                layer_idx=layer,
                module_names=modules,
                hidden_states=from_torch(x_TI),
                bias=self._sites is None,
            )
            for x_TI in sent
        )
        asked = Asked(operator, layer, requests, (rows, width), dtype)
        return await self._answers(asked, deadline)

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
        self._rules.check_product(operator, a, b, masked)
        request = MatmulRequest(a=from_torch(masked.a), b=from_torch(masked.b))
        shape = (*masked.a.shape[:-1], masked.b.shape[-1])
        asked = Asked(operator, layer, (request,), shape, masked.a.dtype)
        return await self._result(
            operator,
            layer,
            lambda deadline: self._answers(asked, deadline),
            masked,
            Plain((*a.shape[:-1], b.shape[-1]), a.dtype),
            lambda verifier, y: verifier.product(a, b, y),
        )
