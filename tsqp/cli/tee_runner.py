"""`tee-runner`: run the forward pass in the TEE and generate text."""

from typing import NoReturn

import click

from tsqp.cli.config import CONTEXT, Commands, config_option, version_option
from tsqp.run.process import run


@click.group(
    "tee-runner",
    cls=Commands,
    modules={"generate": "generate", "chat": "serve", "pads": "pads", "serve": "serve"},
    context_settings=CONTEXT,
)
@config_option
@version_option
def command() -> None:
    """Run a model's forward pass in the TEE, and its heavy operators on a gpu-service.

    Shell completion: tsqp completion bash|zsh|fish.
    """


def main() -> NoReturn:
    """Entry point."""
    run(command, "tee-runner", has_secrets=True)
