"""`tsqp doctor`: what a machine has and lacks, and whether a run would start on it."""

from __future__ import annotations

from typing import Any

import click

from protocol.errors import SettingsError
from tsqp.cli.options import use
from tsqp.cli.program import EXIT_FAILURE, model_directory
from tsqp.cli.settings import CONTEXT, FiniteFloatRange, config_option, model_argument
from tsqp.cli.trust import load_manifest

_FILES = ("calibration", "bank", "bank-key", "bank-index", "bank-witness", "bank-key-beside-bank")
_TRUST = (
    *("identity", "service-key", "service-appraisal", "shares-in-the-clear"),
    *("http-token", "http-ca", "manifest", "manifest-digest"),
)


@click.command(context_settings=CONTEXT)
@model_argument(required=False)
@use("gpu", "policy", *_FILES, *_TRUST, "json")
@click.option(
    "--timeout-s",
    type=FiniteFloatRange(0, 3600, min_open=True),
    default=5.0,
    help="How long to wait for each service.",
)
@config_option
@click.pass_context
def doctor(context: click.Context, /, *, model: str | None, as_json: bool, **settings: Any) -> None:
    """Say what this machine has and lacks; with MODEL, whether a run with these options starts.

    MODEL is a Hugging Face directory, or "demo". Of what is missing, the command that makes it is
    said as well. Exit status 1 if something is missing that the run needs. No prompt is sent.
    """
    from tsqp.doctor import examine, render

    findings = examine()
    if model is None:
        given = [name for name in settings if _is_given(context, name)]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise SettingsError(option, got="no MODEL", expected="the model of the run")
    else:
        from tsqp.preflight import Plan, examine_plan

        directory = model_directory(model)
        manifest = load_manifest(directory, settings)
        plan = examine_plan(Plan(directory, settings["policy"], manifest, settings))
        findings = [*plan, *findings]
    click.echo(render(findings, as_json=as_json))
    lacking = any(found.topic == "run" and found.state == "missing" for found in findings)
    context.exit(EXIT_FAILURE if lacking else 0)


def _is_given(context: click.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
