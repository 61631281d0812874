"""`tsqp`: demo, doctor and the other commands for people."""

import sys
from importlib import import_module
from typing import NoReturn

import click

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, PROGRAMS, Commands, config_option, use, version_option
from tsqp.cli.terminal import require_utf8
from tsqp.extras import needing
from tsqp.run.process import EXIT_FAILURE, run

# Commands that make keys, or read a text that may be private.
_WITH_SECRETS = {"accuracy", "api-key", "audit", "keys", "keyserver", "provision", "seal"}
# The commands of each module.
_COMMANDS = {
    "bench": ("bench", "plan"),
    "policies": ("explain", "masks", "policies"),
    "evidence": ("keyserver", "proxy", "receipt", "verify"),
    "guest_image": ("image", "measure"),
    "leak": ("leak",),
    "model_files": ("accuracy", "import", "manifest", "provision", "pull", "seal"),
    "operate": ("api-key", "audit", "doctor", "health", "keys"),
}
_MODULES = {name: module for module, names in _COMMANDS.items() for name in names}


@click.group("tsqp", cls=Commands, modules=_MODULES, context_settings=CONTEXT)
@config_option
@version_option
def command() -> None:
    """See and measure how a model runs across a trusted VM and an untrusted GPU."""


@command.command(context_settings=CONTEXT)
@use(
    "policy",
    policy={
        "multiple": True,
        "default": (),
        "help": "Show this one, with its cost per operator; repeatable. Default: tee-only,"
        " attention-in-tee and shielded, one after another.",
    },
)
@click.option("--prompt", default="Once upon a time", metavar="TEXT")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=240)
@use("dealer_in_the_clear")
@config_option
@click.pass_context
def demo(
    context: click.Context,
    /,
    *,
    policy: tuple[str, ...],
    prompt: str,
    max_new_tokens: int,
    dealer_in_the_clear: bool,
) -> None:
    """Watch the same prompt three ways: all in the TEE, offloaded in the clear, and shielded.

    Then shielded again: as a chat over HTTP, and with a service that lies in one number. Starts
    gpu-service and tee-runner processes on loopback, and shows the story, what the GPU side
    received each time, and what it cost. Exit status 1 if tokens differ from transformers', masked
    integers from the same integers without a mask, or the lie goes unnoticed.
    """
    require_utf8(prompt, "--prompt")
    with needing("tsqp demo", "the extra demo: pip install '.[demo]'"):
        from tsqp.demo.acts import run_demo
    right = run_demo(
        policies=policy,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        options=["--dealer-in-the-clear"] if dealer_in_the_clear else [],
    )
    context.exit(0 if right else EXIT_FAILURE)


@command.command("train-demo", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, expose_value=False)
def train_demo() -> None:
    """Say where the training of the demo model went. Raises SettingsError."""
    raise SettingsError(
        "tsqp train-demo",
        got="a command of earlier versions",
        expected="python -m benchmarks.train_demo OUTPUT, in a checkout",
    )


@command.command(context_settings=CONTEXT)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@config_option
def completion(shell: str) -> None:
    """Print the completion script of all three programs: eval "$(tsqp completion bash)"."""
    from click.shell_completion import get_completion_class

    generator = get_completion_class(shell)
    if generator is None:
        raise SettingsError("shell", got=shell, expected="bash, zsh or fish")
    for name, module in PROGRAMS.items():
        program = import_module(f"tsqp.cli.{module}").command
        variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
        click.echo(generator(program, {}, name, variable).source())


def main() -> NoReturn:
    """Entry point."""
    # By their names, wherever they stand: memory that is private without need harms no command.
    run(command, "tsqp", has_secrets=not _WITH_SECRETS.isdisjoint(sys.argv[1:]))
