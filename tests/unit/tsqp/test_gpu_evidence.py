"""Evidence of GPUs as NVIDIA's driver gives it, of a driver that is not there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pynvml
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.curve import ClientKeys
from protocol.errors import EvidenceError
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.claims import Claims
from tee_side.attest.nvidia import verify_nvidia
from tee_side.attest.statement import Statement
from tee_side.remote.attested import ServiceAppraisal
from tests.kit.nvidia_chain import BEGINS, NvidiaGpu, make_blackwell, make_gpu, messages
from tests.kit.rows import each_row
from tsqp.gpu_evidence import ask_gpus, read_certificates
from tsqp.key_files import public_key_of
from tsqp.service_attestation import attested_service

NONCE = bytes(range(32))


class FakeDriver:
    """What pynvml finds. `broken`: what fails, by the name of its function, with which code."""

    def __init__(self, *gpus: NvidiaGpu, broken: tuple[str, int] = ("", 0)) -> None:
        self.gpus, self._broken, self.opened = gpus, broken, 0

    def _may_fail(self, name: str) -> None:
        if name == self._broken[0]:
            raise pynvml.NVMLError(self._broken[1])

    def init(self) -> None:
        self._may_fail("nvmlInit")
        self.opened += 1

    def end(self) -> None:
        self.opened -= 1

    def count(self) -> int:
        return len(self.gpus)

    def certificate(self, gpu: NvidiaGpu) -> pynvml.c_nvmlConfComputeGpuCertificate_t:
        self._may_fail("nvmlDeviceGetConfComputeGpuCertificate")
        pem = b"".join(
            x509.load_der_x509_certificate(one).public_bytes(Encoding.PEM)
            for one in gpu.certificates
        )
        found = pynvml.c_nvmlConfComputeGpuCertificate_t()
        found.attestationCertChainSize = len(pem)
        found.attestationCertChain[: len(pem)] = pem
        return found

    def report(
        self, gpu: NvidiaGpu, nonce: bytes
    ) -> pynvml.c_nvmlConfComputeGpuAttestationReport_t:
        self._may_fail("nvmlDeviceGetConfComputeGpuAttestationReport")
        signed = gpu.sign(messages(nonce))
        found = pynvml.c_nvmlConfComputeGpuAttestationReport_t()
        found.attestationReportSize = len(signed)
        found.attestationReport[: len(signed)] = signed
        return found

    def replace_real(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(pynvml, "nvmlInit", self.init)
        patch.setattr(pynvml, "nvmlShutdown", self.end)
        patch.setattr(pynvml, "nvmlDeviceGetCount", self.count)
        patch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", self.gpus.__getitem__)
        patch.setattr(pynvml, "nvmlDeviceGetConfComputeGpuCertificate", self.certificate)
        patch.setattr(pynvml, "nvmlDeviceGetConfComputeGpuAttestationReport", self.report)


def test_each_gpu_is_asked_with_the_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(make_gpu(), make_blackwell())
    driver.replace_real(monkeypatch)
    found = ask_gpus(NONCE)
    assert list(found) == ["0", "1"]
    assert read_certificates() == {name: one.certificates for name, one in found.items()}
    for shown, gpu in zip(found.values(), driver.gpus, strict=True):
        with gpu.pinned():
            verify_nvidia(shown.report, shown.certificates, NONCE, BEGINS)
    assert driver.opened == 0


@each_row(
    ("driver", "got"),
    [
        (FakeDriver(), "no GPU"),
        (FakeDriver(make_gpu(), broken=("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)), "NVML"),
        (
            FakeDriver(
                make_gpu(),
                broken=(
                    "nvmlDeviceGetConfComputeGpuAttestationReport",
                    pynvml.NVML_ERROR_NOT_SUPPORTED,
                ),
            ),
            "Not Supported",
        ),
        (FakeDriver(NvidiaGpu((), make_gpu().key)), "certificates that cannot be read"),
    ],
)
def test_a_machine_without_such_a_gpu_is_told(
    driver: FakeDriver, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.replace_real(monkeypatch)
    with pytest.raises(EvidenceError, match=f"evidence of GPUs: got .*{got}.*, expected GPUs of"):
        ask_gpus(NONCE)
    assert driver.opened == 0


def test_a_service_with_gpus_is_what_a_runner_accepts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = FakeDriver(make_gpu(), make_blackwell())
    driver.replace_real(monkeypatch)
    options = {"attest": "simulated", "attest_gpus": True, "public_key": tmp_path / "service.pub"}
    options |= {"attest_certificate": (), "attest_collateral": None}
    made = attested_service(options, {"device": "cuda"})
    assert made is not None
    keys = ClientKeys(made.secret, public_key_of(tmp_path / "service.pub"))
    said = AppraisalPolicy.development().model_dump(exclude={"nvidia"})
    any_gpu = dict.fromkeys(("measurements", "driver", "vbios"), "any")
    policy = AppraisalPolicy.model_validate(said | {"nvidia": any_gpu}, strict=False)
    appraise = ServiceAppraisal("simulated+nvidia", policy)  # type: ignore[arg-type]
    weights = "ab" * 32
    stated = made.attest(NONCE, weights)
    with ExitStack() as stack:
        for gpu in driver.gpus:
            stack.enter_context(gpu.pinned())
        appraise("tcp://gpu:1", keys, stated, NONCE)
        with pytest.raises(EvidenceError, match="nonce"):
            appraise("tcp://gpu:1", keys, stated, bytes(32))
        without = AppraisalPolicy.model_validate(said, strict=False)
        with pytest.raises(EvidenceError, match="GPUs: got 0, 1, expected"):
            ServiceAppraisal("simulated", without)("tcp://gpu:1", keys, stated, NONCE)
    assert Claims.decode(Statement.decode(stated).claims).model.hex() == weights
