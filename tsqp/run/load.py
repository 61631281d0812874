"""From settings to a runner: reads what they name, and connects to the services.

They name a seal, a manifest, a policy, keys, evidence, and pads with their bank.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import SettingsError, describe
from tsqp.run.process import configure, tell
from tsqp.run.settings import (
    MIB,
    RunSettings,
    TextSettings,
    model_directory,
    option_of,
    said_of,
    settings_of,
)

if TYPE_CHECKING:
    from protocol.channel import ChannelWrapper
    from protocol.curve import ClientKeys, HttpAccess
    from protocol.model.at_rest import Manifest
    from tee_side.engine.engine import EngineSettings
    from tee_side.engine.request import SamplingSettings
    from tee_side.engine.tokenizer import Tokenizer
    from tee_side.plugins import FileCheck
    from tee_side.policy.placement import Policy
    from tee_side.protect.pads.bank_files import BankPlace
    from tee_side.runner import Runner, RunnerSettings
    from tsqp.operator_table import OperatorTable
    from tsqp.page.feed import Feed

_APPRAISAL = "--service-appraisal"
# The settings that say where a bank is.
BANK = ("bank", "bank_key", "bank_index", "bank_witness", "bank_key_beside_bank")


@dataclass(frozen=True)
class Loaded:
    """What is read before services are connected to. `tokenizer`: None for a model without one."""

    manifest: Manifest | None
    policy: Policy
    tokenizer: Tokenizer | None


def load(
    settings: RunSettings,
    *,
    text_needed: bool,
    release: Callable[[Manifest | None, Policy], bytes] | None = None,
) -> Loaded:
    """Open the seal and read manifest, policy and, if the model has one, tokenizer.

    `release`: asks a key server for the key of the seal. It tells that server manifest and policy,
    so they are read before the seal is open. Raises SealError, and ModelError for a directory that
    is missing, or for a tokenizer that is missing and needed.
    """
    from protocol.model.config import read_config
    from protocol.model.files import find_file
    from tee_side.engine.tokenizer import TOKENIZER_FILE, Tokenizer

    directory = model_directory(settings.model)
    if release is None:
        open_seal(directory, settings)
    manifest = load_manifest(directory, settings)
    policy = load_run_policy(settings, manifest)
    if release is not None:
        open_seal(directory, settings, partial(release, manifest, policy))
    # Before the tokenizer: a missing directory has an error of its own.
    read_config(directory, manifest)
    there = text_needed or find_file(directory, TOKENIZER_FILE, manifest) is not None
    return Loaded(manifest, policy, Tokenizer(directory, manifest) if there else None)


def policy_digest(policy: Policy) -> bytes:
    """Return SHA-256 over what a policy says; the code of its masks is not covered."""
    operators = {
        operator: [
            (p.scope, p.place, p.mask.described() if p.mask else "none", p.verify)
            + ((p.window.sinks, p.window.recent) if p.window else ())
            for p in placements
        ]
        for operator, placements in policy.operators.items()
    }
    prefill = (policy.prefill, policy.left_to_decode)
    said = [
        policy.name,
        policy.arithmetic,
        policy.one_rpc_per_module,
        prefill,
        operators,
        policy.service.attested,
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def engine_settings(settings: RunSettings) -> EngineSettings:
    """Return the bounds that settings of every run give an engine."""
    from tee_side.engine.engine import EngineSettings

    return EngineSettings(
        step_tokens=settings.step_tokens,
        max_kv_bytes=None if settings.max_kv_mib is None else settings.max_kv_mib * MIB,
    )


def open_runner(
    settings: RunSettings,
    loaded: Loaded,
    table: OperatorTable | None,
    *,
    idles: bool = False,
    engine: EngineSettings | None = None,
    feed: Feed | None = None,
    on_load: Callable[[str, int, int], None] | None = None,
) -> Runner:
    """Connect to the services, and say on stderr what they will see. `feed`: sees it, too.

    `on_load`: see Runner.
    """
    from tee_side.assembly import MaskSettings
    from tee_side.protect.masks.mask import AdditiveMask
    from tee_side.runner import Runner
    from tsqp.leakage_summary import leakage_summary

    # Services that are lost, left out or come back are told of while the run goes on.
    configure("warning")
    policy = loaded.policy
    useful = ("wait", "tee") if idles else ("wait",)
    SettingsError.unless(
        settings.bank is not None
        or settings.when_out in useful
        or not any(isinstance(mask, AdditiveMask) for mask in policy.masks),
        "--when-out",
        f"{settings.when_out} without --bank",
        " or ".join(useful) + ", or a --bank: else pads are made by waiting only",
    )
    SettingsError.unless(
        policy.services or len(settings.gpu) <= 1,
        "--gpu",
        f"{len(settings.gpu)} endpoints",
        f"none: nothing leaves the TEE under policy {policy.name}",
    )
    # What channels are wrapped in: the model of a slower link, the page's feed, or both.
    link: ChannelWrapper | None = feed
    if settings.link_gbps is not None or settings.link_rtt_us:
        from tsqp.link import Link

        slow = Link(settings.link_gbps, settings.link_rtt_us)
        link = slow if feed is None else lambda channel, each: feed(slow(channel, each), each)
    named = (*settings.gpu, *settings.dealer)
    exposed = exposed_services(named) if policy.services and settings.identity is None else ""
    if exposed:
        tell(
            f"{exposed}: the connection is not encrypted, and anyone may answer"
            " (--identity and --service-key; tsqp keys new makes keys)"
        )
    chosen = runner_settings(settings, policy, loaded.manifest)
    masks = MaskSettings(key=settings.key, bank=bank_place(settings), when_out=settings.when_out)
    runner = Runner(
        replace(chosen, masks=masks, engine=engine or engine_settings(settings), link=link),
        table,
        loaded.tokenizer,
        on_load,
    )
    # All objects so far live as long as the process. Searching them for garbage again and again
    # takes a tenth of the time of a decoded token.
    gc.collect()
    gc.freeze()
    summary = leakage_summary(policy, links_encrypted=runner.links_encrypted)
    said = [summary] if summary else []
    said += added_leakage(policy, runner.engine.settings)
    said += runner.assignments if len(runner.assignments) > 1 else ()
    for line in said:
        tell(line)
    return runner


def runner_settings(
    settings: RunSettings, policy: Policy, manifest: Manifest | None
) -> RunnerSettings:
    """Return what a runner is told, but for masks, engine and link; reads keys and tokens.

    Raises as `read_client_keys`, `read_http_access` and `service_appraisal`.
    """
    from tee_side.runner import RunnerSettings

    return RunnerSettings(
        model=model_directory(settings.model),
        policy=policy,
        gpu=settings.gpu,
        dealers=settings.dealer,
        dtype=settings.dtype,
        kernels=settings.kernels,
        threads=settings.threads,
        micro_batches=settings.micro_batches,
        spin_us=settings.spin_us,
        connect_timeout_s=settings.connect_timeout_s,
        request_timeout_s=settings.request_timeout_s,
        max_message_bytes=settings.max_message_mib * MIB,
        keys=read_client_keys(settings, manifest),
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        manifest=manifest,
        dealer_in_the_clear=settings.dealer_in_the_clear,
        appraise_service=service_appraisal(settings, policy, manifest),
        http=read_http_access(settings, manifest),
    )


def hides(policy: Policy) -> bool:
    """Say whether pads hide what leaves: then the GPU side learns lengths and timing."""
    return any(mask.uniform for mask in policy.masks)


def added_leakage(policy: Policy, engine: EngineSettings) -> Iterator[str]:
    """Yield a sentence for each feature that adds to what a hiding policy gives away."""
    if hides(policy) and engine.speculative_tokens:
        yield (
            "speculation adds to lengths and timing: the GPU side sees how many guessed tokens a"
            " text takes a step, so how repetitive it is"
        )
    if hides(policy) and engine.prefix_reuse:
        yield (
            "prefix reuse adds to lengths and timing: the GPU side sees how much of a prompt an"
            " earlier one of the same owner began with"
        )


def sampling_of(settings: TextSettings) -> SamplingSettings:
    """Return how to sample, with a fresh seed where none was given."""
    from tee_side.engine.request import SamplingSettings

    # As many bits as a JSON number holds everywhere.
    seed = secrets.randbits(53) if settings.seed is None else settings.seed
    return SamplingSettings(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        seed=seed,
    )


def open_seal(
    directory: Path, settings: RunSettings, release: Callable[[], bytes] | None = None
) -> None:
    """Have MODEL read through its seal from now on, where a key is given.

    Warns on stderr where the digest of the seal is not given. `release`: asks the key server, where
    one is named. Raises SettingsError, KeyFileError, SealError, and as `release`.
    """
    from protocol.model.files import use_seal

    _check_pins(settings)
    digest = settings.seal_digest
    use_seal(directory, None)
    given = (settings.seal_key, settings.seal_key_fd, settings.seal_key_command)
    if release is None and all(one is None for one in (*given, digest)):
        return
    from protocol.model.at_rest import SealedModel
    from tsqp.key_files import provided_key

    seal = SealedModel(directory, provided_key(*given, release), digest)
    use_seal(directory, seal.files)
    if digest is None:
        tell(
            f"{directory} is taken without --seal-digest {seal.digest}: an older seal, or another"
            " model's for the same key, would be taken as well"
        )


def load_manifest(directory: Path, settings: RunSettings) -> Manifest | None:
    """Read what `--manifest` and `--manifest-digest` say; None without them.

    Checks the settings files that were read against it. Warns on stderr of a manifest inside MODEL
    whose digest is not given. Raises SettingsError, ManifestError.
    """
    _check_pins(settings)
    path, digest = settings.manifest, settings.manifest_digest
    if path is None:
        SettingsError.unless(
            digest is None, "--manifest-digest", "no --manifest", "the file that it is of"
        )
        return None
    from protocol.model.at_rest import Manifest

    found = Manifest.load(path, digest)
    for settings_file, content in settings.read_files:
        found.check_also("--config", settings_file, content)
    if digest is None and path.resolve().parent == directory.resolve():
        tell(
            f"{path} lies in the model's directory, and is taken without --manifest-digest: it"
            " shows damage, but nothing that was changed on purpose"
        )
    return found


def _check_pins(settings: RunSettings) -> None:
    """Refuse what is no digest, and a settings file that says which model.

    A manifest, maybe sealed, pins that file.
    """
    for name, (known, _) in settings_of(type(settings)).items():
        SettingsError.unless(
            not (said_of(known).pins and name in settings.of_files),
            option_of(name),
            "a value in a settings file, which a manifest has to pin",
            "it on the command line or in the environment",
        )
    for option, digest in (
        ("--seal-digest", settings.seal_digest),
        ("--manifest-digest", settings.manifest_digest),
    ):
        SettingsError.unless(
            digest is None or re.fullmatch("[0-9a-fA-F]{64}", digest),
            option,
            describe(digest),
            "64 hexadecimal digits",
        )


def check_of(manifest: Manifest | None, option: str) -> FileCheck:
    """Return what checks a file that `option` led to; without a manifest any file is accepted."""
    from tee_side.plugins import accept_any

    return accept_any if manifest is None else partial(manifest.check_also, option)


def load_pinned_policy(name: str, manifest: Manifest | None) -> Policy:
    """Load a policy and its masks; with a manifest only from files that it pins.

    Raises PolicyError, PluginError, ManifestError.
    """
    from tee_side.policy.placement import load_policy

    if manifest is None:
        return load_policy(name)
    from tee_side.plugins import checking_files

    with checking_files(check_of(manifest, "--policy")):
        return load_policy(name)


def exposed_services(endpoints: Sequence[str]) -> str:
    """Return, in one line, the services that without keys a network reaches unencrypted.

    `endpoints`: as `ServiceSpec.parse` reads them.
    """
    from protocol.endpoint import is_exposed
    from tee_side.remote.services.plan import ServiceSpec

    return ", ".join(filter(is_exposed, (ServiceSpec.parse(text).endpoint for text in endpoints)))


def read_client_keys(settings: RunSettings, manifest: Manifest | None) -> tuple[ClientKeys, ...]:
    """Read what --identity and --service-key name; with a manifest only key files that it pins.

    Raises KeyFileError, ManifestError and SettingsError.
    """
    identity, services = settings.identity, settings.service_key
    if identity is None and not services:
        return ()
    from protocol.curve import ClientKeys, read_key
    from tsqp.key_files import public_key

    if identity is None or not services:
        options = ("--identity", "--service-key")
        given, missing = options if identity else reversed(options)
        raise SettingsError("keys", got=f"{given} alone", expected=f"{missing} as well, or neither")
    secret, check = read_key(identity, secret=True), check_of(manifest, "--service-key")
    return tuple(ClientKeys(secret, public_key(service, check)) for service in services)


def load_run_policy(settings: RunSettings, manifest: Manifest | None) -> Policy:
    """Load the policy of a run.

    Where services are appraised in development, a policy with attested services asks for simulated
    evidence in place of its own, and says so wherever it says what it gives away. Raises as
    `load_pinned_policy`, and SettingsError.
    """
    policy = load_pinned_policy(settings.policy, manifest)
    path = settings.service_appraisal
    if path is None or policy.service.attested == "none":
        return policy
    from tee_side.attest.appraisal import AppraisalPolicy
    from tee_side.policy.placement import ServiceTerms

    if AppraisalPolicy.load(path, check_of(manifest, _APPRAISAL)).mode != "development":
        return policy
    return policy.model_copy(update={"service": ServiceTerms(attested="simulated")})


def read_http_access(settings: RunSettings, manifest: Manifest | None) -> dict[str, HttpAccess]:
    """Read what --http-token and --http-ca name, by URL; with a manifest a pinned CA.

    Tokens go with URLs as keys with other endpoints, but one for all is for one host and port
    alone. Raises KeyFileError, ManifestError, and SettingsError, also where no service has a URL.
    """
    tokens, ca = settings.http_token, settings.http_ca
    if not tokens and ca is None:
        return {}
    named = (*settings.gpu, *settings.dealer)
    urls = [url[0] for text in named if (url := re.match("https?://[^=,]*", text))]
    if not urls:
        raise SettingsError(
            "--http-token" if tokens else "--http-ca",
            got=", ".join(named),
            expected="a service with a URL",
        )
    from protocol.curve import HttpAccess, read_text, require_only_we_write
    from protocol.endpoint import one_for_each
    from tsqp.key_files import read_token

    # Scheme, host and port.
    hosts = ["".join(url.lower().split("/")[:3]) for url in urls]
    paired = zip(urls, one_for_each(tokens, hosts, "--http-token"), strict=True)
    SettingsError.unless(
        len(tokens) != 1 or len(set(hosts)) == 1,
        "--http-token",
        "one for several hosts",
        "one for each URL in order: a service that has ours can use it at the others",
    )
    pem = None
    if ca is not None:
        pem, status = read_text(ca, 2**22, check_of(manifest, "--http-ca"))
        require_only_we_write(ca, status)
    return {
        url: HttpAccess(None if token is None else read_token(token), pem) for url, token in paired
    }


def service_appraisal(
    settings: RunSettings, policy: Policy, manifest: Manifest | None
) -> Callable[[str, ClientKeys | None, bytes, bytes], None] | None:
    """Return what appraises the services of a policy, None for one that asks for no evidence.

    With a manifest, only by a file that it pins. Raises SettingsError, ManifestError.
    """
    attested, path, option = policy.service.attested, settings.service_appraisal, _APPRAISAL
    if attested == "none":
        SettingsError.unless(
            path is None,
            option,
            str(path),
            f"nothing: policy {policy.name} has no attested services",
        )
        return None
    from tee_side.attest.appraisal import AppraisalPolicy, appraise_service

    if path is not None:
        appraisal = AppraisalPolicy.load(path, check_of(manifest, option))
        SettingsError.unless(
            appraisal.mode != "gpu-confidential",
            f"{path}: mode",
            appraisal.mode,
            "production, with a table [nvidia]: a service has no services of its own",
        )
    elif attested == "simulated":
        appraisal = AppraisalPolicy.development()
    else:
        raise SettingsError(
            option,
            got="none",
            expected=f"a file that says what services must be: policy {policy.name} asks for"
            " evidence",
        )
    return partial(appraise_service, attested, appraisal)


def bank_place(settings: RunSettings) -> BankPlace | None:
    """Return where the bank is, None where none is named. Raises SettingsError."""
    if settings.bank is None:
        for name in BANK:
            value = getattr(settings, name)
            SettingsError.unless(not value, option_of(name), str(value), "nothing without --bank")
        return None
    from tee_side.protect.pads.bank_files import BankPlace

    return BankPlace.at(
        settings.bank,
        settings.bank_key,
        settings.bank_index,
        settings.bank_witness,
        beside_bank=settings.bank_key_beside_bank,
    )
