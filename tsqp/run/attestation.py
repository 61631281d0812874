"""What our programs prove of themselves (`--attest`): their identity, and evidence of GPUs.

Source of what NVIDIA's driver is asked: "NVML API Reference",
nvmlDeviceGetConfComputeGpuAttestationReport and nvmlDeviceGetConfComputeGpuCertificate.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from zmq.utils import z85

from protocol.endpoint import one_for_each
from protocol.errors import EvidenceError, SettingsError
from tee_side.attest.attesters import Attester, find_attester
from tee_side.attest.statement import NONE, About, GpuEvidence, Statement
from tee_side.plugins import sources
from tee_side.serve.identity import Identity, state
from tee_side.serve.sealed import HpkeKey
from tsqp.extras import require
from tsqp.keyserver import key_of_server
from tsqp.run.load import policy_digest, read_client_keys
from tsqp.run.process import tell
from tsqp.run.server_settings import EvidenceSettings, ServeSettings, claims
from tsqp.run.settings import Settings

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest
    from tee_side.policy.placement import Policy

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_OURS = ("protocol.", "tee_side.", "tsqp.")
# Emulation measures nothing: QEMU repeats it to its guest.
_EMULATED = Path("/sys/firmware/qemu_fw_cfg/by_name/opt/tsqp/measurement/raw")
# Of a service that proves none.
_NO_KEY = z85.encode(bytes(32))


def identify(settings: ServeSettings, manifest: Manifest | None, policy: Policy) -> Identity:
    """Make the keys of a server, and evidence of what it runs.

    Raises EvidenceError and SettingsError.
    """
    return Identity(attester_of(settings), _about(settings, manifest, policy))


def release_key(settings: ServeSettings, manifest: Manifest | None, policy: Policy) -> bytes:
    """Have the server of `--seal-key-server` give the key of MODEL's seal to what runs here.

    Says on stderr what that server is told. It is what clients are told later, but for keys of
    connections and receipts, which there are not yet. Raises as `key_of_server`.
    """
    SettingsError.unless(
        settings.attest,
        "--seal-key-server",
        "no --attest",
        "--attest: a key server gives the key to evidence",
    )
    about = _about(settings, manifest, policy)
    attester = attester_of(settings)

    def stated(nonce: bytes, key: HpkeKey) -> Statement:
        own = {"purpose": "key", "nonce": nonce, "hpke_suite": key.suite, "hpke_key": key.public}
        return state(attester, about, time.time(), **own, tls_key=NONE, receipt_key=None)

    tell(f"a key server is asked, with evidence of {attester.kind}: {about}")
    return key_of_server(settings.seal_key_server or "", stated)


def refuse_inside(directory: Path, settings: ServeSettings) -> None:
    """Refuse files of MODEL that a key server is told of, before it gives the key to MODEL.

    Raises SettingsError.
    """
    for name, given in (("manifest", settings.manifest), ("policy", settings.policy)):
        path = Path(given or "")
        SettingsError.unless(
            not (path.is_file() and path.resolve().is_relative_to(directory.resolve())),
            f"--{name}",
            f"a file in {directory}, with --seal-key-server",
            "one outside: it is read before that server gives the key",
        )


def attester_of(settings: EvidenceSettings) -> Attester:
    """Return what gives evidence of the kind that `--attest` names.

    Raises EvidenceError, and SettingsError for files that cannot be read.
    """
    if settings.attest is None:
        raise SettingsError("--attest", got="none", expected="a kind of evidence")
    return find_attester(
        settings.attest,
        certificates=[one for path in settings.attest_certificate for one in _der(path)],
        collateral=_content(settings.attest_collateral),
        # What tsqp image run --no-tee computed of this guest; elsewhere, the version's.
        measurement=(
            bytes.fromhex(_EMULATED.read_text("ascii"))
            if _EMULATED.exists()
            else hashlib.sha384(version("tsqp").encode()).digest()
        ),
    )


def _about(settings: ServeSettings, manifest: Manifest | None, policy: Policy) -> About:
    if manifest is None:
        raise SettingsError(
            "--attest",
            got="no --manifest",
            expected="--manifest, which pins what is claimed (tsqp manifest MODEL)",
        )
    # The runner's key, and that of each service; zeros for one that proves none.
    keys = read_client_keys(settings, manifest)
    endpoints = (*settings.gpu, *settings.dealer) if policy.services else ()
    found = one_for_each(keys, endpoints) if endpoints else []
    said = {
        f"service {n}": _NO_KEY if one is None else one.service for n, one in enumerate(found, 1)
    }
    said |= {"runner": keys[0].public} if keys else {}
    # A digest of the source of each mask that is not ours, by its name.
    plugins = {}
    for kind in map(type, policy.masks):
        if kind.__module__.startswith(_OURS):
            continue
        source, name = sources.get(kind.__module__), ascii(kind.__name__)
        if source is None:
            raise SettingsError(
                "--attest: policy",
                got=f"the mask {name}",
                expected="masks of files: what a package has on the disk may not be what was"
                " imported",
            )
        digest = hashlib.sha256(source).digest()
        plugins[f"{name} {digest.hex()[:8]}"] = digest
    path = settings.service_appraisal
    # What services must be is among the operator's own files.
    if path is not None:
        plugins["service appraisal"] = hashlib.sha256(_content(path)).digest()
    return About(
        model=hashlib.sha256(manifest.to_bytes()).digest(),
        policy=policy_digest(policy),
        settings=settings_digest(settings),
        curve_keys={owner: z85.decode(key) for owner, key in said.items()},
        plugins=plugins,
        version=version("tsqp"),
        attested_services=policy.service.attested,
    )


def settings_digest(settings: Settings, **resolved: object) -> bytes:
    """Return SHA-256 over the settings that are claimed; no file is read.

    A key server is told the digest before MODEL can be read.
    `resolved`: what settings came to mean, in their place.
    """
    said = dict(claims(settings)) | resolved
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def _der(path: Path) -> list[bytes]:
    """Read the certificates of a file, in DER or PEM."""
    content = _content(path)
    return [b64decode(one) for one in _PEM.findall(content)] or [content]


def _content(path: Path | None) -> bytes:
    if path is None:
        return b""
    with SettingsError.for_os(str(path), "a file to read"):
        return path.read_bytes()


def read_certificates() -> dict[str, tuple[bytes, ...]]:
    """Return the certificates of every GPU of this machine, in DER, leaf first, by its number.

    Of all: which of them a program computes on, only that program knows. Raises EvidenceError, and
    SettingsError where nvidia-ml-py is not installed.
    """
    with _devices() as (nvml, devices):
        return {name: _gpu_certificates(nvml, device) for name, device in devices.items()}


def ask_gpus(nonce: bytes) -> dict[str, GpuEvidence]:
    """Return evidence of every GPU, by its number, for a nonce of 32 bytes.

    Takes about a second for each. Raises as `read_certificates`.
    """
    found = {}
    with _devices() as (nvml, devices):
        for name, device in devices.items():
            said = nvml.nvmlDeviceGetConfComputeGpuAttestationReport(device, nonce)
            report = bytes(said.attestationReport)[: said.attestationReportSize]
            found[name] = GpuEvidence(report=report, certificates=_gpu_certificates(nvml, device))
    return found


@contextmanager
def _devices() -> Iterator[tuple[Any, dict[str, Any]]]:
    require("pynvml", "evidence of GPUs", "the extra attest: pip install '.[attest]'")
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
            if not count:
                raise _no_gpus("no GPU")
            yield nvml, {f"{n}": nvml.nvmlDeviceGetHandleByIndex(n) for n in range(count)}
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise _no_gpus(str(error)) from None
    except ValueError:
        raise _no_gpus("certificates that cannot be read") from None


def _gpu_certificates(nvml: Any, device: Any) -> tuple[bytes, ...]:
    found = nvml.nvmlDeviceGetConfComputeGpuCertificate(device)
    pem = bytes(found.attestationCertChain)[: found.attestationCertChainSize]
    return tuple(one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(pem))


def _no_gpus(got: str) -> EvidenceError:
    return EvidenceError(
        "evidence of GPUs",
        got=got,
        expected="GPUs of NVIDIA's in confidential mode, and their driver",
    )
