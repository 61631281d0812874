"""`tsqp receipt`: check what a server signed of its answers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.errors import EvidenceError, SettingsError, describe
from tsqp.cli.appraising import appraisal_options, read_appraisal
from tsqp.cli.options import use
from tsqp.cli.program import EXIT_FAILURE
from tsqp.cli.settings import CONTEXT, PATH, config_option

if TYPE_CHECKING:
    from tee_side.attest.appraisal import Appraisal, AppraisalStep
    from tee_side.attest.appraisal_policy import AppraisalPolicy
    from tee_side.attest.statement import Claims, Receipt

# As a header, as `curl -D` writes it, or as the comment in a stream.
_NAMED = re.compile(rb"^(?:: )?tsqp-receipt:? ([A-Za-z0-9+/=]+)\r?$", re.IGNORECASE | re.MULTILINE)
_DONE = b"data: [DONE]\n\n"


@click.group(context_settings=CONTEXT)
@config_option
def receipt() -> None:
    """Check the receipts of tee-runner serve: what it signed of its answers."""


@receipt.command(context_settings=CONTEXT)
@click.argument("files", type=PATH, nargs=-1, required=True, metavar="RECEIPT...")
@click.option(
    "--key",
    "key_hex",
    metavar="HEX",
    allow_from_autoenv=False,  # elsewhere it is the key of a feature mask
    help="The server's public key of receipts, 64 digits.",
)
@click.option(
    "--attestation",
    type=PATH,
    metavar="FILE",
    allow_from_autoenv=False,
    help="What the server answered to GET /v1/attestation; appraised by --policy or --mode.",
)
@click.option(
    "--request",
    type=PATH,
    metavar="FILE",
    allow_from_autoenv=False,
    help="The body that was sent, byte for byte.",
)
@click.option(
    "--response",
    type=PATH,
    metavar="FILE",
    allow_from_autoenv=False,
    help="The body that came, byte for byte; of a stream, up to its receipt or all of it.",
)
@appraisal_options
@use("json")
@config_option
@click.pass_context
def verify(
    context: click.Context,
    /,
    *,
    files: Sequence[Path],
    key_hex: str | None,
    attestation: Path | None,
    request: Path | None,
    response: Path | None,
    policy: Path | None,
    mode: str | None,
    as_json: bool,
) -> None:
    """Check a receipt: who signed it, and the bodies that it is of.

    RECEIPT is a file with the header tsqp-receipt of an answer (curl -D), a stream as it was saved,
    or base64 alone. Several, in their order, are a piece of the server's chain: one that is missing
    between them shows. --attestation is appraised by --policy or --mode, as tsqp verify does. Exit
    status 1 if anything differs.
    """
    from tee_side.attest.appraisal import AppraisalStep
    from tee_side.attest.statement import verify_receipt as verified

    if (key_hex is None) == (attestation is None):
        raise click.UsageError("one of --key and --attestation is needed")
    if len(files) > 1 and (request or response):
        raise click.UsageError("--request and --response are of one RECEIPT")
    key, claims = b"" if key_hex is None else _key(key_hex), None
    steps: list[AppraisalStep] = []
    found: list[tuple[bytes, Receipt]] = []
    try:
        if attestation is not None:
            appraised = _appraised(attestation, read_appraisal(policy, mode))
            claims, steps = appraised.claims, list(appraised.steps)
            key = b"" if claims is None else claims.receipt_key or b""
        for file in files:
            signed = _read(file)
            one = verified(signed, key)
            steps.append(
                AppraisalStep(f"{file}", True, f"receipt {one.sequence}, of the key", "one of it")
            )
            steps += _steps(one, found[-1] if found else None, claims)
            found.append((signed, one))
        if request is not None:
            digest = hashlib.sha256(request.read_bytes()).digest()
            steps.append(_same("request", digest, found[0][1].request))
        if response is not None:
            steps.append(_response_step(response.read_bytes(), *found[0]))
    except EvidenceError as error:
        # What is not genuine says nothing.
        steps.append(AppraisalStep(error.where, False, error.got, error.expected))
    passed = all(step.passed for step in steps)
    if as_json:
        listed = [step._asdict() for step in steps]
        said = [one.model_dump() | {"sha256": hashlib.sha256(it).digest()} for it, one in found]
        report = {"passed": passed, "steps": listed, "receipts": said}
        click.echo(json.dumps(report, default=bytes.hex))
    else:
        for line in (*steps, *(line for one in found for line in _told(*one))):
            click.echo(str(line))
    context.exit(0 if passed else EXIT_FAILURE)


def _key(text: str) -> bytes:
    if not re.fullmatch("[0-9A-Fa-f]{64}", text):
        raise SettingsError("--key", got=describe(text), expected="64 hexadecimal digits")
    return bytes.fromhex(text)


def _appraised(path: Path, policy: AppraisalPolicy) -> Appraisal:
    """Appraise what a server said of itself. Raises EvidenceError for what cannot be read."""
    from tee_side.attest.appraisal import Expected, appraise
    from tsqp.client.attested_tls import read_answer

    stated = read_answer(path.read_bytes())
    expected = Expected(None, None, datetime.now(UTC), "serve")
    return appraise(stated, policy, expected)


def _read(path: Path) -> bytes:
    """Return the last receipt of a file. Raises EvidenceError."""
    content = path.read_bytes()
    named = _NAMED.findall(content)
    try:
        return base64.b64decode(named[-1] if named else content.strip(), validate=True)
    except ValueError:
        expected = "a receipt: base64, or a line tsqp-receipt"
        raise EvidenceError(f"{path}", got="other text", expected=expected) from None


def _steps(
    one: Receipt, before: tuple[bytes, Receipt] | None, claims: Claims | None
) -> Iterator[AppraisalStep]:
    from tee_side.attest.appraisal import AppraisalStep

    if before is not None:
        follows = one.previous == hashlib.sha256(before[0]).digest()
        got = f"{one.sequence} behind {before[1].sequence}"
        yield AppraisalStep("chain", follows, got, f"{before[1].sequence + 1}, with its digest")
    if claims is not None:
        yield _same("model", one.model, claims.model)
        yield _same("policy", one.policy, claims.policy)


def _response_step(content: bytes, signed: bytes, one: Receipt) -> AppraisalStep:
    from tee_side.attest.appraisal import AppraisalStep

    line = b": tsqp-receipt %s\n\n" % base64.b64encode(signed)
    answer, comment, rest = content.partition(line)
    if comment and rest not in (b"", _DONE):
        return AppraisalStep(
            "response", False, f"{len(rest)} bytes behind the receipt", "[DONE], or none"
        )
    return _same("response", hashlib.sha256(answer).digest(), one.response)


def _same(name: str, got: bytes, expected: bytes) -> AppraisalStep:
    from tee_side.attest.appraisal import AppraisalStep

    return AppraisalStep(name, got == expected, got.hex(), expected.hex())


def _told(signed: bytes, one: Receipt) -> Iterator[str]:
    """Yield what a receipt says, in words."""
    yield f"says  receipt: {one.sequence}, SHA-256 {hashlib.sha256(signed).hexdigest()}"
    yield f"says  time: {datetime.fromtimestamp(one.time, UTC).isoformat()}"
    for name in ("previous", "model", "policy", "request", "response"):
        yield f"says  {name}: {getattr(one, name).hex()}"
    yield f"says  tokens: {one.prompt_tokens} read, {one.completion_tokens} made"
    yield f"says  sampling: {json.dumps(one.sampling)}"
    yield f"says  seed: {'none that was asked for' if one.seed is None else one.seed}"
