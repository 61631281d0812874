"""What commands that talk to a server which proves itself share: by what it is appraised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError
from tsqp.cli.settings import PATH

if TYPE_CHECKING:
    from tee_side.attest.appraisal_policy import AppraisalPolicy

_DEVELOPMENT = "development"
_MODES = (_DEVELOPMENT, "production", "gpu-confidential")


def appraisal_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--policy` and `--mode`."""
    policy = click.option(
        "--policy",
        type=PATH,
        metavar="FILE",
        allow_from_autoenv=False,  # elsewhere it is a placement policy
        help="What has to prove itself must be: an appraisal policy, in TOML.",
    )
    mode = click.option(
        "--mode",
        type=click.Choice(_MODES),
        help="As the policy must say. Without one, development accepts any simulated TEE.",
    )
    return policy(mode(command))


def read_appraisal(policy: Path | None, mode: str | None) -> AppraisalPolicy:
    """Return the policy that two options name, and warn of one that proves nothing.

    Raises SettingsError.
    """
    from tee_side.attest.appraisal_policy import AppraisalPolicy

    if policy is None:
        if mode != _DEVELOPMENT:
            expected = "a file, or --mode development, where nothing is proved"
            raise SettingsError("--policy", got="none", expected=expected)
        found = AppraisalPolicy.development()
    else:
        found = AppraisalPolicy.load(policy)
        if mode not in (None, found.mode):
            raise SettingsError("--mode", got=str(mode), expected=f"{found.mode}, as {policy} says")
    if found.mode == _DEVELOPMENT:
        said = (
            "DEVELOPMENT: a simulated TEE is accepted, whose key everybody has. Nothing is proved."
        )
        click.secho(said, err=True, fg="red", bold=True)
    return found
