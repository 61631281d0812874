"""`tsqp verify`: have a server prove what it is, and show how it did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import EvidenceError, SettingsError
from tsqp.cli.appraising import appraisal_options, read_appraisal
from tsqp.cli.options import use
from tsqp.cli.program import EXIT_FAILURE
from tsqp.cli.settings import CONTEXT, config_option

if TYPE_CHECKING:
    from tee_side.attest.appraisal import Appraisal, Step
    from tee_side.attest.appraisal_policy import AppraisalPolicy


@dataclass(frozen=True)
class _Verdict:
    """Steps in their order, and what was pinned; `refused`: what ended it before any step."""

    steps: tuple[Step, ...]
    pinned: dict[str, object]
    refused: str | None = None

    @property
    def passed(self) -> bool:
        return self.refused is None and all(step.passed for step in self.steps)


@click.command(context_settings=CONTEXT)
@click.argument("server", metavar="URL|FILE")
@appraisal_options
@use("json")
@config_option
@click.pass_context
def verify(
    context: click.Context,
    /,
    *,
    server: str,
    policy: Path | None,
    mode: str | None,
    as_json: bool,
) -> None:
    """Have the server at URL prove what it is, or look at a FILE of what one said.

    URL is https://HOST:PORT; nothing is sent but a random number. FILE is what a server answered to
    GET /v1/attestation; that it is of now, it cannot prove. Exit status 0 where every step passed.
    """
    appraisal = read_appraisal(policy, mode)
    found = _of_server(server, appraisal) if "://" in server else _of_file(server, appraisal)
    if as_json:
        steps = [step._asdict() for step in found.steps]
        said = {"passed": found.passed, "refused": found.refused, "steps": steps}
        click.echo(json.dumps(said | {"pinned": found.pinned}, indent=1))
    else:
        for step in found.steps:
            click.echo(step)
        for name, value in found.pinned.items():
            click.echo(f"pinned  {name}: {value}")
        click.echo(found.refused or ("verified" if found.passed else "NOT verified"))
    context.exit(0 if found.passed else EXIT_FAILURE)


def _of_server(url: str, policy: AppraisalPolicy) -> _Verdict:
    from tsqp.client.attested_tls import Address, AttestedContext, NotAttestedError, prove

    try:
        proved = prove(Address.of(url), AttestedContext(policy))
    except NotAttestedError as error:
        steps = error.appraisal.steps if error.appraisal is not None else ()
        return _Verdict(steps, {}, f"NOT verified: {error}")
    return _Verdict(proved.fresh.steps, _pinned(proved.fresh, proved.certificate))


def _of_file(name: str, policy: AppraisalPolicy) -> _Verdict:
    from tee_side.attest.appraisal import Expected, appraise
    from tsqp.client.attested_tls import read_answer

    try:
        stated = read_answer(Path(name).read_bytes())
        expected = Expected(None, None, datetime.now(UTC), "serve")
        found = appraise(stated, policy, expected)
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise SettingsError(name, got=got, expected="https://HOST:PORT, or a file") from None
    except EvidenceError as error:
        return _Verdict((), {}, f"NOT verified: {error}")
    return _Verdict(found.steps, _pinned(found, None))


def _pinned(found: Appraisal, certificate: bytes | None) -> dict[str, object]:
    """Return what a client holds on to from now on."""
    import hashlib

    if found.claims is None:
        return {}
    said = {"certificate": certificate and hashlib.sha256(certificate).hexdigest()}
    shown = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in found.claims.model_dump(exclude={"nonce", "hpke_key"}).items()
        if not isinstance(value, dict)
    }
    owners = {f"CURVE key of {owner}": key.hex() for owner, key in found.claims.curve_keys.items()}
    plugins = {f"plug-in {name}": key.hex() for name, key in found.claims.plugins.items()}
    return {**said, **shown, **owners, **plugins}
