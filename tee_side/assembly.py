"""From a policy to the operators that the forward pass calls, with all that its masks need.

The order is that of mistakes that show early: the policy against the model, files of the TEE's own
(key, pad bank), and only then the services.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protocol.channel import Channel
from protocol.errors import PolicyError, SettingsError
from protocol.integer import check_kernels
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_digest, model_digest
from protocol.model.config import ModelConfig
from protocol.model.forward import Call
from protocol.model.weights import CPU
from tee_side.model.operators import (
    LocalOperators,
    MicroBatchOperators,
    Product,
    RemoteSegment,
    TeeModel,
    load_local_operators,
    load_site,
    not_here,
    place,
)
from tee_side.observer import Observers, timed
from tee_side.policy.placement import Policy, Segment
from tee_side.protect.masking import MaskRules, PaddedSite
from tee_side.protect.masks.mask import AdditiveMask, Given, Mask, MaskKey, Pad, in_the_clear
from tee_side.protect.pads.source import (
    DrawsPads,
    Multiply,
    PadLane,
    Pads,
    WhenOut,
    fill_pads,
    multiply_here,
    read_weights,
)
from tee_side.protect.pads.store import MemoryStore, PadStore
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import (
    FloatSite,
    IntegerSites,
    LinearSite,
    PadLayout,
    Weights,
    load_biases,
    site_number,
    tensors_of,
)
from tee_side.protect.verification import (
    UNVERIFIED,
    ExactCheck,
    LinearCheck,
    SiteSecrets,
    find_checks,
)
from tee_side.remote.call import (
    CallSettings,
    ChannelsAt,
    RegisteredOperator,
    RunParts,
    find_registered,
    plan_linear,
)
from tee_side.words import Operator, PadsFrom, Phase, Site, Verify, is_projection, registered_name

if TYPE_CHECKING:
    from tee_side.model.segment import Sessions
    from tee_side.protect.pads.bank_files import BankPlace
    from tee_side.remote.dealing import Dealing

# Banks, segments and what packages register are imported where a policy or an option
# names them: a run does not trust the code of the others.

# Tokens that pads are kept ready for in memory while nothing runs, where no bank is given.
AHEAD_IN_MEMORY = 128

# How many of them a dealer multiplies at once, where pads are dealt: it reads each weight once for
# all of them.
DEALT_GROUP = 32

# int8 products have to be exact here: they make pads and compute what stays. Checked once a
# process; the service checks its own. Raises KernelError.
_check_own_kernels = cache(check_kernels)


@dataclass(frozen=True)
class MaskSettings:
    """What masks need beside the policy.

    `key`: what `tsqp provision` wrote; `bank`: pads on disk, None to make them in memory as the run
    goes; `dealers`: who multiplies pads that are dealt, each by a name that is no other owner's.
    """

    key: Path | None = None
    bank: BankPlace | None = None
    when_out: WhenOut = "wait"
    dealers: tuple[str, ...] = ("a dealer",)


class Assembly:
    """A policy made ready for one model, before any service is asked; close it after use.

    `dealers_at`: the dealers of each layer, for who makes pads alone; those of `lanes`, where
    nothing else is said before.

    Raises PolicyError, ModelError, FeatureKeyError, PadBankError, SettingsError.
    """

    def __init__(
        self,
        policy: Policy,
        config: ModelConfig,
        checkpoint: Checkpoint,
        model: TeeModel,
        settings: MaskSettings,
        *,
        step_tokens: int,
        on_load: Callable[[str, int, int], None] | None = None,
        on_wait: Callable[[int], None] | None = None,
    ) -> None:
        self._on_load = on_load
        self._parts = RunParts(policy, config, checkpoint, model.dtype)
        self._model = model
        layers = config.num_hidden_layers
        policy.check(layers)
        PolicyError.unless(
            config.score_cap is None or not policy.segments(layers),
            f"policy {policy.name}: segment",
            f"{config.architecture}, whose scores are capped",
            "operators one by one: services compute no whole layers of it",
        )
        padded = {
            mask: policy.sites_under(layers, mask)
            for mask in policy.masks
            if isinstance(mask, AdditiveMask)
        }
        # Where pads may run out, the TEE computes what they were for.
        missed = chain(*padded.values()) if settings.when_out == "tee" else ()
        self._sites_here = list(dict.fromkeys([*policy.sites_here(layers), *missed]))
        self._verified = policy.sites(layers, lambda placed: placed.verify != "none")
        if self._verified:
            self._checks_class = find_checks(policy.name, policy.served_arithmetic)
        # What is no linear operator, nor part of a segment.
        inside = ["segment", *["lm_head"] * any(one.head for one in policy.segments(layers))]
        others = [o for o, _ in policy.leaving() if o not in (*policy.projections, *inside)]
        self._registered_classes = find_registered(policy.name, others)
        _check_settings(settings, policy, padded.keys())
        # What the TEE computes, makes pads from or verifies; and integers are scaled back by the
        # weights' scales, wherever they are computed.
        known = (
            policy.sites(layers, lambda _: True)
            if policy.arithmetic == "int8"
            else [*self._sites_here, *self._verified, *chain(*padded.values())]
        )
        checkpoint.require(light_tensors(config) | tensors_of(known, config))
        checkpoint.refuse_extra(config)
        self._sessions: dict[int, Sessions] = {}
        self.dealers_at: ChannelsAt | None = None
        self.key: MaskKey | None = None
        if (keyed := policy.feature_mask) is not None:
            self.key = keyed.load_key(settings.key, config, checkpoint, model.light)
        self.linear_digest = linear_digest(config, checkpoint)
        # Biases, where the TEE adds them: for integers, under masks, to what it verifies.
        operators = [
            name
            for name in FUSED_MODULES
            if policy.arithmetic == "int8"
            or any((p.mask, p.verify) != (None, "none") for p in policy.operators.get(name, ()))
        ]
        self._biases = biases = load_biases(checkpoint, config, operators, model.dtype)
        self._integers: IntegerSites | None = None
        if policy.arithmetic == "int8":
            _check_own_kernels(CPU)
            self._integers = IntegerSites(config, checkpoint, biases, model.dtype)
        # Pads are opened before weights are loaded, and made afterwards from those that stay.
        self.pads: dict[Mask, Pads] = {}
        with ExitStack() as opened:
            for mask, sites in padded.items():
                layout = PadLayout.of(config, sites)
                dealers, group = (settings.dealers, DEALT_GROUP) if mask.dealt else ((), 1)
                # A step may have as many rows, and begin within a group; memory is taken as it is
                # filled.
                capacity = math.ceil(max(AHEAD_IN_MEMORY, step_tokens) / group) * group
                capacity += group if dealers else 0
                store = opened.enter_context(
                    MemoryStore(layout, capacity, group=group, dealers=dealers)
                    if settings.bank is None
                    else self._open_bank(settings.bank, layout, mask, dealers)
                )
                dealing = None
                if dealers:
                    from tee_side.remote.dealing import Dealing

                    dealing = Dealing(config, self._dealers, self._exact_check)
                self.pads[mask] = Pads(
                    mask,
                    store,
                    partial(fill_pads, self._multiply(mask, dealing), store),
                    settings.when_out,
                    ahead=AHEAD_IN_MEMORY if settings.bank is None else None,
                    decode_share=policy.left_to_decode,
                    dealing=dealing,
                    on_wait=on_wait,
                )
            # Lets go of the pad bank.
            self.close = opened.pop_all().close

    def _open_bank(
        self, place: BankPlace, layout: PadLayout, mask: AdditiveMask, dealers: tuple[str, ...]
    ) -> PadStore:
        from tee_side.protect.pads.bank import BankFile
        from tee_side.protect.pads.bank_files import Purpose

        checkpoint = self._parts.checkpoint
        purpose = Purpose.of(
            layout,
            mask=mask.described(),
            model=checkpoint.directory.resolve().name,
            model_digest=model_digest(self._parts.config, checkpoint),
            linear_digest=self.linear_digest or "",
            dealers=dealers,
        )
        return BankFile.open(place, purpose)

    def _multiply(self, mask: AdditiveMask, dealing: Dealing | None) -> Multiply:
        if dealing is not None:
            return dealing.multiply
        config, checkpoint = self._parts.config, self._parts.checkpoint
        weights = read_weights(checkpoint, config, mask.arithmetic, self._integers)
        return multiply_here(mask, weights)

    def _dealers(self, layer: int) -> Sequence[Channel]:
        if self.dealers_at is None:
            raise LookupError("dealers that nothing connects to")
        return self.dealers_at(layer)

    def _exact_check(self, site: Site) -> ExactCheck | None:
        check = self._secrets[site] if site in self._verified else None
        return check.exact if isinstance(check, LinearCheck) else None

    def lanes(
        self,
        channels_at: ChannelsAt,
        observers: Observers | None = None,
        randomness: Randomness | None = None,
        *,
        micro_batches: int = 1,
        only: Collection[Operator] | None = None,
        timeout_s: float = math.inf,
    ) -> list[MicroBatchOperators]:
        """Build the tables for each micro-batch of a step, and spares for parts beside it.

        `channels_at`: the service of each layer and, for pads that are dealt as they are used, each
        dealer. `only`: what the observers are told of, where it runs in the TEE; None for
        everything. `timeout_s`: for a result, however many are asked for it because others' were
        refused; infinite: each has its channel's own deadline. The first call loads the weights
        that stay, and draws what results are verified with.
        """
        drawn = randomness or Randomness()
        if self.dealers_at is None:
            self.dealers_at = lambda layer: channels_at(layer)[1:]
        lane = partial(self._lane, channels_at, timeout_s, observers, only, drawn)
        lanes = [lane(index) for index in range(micro_batches)]
        tables = {*map(id, lanes[0].tables.values())}
        spares = range(micro_batches, micro_batches + len(tables) - 1)
        return [*lanes, *(replace(lane(index), spare=True) for index in spares)]

    def _lane(
        self,
        channels_at: ChannelsAt,
        timeout_s: float,
        observers: Observers | None,
        only: Collection[Operator] | None,
        randomness: Randomness,
        index: int,
    ) -> MicroBatchOperators:
        observer = None if observers is None else observers(index)
        settings = CallSettings(channels_at, timeout_s, observer if only is None else None)
        policy, config = self._parts.policy, self._parts.config
        loaded, integers = self._local, self._integers
        # Two micro-batches never draw from one stretch of pads.
        pads = {mask: PadLane(found) for mask, found in self.pads.items()}
        dealers = len(channels_at(0)) - 1 if policy.dealt else 0

        @cache
        def linear(site: Site, mask: Mask | None, verify: Verify, dealt_now: bool) -> Call:
            # What is neither masked nor checked is computed with its bias and all.
            bias_leaves = integers is None and mask is None and verify == "none"
            # Before `integers[site]`: drawing the check reads the weight, and it is not read again.
            check = UNVERIFIED if verify == "none" else self._secrets[site].under(mask)
            of_site: LinearSite = (
                FloatSite(None if bias_leaves else self._biases.get(site))
                if integers is None
                else integers[site]
            )
            made = None if mask is None else pads.get(mask)
            given, asked = Given(site, randomness, key=self.key), 0
            lane: DrawsPads | None = made
            accuse = None
            if made is not None and dealt_now:
                from tee_side.protect.pads.dealt import FreshPads

                lane = fresh = FreshPads(made.source.store.layout, dealers, randomness)
                given, asked = replace(given, deal=fresh.deal), dealers
            elif made is not None:
                given, accuse = replace(given, draw=made.draw), made.source.accuse
            padded = None
            # What a subclass of `Pad` sends is its own affair.
            if type(mask) is Pad and lane is not None and not isinstance(of_site, FloatSite):
                exact = check.exact if isinstance(check, LinearCheck) else None
                if of_site.compiled:
                    padded = PaddedSite(of_site, site_number(*site), lane, exact)
            return plan_linear(
                site,
                of_site,
                in_the_clear if mask is None else mask.hiding(given),
                MaskRules(mask, asked),
                check,
                config,
                settings,
                bias_leaves=bias_leaves,
                one_rpc_per_module=policy.one_rpc_per_module,
                padded=padded,
                accuse=accuse,
            )

        def stays(operator: Operator, layer: int | None) -> Product:
            function = loaded.get(
                (layer, operator), self._head if operator == "lm_head" else not_here
            )
            told = observer if only is None or operator in only else None
            return timed(function, told, operator, layer)

        def leaves(
            operator: Operator, layer: int, phase: Phase, source: PadsFrom
        ) -> Callable[..., Any]:
            if is_projection(operator) and operator in policy.projections:
                placement = policy.at(operator, layer, phase)
                mask, verify = placement.mask, placement.verify
                dealt_now = isinstance(mask, AdditiveMask) and not mask.made(source)
                return linear((layer, operator), mask, verify, dealt_now)
            registered = self._registered[registered_name(operator)]
            return registered.bind(layer, phase, settings, randomness)

        layers = config.num_hidden_layers
        segments: list[tuple[Segment, Callable[[Segment], RemoteSegment]]] = []
        for found in policy.segments(layers):
            from tee_side.model.segment import SegmentCall, Sessions, cut

            for one in cut(found, channels_at):
                sessions = self._sessions.setdefault(one.first, Sessions())
                segments.append((one, partial(SegmentCall, config, settings, sessions, self.key)))
        tables = place(policy, layers, stays, leaves, segments)
        return MicroBatchOperators(replace(self._model, observer=settings.observer), tables, pads)

    def _head(self, h_ND: torch.Tensor) -> torch.Tensor:
        """Compute the LM head in the TEE, read when first asked for: log-probabilities of prompts.

        All else that it computes, it has from the start.
        """
        if (None, "lm_head") not in self._local:
            site: Site = (self._parts.config.num_hidden_layers - 1, "lm_head")
            self._local[None, "lm_head"] = load_site(self._parts, site, self._integers)
        return self._local[None, "lm_head"](h_ND)

    @cached_property
    def _local(self) -> LocalOperators:
        parts, integers = self._parts, self._integers
        sites = self._told("weights that stay in the TEE", self._sites_here)
        return load_local_operators(parts, sites=sites, integers=integers)

    @cached_property
    def _secrets(self) -> dict[Site, SiteSecrets]:
        # What stays is loaded before, and not read again. From a generator of their own, which no
        # caller chooses.
        _ = self._local
        parts = self._parts
        weights = Weights(parts.config, parts.checkpoint, parts.dtype, self._integers)
        sites = self._told("weights that verify results", self._verified)
        draw, randomness = self._checks_class.draw, Randomness()
        return {site: draw(site, weights, randomness) for site in sites}

    def _told(self, what: str, sites: Sequence[Site]) -> Iterator[Site]:
        for done, site in enumerate(sites, 1):
            yield site
            if self._on_load is not None:
                self._on_load(what, done, len(sites))

    @cached_property
    def _registered(self) -> dict[str, RegisteredOperator]:
        return {name: made(self._parts) for name, made in self._registered_classes.items()}


def _check_settings(
    settings: MaskSettings, policy: Policy, padded: Collection[AdditiveMask]
) -> None:
    """Refuse files that the policy has no use for: the operator who names one relies on it.

    `padded`: the masks that need pads. Raises SettingsError and PolicyError.
    """
    bank = settings.bank
    name = f"policy {policy.name}"
    uses = {
        "--bank": (bank and bank.bank, bool(padded), "pads"),
        "--key": (settings.key, policy.feature_mask is not None, "a feature mask"),
    }
    for option, (given, used, what) in uses.items():
        expected = f"nothing: {name} runs without {what}"
        SettingsError.unless(given is None or used, option, str(given), expected)
    if bank is None:
        return
    for mask in padded:
        where = f"{name}: pad bank {bank.bank}"
        expected = "mask pad: a bank holds ring elements"
        PolicyError.unless(mask.arithmetic == "int8", where, f"mask {mask.name}", expected)
        masks = " and ".join(other.described() for other in padded)
        expected = "one mask with pads: a bank is made for one"
        PolicyError.unless(len(padded) == 1, where, f"masks {masks}", expected)
