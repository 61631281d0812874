"""`tsqp`: demo, doctor and the other commands for people."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from protocol.errors import SettingsError
from tsqp.cli.bench import bench
from tsqp.cli.calibrate import calibrate
from tsqp.cli.catalogue import masks, policies
from tsqp.cli.explain import explain
from tsqp.cli.health import health
from tsqp.cli.keys import keys
from tsqp.cli.leak import leak
from tsqp.cli.manifest import manifest
from tsqp.cli.plan import plan
from tsqp.cli.program import EXIT_FAILURE, run
from tsqp.cli.prompts import require_utf8
from tsqp.cli.provision import provision
from tsqp.cli.settings import THREADS, config_option, version_option
from tsqp.extras import needing

CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}
_EXTRA = "the extra demo: pip install '.[demo]'"


@click.group(context_settings=CONTEXT)
@config_option
@version_option
def command() -> None:
    """See and measure how a model runs across a trusted VM and an untrusted GPU."""


@command.command(context_settings=CONTEXT)
@click.option(
    "--policy",
    multiple=True,
    metavar="NAME|FILE",
    help="Show this one, with its cost per operator; repeatable. Default: tee-only,"
    " attention-in-tee and shielded, one after another.",
)
@click.option("--prompt", default="Once upon a time", metavar="TEXT")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=240)
@config_option
@click.pass_context
def demo(
    context: click.Context, /, *, policy: tuple[str, ...], prompt: str, max_new_tokens: int
) -> None:
    """Watch the same prompt three ways: all in the TEE, offloaded in the clear, and shielded.

    Then shielded again, with a service that lies in one number. Starts gpu-service and tee-runner
    processes on loopback, and shows the story, what the GPU side received each time, and what it
    cost. Exit status 1 if tokens differ from transformers', masked integers from the same integers
    without a mask, or the lie goes unnoticed.
    """
    require_utf8(prompt, "--prompt")
    with needing("tsqp demo", _EXTRA):
        from tsqp.demo.acts import run_demo
    right = run_demo(policies=policy, prompt=prompt, max_new_tokens=max_new_tokens)
    context.exit(0 if right else EXIT_FAILURE)


@command.command("train-demo", context_settings=CONTEXT)
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=7)
@click.option("--tokens", type=click.IntRange(min=1), help="How many to train on.")
@click.option("--threads", type=THREADS, help="CPU threads for torch.")
@config_option
def train_demo(output: Path, seed: int, tokens: int | None, threads: int | None) -> None:
    """Train the demo model that ships with us, into the new directory OUTPUT."""
    with needing("tsqp train-demo", _EXTRA):
        from tsqp.train_demo.train import DEFAULT_TOKENS, OutputDirectoryError
        from tsqp.train_demo.train import train_demo as train
    try:
        record = train(output, seed=seed, tokens=tokens or DEFAULT_TOKENS, threads=threads)
    except OutputDirectoryError as error:
        raise SettingsError(str(output), got=str(error), expected="an empty directory") from None
    click.echo(
        f"{output}: validation loss {record.validation_loss_nats_per_token:.4f} nats per token"
    )


@command.command(context_settings=CONTEXT)
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@config_option
def doctor(**settings: bool) -> None:
    """Say what this machine has and lacks for either side."""
    from tsqp.doctor import examine, render

    findings = examine()
    click.echo(render(findings, as_json=settings["json"]))


@command.command(context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of all three programs: eval "$(tsqp completion bash)"."""
    from click.shell_completion import get_completion_class

    from tsqp.cli.gpu_service import command as gpu_service
    from tsqp.cli.tee_runner import command as tee_runner

    generator = get_completion_class(shell)
    if generator is None:
        raise SettingsError("shell", got=shell, expected="bash, zsh or fish")
    programs = {"gpu-service": gpu_service, "tee-runner": tee_runner, "tsqp": command}
    for name, program in programs.items():
        variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
        click.echo(generator(program, {}, name, variable).source())


for _command in (
    policies,
    masks,
    explain,
    bench,
    plan,
    leak,
    calibrate,
    keys,
    manifest,
    provision,
    health,
):
    command.add_command(_command)


def main() -> NoReturn:
    """Entry point."""
    run(command, "tsqp", "TSQP")
