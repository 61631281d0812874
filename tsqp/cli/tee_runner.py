"""`tee-runner`: run the forward pass in the TEE and generate text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TextIO, TypeVar

import click

from protocol.errors import PromptError, SettingsError
from tsqp.cli.program import (
    DEFAULT_ENDPOINT,
    DTYPES,
    config_option,
    model_directory,
    run,
    version_option,
)
from tsqp.cli.status import StatusLine, traffic

if TYPE_CHECKING:
    import torch

    from tee_side.observer import OperatorTable
    from tee_side.runner import Generation, GenerationResult, Runner
    from tee_side.sampling import SamplingSettings

C = TypeVar("C", bound=Callable[..., Any])
CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}


def _complete_policy(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    from tee_side.policy import builtin_policies

    return [name for name in builtin_policies() if name.startswith(incomplete)]


def shared_options(command: C) -> C:
    """Add the settings that generate and chat have in common."""
    options = [
        click.option("--gpu", default=DEFAULT_ENDPOINT, metavar="ENDPOINT", help="gpu-service."),
        click.option(
            "--policy",
            default="attention-in-tee",
            metavar="NAME|FILE",
            shell_complete=_complete_policy,
            help="What leaves the TEE: tee-only, attention-in-tee, tsqp, or a TOML file.",
        ),
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=256),
        click.option(
            "--temperature", type=click.FloatRange(min=0), default=0.0, help="0 is greedy."
        ),
        click.option("--top-k", type=click.IntRange(min=0), default=0, help="0 is off."),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0),
        click.option("--min-p", type=click.FloatRange(0, 1), default=0.0),
        click.option("--repetition-penalty", type=click.FloatRange(0, min_open=True), default=1.0),
        click.option("--seed", type=click.IntRange(min=0), help="Default: a fresh one."),
        click.option("--stop", multiple=True, metavar="TEXT", help="Stop string; repeatable."),
        click.option("--dtype", type=DTYPES, help="In the TEE; default: the model's own dtype."),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads for torch."),
        click.option(
            "--step-tokens",
            type=click.IntRange(min=1),
            default=512,
            help="Tokens in one step: longer prompts are prefilled in chunks.",
        ),
        click.option(
            "--connect-timeout-s", type=click.FloatRange(0, 3600, min_open=True), default=10.0
        ),
        click.option(
            "--request-timeout-s", type=click.FloatRange(0, 3600, min_open=True), default=60.0
        ),
        click.option(
            "--max-message-mib",
            type=click.IntRange(1, 4096),
            default=512,
            help="Larger messages are neither sent nor taken; the service has its own limit.",
        ),
        click.option("--json", is_flag=True, help="One JSON object instead of text."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


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
    type=click.File(encoding="utf-8"),
    help="- reads standard input. A final newline is dropped.",
)
@click.option("--prompt-token-ids", metavar="1,2,3")
@click.option(
    "--report",
    type=click.File("wb", lazy=False),
    help="Write the JSON object, with totals per operator, to this file.",
)
@click.option(
    "--save-logits",
    type=click.File("wb", lazy=False),
    help="Write the logits of every new token to this safetensors file, to compare them.",
)
@shared_options
@config_option
def generate(
    *,
    model: str,
    prompt: str | None,
    prompt_file: TextIO | None,
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

    if sum(given is not None for given in (prompt, prompt_file, prompt_token_ids)) != 1:
        raise SettingsError(
            "prompt",
            got="none, or more than one",
            expected="exactly one of --prompt, --prompt-file and --prompt-token-ids",
        )
    ids = None if prompt_token_ids is None else _parse_ids(prompt_token_ids)
    if prompt_file is not None:
        prompt = prompt_file.read().removesuffix("\n")
    table = OperatorTable() if report else None
    with _open_runner(model, settings, table) as runner:
        if ids is None:
            ids = runner.tokenizer.encode(prompt or "")
        with_text = prompt_token_ids is None or _has_tokenizer(model)
        generation = runner.generate(
            ids,
            max_new_tokens=max_new_tokens,
            sampling=_sampling(settings),
            stop=stop,
            with_text=with_text,
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
    messages = [{"role": "system", "content": system}] if system else []
    turns: list[GenerationResult] = []
    with _open_runner(model, settings, None) as runner:
        problem: PromptError | None = None
        while (line := _read_turn()) is not None:
            if not line.strip():
                continue
            user = {"role": "user", "content": line}
            try:
                ids = runner.tokenizer.apply_chat_template([*messages, user])
                generation = runner.generate(
                    ids, max_new_tokens=max_new_tokens, sampling=_sampling(settings), stop=stop
                )
            except PromptError as error:
                # The conversation has outgrown the context: what was said so far is still shown.
                problem = error
                break
            messages.append(user)
            result = _stream(runner, generation, show=not settings["json"], keep_logits=None)
            turns.append(result)
            messages.append({"role": "assistant", "content": result.text or ""})
    if settings["json"]:
        click.echo(
            json.dumps({"messages": messages, "turns": [turn.model_dump() for turn in turns]})
        )
    if problem is not None:
        raise problem


def _open_runner(model: str, settings: dict[str, Any], table: OperatorTable | None) -> Runner:
    from tee_side.policy import load_policy
    from tee_side.runner import Runner, RunnerSettings

    policy = load_policy(settings["policy"])
    runner = Runner(
        RunnerSettings(
            model=model_directory(model),
            policy=policy,
            gpu=settings["gpu"],
            dtype=settings["dtype"],
            threads=settings["threads"],
            step_tokens=settings["step_tokens"],
            connect_timeout_s=settings["connect_timeout_s"],
            request_timeout_s=settings["request_timeout_s"],
            max_message_bytes=settings["max_message_mib"] * 1024 * 1024,
        ),
        table,
    )
    if disclosure := policy.disclosure():
        click.echo(disclosure, err=True)
    return runner


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


def _has_tokenizer(model: str) -> bool:
    from tee_side.tokenizer import TOKENIZER_FILE

    return (model_directory(model) / TOKENIZER_FILE).exists()


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise PromptError(
            "--prompt-token-ids", got="something that is no integer", expected="integers like 1,2,3"
        ) from None


def _read_turn() -> str | None:
    """Return the next line of the user, or None at the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    if interactive and not line:
        click.echo(err=True)
    return line.rstrip("\n") if line else None


def _stream(
    runner: Runner,
    generation: Generation,
    *,
    show: bool,
    keep_logits: list[torch.Tensor] | None,
) -> GenerationResult:
    with StatusLine(runner.policy.name, enabled=show) as status:
        for sampled, text in generation.steps():
            if show and text:
                click.echo(text, nl=False)
            if keep_logits is not None:
                keep_logits.append(sampled.logits_V)
            status.update(generation)
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
        f"{traffic(result.rpc)}",
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
    file.write(json.dumps(result.model_dump() | {"operators": operators}, indent=1).encode())


def _write_logits(file: BinaryIO, logits: list[torch.Tensor]) -> None:
    import torch
    from safetensors.torch import save

    file.write(save({"logits": torch.stack(logits).to(torch.float32)}))


def main() -> NoReturn:
    """Entry point."""
    run(command, "tee-runner", "TEE_RUNNER")
