"""From settings to a runner: reads what they name, and connects to the services."""

from __future__ import annotations

import gc
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from protocol.errors import SettingsError
from tsqp.run.process import configure, tell
from tsqp.run.settings import MIB, RunSettings, TextSettings, model_directory
from tsqp.run.trust import (
    bank_place,
    exposed_services,
    load_manifest,
    load_run_policy,
    open_seal,
    read_client_keys,
    read_http_access,
    service_appraisal,
)

if TYPE_CHECKING:
    from protocol.channel import ChannelWrapper
    from protocol.model.at_rest import Manifest
    from tee_side.engine.engine import EngineSettings
    from tee_side.engine.request import SamplingSettings
    from tee_side.engine.tokenizer import Tokenizer
    from tee_side.policy.placement import Policy
    from tee_side.runner import Runner
    from tsqp.operator_table import OperatorTable
    from tsqp.page.feed import Feed


# Gives the key of a seal, for a program with this manifest and policy.
Release: TypeAlias = "Callable[[Manifest | None, Policy], bytes]"


@dataclass(frozen=True)
class Loaded:
    """What is read before services are connected to. `tokenizer`: None for a model without one."""

    manifest: Manifest | None
    policy: Policy
    tokenizer: Tokenizer | None


def load(settings: RunSettings, *, text_needed: bool, release: Release | None = None) -> Loaded:
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

    most = None if settings.max_kv_mib is None else settings.max_kv_mib * MIB
    return EngineSettings(step_tokens=settings.step_tokens, max_kv_bytes=most)


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
    from tee_side.runner import Runner, RunnerSettings

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
    keys = read_client_keys(settings, loaded.manifest)
    exposed = exposed_services(settings.gpu) if policy.services and not keys else ""
    if exposed:
        tell(
            f"{exposed}: the connection is not encrypted, and anyone may answer"
            " (--identity and --service-key; tsqp keys new makes keys)"
        )
    runner = Runner(
        RunnerSettings(
            model=model_directory(settings.model),
            policy=policy,
            gpu=settings.gpu,
            masks=MaskSettings(
                calibration=settings.calibration,
                key=settings.key,
                bank=bank_place(settings),
                when_out=settings.when_out,
            ),
            dtype=settings.dtype,
            kernels=settings.kernels,
            threads=settings.threads,
            engine=engine or engine_settings(settings),
            micro_batches=settings.micro_batches,
            spin_us=settings.spin_us,
            link=link,
            connect_timeout_s=settings.connect_timeout_s,
            request_timeout_s=settings.request_timeout_s,
            max_message_bytes=settings.max_message_mib * MIB,
            keys=keys,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            manifest=loaded.manifest,
            shares_in_the_clear=settings.shares_in_the_clear,
            appraise_service=service_appraisal(settings, policy, loaded.manifest),
            http=read_http_access(settings, loaded.manifest),
        ),
        table,
        loaded.tokenizer,
        on_load,
    )
    # All objects so far live as long as the process. Searching them for garbage again and again
    # takes a tenth of the time of a decoded token.
    gc.collect()
    gc.freeze()
    said = [runner.leakage_summary] if runner.leakage_summary else []
    said += added_leakage(policy, runner.engine.settings)
    said += runner.assignments if len(runner.assignments) > 1 else ()
    for line in said:
        tell(line)
    return runner


def hides(policy: Policy) -> bool:
    """Say whether pads or shares hide what leaves: then the GPU side learns lengths and timing."""
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
