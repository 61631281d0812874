"""`tee-runner`: run the forward pass in the TEE and generate text."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

import click

from protocol.errors import SettingsError
from tsqp.cli.keys import read_client_keys, warn_without_keys
from tsqp.cli.manifest import load_manifest
from tsqp.cli.pads import pads
from tsqp.cli.program import model_directory, run, setup_logging
from tsqp.cli.prompts import chosen_prompt, read_turn, require_utf8
from tsqp.cli.runner_options import shared_options
from tsqp.cli.settings import (
    config_option,
    version_option,
)
from tsqp.cli.status import StatusLine, pads_left, traffic

if TYPE_CHECKING:
    import torch

    from protocol.model.manifest import Manifest
    from tee_side.generation import Generation, GenerationResult
    from tee_side.observer import OperatorTable
    from tee_side.policy import Policy
    from tee_side.runner import Runner
    from tee_side.sampling import SamplingSettings
    from tee_side.tokenizer import Tokenizer

C = TypeVar("C", bound=Callable[..., Any])
CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}


@click.group(context_settings=CONTEXT)
@config_option
@version_option
def command() -> None:
    """Run a model's forward pass in the TEE, and its heavy operators on a gpu-service.

    Shell completion: tsqp completion bash|zsh|fish.
    """


@command.command(context_settings=CONTEXT)
@click.argument("model", envvar="TEE_RUNNER_GENERATE_MODEL")
@click.option("--prompt", metavar="TEXT")
@click.option(
    "--prompt-file",
    metavar="FILE",
    help="UTF-8; - reads standard input. A final newline is dropped.",
)
@click.option("--prompt-token-ids", metavar="1,2,3")
@click.option(
    "--report",
    type=click.File("ab", lazy=False),
    help="Write the JSON object, with totals per operator, to this file.",
)
@click.option(
    "--save-logits",
    type=click.File("ab", lazy=False),
    help="Write the logits of every new token to this safetensors file, to compare them.",
)
@shared_options
@config_option
@click.pass_context
def generate(
    context: click.Context,
    /,
    *,
    model: str,
    prompt: str | None,
    prompt_file: str | None,
    prompt_token_ids: str | None,
    report: BinaryIO | None,
    save_logits: BinaryIO | None,
    stop: tuple[str, ...],
    max_new_tokens: int,
    **settings: Any,
) -> None:
    """Generate text from a prompt.

    MODEL is a Hugging Face directory, or "demo". Prompt and answer are on this machine only: what
    the GPU side can see of them is the policy's, and the first line on stderr says it.
    """
    from tee_side.observer import OperatorTable
    from tee_side.policy import load_policy

    given = chosen_prompt(
        context, prompt=prompt, prompt_file=prompt_file, prompt_token_ids=prompt_token_ids
    )
    policy = load_policy(settings["policy"])
    manifest = load_manifest(model_directory(model), settings)
    # Token ids are enough for a model without a tokenizer; what comes out are token ids, too.
    needed = given.token_ids is None or _has_tokenizer(model, manifest)
    tokenizer = _load_tokenizer(model, manifest) if needed else None
    ids = given.token_ids
    if tokenizer is not None and ids is None:
        ids = tokenizer.encode(given.text or "")
    table = OperatorTable() if report else None
    with _open_runner(model, policy, settings, table, tokenizer, manifest) as runner:
        generation = runner.generate(
            ids or [],
            max_new_tokens=max_new_tokens,
            sampling=_sampling(settings),
            stop=stop,
            with_text=tokenizer is not None,
        )
        logits: list[torch.Tensor] = []
        result = _stream(
            runner,
            generation,
            show=not settings["json"],
            keep_logits=logits if save_logits else None,
        )
    if settings["json"]:
        click.echo(result.model_dump_json())
    if report and table:
        _write_report(report, result, table)
    if save_logits:
        _write_logits(save_logits, logits)


@command.command(context_settings=CONTEXT)
@click.argument("model", envvar="TEE_RUNNER_CHAT_MODEL")
@click.option("--system", metavar="TEXT", help="System message, if the model's template has one.")
@shared_options
@config_option
def chat(
    *,
    model: str,
    system: str | None,
    stop: tuple[str, ...],
    max_new_tokens: int,
    **settings: Any,
) -> None:
    """Talk with a model, through its chat template; one line a turn, end of input ends it.

    MODEL is a Hugging Face directory, or "demo".
    """
    from tee_side.policy import load_policy

    messages = [{"role": "system", "content": require_utf8(system, "--system")}] if system else []
    turns: list[GenerationResult] = []
    policy = load_policy(settings["policy"])
    manifest = load_manifest(model_directory(model), settings)
    tokenizer = _load_tokenizer(model, manifest)
    try:
        with _open_runner(model, policy, settings, None, tokenizer, manifest, idles=True) as runner:
            while (line := _next_turn(runner)) is not None:
                if not line.strip():
                    continue
                user = {"role": "user", "content": line}
                ids = tokenizer.apply_chat_template([*messages, user])
                generation = runner.generate(
                    ids, max_new_tokens=max_new_tokens, sampling=_sampling(settings), stop=stop
                )
                result = _stream(runner, generation, show=not settings["json"], keep_logits=None)
                turns.append(result)
                messages += [user, {"role": "assistant", "content": result.text or ""}]
    finally:
        # Whatever ends the conversation (an outgrown context, a lost service, Ctrl-C): what was
        # said so far is still shown.
        if settings["json"] and turns:
            click.echo(
                json.dumps({"messages": messages, "turns": [turn.model_dump() for turn in turns]})
            )


def _next_turn(runner: Runner) -> str | None:
    """Read a turn; while the person thinks, pads are made."""
    with runner.idle():
        return read_turn()


def _load_tokenizer(model: str, manifest: Manifest | None) -> Tokenizer:
    """Return the tokenizer; called before connecting, which is pointless without one."""
    from protocol.model.config import read_config
    from tee_side.tokenizer import Tokenizer

    directory = model_directory(model)
    # First, because a missing directory is to be called that, and not a missing tokenizer.
    read_config(directory, manifest)
    return Tokenizer(directory, manifest)


def _open_runner(
    model: str,
    policy: Policy,
    settings: dict[str, Any],
    table: OperatorTable | None,
    tokenizer: Tokenizer | None,
    manifest: Manifest | None,
    *,
    idles: bool = False,
) -> Runner:
    from protocol.link import Link
    from tee_side.assembly import MaskSettings
    from tee_side.runner import Runner, RunnerSettings

    # Services that are lost, left out or come back are told of while the run goes on.
    setup_logging("warning")
    _check_use(policy, settings, idles=idles)
    keys = read_client_keys(settings)
    if policy.services and not keys:
        warn_without_keys(settings["gpu"])
    masks = MaskSettings(
        calibration=settings["calibration"],
        key=settings["key"],
        bank=settings["bank"],
        bank_key=settings["bank_key"],
        bank_index=settings["bank_index"],
        when_out=settings["when_out"],
    )
    runner = Runner(
        RunnerSettings(
            model=model_directory(model),
            policy=policy,
            manifest=manifest,
            max_kv_bytes=_mib(settings["max_kv_mib"]),
            gpu=settings["gpu"],
            masks=masks,
            dtype=settings["dtype"],
            threads=settings["threads"],
            step_tokens=settings["step_tokens"],
            connect_timeout_s=settings["connect_timeout_s"],
            request_timeout_s=settings["request_timeout_s"],
            micro_batches=settings["micro_batches"],
            spin_us=settings["spin_us"],
            link=Link.of(settings["link_gbps"], settings["link_rtt_us"]),
            max_message_bytes=settings["max_message_mib"] * 1024 * 1024,
            keys=keys,
            heartbeat_timeout_s=settings["heartbeat_timeout_s"],
        ),
        table,
        tokenizer,
    )
    # What was made by now lives as long as the process; to look through it again and again for
    # garbage costs a tenth of the time of a decoded token.
    gc.collect()
    gc.freeze()
    if disclosure := policy.disclosure():
        click.echo(disclosure, err=True)
    return runner


def _mib(size: int | None) -> int | None:
    return None if size is None else size * 1024 * 1024


def _check_use(policy: Policy, settings: dict[str, Any], *, idles: bool) -> None:
    """Refuse what could not do what was asked for: pads that never are, services without a part."""
    from tee_side.masks.mask import AdditiveMask

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


def _sampling(settings: dict[str, Any]) -> SamplingSettings:
    from pydantic import ValidationError

    from tee_side.sampling import SamplingSettings

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    try:
        return SamplingSettings(**{name: settings[name] for name in names})
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise SettingsError(option, got=str(first["input"]), expected=first["msg"]) from None


def _has_tokenizer(model: str, manifest: Manifest | None) -> bool:
    from protocol.model.manifest import find_file
    from tee_side.tokenizer import TOKENIZER_FILE

    return find_file(model_directory(model), TOKENIZER_FILE, manifest) is not None


def _stream(
    runner: Runner,
    generation: Generation,
    *,
    show: bool,
    keep_logits: list[torch.Tensor] | None,
) -> GenerationResult:
    shown = False
    try:
        with StatusLine(runner.policy.name, enabled=show) as status:
            runner.on_wait = status.waiting
            for sampled, text in generation.steps():
                if show and text:
                    click.echo(text, nl=False)
                    shown = True
                if keep_logits is not None:
                    keep_logits.append(sampled.logits_V)
                status.update(generation)
    except BaseException:
        if shown:  # what is said next begins a line
            click.echo()
        raise
    result = generation.result()
    if show:
        if result.text is None:
            click.echo(",".join(map(str, result.token_ids)), nl=False)
        click.echo()
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


def _write_report(file: BinaryIO, result: GenerationResult, table: OperatorTable) -> None:
    operators = {
        name: {
            "place": totals.place,
            "calls": totals.calls,
            "round_trips": totals.round_trips,
            "bytes_sent": totals.bytes_sent,
            "bytes_received": totals.bytes_received,
            "tee_s": totals.tee_ns / 1e9,
            "wire_s": totals.wire_ns / 1e9,
            "queue_s": totals.queue_ns / 1e9,
            "gpu_s": totals.gpu_ns / 1e9,
        }
        for name, totals in table.totals.items()
    }
    _write(file, json.dumps(result.model_dump() | {"operators": operators}, indent=1).encode())


def _write_logits(file: BinaryIO, logits: list[torch.Tensor]) -> None:
    import torch
    from safetensors.torch import save

    _write(file, save({"logits": torch.stack(logits).to(torch.float32)}))


def _write(file: BinaryIO, content: bytes) -> None:
    """Write and flush, because click drops errors of closing. Raises OSError with the name."""
    try:
        # Opened for appending, so that a run that is refused leaves the old file as it was.
        with suppress(OSError):  # a device has no length
            file.truncate(0)
        file.write(content)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None


command.add_command(pads)


def main() -> NoReturn:
    """Entry point."""
    run(command, "tee-runner", "TEE_RUNNER")
