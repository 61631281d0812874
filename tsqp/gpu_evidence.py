"""Asks NVIDIA's driver for evidence of this machine's GPUs (confidential computing).

Source: NVIDIA, "NVML API Reference", nvmlDeviceGetConfComputeGpuAttestationReport and
nvmlDeviceGetConfComputeGpuCertificate.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EvidenceError
from tee_side.attest.evidence import GpuEvidence
from tsqp.extras import require

_EXTRA = "the extra attest: pip install '.[attest]'"


def ask_gpus(nonce: bytes) -> dict[str, GpuEvidence]:
    """Return evidence of every GPU of this machine, by its number, for a nonce of 32 bytes.

    Of all: which of them a program computes on, only that program knows. Takes about a second for
    each. Raises EvidenceError, and SettingsError where nvidia-ml-py is not installed.
    """
    require("pynvml", "evidence of GPUs", _EXTRA)
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
            found = {
                f"{n}": _ask(nvml, nvml.nvmlDeviceGetHandleByIndex(n), nonce) for n in range(count)
            }
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise _refused(str(error)) from None
    except ValueError:
        raise _refused("certificates that cannot be read") from None
    if not found:
        raise _refused("no GPU")
    return found


def _ask(nvml: Any, device: Any, nonce: bytes) -> GpuEvidence:
    certificates = nvml.nvmlDeviceGetConfComputeGpuCertificate(device)
    pem = bytes(certificates.attestationCertChain)[: certificates.attestationCertChainSize]
    said = nvml.nvmlDeviceGetConfComputeGpuAttestationReport(device, nonce)
    return GpuEvidence(
        report=bytes(said.attestationReport)[: said.attestationReportSize],
        certificates=tuple(
            one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(pem)
        ),
    )


def _refused(got: str) -> EvidenceError:
    expected = "GPUs of NVIDIA's in confidential mode, and their driver"
    return EvidenceError("evidence of GPUs", got=got, expected=expected)
