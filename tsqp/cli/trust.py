"""What the options of a run name: seal, manifest, policy, keys and pad bank."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from protocol.errors import SettingsError, describe
from tsqp.cli.settings import settings_files

if TYPE_CHECKING:
    from protocol.curve import ClientKeys
    from protocol.http_access import HttpAccess
    from protocol.model.manifest import Manifest
    from tee_side.plugins import FileCheck
    from tee_side.policy.placement import Policy
    from tee_side.protect.pads.bank_files import BankPlace
    from tee_side.remote.attested import ServiceAppraisal

# Settings of a sealed model.
SEAL = ("seal_key", "seal_key_fd", "seal_key_command", "seal_digest")
# Of commands that prove what they run. A settings file may say it: the manifest is read before.
KEY_SERVER = "seal_key_server"
_APPRAISAL = "--service-appraisal"


def open_seal(
    directory: Path, settings: Mapping[str, Any], release: Callable[[str], bytes] | None = None
) -> None:
    """Have MODEL read through its seal from now on, where a key is given.

    Says on stderr what a seal is worth whose digest is not. `release`: asks the key server, where
    one is named. Raises SettingsError, KeyFileError, SealError, and as `release`.
    """
    from protocol.model.files import use_seal

    _refuse_from_settings_file(*SEAL)
    digest = _checked_digest(settings, "seal_digest")
    use_seal(directory, None)
    if release is None and all(settings[name] is None for name in SEAL):
        return
    from protocol.model.sealed import SealedModel
    from tsqp.seal_keys import provided_key

    seal = SealedModel(directory, provided_key(settings, release), digest)
    use_seal(directory, seal)
    if digest is None:
        click.echo(
            f"{directory} is taken without --seal-digest {seal.digest}: an older seal, or another"
            " model's for the same key, would be taken as well",
            err=True,
        )


def load_manifest(directory: Path, settings: Mapping[str, Any]) -> Manifest | None:
    """Read what `--manifest` and `--manifest-digest` say; None without them.

    Checks the settings files of this command against it, and says on stderr what a manifest inside
    MODEL is worth. Raises SettingsError, ManifestError.
    """
    _refuse_from_settings_file("manifest", "manifest_digest")
    path, digest = settings["manifest"], _checked_digest(settings, "manifest_digest")
    if path is None:
        if digest is not None:
            raise SettingsError(
                "--manifest-digest", got="no --manifest", expected="the file that it is of"
            )
        return None
    from protocol.model.manifest import Manifest

    found = Manifest.load(path, digest)
    for settings_file, content in settings_files():
        found.check_also("--config", settings_file, content)
    if digest is None and path.resolve().parent == directory.resolve():
        click.echo(
            f"{path} lies in the model's directory, and is taken without --manifest-digest: it"
            " shows damage, but nothing that was changed on purpose",
            err=True,
        )
    return found


def _checked_digest(settings: Mapping[str, Any], name: str) -> str | None:
    digest: str | None = settings[name]
    if digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", digest):
        where = f"--{name.replace('_', '-')}"
        raise SettingsError(where, got=describe(digest), expected="64 hexadecimal digits")
    return digest


def _refuse_from_settings_file(*names: str) -> None:
    """Refuse a settings file that says which model: a manifest, maybe sealed, pins that file."""
    context = click.get_current_context(silent=True)
    for name in names:
        if context and context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
            raise SettingsError(
                f"--{name.replace('_', '-')}",
                got="a value in a settings file, which a manifest has to pin",
                expected="it on the command line or in the environment",
            )


def check_of(manifest: Manifest | None, option: str) -> FileCheck:
    """Return what checks a file that `option` led to; without a manifest any file is accepted."""
    from tee_side.plugins import accept_any

    return accept_any if manifest is None else partial(manifest.check_also, option)


def load_pinned_policy(name: str, manifest: Manifest | None) -> Policy:
    """Load a policy and its masks; with a manifest only from files that it pins.

    Raises PolicyError, PluginError, ManifestError.
    """
    from tee_side.policy.placement import load_policy

    if manifest is None:
        return load_policy(name)
    from tee_side.plugins import checking_files

    with checking_files(check_of(manifest, "--policy")):
        return load_policy(name)


def warn_without_keys(endpoints: Sequence[str]) -> None:
    """Say on stderr, in one line, which of these services are reached over a network in the open.

    `endpoints`: as `ServiceSpec.parse` reads them; all are reached without keys.
    """
    from protocol.endpoint import is_exposed
    from tee_side.remote.services.plan import ServiceSpec

    known = [ServiceSpec.parse(text).endpoint for text in endpoints]
    exposed = [endpoint for endpoint in known if is_exposed(endpoint)]
    if exposed:
        click.echo(
            f"{', '.join(exposed)}: the connection is not encrypted, and anyone may answer"
            " (--identity and --service-key; tsqp keys new makes keys)",
            err=True,
        )


def read_client_keys(settings: dict[str, Any], manifest: Manifest | None) -> tuple[ClientKeys, ...]:
    """Read what --identity and --service-key name; with a manifest only key files that it pins.

    Raises KeyFileError, ManifestError and SettingsError.
    """
    identity: Path | None = settings["identity"]
    services: tuple[str, ...] = settings["service_key"]
    if identity is None and not services:
        return ()
    from protocol.curve import ClientKeys, public_key, read_secret_key

    if identity is None or not services:
        given, missing = "--identity", "--service-key"
        if identity is None:
            given, missing = missing, given
        raise SettingsError("keys", got=f"{given} alone", expected=f"{missing} as well, or neither")
    secret, check = read_secret_key(identity), check_of(manifest, "--service-key")
    return tuple(ClientKeys(secret, public_key(service, check)) for service in services)


def load_run_policy(settings: Mapping[str, Any], manifest: Manifest | None) -> Policy:
    """Load the policy of a run.

    Where services are appraised in development, a policy with attested services asks for simulated
    evidence in place of its own, and says so wherever it says what it gives away. Raises as
    `load_pinned_policy`, and SettingsError.
    """
    policy = load_pinned_policy(settings["policy"], manifest)
    path = settings.get("service_appraisal")
    if path is None or policy.service.attested == "none":
        return policy
    from tee_side.attest.appraisal_policy import AppraisalPolicy
    from tee_side.policy.placement import ServiceTerms

    if AppraisalPolicy.load(path, check_of(manifest, _APPRAISAL)).mode != "development":
        return policy
    return policy.model_copy(update={"service": ServiceTerms(attested="simulated")})


def read_http_access(
    settings: Mapping[str, Any], manifest: Manifest | None
) -> dict[str, HttpAccess]:
    """Read what --http-token and --http-ca name, by URL; with a manifest a pinned CA.

    Tokens go with URLs as keys with other endpoints, but one for all is for one host and port
    alone. Raises KeyFileError, ManifestError, and SettingsError, also where no service has a URL.
    """
    tokens, ca = settings["http_token"], settings["http_ca"]
    if not tokens and ca is None:
        return {}
    urls = [url[0] for text in settings["gpu"] if (url := re.match("https?://[^=,]*", text))]
    if not urls:
        option, expected = "--http-token" if tokens else "--http-ca", "a service with a URL"
        raise SettingsError(option, got=", ".join(settings["gpu"]), expected=expected)
    from protocol.curve import read_text, require_only_we_write
    from protocol.endpoint import one_for_each
    from protocol.http_access import HttpAccess, read_token

    # Scheme, host and port.
    hosts = ["".join(url.lower().split("/")[:3]) for url in urls]
    paired = zip(urls, one_for_each(tokens, hosts, "--http-token"), strict=True)
    if len(tokens) == 1 and len(set(hosts)) > 1:
        expected = "one for each URL in order: a service that has ours can use it at the others"
        raise SettingsError("--http-token", got="one for several hosts", expected=expected)
    pem = None
    if ca is not None:
        pem, status = read_text(ca, 2**22, check_of(manifest, "--http-ca"))
        require_only_we_write(ca, status)
    return {url: HttpAccess(token and read_token(token), pem) for url, token in paired}


def service_appraisal(
    settings: Mapping[str, Any], policy: Policy, manifest: Manifest | None
) -> ServiceAppraisal | None:
    """Return what appraises the services of a policy, None for one that asks for no evidence.

    With a manifest, only by a file that it pins. Raises SettingsError, ManifestError.
    """
    attested, path, option = policy.service.attested, settings["service_appraisal"], _APPRAISAL
    if attested == "none":
        if path is not None:
            expected = f"nothing: policy {policy.name} has no attested services"
            raise SettingsError(option, got=str(path), expected=expected)
        return None
    from tee_side.attest.appraisal_policy import AppraisalPolicy
    from tee_side.remote.attested import ServiceAppraisal

    if path is not None:
        appraisal = AppraisalPolicy.load(path, check_of(manifest, option))
        if appraisal.mode == "gpu-confidential":
            expected = "production, with a table [nvidia]: a service has no services of its own"
            raise SettingsError(f"{path}: mode", got=appraisal.mode, expected=expected)
    elif attested == "simulated":
        appraisal = AppraisalPolicy.development()
    else:
        expected = f"a file that says what services must be: policy {policy.name} asks for evidence"
        raise SettingsError(option, got="none", expected=expected)
    return ServiceAppraisal(attested, appraisal)


def bank_place(settings: Mapping[str, Any]) -> BankPlace | None:
    """Return where the bank is, None where none is named. Raises SettingsError."""
    rest = ("bank_key", "bank_index", "bank_witness", "bank_key_beside_bank")
    if settings["bank"] is None:
        for name in filter(settings.get, rest):
            option, got = f"--{name.replace('_', '-')}", str(settings[name])
            raise SettingsError(option, got=got, expected="nothing without --bank")
        return None
    from tee_side.protect.pads.bank_files import BankPlace

    *files, beside = (settings[name] for name in rest)
    return BankPlace.at(settings["bank"], *files, beside_bank=beside)
