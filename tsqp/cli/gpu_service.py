"""`gpu-service`: hold the weights and answer the TEE's requests."""

from __future__ import annotations

from typing import NoReturn

import click
from click.core import ParameterSource

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, config_option, takes, version_option
from tsqp.run.process import configure, run
from tsqp.run.service import GpuServiceSettings


def _refuse(_context: click.Context, _parameter: click.Parameter, text: str | None) -> None:
    """Refuse the option of parts of the columns, which was removed."""
    if text is not None:
        from tee_side.remote.services.plan import WITHOUT_COLUMNS

        raise SettingsError("--columns", got=repr(text)[:60], expected=WITHOUT_COLUMNS)


without_columns = click.option("--columns", callback=_refuse, hidden=True, expose_value=False)


@click.command("gpu-service", context_settings=CONTEXT)
@takes(GpuServiceSettings)
@without_columns
@config_option
@version_option
@click.pass_context
def command(context: click.Context, /, *, settings: GpuServiceSettings) -> None:
    """Hold the weights of MODEL and do the heavy operators for tee-runner.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". The process needs no
    secret and is trusted with none: what it gets to see is the runner's policy.
    """
    from gpu_side.service import serve
    from tsqp.run.service import attested_service, held_layers, served

    configure(settings.log_level)
    source = context.get_parameter_source("bind")
    SettingsError.unless(
        settings.http is None or source is ParameterSource.DEFAULT,
        "--http",
        f"--bind {settings.bind} as well",
        "one of them",
    )
    held = held_layers(settings)
    attested = attested_service(settings, held)
    service = served(settings, held, attested and attested.secret)
    serve(service, attested and attested.attest)


def main() -> NoReturn:
    """Entry point."""
    run(command, "gpu-service")
