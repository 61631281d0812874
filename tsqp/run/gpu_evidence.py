"""Asks NVIDIA's driver for evidence of this machine's GPUs (confidential computing).

Source: NVIDIA, "NVML API Reference", nvmlDeviceGetConfComputeGpuAttestationReport and
nvmlDeviceGetConfComputeGpuCertificate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EvidenceError
from tee_side.attest.statement import GpuEvidence
from tsqp.extras import require

_EXTRA = "the extra attest: pip install '.[attest]'"


def read_certificates() -> dict[str, tuple[bytes, ...]]:
    """Return the certificates of every GPU of this machine, in DER, leaf first, by its number.

    Of all: which of them a program computes on, only that program knows. Raises EvidenceError, and
    SettingsError where nvidia-ml-py is not installed.
    """
    with _devices() as (nvml, devices):
        return {name: _certificates(nvml, device) for name, device in devices.items()}


def ask_gpus(nonce: bytes) -> dict[str, GpuEvidence]:
    """Return evidence of every GPU, by its number, for a nonce of 32 bytes.

    Takes about a second for each. Raises as `read_certificates`.
    """
    found = {}
    with _devices() as (nvml, devices):
        for name, device in devices.items():
            said = nvml.nvmlDeviceGetConfComputeGpuAttestationReport(device, nonce)
            report = bytes(said.attestationReport)[: said.attestationReportSize]
            found[name] = GpuEvidence(report=report, certificates=_certificates(nvml, device))
    return found


@contextmanager
def _devices() -> Iterator[tuple[Any, dict[str, Any]]]:
    require("pynvml", "evidence of GPUs", _EXTRA)
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
            if not count:
                raise _refused("no GPU")
            yield nvml, {f"{n}": nvml.nvmlDeviceGetHandleByIndex(n) for n in range(count)}
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise _refused(str(error)) from None
    except ValueError:
        raise _refused("certificates that cannot be read") from None


def _certificates(nvml: Any, device: Any) -> tuple[bytes, ...]:
    found = nvml.nvmlDeviceGetConfComputeGpuCertificate(device)
    pem = bytes(found.attestationCertChain)[: found.attestationCertChainSize]
    return tuple(one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(pem))


def _refused(got: str) -> EvidenceError:
    expected = "GPUs of NVIDIA's in confidential mode, and their driver"
    return EvidenceError("evidence of GPUs", got=got, expected=expected)
