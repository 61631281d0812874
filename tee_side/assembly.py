"""From a policy to the operators that the forward pass calls, with all that its masks need.

The order is that of mistakes that show early: the policy against the model, files of the TEE's own
(calibration, key, pad bank), and only then the services.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from protocol.errors import PolicyError, SettingsError
from protocol.integer import check_kernels
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import QuantizedLinear
from protocol.model.weights import CPU
from tee_side.model.layers import TeeModel
from tee_side.model.local_operators import (
    LocalOperators,
    load_local_operators,
    sites_here,
)
from tee_side.model.operators import Call, MicroBatchOperators, place, staying
from tee_side.observer import Observer, Observers, timed
from tee_side.policy.placement import Placement, Policy
from tee_side.protect.calibration import Calibration, calibration_path
from tee_side.protect.masking import HideAt, MaskRules, linear_masking
from tee_side.protect.masks.keyed import TransformKey, load_key
from tee_side.protect.masks.mask import AdditiveMask, KeyedTransform, Mask
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout
from tee_side.protect.pads.maker import PadMaker, held_or, read_weights
from tee_side.protect.pads.source import Pads, WhenOut
from tee_side.protect.pads.store import MemoryStore, PadStore
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import (
    FloatSite,
    FloatSites,
    IntegerSites,
    Sites,
    load_biases,
    tensors_of,
)
from tee_side.protect.verifier import UNVERIFIED, Secrets, Weights, check_verifiable
from tee_side.remote.linear import CallSettings, ChannelsAt, RemoteLinear
from tee_side.remote.registered import (
    RegisteredOperator,
    RunParts,
    find_registered,
    registered_name,
)
from tee_side.words import PHASES, Operator, Phase, Site, Verify, is_linear

# Tokens that pads are kept ready for in memory while nothing runs, where no bank is given.
AHEAD_IN_MEMORY = 128


@dataclass(frozen=True)
class MaskSettings:
    """What masks need beside the policy.

    `calibration`: None for the file beside the model; `key`: what `tsqp provision` wrote; `bank`:
    pads on disk, None to make them in memory as the run goes.
    """

    calibration: Path | None = None
    key: Path | None = None
    bank: BankPlace | None = None
    when_out: WhenOut = "wait"


class Assembly:
    """A policy made ready for one model, before any service is asked; close it after use.

    Raises PolicyError, ModelError, CalibrationError, FeatureKeyError, PadBankError, SettingsError.
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
        on_wait: Callable[[int], None] | None = None,
    ) -> None:
        self.policy = policy
        self._on_wait = on_wait
        self._config = config
        self._checkpoint = checkpoint
        self._model = model
        self._settings = settings
        policy.check(config.num_hidden_layers)
        self._local_sites = self._sites_needed_here()
        padded = {
            mask: self._under(mask) for mask in policy.masks if isinstance(mask, AdditiveMask)
        }
        self._verified = sites_where(
            policy, config.num_hidden_layers, lambda placement: placement.verify != "none"
        )
        check_verifiable(policy.name, self._verified, config, checkpoint)
        self._registered_classes = find_registered(policy)
        self._check_settings(padded)
        checkpoint.require(light_tensors(config) | tensors_of(self._local_sites, config))
        checkpoint.refuse_extra(config)
        self.key = self._load_key()
        self.linear_digest = linear_digest(config, checkpoint)
        self._integers = self._load_integers()
        self._sites: Sites = self._integers or FloatSites(self._biases())
        self.pads: dict[Mask, Pads] = {}
        self._stores: list[PadStore] = []
        # Pads are opened before weights are loaded, and made afterwards from those that stay.
        self._held: dict[Site, QuantizedLinear] = {}
        try:
            for mask, sites in padded.items():
                self.pads[mask] = self._open_pads(mask, sites, step_tokens)
        except BaseException:
            self.close()
            raise

    def lanes(
        self,
        channels_at: ChannelsAt,
        observers: Observers | None = None,
        randomness: Randomness | None = None,
        *,
        micro_batches: int = 1,
        only: Collection[Operator] | None = None,
        timeout_s: float | None = None,
    ) -> list[MicroBatchOperators]:
        """Build the tables for each micro-batch of a step.

        `channels_at`: the services of each layer. `only`: what the observers are told of, where it
        runs in the TEE; None for everything. `timeout_s`: for a result, however many are asked for
        it because others' were refused; None: each has its channel's own deadline. The first call
        loads the weights that stay, and draws what results are verified with.
        """
        randomness = randomness or Randomness()
        settings = CallSettings(channels_at, timeout_s, None, torch.get_num_threads())
        return [
            self._lane(
                observers.lane(index) if observers is not None else None, settings, randomness, only
            )
            for index in range(micro_batches)
        ]

    def _lane(
        self,
        told: Observer | None,
        settings: CallSettings,
        randomness: Randomness,
        only: Collection[Operator] | None,
    ) -> MicroBatchOperators:
        told_all = told if only is None else None
        settings = replace(settings, observer=told_all)
        # Two micro-batches never draw from one stretch of pads.
        pads = {mask: found.lane() for mask, found in self.pads.items()}
        hides = {
            mask: linear_masking(
                mask,
                randomness,
                pads=pads.get(mask) if mask is not None else None,
                transforms=self._transforms,
            )
            for mask in (None, *self.policy.masks)
        }

        @cache
        def remote_linear(site: Site, mask: Mask | None, verify: Verify) -> RemoteLinear:
            return self._remote_linear(site, mask, verify, settings, hides[mask])

        def local(operator: Operator, layer: int | None) -> Call:
            observer = told if only is None or operator in only else None
            function = self._local.function(operator, layer)
            return staying(timed(function, observer, operator, layer))

        def remote(operator: Operator, layer: int, phase: Phase) -> Callable[..., Any]:
            if is_linear(operator):
                placement = self.policy.at(operator, layer, phase)
                return remote_linear((layer, operator), placement.mask, placement.verify)
            registered = self._registered[registered_name(operator)]
            return registered.bind(layer, phase, settings, randomness)

        decode, prefill = place(self.policy, self._config.num_hidden_layers, local, remote)
        model = self._model.observed(told_all)
        return MicroBatchOperators(model, prefill, decode, prefill is decode, tuple(pads.values()))

    def _remote_linear(
        self, site: Site, mask: Mask | None, verify: Verify, settings: CallSettings, hide: HideAt
    ) -> RemoteLinear:
        # What is neither masked nor checked is computed with its bias and all.
        bias_leaves = self._integers is None and mask is None and verify == "none"
        return RemoteLinear(
            site,
            self._config,
            settings,
            hide=hide(site),
            rules=MaskRules(mask),
            check=UNVERIFIED if verify == "none" else self._secrets.check(site, mask),
            linear=FloatSite() if bias_leaves else self._sites[site],
            bias_leaves=bias_leaves,
            without_factors=staying(self._local.linear(site)),
            one_rpc_per_module=self.policy.one_rpc_per_module,
        )

    def close(self) -> None:
        """Let go of the pad bank."""
        for store in self._stores:
            store.close()

    def _sites_needed_here(self) -> list[Site]:
        sites = sites_here(self.policy, self._config)
        if self._settings.when_out == "tee":
            under = [site for mask in self.policy.masks for site in self._under(mask)]
            sites += [site for site in under if site not in sites]
        return sites

    def _check_settings(self, padded: Mapping[AdditiveMask, Sequence[Site]]) -> None:
        """Refuse files that the policy has no use for, and pads that nothing can come from.

        Somebody who names a file relies on it. Raises SettingsError and PolicyError.
        """
        settings, name = self._settings, f"policy {self.policy.name}"
        uses = {
            "--bank": (settings.bank and settings.bank.bank, bool(padded), "pads"),
            "--key": (settings.key, self.policy.feature_mask is not None, "a feature mask"),
            "--calibration": (settings.calibration, self.policy.arithmetic == "int8", "int8"),
        }
        for option, (given, used, what) in uses.items():
            if given is not None and not used:
                raise SettingsError(
                    option, got=str(given), expected=f"nothing: {name} runs without {what}"
                )
        if settings.bank is not None:
            return
        for mask, sites in padded.items():
            if not self._checkpoint.holds(tensors_of(sites, self._config)):
                raise PolicyError(
                    f"{name}: mask {mask.name}",
                    got=f"no --bank, and not all linear weights in {self._checkpoint.directory}",
                    expected="one of them: pads are made from the weights",
                )

    def _under(self, mask: Mask) -> list[Site]:
        return sites_under(self.policy, self._config.num_hidden_layers, mask)

    def _biases(self) -> dict[Site, torch.Tensor]:
        """Read biases where the TEE adds them: for integers, under masks, to what it verifies."""
        operators = [
            operator
            for operator in FUSED_MODULES
            if self.policy.arithmetic == "int8"
            or any((p.mask, p.verify) != (None, "none") for p in self.policy.operators[operator])
        ]
        return load_biases(self._checkpoint, self._config, operators, self._model.dtype)

    def _load_integers(self) -> IntegerSites | None:
        if self.policy.arithmetic != "int8":
            return None
        _check_own_kernels()
        path = calibration_path(self._checkpoint.directory, self._settings.calibration)
        calibration = Calibration.load(
            path,
            self._config,
            model_digest(self._config, self._checkpoint),
            self.linear_digest,
            self._checkpoint.manifest,
        )
        # Where the directory has no linear weights: those that the scales belong to.
        self.linear_digest = calibration.linear_digest
        return IntegerSites(calibration, self._biases(), self._model.dtype)

    def _load_key(self) -> TransformKey | None:
        mask, path = self.policy.feature_mask, self._settings.key
        if mask is None:
            return None
        if path is None:
            raise SettingsError(
                "--key",
                got="none",
                expected=f"the key that tsqp provision --mask {mask.name} wrote",
            )
        key = load_key(path)
        key.check(self._config, self._checkpoint, mask)
        return key

    @cached_property
    def _local(self) -> LocalOperators:
        return load_local_operators(
            self._config,
            self._checkpoint,
            self.policy,
            self._model.dtype,
            sites=self._local_sites,
            integers=self._integers,
            held=self._held,
        )

    @cached_property
    def _secrets(self) -> Secrets:
        # What stays is loaded before, and not read again. From a generator of their own, which no
        # caller chooses.
        _ = self._local
        weights = Weights(self._config, self._checkpoint, self._model.dtype, self._held)
        return Secrets.draw(self._verified, weights, self._integers, Randomness())

    @cached_property
    def _registered(self) -> dict[str, RegisteredOperator]:
        parts = RunParts(self.policy, self._config, self._checkpoint, self._model.dtype)
        return {name: found(parts) for name, found in self._registered_classes.items()}

    @cached_property
    def _transforms(self) -> dict[Site, KeyedTransform] | None:
        feature = self.policy.feature_mask
        if self.key is None or feature is None:
            return None
        gains = [
            (norms.input_layernorm, norms.post_attention_layernorm) for norms in self._model.norms
        ]
        return self.key.transforms(feature, self._config, gains)

    def _open_pads(self, mask: AdditiveMask, sites: Sequence[Site], step_tokens: int) -> Pads:
        settings, layout = self._settings, PadLayout.of(self._config, sites)
        store: PadStore
        if settings.bank is None:
            # A step may have as many rows; memory is taken as it is filled.
            store = MemoryStore(layout, max(AHEAD_IN_MEMORY, step_tokens))
        elif mask.arithmetic != "int8":
            raise PolicyError(
                f"policy {self.policy.name}: pad bank {settings.bank.bank}",
                got=f"mask {mask.name}",
                expected="mask pad: a bank holds ring elements",
            )
        elif self.pads:
            others = " and ".join(other.described() for other in (*self.pads, mask))
            raise PolicyError(
                f"policy {self.policy.name}: pad bank {settings.bank.bank}",
                got=f"masks {others}",
                expected="one mask with pads: a bank is made for one",
            )
        else:
            purpose = Purpose.of(
                layout,
                mask=mask.described(),
                model=self._checkpoint.directory.resolve().name,
                model_digest=model_digest(self._config, self._checkpoint),
                linear_digest=self.linear_digest or "",
            )
            store = BankFile.open(settings.bank, purpose)
        self._stores.append(store)
        maker = None
        if self._checkpoint.holds(tensors_of(sites, self._config)):
            check = self._integers.check_weights if self._integers is not None else None
            read = read_weights(self._checkpoint, self._config, mask.arithmetic, check)
            maker = PadMaker(mask, held_or(self._held, read) if mask.arithmetic == "int8" else read)
        return Pads(
            mask,
            store,
            maker,
            settings.when_out,
            ahead=AHEAD_IN_MEMORY if settings.bank is None else None,
            on_wait=self._on_wait,
        )


@cache
def _check_own_kernels() -> None:
    """Check that int8 products are exact here: they make pads and compute what stays.

    Once a process; the service checks its own. Raises KernelError.
    """
    check_kernels(CPU)


def sites_where(policy: Policy, layers: int, placed: Callable[[Placement], bool]) -> list[Site]:
    """Return the linear operators that are placed so in some phase."""
    return [
        (layer, operator)
        for layer in range(layers)
        for operator in FUSED_MODULES
        if any(placed(policy.at(operator, layer, phase)) for phase in PHASES)
    ]


def sites_under(policy: Policy, layers: int, mask: Mask) -> list[Site]:
    """Return the linear operators that are under a mask in some phase."""
    return sites_where(policy, layers, lambda placement: placement.mask == mask)
