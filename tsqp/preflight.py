"""Whether a run would start here: each thing that a policy needs, and the command that makes it.

A preflight reads files and asks services for what they hold. It sends nothing of a prompt, uses no
pad, and changes nothing.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from protocol.curve import ClientKeys
from protocol.endpoint import one_for_each
from protocol.errors import ReplyError, TsqpError
from protocol.messages import FUSED_MODULES, NONCE_BYTES, InitReply, InitRequest
from protocol.model.at_rest import Manifest
from protocol.model.checkpoint import (
    Checkpoint,
    light_tensors,
    linear_digest,
    linear_tensors,
    model_digest,
)
from protocol.model.config import ModelConfig
from protocol.model.files import find_file
from protocol.transport import open_channel
from tee_side.engine.tokenizer import TOKENIZER_FILE, Tokenizer
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.bank import check_purpose, read_bank_status
from tee_side.remote.services.plan import (
    ServiceSpec,
    check_links,
    dealer_names,
    plan_services,
    read_services,
)
from tsqp.doctor import Finding, kernel_file
from tsqp.leakage_summary import leakage_summary
from tsqp.run.bank import padded, purpose_of
from tsqp.run.load import (
    bank_place,
    exposed_services,
    load_run_policy,
    read_client_keys,
    read_http_access,
    service_appraisal,
)
from tsqp.run.process import require_seed
from tsqp.run.settings import RunSettings

_CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
# Read in a processor's register or in shared memory; all others cost a microsecond a reading.
_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")


@dataclass(frozen=True)
class Start:
    """What a run would be started with. `model`: its directory.

    `timeout_s`: how long each service is waited for.
    """

    model: Path
    settings: RunSettings
    manifest: Manifest | None
    timeout_s: float

    @cached_property
    def policy(self) -> Policy:
        """The policy. Raises PolicyError, PluginError, ManifestError."""
        return load_run_policy(self.settings, self.manifest)

    @cached_property
    def config(self) -> ModelConfig:
        """The model's configuration. Raises ModelError, ManifestError."""
        return self._opened[0]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's weights. Raises ModelError, ManifestError."""
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[ModelConfig, Checkpoint]:
        return Checkpoint.open(self.model, self.manifest)

    @cached_property
    def digests(self) -> tuple[str, str | None]:
        """Digests of model and linear weights, None where the directory lacks those."""
        return (
            model_digest(self.config, self.checkpoint),
            linear_digest(self.config, self.checkpoint),
        )

    @cached_property
    def keys(self) -> tuple[ClientKeys, ...]:
        """Keys of services. Raises KeyFileError, SettingsError, ManifestError."""
        return read_client_keys(self.settings, self.manifest)

    @cached_property
    def services(self) -> tuple[Sequence[ServiceSpec], Sequence[ClientKeys | None]]:
        """Services and dealers, and the keys of each. Raises SettingsError."""
        specs = read_services(self.settings.gpu, self.settings.dealer, self.policy)
        return specs, one_for_each(self.keys, [spec.endpoint for spec in specs]) if specs else []


def examine_start(start: Start) -> list[Finding]:
    """Carry out the checks. One that raises a TsqpError is a finding: `missing`.

    Nothing comes after what the others build on, if that is missing.
    """
    found: list[Finding] = []
    for (name, remedy), check in _CHECKS.items():
        try:
            found += check(start)
        except TsqpError as error:
            made_by = remedy.format(model=start.model, bank=start.settings.bank)
            found.append(Finding("run", name, "missing", str(error), made_by))
            if name in ("model", "policy", "keys"):
                break
    return found


def _policy(start: Start) -> Iterator[Finding]:
    start.policy.check(start.config.num_hidden_layers)
    nothing = f"policy {start.policy.name}: nothing leaves the TEE"
    yield Finding("run", "policy", "ok", leakage_summary(start.policy) or nothing)


def _model(start: Start) -> Iterator[Finding]:
    start.checkpoint.require(light_tensors(start.config))
    pinned = "pinned by the manifest" if start.manifest else "no --manifest: not pinned"
    yield Finding(
        "run",
        "model",
        "ok",
        f"{start.config.architecture}, {start.config.num_hidden_layers} layers, {pinned}",
    )


def _weights(start: Start) -> Iterator[Finding]:
    """Look for linear weights: for what stays, for pads made on the way, for results."""
    policy, without_bank = start.policy, start.settings.bank is None
    stays = any(
        placement.place == "tee" or (without_bank and isinstance(placement.mask, AdditiveMask))
        for operator in FUSED_MODULES
        for placement in policy.operators[operator]
    )
    if stays or policy.verified or policy.arithmetic == "int8":
        start.checkpoint.require(linear_tensors(start.config))
        yield Finding("run", "linear weights", "ok", "all are there")


def _tokenizer(start: Start) -> Iterator[Finding]:
    if find_file(start.model, TOKENIZER_FILE, start.manifest) is None:
        yield Finding(
            "run",
            "tokenizer",
            "note",
            f"no {TOKENIZER_FILE}: prompts are token ids (--prompt-token-ids)",
        )
        return
    Tokenizer(start.model, start.manifest)
    yield Finding("run", "tokenizer", "ok", TOKENIZER_FILE)


def _bank(start: Start) -> Iterator[Finding]:
    if not any(isinstance(mask, AdditiveMask) for mask in start.policy.masks):
        if start.settings.bank is not None:
            yield Finding(
                "run",
                "bank",
                "missing",
                f"{start.settings.bank} is of no use: policy {start.policy.name} needs no pads",
                "leave out --bank",
            )
        return
    policy = start.settings.policy
    make = f"tee-runner pads make {start.model} --policy {policy} --tokens N --bank FILE"
    place = bank_place(start.settings)
    if place is None:
        yield Finding("run", "bank", "note", "no --bank: pads are made while the run waits", make)
        return
    place.check_apart()
    header, state = read_bank_status(place)
    mask, layout = padded(start.policy, start.config)
    dealers = dealer_names(*start.services)
    wanted = purpose_of(start.checkpoint, start.config, mask, layout, dealers)
    check_purpose(place.bank, header, wanted)
    available = state.filled - state.reserved
    left = f"{available} of {header.capacity} pads left"
    yield Finding("run", "bank", *(("ok", left) if available else ("missing", left, make)))


def _named(start: Start) -> tuple[str, ...]:
    return (*start.settings.gpu, *start.settings.dealer)


def _keys(start: Start) -> Iterator[Finding]:
    if start.keys:
        yield Finding("run", "keys", "ok", f"{len(start.keys)} of services, and our own")
    elif start.policy.services and (exposed := exposed_services(_named(start))):
        yield Finding(
            "run",
            "keys",
            "note",
            f"none for {exposed}: not encrypted, and anyone may answer",
            "tsqp keys new NAME",
        )


def _services(start: Start) -> Iterator[Finding]:
    policy, (specs, keys) = start.policy, start.services
    check_links(specs, keys, policy, dealer_in_the_clear=start.settings.dealer_in_the_clear)
    plan_services(specs, start.config.num_hidden_layers)
    appraise = service_appraisal(start.settings, policy, start.manifest)
    nonce = b"" if appraise is None else secrets.token_bytes(NONCE_BYTES)
    access, limit_s = read_http_access(start.settings, start.manifest), start.timeout_s
    for spec, own in zip(specs, keys, strict=True):
        where = spec.endpoint
        try:
            http = access.get(where)
            with open_channel(where, timeout_s=limit_s, keys=own, http=http) as channel:
                reply = channel.call(InitRequest(nonce=nonce)).response
            if not isinstance(reply, InitReply):
                raise ReplyError(where, got=type(reply).__name__, expected=InitReply.__name__)
            if appraise is not None:
                appraise(where, own, reply.statement, nonce)
        except TsqpError as error:
            yield Finding(
                "run",
                f"service {where}",
                "missing",
                str(error),
                f"gpu-service {start.model} --bind {where}",
            )
        else:
            yield _held(start, where, reply)


def _held(start: Start, where: str, reply: InitReply) -> Finding:
    """Compare what a service says that it holds with our own directory."""
    name, (model, linear) = f"service {where}", start.digests
    arithmetic, own = start.policy.arithmetic, start.policy.feature_mask is None
    same = reply.model_digest == model and linear in (None, reply.linear_digest)
    no_weights = f"has no {arithmetic} weights (gpu-service --arithmetic)"
    checks = (
        (arithmetic in reply.arithmetic, no_weights),
        (same or not own, "holds another model"),
        (own or reply.provision_id, "holds weights that no tsqp provision has transformed"),
    )
    for holds, fault in checks:
        if not holds:
            return Finding(
                "run", name, "missing", fault, f"gpu-service {start.model} --bind {where}"
            )
    first, last = reply.layers
    return Finding("run", name, "ok", f"the same model, layers {first}-{last}")


def _clock(_start: Start) -> Iterator[Finding]:
    """Look at the clock: each RPC reads it several times, and deadlines depend on it."""
    source = kernel_file(_CLOCK_SOURCE).strip() or "unknown"
    detail = f"{source}, resolution {time.get_clock_info('monotonic').resolution * 1e9:.0f} ns"
    yield Finding("run", "clock", "ok" if source in _FAST_CLOCKS else "note", detail)


def _entropy(_start: Start) -> Iterator[Finding]:
    """Look at the operating system's generator: pads and secrets come from it."""
    require_seed()
    yield Finding("run", "entropy", "ok", "the operating system's generator is seeded")


# By name, and the command that makes what is missing.
_CHECKS: dict[tuple[str, str], Callable[[Start], Iterator[Finding]]] = {
    ("clock", ""): _clock,
    ("entropy", "wait a moment: no run starts"): _entropy,
    ("model", "give MODEL a Hugging Face directory with safetensors weights"): _model,
    ("policy", "tsqp policies"): _policy,
    ("linear weights", "copy the model's safetensors files into {model}"): _weights,
    ("tokenizer", "copy the model's tokenizer.json into {model}"): _tokenizer,
    ("bank", "tee-runner pads make {model} --tokens N --bank {bank}"): _bank,
    ("keys", "tsqp keys new NAME"): _keys,
    ("services", "gpu-service {model} --bind ENDPOINT"): _services,
}
