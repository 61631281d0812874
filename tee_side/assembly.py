"""From a policy to the operators that the forward pass calls, with all that its masks need.

The order is that of mistakes that show early: the policy against the model, files of the TEE's own
(calibration, key, pad bank), and only then the services.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from protocol.errors import PolicyError, SettingsError
from protocol.integer import check_kernels
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import QuantizedLinear
from protocol.model.weights import CPU
from tee_side.calibration import Calibration, calibration_path
from tee_side.feature_key import FeatureKey
from tee_side.light import LightOperators
from tee_side.local_operators import LocalOperators, load_local_operators, sites_here
from tee_side.masking import linear_masking
from tee_side.masks.mask import AdditiveMask, Cloak, Mask
from tee_side.model import TeeModel
from tee_side.observed import ObservedLight, ObservedRemoteOperators
from tee_side.observer import Observer, Observers
from tee_side.operators import Cover, Operators, PlacedOperators, cover_of, place
from tee_side.pads.bank import BankFile
from tee_side.pads.layout import PadLayout
from tee_side.pads.maker import PadMaker, held_or, read_weights
from tee_side.pads.source import PadLane, Pads, WhenOut
from tee_side.pads.store import MemoryStore, PadStore
from tee_side.policy import Policy
from tee_side.randomness import Randomness
from tee_side.remote_operators import ChannelsAt, RemoteOperators, RemoteSettings
from tee_side.sites import FloatSites, IntegerSites, Sites, load_biases, tensors_of
from tee_side.verifier import UNVERIFIED, Secrets, Weights, check_verifiable
from tee_side.vocabulary import PHASES, Operator, Site

# A linear operator that leaves so is computed where it goes with its bias and all.
_ALL_THERE: Cover = (None, "none")

# Tokens that pads are kept ready for in memory while nothing runs, where no bank is given.
AHEAD_IN_MEMORY = 128


@dataclass(frozen=True)
class MaskSettings:
    """What masks need beside the policy.

    `calibration`: None for the file beside the model; `key`: what `tsqp provision` wrote; `bank`:
    pads on disk, None to make them in memory as the run goes; `bank_key`, `bank_index`: None for
    the files beside the bank.
    """

    calibration: Path | None = None
    key: Path | None = None
    bank: Path | None = None
    bank_key: Path | None = None
    bank_index: Path | None = None
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
        padded = {mask: self._under(mask) for mask in policy.masks if _needs_factors(mask)}
        check_verifiable(policy, config, checkpoint)
        self._check_settings(padded)
        checkpoint.require(light_tensors(config) | tensors_of(self._local_sites, config))
        checkpoint.refuse_extra(config)
        self.key = self._load_key()
        self.linear_digest = linear_digest(config, checkpoint)
        self._integers = self._load_integers()
        self._floats = FloatSites(self._biases()) if policy.arithmetic == "float" else None
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
    ) -> list[PlacedOperators]:
        """Build the tables for each micro-batch of a step.

        `channels_at`: the services of each layer. `only`: what the observers are told of, where it
        runs in the TEE; None for everything. `timeout_s`: for a result, however many are asked for
        it because others' were refused; None: each has its channel's own deadline. The first call
        loads the weights that stay, and draws what results are verified with.
        """
        randomness = randomness or Randomness()
        (local, _), cloaks = self._stays, self._cloaks
        eps = self._config.rms_norm_eps
        lanes = []
        for index in range(micro_batches):
            told = observers.lane(index) if observers else None
            told_all = told if only is None else None
            # Two lanes never draw from one stretch of pads.
            pads = {mask: found.lane() for mask, found in self.pads.items()}
            remote: dict[Cover, Operators] = {
                cover: self._remote(
                    cover, channels_at, local, cloaks, pads, randomness, told_all, timeout_s
                )
                for cover in {cover_of(placement): None for _, placement in self.policy.leaving()}
            }
            light = LightOperators(eps) if told_all is None else ObservedLight(eps, told_all)
            layers = self._config.num_hidden_layers
            drawn = list(pads.values())
            lanes.append(place(self.policy, layers, local, remote, light, told, only, drawn))
        return lanes

    def _remote(
        self,
        cover: Cover,
        channels_at: ChannelsAt,
        local: LocalOperators,
        cloaks: Mapping[Site, Cloak] | None,
        pads: Mapping[Mask, PadLane],
        randomness: Randomness,
        observer: Observer | None,
        timeout_s: float | None,
    ) -> RemoteOperators:
        mask, verify = cover
        sites: Sites | None = self._integers
        if sites is None and cover != _ALL_THERE:
            sites = self._floats
        drawn = pads.get(mask) if mask is not None else None
        settings: RemoteSettings = {
            "mask": mask,
            "hide": linear_masking(mask, randomness, pads=drawn, cloaks=cloaks),
            "verifier": UNVERIFIED if verify == "none" else self._secrets.under(mask),
            "sites": sites,
            "randomness": randomness,
            "without_factors": local,
            "one_rpc_per_module": self.policy.one_rpc_per_module,
            "timeout_s": timeout_s,
        }
        config, dtype = self._config, self._model.dtype
        if observer is None:
            return RemoteOperators(channels_at, config, dtype, **settings)
        return ObservedRemoteOperators(channels_at, config, dtype, observer=observer, **settings)

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

    def _check_settings(self, padded: Mapping[Mask, Sequence[Site]]) -> None:
        """Refuse files that the policy has no use for, and pads that nothing can come from.

        Somebody who names a file relies on it. Raises SettingsError and PolicyError.
        """
        settings, name = self._settings, f"policy {self.policy.name}"
        uses = {
            "--bank": (settings.bank, bool(padded), "pads"),
            "--key": (settings.key, self.policy.feature_mask is not None, "a feature mask"),
            "--calibration": (settings.calibration, self.policy.arithmetic == "int8", "int8"),
            "--bank-key": (settings.bank_key, settings.bank is not None, "--bank"),
            "--bank-index": (settings.bank_index, settings.bank is not None, "--bank"),
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
            or any(cover_of(p) != _ALL_THERE for p in self.policy.operators[operator])
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

    def _load_key(self) -> FeatureKey | None:
        mask, path = self.policy.feature_mask, self._settings.key
        if mask is None:
            return None
        if path is None:
            raise SettingsError(
                "--key",
                got="none",
                expected=f"the key that tsqp provision --mask {mask.name} wrote",
            )
        key = FeatureKey.load(path)
        key.check(self._config, self._checkpoint, mask)
        return key

    @cached_property
    def _stays(self) -> tuple[LocalOperators, Mapping[Site, QuantizedLinear]]:
        """Load what stays; returns its integers beside what computes with them."""
        local = load_local_operators(
            self._config,
            self._checkpoint,
            self.policy,
            self._model.dtype,
            sites=self._local_sites,
            integers=self._integers,
            held=self._held,
        )
        return local, self._held

    @cached_property
    def _secrets(self) -> Secrets:
        # What stays is loaded before, and not read again. From a generator of their own, which no
        # caller chooses.
        _, held = self._stays
        weights = Weights(self._config, self._checkpoint, self._model.dtype, held)
        return Secrets.draw(self.policy, weights, self._integers, Randomness())

    @cached_property
    def _cloaks(self) -> dict[Site, Cloak] | None:
        feature = self.policy.feature_mask
        if self.key is None or feature is None:
            return None
        gains = [
            (norms.input_layernorm, norms.post_attention_layernorm) for norms in self._model.norms
        ]
        return self.key.cloaks(feature, self._config, gains)

    def _open_pads(self, mask: Mask, sites: Sequence[Site], step_tokens: int) -> Pads:
        if not isinstance(mask, AdditiveMask):
            raise PolicyError(f"mask {mask.name}", got="no factors", expected="an additive mask")
        settings, layout = self._settings, PadLayout.of(self._config, sites)
        store: PadStore
        if settings.bank is None:
            # A step may have as many rows; memory is taken as it is filled.
            store = MemoryStore(layout, max(AHEAD_IN_MEMORY, step_tokens))
        elif mask.arithmetic != "int8":
            raise PolicyError(
                f"policy {self.policy.name}: pad bank {settings.bank}",
                got=f"mask {mask.name}",
                expected="mask pad: a bank holds ring elements",
            )
        elif self.pads:
            others = " and ".join(other.described() for other in (*self.pads, mask))
            raise PolicyError(
                f"policy {self.policy.name}: pad bank {settings.bank}",
                got=f"masks {others}",
                expected="one mask with pads: a bank is made for one",
            )
        else:
            store = BankFile.open(
                settings.bank,
                settings.bank_key,
                layout=layout,
                mask=mask.described(),
                model_digest=model_digest(self._config, self._checkpoint),
                linear_digest=self.linear_digest or "",
                index_path=settings.bank_index,
            )
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


def sites_under(policy: Policy, layers: int, mask: Mask) -> list[Site]:
    """Return the linear operators that are under a mask in some phase."""
    return [
        (layer, operator)
        for operator in FUSED_MODULES
        for layer in range(layers)
        if any(policy.at(operator, layer, phase).mask == mask for phase in PHASES)
    ]


def _needs_factors(mask: Mask) -> bool:
    return isinstance(mask, AdditiveMask)
