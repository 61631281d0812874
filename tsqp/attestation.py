"""What a server says of itself (`--attest`): from its options to an identity."""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import InspectLoader
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from zmq.utils import z85

from protocol.errors import SettingsError
from protocol.model.files import read_bytes
from tee_side.attest.attesters import find_attester
from tee_side.attest.identity import About, Identity
from tee_side.protect.calibration import calibration_path
from tsqp.cli.program import model_directory
from tsqp.cli.running import Loaded, policy_digest
from tsqp.cli.trust import read_client_keys
from tsqp.manifest import MAX_FILE_BYTES

if TYPE_CHECKING:
    from tee_side.policy.placement import Policy

# What shapes answers and what leaves, beside model and policy.
_CLAIMED = (
    *("dtype", "kernels", "when_out", "micro_batches", "shares_in_the_clear", "step_tokens"),
    *("max_model_len", "max_sequences", "speculative", "speculative_tokens", "prefix_reuse"),
    *("fixed_tempo_ms", "round_usage", "pooling", "page", "api_keys", "audit_log"),
)
# Of those, files of the operator's: whether there is one.
_GIVEN = ("api_keys", "audit_log")
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_OURS = ("protocol.", "tee_side.", "tsqp.")


def identify(settings: Mapping[str, Any], loaded: Loaded) -> Identity:
    """Make the keys of a server, and evidence of what it runs.

    Raises EvidenceError and SettingsError.
    """
    if loaded.manifest is None:
        expected = "--manifest, which pins what is claimed (tsqp manifest MODEL)"
        raise SettingsError("--attest", got="no --manifest", expected=expected)
    attester = find_attester(
        settings["attest"],
        certificates=[one for path in settings["attest_certificate"] for one in _der(path)],
        collateral=_content(settings["attest_collateral"]),
        measurement=hashlib.sha384(version("tsqp").encode()).digest(),
    )
    about = About(
        model=hashlib.sha256(loaded.manifest.to_bytes()).digest(),
        policy=bytes.fromhex(policy_digest(loaded.policy)),
        settings=_settings_digest(settings, loaded.policy),
        curve_keys=_curve_keys(settings, loaded),
        plugins=_plugins(loaded.policy),
        version=version("tsqp"),
    )
    return Identity(attester, about)


@contextmanager
def tls_files(identity: Identity) -> Iterator[tuple[str, str]]:
    """Give names for the certificate and key of an identity, which never are on a disk.

    What takes names alone, as OpenSSL does, can open them in the block.
    """
    certificate = ssl.DER_cert_to_PEM_cert(identity.certificate).encode()
    key = identity.tls_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptors = [_in_memory(content) for content in (certificate, key)]
    try:
        names = [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]
        yield names[0], names[1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _in_memory(content: bytes) -> int:
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def _settings_digest(settings: Mapping[str, Any], policy: Policy) -> bytes:
    said = {name: settings[name] for name in _CLAIMED}
    said |= {name: said[name] is not None for name in _GIVEN}
    if policy.arithmetic == "int8":
        directory = model_directory(settings["model"])
        said["calibration"] = calibration_digest(directory, settings["calibration"])
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def calibration_digest(directory: Path, given: Path | None) -> str:
    """Return SHA-256 of the calibration of a model, in hex. Raises CalibrationError."""
    content = read_bytes(calibration_path(directory, given), MAX_FILE_BYTES, inside=False)
    return hashlib.sha256(content).hexdigest()


def _curve_keys(settings: Mapping[str, Any], loaded: Loaded) -> dict[str, bytes]:
    keys = read_client_keys(dict(settings), loaded.manifest)
    said = [("runner", one.public) for one in keys[:1]]
    said += [(f"service {number}", one.service) for number, one in enumerate(keys, 1)]
    return {owner: z85.decode(key) for owner, key in said}


def _plugins(policy: Policy) -> dict[str, bytes]:
    """Return a digest of the source of each mask that is not ours, by its name."""
    found = {}
    for kind in map(type, policy.masks):
        if kind.__module__.startswith(_OURS):
            continue
        loader = getattr(sys.modules[kind.__module__], "__loader__", None)
        source = loader.get_source(kind.__module__) if isinstance(loader, InspectLoader) else None
        if source is None:
            got, expected = f"{kind.__name__}, which has none", "masks with a source, to claim it"
            raise SettingsError("--attest: source", got=got, expected=expected)
        found[kind.__name__] = hashlib.sha256(source.encode()).digest()
    return found


def _der(path: Path) -> list[bytes]:
    """Read the certificates of a file, in DER or PEM."""
    content = _content(path)
    return [b64decode(one) for one in _PEM.findall(content)] or [content]


def _content(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise SettingsError(str(path), got=got, expected="a file to read") from None
