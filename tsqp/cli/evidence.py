"""`tsqp verify`, `receipt`, `proxy` and `keyserver`: what a server proves, and what it signed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from protocol.errors import EvidenceError, SettingsError, describe
from tsqp.cli.config import CONTEXT, PATH, FiniteFloatRange, config_option, read_listen, use
from tsqp.run.process import EXIT_FAILURE

if TYPE_CHECKING:
    from tee_side.attest.appraisal import Appraisal, AppraisalPolicy, AppraisalStep
    from tee_side.attest.statement import Receipt


_DEVELOPMENT = "development"


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
        type=click.Choice((_DEVELOPMENT, "production", "gpu-confidential")),
        help="As the policy must say. Without one, development accepts any simulated TEE.",
    )
    return policy(mode(command))


def read_appraisal(policy: Path | None, mode: str | None) -> AppraisalPolicy:
    """Return the policy that two options name, and warn of one that proves nothing.

    Raises SettingsError.
    """
    from tee_side.attest.appraisal import AppraisalPolicy

    if policy is None:
        SettingsError.unless(
            mode == _DEVELOPMENT,
            "--policy",
            "none",
            "a file, or --mode development, where nothing is proved",
        )
        found = AppraisalPolicy.development()
    else:
        found = AppraisalPolicy.load(policy)
        SettingsError.unless(
            mode in (None, found.mode), "--mode", str(mode), f"{found.mode}, as {policy} says"
        )
    if found.mode == _DEVELOPMENT:
        click.secho(
            "DEVELOPMENT: a simulated TEE is accepted, whose key is published. Nothing is proved.",
            err=True,
            fg="red",
            bold=True,
        )
    return found


# Steps in their order, what was pinned, and what ended it before any step.
_Verdict: TypeAlias = "tuple[tuple[AppraisalStep, ...], dict[str, object], str | None]"


@click.command(context_settings=CONTEXT)
@click.argument("server", metavar="URL|FILE")
@appraisal_options
@use("as_json")
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
    look = _of_server if "://" in server else _of_file
    steps, pinned, refused = look(server, appraisal)
    more = {"refused": refused, "pinned": pinned}
    lines = [f"pinned  {name}: {value}" for name, value in pinned.items()]
    passed = refused is None and all(step.passed for step in steps)
    lines.append(refused or ("verified" if passed else "NOT verified"))
    _end(context, steps, lines, more, passed=passed, as_json=as_json)


def _end(
    context: click.Context,
    steps: Sequence[AppraisalStep],
    lines: Iterable[str],
    more: Mapping[str, object],
    *,
    passed: bool,
    as_json: bool,
) -> None:
    """Print steps with further lines, or one object with more, and exit: 0 where all passed."""
    if as_json:
        listed = [step._asdict() for step in steps]
        click.echo(
            json.dumps({"passed": passed, "steps": listed, **more}, indent=1, default=bytes.hex)
        )
    else:
        for line in (*steps, *lines):
            click.echo(str(line))
    context.exit(0 if passed else EXIT_FAILURE)


def _of_server(url: str, policy: AppraisalPolicy) -> _Verdict:
    from tsqp.client.attested_tls import Address, AttestedContext, NotAttestedError, prove

    try:
        proved = prove(Address.of(url), AttestedContext(policy))
    except NotAttestedError as error:
        steps = error.appraisal.steps if error.appraisal is not None else ()
        return steps, {}, f"NOT verified: {error}"
    return proved.fresh.steps, _pinned(proved.fresh, proved.certificate), None


def _appraised(path: Path, policy: AppraisalPolicy) -> Appraisal:
    """Appraise what a server said of itself. Raises EvidenceError for what cannot be read."""
    from tee_side.attest.appraisal import Expected, appraise
    from tsqp.client.attested_tls import read_answer

    stated = read_answer(path.read_bytes())
    return appraise(stated, policy, Expected(None, None, datetime.now(UTC), "serve"))


def _of_file(name: str, policy: AppraisalPolicy) -> _Verdict:
    try:
        with SettingsError.for_os(name, "https://HOST:PORT, or a file"):
            found = _appraised(Path(name), policy)
    except EvidenceError as error:
        return (), {}, f"NOT verified: {error}"
    return found.steps, _pinned(found, None), None


def _pinned(found: Appraisal, certificate: bytes | None) -> dict[str, object]:
    """Return what a client holds on to from now on."""
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


# As a header, as `curl -D` writes it, or as the comment in a stream.
_NAMED = re.compile(rb"^(?:: )?tsqp-receipt:? ([A-Za-z0-9+/=]+)\r?$", re.IGNORECASE | re.MULTILINE)
_DONE = b"data: [DONE]\n\n"
# Of an appraisal step: its name, whether it passed, what was found and what was expected.
_Row: TypeAlias = tuple[str, bool, str, str]


@click.group(context_settings=CONTEXT)
@config_option
def receipt() -> None:
    """Check the receipts of tee-runner serve: what it signed of its answers."""


@receipt.command("verify", context_settings=CONTEXT)
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
@use("as_json")
@config_option
@click.pass_context
def verify_receipt(
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
    """Check a receipt: the key that signed it, and the bodies that it is of.

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
    SettingsError.unless(
        key_hex is None or re.fullmatch("[0-9A-Fa-f]{64}", key_hex),
        "--key",
        describe(key_hex),
        "64 hexadecimal digits",
    )
    key, claims = bytes.fromhex(key_hex or ""), None
    rows: list[_Row] = []
    found: list[tuple[bytes, Receipt]] = []
    try:
        if attestation is not None:
            appraised = _appraised(attestation, read_appraisal(policy, mode))
            claims, rows = appraised.claims, [*appraised.steps]
            key = b"" if claims is None else claims.receipt_key or b""
        for file in files:
            content = file.read_bytes()
            # The last one of the file.
            named = _NAMED.findall(content)
            with EvidenceError.instead_of(
                ValueError, f"{file}", "other text", "a receipt: base64, or a line tsqp-receipt"
            ):
                signed = base64.b64decode(named[-1] if named else content.strip(), validate=True)
            one = verified(signed, key)
            rows.append((f"{file}", True, f"receipt {one.sequence}, of the key", "one of it"))
            if found:
                before, last = found[-1]
                follows = one.previous == hashlib.sha256(before).digest()
                got = f"{one.sequence} behind {last.sequence}"
                rows.append(("chain", follows, got, f"{last.sequence + 1}, with its digest"))
            if claims is not None:
                rows.append(_same("model", one.model, claims.model))
                rows.append(_same("policy", one.policy, claims.policy))
            found.append((signed, one))
        if request is not None:
            digest = hashlib.sha256(request.read_bytes()).digest()
            rows.append(_same("request", digest, found[0][1].request))
        if response is not None:
            rows.append(_response(response.read_bytes(), *found[0]))
    except EvidenceError as error:
        # What is not genuine says nothing.
        rows.append((error.where, False, error.got, error.expected))
    steps = [AppraisalStep(*row) for row in rows]
    said = [one.model_dump() | {"sha256": hashlib.sha256(it).digest()} for it, one in found]
    passed = all(step.passed for step in steps)
    lines = (line for one in found for line in _told(*one))
    _end(context, steps, lines, {"receipts": said}, passed=passed, as_json=as_json)


def _response(content: bytes, signed: bytes, one: Receipt) -> _Row:
    line = b": tsqp-receipt %s\n\n" % base64.b64encode(signed)
    answer, comment, rest = content.partition(line)
    if comment and rest not in (b"", _DONE):
        return "response", False, f"{len(rest)} bytes behind the receipt", "[DONE], or none"
    return _same("response", hashlib.sha256(answer).digest(), one.response)


def _same(name: str, got: bytes, expected: bytes) -> _Row:
    return name, got == expected, got.hex(), expected.hex()


def _told(signed: bytes, one: Receipt) -> Iterator[str]:
    """Return what a receipt says, in words."""
    facts = {
        "receipt": f"{one.sequence}, SHA-256 {hashlib.sha256(signed).hexdigest()}",
        "time": datetime.fromtimestamp(one.time, UTC).isoformat(),
        **{
            name: getattr(one, name).hex()
            for name in ("previous", "model", "policy", "request", "response")
        },
        "tokens": f"{one.prompt_tokens} read, {one.completion_tokens} made",
        "sampling": json.dumps(one.sampling),
        "seed": "none that was asked for" if one.seed is None else one.seed,
    }
    return (f"says  {name}: {value}" for name, value in facts.items())


@click.command(context_settings=CONTEXT)
@click.argument("url")
@appraisal_options
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    callback=read_listen,
    metavar="HOST:PORT",
    help="Port 0: a free one.",
)
@click.option(
    "--again-minutes",
    type=FiniteFloatRange(0, 1440, min_open=True),
    default=10.0,
    help="After how many the server must prove itself again; else connections are cut.",
)
@config_option
def proxy(
    *,
    url: str,
    policy: Path | None,
    mode: str | None,
    listen: tuple[str, int],
    again_minutes: float,
) -> None:
    """Listen on this machine, and carry each connection to the server at URL over attested TLS.

    URL is https://HOST:PORT. Programs use http://127.0.0.1:8080/v1 as they would use the server.
    What comes in is in the clear: listen on an address of this machine alone.
    """
    from tsqp.client.attested_tls import Address, AttestedContext, Proxy

    context = AttestedContext(read_appraisal(policy, mode), again_minutes * 60)
    say = partial(click.echo, err=True)
    with closing(Proxy(listen, Address.of(url), context, say)) as made:
        say(f"ready: http://{Address(listen[0], made.port)}/v1 leads to {url}, which is verified")
        made.serve_forever()


@click.command(context_settings=CONTEXT)
@click.argument("keyfile", type=PATH)
@appraisal_options
@click.option(
    "--listen",
    default="127.0.0.1:8090",
    callback=read_listen,
    metavar="HOST:PORT",
    help="Port 0: a free one.",
)
@config_option
def keyserver(
    *, keyfile: Path, policy: Path | None, mode: str | None, listen: tuple[str, int]
) -> None:
    """Give the key in KEYFILE (tsqp seal new-key) to programs that pass an appraisal policy.

    They are started with tee-runner serve --attest ... --seal-key-server http://HOST:PORT, and
    print the digests that the policy names. Each decision is a line on stderr. The key goes out
    sealed to the program that proved itself: the network may be anyone's.
    """
    from tsqp.client.attested_tls import Address
    from tsqp.key_files import SEAL_KEY
    from tsqp.keyserver import KeyRelease, KeyServer

    key, appraisal = SEAL_KEY.read(keyfile), read_appraisal(policy, mode)
    say = partial(click.echo, err=True)
    with KeyServer(listen, KeyRelease(key, appraisal, say), say) as server:
        say(f"ready: http://{Address(listen[0], server.port)}")
        server.serve_forever()
