"""What `generate` and `chat` share: from settings to a runner, and from tokens to text."""

from __future__ import annotations

import gc
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError, TsqpError
from tsqp.cli.logs import configure
from tsqp.cli.printing import Printer
from tsqp.cli.program import model_directory
from tsqp.cli.status import StatusLine, pads_left, traffic
from tsqp.cli.trust import (
    KEY_SERVER,
    SEAL,
    bank_place,
    load_manifest,
    load_run_policy,
    open_seal,
    read_client_keys,
    read_http_access,
    service_appraisal,
    warn_without_keys,
)

if TYPE_CHECKING:
    import torch

    from protocol.channel import ChannelWrapper
    from protocol.model.manifest import Manifest
    from tee_side.engine.engine import EngineSettings
    from tee_side.engine.generation import Generation, GenerationResult
    from tee_side.engine.request import SamplingSettings
    from tee_side.engine.tokenizer import Tokenizer
    from tee_side.policy.placement import Policy
    from tee_side.runner import Runner
    from tsqp.operator_table import OperatorTable
    from tsqp.page.feed import Feed

MIB = 1024 * 1024
# Settings of the runner and of its masks that have the names of their options.
_SAME = (
    *(
        "gpu",
        "shares_in_the_clear",
        "dtype",
        "kernels",
        "threads",
        "micro_batches",
        "spin_us",
    ),
    *("connect_timeout_s", "request_timeout_s", "heartbeat_timeout_s"),
)
_MASKS = ("calibration", "key", "when_out")
_BANK = ("bank", "bank_key", "bank_index", "bank_witness", "bank_key_beside_bank")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_OTHERS = (
    *("policy", "service_appraisal", "identity", "service_key", "manifest", "manifest_digest"),
    *("http_token", "http_ca"),
    *("max_new_tokens", "stop"),
    *("link_gbps", "link_rtt_us", "step_tokens", "max_kv_mib", "max_message_mib", "stats", "json"),
)
RUN_OPTIONS = tuple(
    name.replace("_", "-") for name in (*_OTHERS, *SEAL, *_SAME, *_MASKS, *_BANK, *_SAMPLING)
)
# Where each request says how it is to be answered.
SERVING_OPTIONS = tuple(
    name.replace("_", "-")
    for name in (*_OTHERS, *SEAL, *_SAME, *_MASKS, *_BANK)
    if name not in {"max_new_tokens", "stop", "stats", "json"}
)


@dataclass(frozen=True)
class Loaded:
    """What is read before services are connected to. `tokenizer`: None where there is none."""

    manifest: Manifest | None
    policy: Policy
    tokenizer: Tokenizer | None


def load(settings: dict[str, Any], *, text_needed: bool) -> Loaded:
    """Open the seal, read manifest, policy and tokenizer, which is left out if the model has none.

    A key server is told of manifest and policy: they are then read before the seal is open. Raises
    SealError, and ModelError for a missing directory, or a missing tokenizer that is needed.
    """
    from protocol.model.config import read_config
    from protocol.model.manifest import find_file
    from tee_side.engine.tokenizer import TOKENIZER_FILE, Tokenizer

    directory = model_directory(settings["model"])
    by_server = settings.get(KEY_SERVER) is not None
    if by_server:
        from tsqp.attestation import refuse_inside, release_key

        refuse_inside(directory, settings)
    else:
        open_seal(directory, settings)
    manifest = load_manifest(directory, settings)
    policy = load_run_policy(settings, manifest)
    if by_server:
        open_seal(directory, settings, partial(release_key, settings, manifest, policy))
    # First, because a missing directory is to be called that, and not a missing tokenizer.
    read_config(directory, manifest)
    there = text_needed or find_file(directory, TOKENIZER_FILE, manifest) is not None
    return Loaded(manifest, policy, Tokenizer(directory, manifest) if there else None)


def engine_settings(settings: dict[str, Any], **more: Any) -> EngineSettings:
    """Return the bounds that options give an engine."""
    from tee_side.engine.engine import EngineSettings

    most = settings["max_kv_mib"]
    return EngineSettings(
        step_tokens=settings["step_tokens"], max_kv_bytes=most and most * MIB, **more
    )


def open_runner(
    settings: dict[str, Any],
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
    from tee_side.runner import Runner, RunnerSettings

    # Services that are lost, left out or come back are told of while the run goes on.
    configure("warning")
    policy = loaded.policy
    _check_use(policy, settings, idles=idles)
    keys = read_client_keys(settings, loaded.manifest)
    if policy.services and not keys:
        warn_without_keys(settings["gpu"])
    runner = Runner(
        RunnerSettings(
            model=model_directory(settings["model"]),
            policy=policy,
            manifest=loaded.manifest,
            masks=MaskSettings(
                bank=bank_place(settings), **{name: settings[name] for name in _MASKS}
            ),
            link=_wrapper(settings, feed),
            engine=engine or engine_settings(settings),
            max_message_bytes=settings["max_message_mib"] * MIB,
            keys=keys,
            http=read_http_access(settings, loaded.manifest),
            appraise_service=service_appraisal(settings, policy, loaded.manifest),
            **{name: settings[name] for name in _SAME},
        ),
        table,
        loaded.tokenizer,
        on_load,
    )
    # What was made by now lives as long as the process; to look through it again and again for
    # garbage costs a tenth of the time of a decoded token.
    gc.collect()
    gc.freeze()
    if runner.leakage_summary:
        click.echo(runner.leakage_summary, err=True)
    for line in _added_leakage(policy, runner.engine.settings):
        click.echo(line, err=True)
    for line in runner.assignments if len(runner.assignments) > 1 else ():
        click.echo(line, err=True)
    return runner


def hides(policy: Policy) -> bool:
    """Say whether pads or shares hide what leaves: the GPU side learns lengths and timing."""
    return any(mask.uniform for mask in policy.masks)


def _added_leakage(policy: Policy, engine: EngineSettings) -> Iterator[str]:
    """Say what was switched on that a policy which hides what leaves has off."""
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


def _wrapper(settings: dict[str, Any], feed: Feed | None) -> ChannelWrapper | None:
    """Return what channels are wrapped in: the lab's model of a slower link, the page's feed."""
    if settings["link_gbps"] is None and not settings["link_rtt_us"]:
        return feed
    from tsqp.lab.link import Link

    link = Link.of(settings["link_gbps"], settings["link_rtt_us"])
    if feed is None or link is None:
        return link
    return lambda channel, traffic: feed(link(channel, traffic), traffic)


def _check_use(policy: Policy, settings: dict[str, Any], *, idles: bool) -> None:
    """Refuse what could not do what was asked for: pads that never are, services without a part."""
    from tee_side.protect.masks.mask import AdditiveMask

    padded = any(isinstance(mask, AdditiveMask) for mask in policy.masks)
    useful = ("wait", "tee") if idles else ("wait",)
    if padded and settings["bank"] is None and settings["when_out"] not in useful:
        raise SettingsError(
            "--when-out",
            got=f"{settings['when_out']} without --bank",
            expected=" or ".join(useful) + ", or a --bank: else pads are made by waiting only",
        )
    if not policy.services and (given := len(settings["gpu"])) > 1:
        raise SettingsError(
            "--gpu",
            got=f"{given} endpoints",
            expected=f"none: nothing leaves the TEE under policy {policy.name}",
        )


def sampling_of(settings: dict[str, Any]) -> SamplingSettings:
    """Return how to sample, with a fresh seed where none was given. Raises SettingsError."""
    from pydantic import ValidationError

    from tee_side.engine.request import SamplingSettings

    chosen = {name: settings[name] for name in _SAMPLING}
    if chosen["seed"] is None:
        chosen["seed"] = secrets.randbits(53)  # as many as a JSON number holds everywhere
    try:
        return SamplingSettings(**chosen)
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise SettingsError(option, got=str(first["input"]), expected=first["msg"]) from None


def stream(
    runner: Runner,
    generation: Generation,
    settings: dict[str, Any],
    keep_logits: list[torch.Tensor] | None = None,
) -> GenerationResult:
    """Run a generation to its end, and show text and statistics unless JSON is asked for.

    What is shown is decoded and written by a thread of its own: between two tokens there is
    the same work for each.
    """
    show = not settings["as_json"]
    stats = settings["stats"] and show
    status = StatusLine(runner.policy.name, generation, enabled=stats)
    with Printer(generation.text_stream() if show else None, status) as printer:
        runner.on_wait = status.waiting
        for sampled in generation.steps():
            printer.put(sampled.token_id)
            if keep_logits is not None:
                keep_logits.append(sampled.logits_V)
    result = generation.result()
    if show:
        click.echo(",".join(map(str, result.token_ids)) if result.text is None else "")
    if stats:
        _summarise(result)
    return result


def _summarise(result: GenerationResult) -> None:
    timing, usage = result.timing, result.usage
    per_token = "" if timing.tpot_s is None else f", {timing.tpot_s * 1e3:.1f} ms a token after it"
    click.echo(
        f"{result.policy}: {usage.prompt_tokens} + {usage.completion_tokens} tokens"
        f" ({result.finish_reason}), first after {timing.ttft_s * 1e3:.0f} ms{per_token}"
        f"{traffic(result.rpc)}{pads_left(result.pads)}",
        err=True,
    )


@dataclass
class SoFar:
    """What there is to show of a run, also when it ends with an error."""

    settings: dict[str, Any]
    generation: Generation | None = None

    def described(
        self, runner: Runner, result: GenerationResult, sampling: SamplingSettings
    ) -> dict[str, object]:
        """Return a result with what it was made with, so that it can be made again."""
        from protocol import native

        return result.model_dump() | {
            "model": self.settings["model"],
            "model_digest": runner.model_digest,
            "policy_digest": policy_digest(runner.policy),
            "kernels": native.choice().variant,
            "cores": runner.cores._asdict(),
            "seed": sampling.seed,
        }


@contextmanager
def errors_as_json(settings: dict[str, Any]) -> Iterator[SoFar]:
    """With `--json`, print an error of the block as an object too, with the tokens so far."""
    so_far = SoFar(settings)
    try:
        yield so_far
    except TsqpError as error:
        if settings["as_json"]:
            made = so_far.generation
            token_ids, text = (made.token_ids, made.text or "") if made else ([], "")
            said = {"error": describe_error(error), "token_ids": token_ids, "text": text}
            click.echo(json.dumps(said))
        raise


def describe_error(error: TsqpError) -> dict[str, object]:
    """Return an error as JSON has it."""
    parts = {name: getattr(error, name) for name in ("where", "got", "expected", "retryable")}
    return {"type": type(error).__name__, **parts}


def policy_digest(policy: Policy) -> str:
    """Return SHA-256, in hex, over what a policy says; the code of its masks is not covered."""
    operators = {
        operator: [
            (p.scope, p.place, p.mask.described() if p.mask else "none", p.verify)
            + ((p.window.sinks, p.window.recent) if p.window else ())
            for p in placements
        ]
        for operator, placements in policy.operators.items()
    }
    prefill = (policy.prefill, policy.left_to_decode)
    said = [policy.name, policy.arithmetic, policy.one_rpc_per_module, prefill, operators]
    said.append(policy.service.attested)
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
