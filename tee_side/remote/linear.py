"""Products with weights that leave the TEE: an object for each site, with a plan a row count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from protocol.channel import Channel
from protocol.messages import LinearRequest, RingLinearRequest, RingLMHeadRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.prepared import PreparedRequest
from protocol.tensors import WireTensor, short_name
from tee_side.observer import UNTIMED, Observer, StageClock, Untimed
from tee_side.policy.placement import Policy
from tee_side.protect.masking import Hide, MaskRules, PaddedSite
from tee_side.protect.masks.mask import Masked
from tee_side.protect.sites import LinearSite
from tee_side.protect.verification import ResultCheck, Unverified
from tee_side.remote.call import CallPlan, Planned
from tee_side.words import Operator, Site, layer_of

# The services of a layer, one for each share; a mask uses the first `mask.services` of them. The
# embedding goes where layer 0 is, the LM head where the last one is.
ChannelsAt: TypeAlias = Callable[[int], Sequence[Channel]]


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the operators of a run are made from; the policy has been checked against the model."""

    policy: Policy
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What all calls of a micro-batch have in common.

    `channels_at`: the services of each layer. `timeout_s`: after which no other service is asked
    for what was refused; None: each request has its channel's own deadline. `observer`: told of
    every stage; None for none.
    """

    channels_at: ChannelsAt
    timeout_s: float | None
    observer: Observer | None

    def clock(self, operator: Operator, layer: int | None) -> StageClock | Untimed:
        """Return what tells the observer of an operator's stages."""
        return UNTIMED if self.observer is None else StageClock(self.observer, operator, layer)

    @property
    def longest_s(self) -> float:
        """`timeout_s`, infinite for None."""
        return math.inf if self.timeout_s is None else self.timeout_s


@dataclass(frozen=True, slots=True, eq=False)
class SitePlan:
    """How one site leaves the TEE under one protection, resolved once from its placement.

    `hide`: masks what `linear` has encoded, under `rules`; `check`: of the product. `bias_leaves`:
    the service adds the bias, as nothing is masked or checked. `padded`: does all of this compiled,
    where it can be.
    """

    site: Site
    linear: LinearSite
    hide: Hide
    rules: MaskRules
    check: ResultCheck | Unverified
    bias_leaves: bool
    padded: PaddedSite | None = None


class RemoteLinear(Planned):
    """A linear operator of one layer, or the LM head, under one protection; call it with [T, I].

    `one_rpc_per_module`: q, k, v, gate and up travel alone, as in the published schema, instead of
    together with what shares their input.

    GPU sees: the input, as the mask leaves it. Raises as `carry_out` does.
    """

    def __init__(
        self,
        plan: SitePlan,
        config: ModelConfig,
        settings: CallSettings,
        *,
        one_rpc_per_module: bool = False,
    ) -> None:
        super().__init__()
        self._site, self._settings = plan, settings
        _, operator = site = plan.site
        rows, (self._outputs, _) = config.row_layout(operator)
        modules = tuple(rows)
        self._messages = [(module,) for module in modules] if one_rpc_per_module else [modules]
        self._sizes = {module: its.stop - its.start for module, its in rows.items()}
        self._layer = layer_of(site)
        self._clock = settings.clock(operator, self._layer)

    def plan(self, x_TI: torch.Tensor) -> CallPlan:
        """Make the plan for the row count of this input.

        Its output has the outputs of the operator's modules side by side [T, O], biases included.
        """
        site, settings, rows = self._site, self._settings, x_TI.shape[0]
        (layer, operator), rules = site.site, site.rules
        shape, most_rows = (rows, self._outputs), rules.most_rows(rows)
        # By how many rows cross: as many as there are, unless a row mask adds some.
        prepared: dict[int, tuple[PreparedRequest, ...]] = {}

        def requests(encoded: torch.Tensor, masked: Masked) -> tuple[PreparedRequest, ...]:
            rules.check_sent(operator, encoded, most_rows, masked)
            sent_RI = masked.sent[0]
            found = prepared.get(sent_RI.shape[0])
            if found is None:
                found = prepared[sent_RI.shape[0]] = self._prepare(sent_RI.shape, sent_RI.dtype)
            return found

        return CallPlan(
            operator=operator,
            layer=self._layer,
            channels=tuple(settings.channels_at(layer)[: rules.services]),
            encode=site.linear.encode,
            hide=site.hide,
            requests=requests,
            rules=rules,
            shape=shape,
            check=site.check,
            decode=site.linear.decode,
            timeout_s=settings.longest_s,
            clock=self._clock,
            padded=site.padded,
            prepared=() if site.padded is None else self._prepare(x_TI.shape, torch.int32),
        )

    def _prepare(self, shape: tuple[int, ...], of: torch.dtype) -> tuple[PreparedRequest, ...]:
        """Prepare the requests for tensors of a shape [R, I] and dtype."""
        layer, dtype, rows = self._layer, short_name(of), shape[0]
        wire = WireTensor(dtype, tuple(shape), b"")
        if layer is None:
            head = RingLMHeadRequest(elements=wire)
            return (PreparedRequest(head, (rows, self._outputs), dtype),)
        return tuple(
            PreparedRequest(
                RingLinearRequest(layer_idx=layer, module_names=names, elements=wire)
                if of is torch.int32
                else LinearRequest(
                    layer_idx=layer,
                    module_names=names,
                    hidden_states=wire,
                    bias=self._site.bias_leaves,
                ),
                (rows, sum(self._sizes[name] for name in names)),
                dtype,
            )
            for names in self._messages
        )
