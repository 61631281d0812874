"""Genuine evidence of hardware, which lies beside the repository where it is there at all."""

from __future__ import annotations

import base64
import json
import random
import re
import socket
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from tee_side.attest.attesters import find_attester
from tee_side.attest.snp_report import Product, SigningKey, Tcb
from tee_side.attest.statement import Statement
from tee_side.serve.identity import About, Identity
from tsqp.attestation import tls_files

VECTORS = Path(__file__).parents[3] / "shared" / "vectors"

needs_vectors = pytest.mark.skipif(
    not VECTORS.is_dir(), reason="the vectors of attestation are not beside the repository"
)

_PEM = re.compile(r"-----BEGIN (?:CERTIFICATE|X509 CRL)-----(.*?)-----END", re.DOTALL)


def read_pem(path: str) -> list[bytes]:
    """Return what a file of PEM below VECTORS holds, in DER."""
    text = (VECTORS / path).read_text()
    return [base64.b64decode(content) for content in _PEM.findall(text)]


def read_bytes(path: str) -> bytes:
    """Return what a file below VECTORS holds."""
    return (VECTORS / path).read_bytes()


MICROSOFT = "microsoft-tee-attestation-verification/tests/test_data"
PINNED = "microsoft-tee-attestation-verification/src/pinned_arks"
RUST = "confidential-dot-ai-attestation-rs/crates/attestation"
RUST_SNP = f"{RUST}/test_data/snp"
GO = "google-go-sev-guest/verify"
VIRTEE = "virtee-sev/tests/certs_data"
DSTACK = "dstack/dstack/dstack-attest/tests"
OPENPCC = "openpcc/attestation/attest/testdata/sev_certificates.txt"

# Inside the time of every leaf but the VLEK's, which is of 2025.
NOW = datetime(2026, 7, 1, tzinfo=UTC)
NOW_VLEK = datetime(2025, 7, 1, tzinfo=UTC)


def authority(product: Product, which: str) -> bytes:
    """Return AMD's ARK, ASK or ASVK of a product."""
    return read_bytes(f"{RUST}/certs/amd/{product}/{which}.der")


def certificates(leaf: bytes, product: Product, kind: SigningKey = "vcek") -> tuple[bytes, ...]:
    """Return a chain of a leaf."""
    intermediate = authority(product, "asvk" if kind == "vlek" else "ask")
    return leaf, intermediate, authority(product, "ark")


@dataclass(frozen=True)
class SnpVector:
    """A report, its leaf, and what they say."""

    name: str
    report_path: str
    leaf_path: str
    version: int
    product: Product
    tcb: Tcb
    kind: SigningKey = "vcek"
    vmpl: int = 0
    debug: bool = False

    @property
    def report(self) -> bytes:
        """The 1184 bytes."""
        data = read_bytes(self.report_path)
        if self.report_path.endswith(".json"):
            return b64decode(json.loads(data)["evidence"]["attestation_report"])
        if self.report_path.endswith(".hex"):
            return bytes.fromhex(data.decode())
        # One source has 4 bytes before the report, and more behind it.
        return data[4:1188] if self.name == "dstack" else data

    @property
    def leaf(self) -> bytes:
        """VCEK or VLEK, in DER."""
        if self.leaf_path.endswith(".json"):
            return b64decode(
                json.loads(read_bytes(self.leaf_path))["evidence"]["cert_chain"]["vcek"]
            )
        if self.leaf_path.endswith(".pem"):
            (leaf,) = read_pem(self.leaf_path)
            return leaf
        return read_bytes(self.leaf_path)

    @property
    def chain(self) -> tuple[bytes, ...]:
        """Leaf, intermediate and root."""
        return certificates(self.leaf, self.product, self.kind)

    @property
    def now(self) -> datetime:
        """A time at which the certificates are valid."""
        return NOW_VLEK if self.kind == "vlek" else NOW


def _of_microsoft(product: Product, version: int, tcb: Tcb) -> SnpVector:
    files = f"{MICROSOFT}/{product}"
    report, leaf = f"{files}_attestation_report.bin", f"{files}_vcek.pem"
    return SnpVector(f"microsoft {product}", report, leaf, version, product, tcb)


SNP_VECTORS = (
    _of_microsoft("milan", 3, Tcb(4, 0, 24, 219)),
    _of_microsoft("genoa", 3, Tcb(10, 0, 23, 84)),
    _of_microsoft("turin", 5, Tcb(1, 1, 4, 81, fmc=1)),
    SnpVector(
        "live genoa",
        f"{RUST_SNP}/live-report-v5-genoa.bin",
        f"{RUST_SNP}/live-vcek-genoa.der",
        5,
        "genoa",
        Tcb(10, 0, 27, 27),
    ),
    SnpVector(
        "live genoa evidence",
        f"{RUST_SNP}/live-evidence-genoa.json",
        f"{RUST_SNP}/live-evidence-genoa.json",
        5,
        "genoa",
        Tcb(10, 0, 27, 27),
    ),
    SnpVector(
        "attestation-rs milan",
        f"{RUST_SNP}/test-report.bin",
        f"{RUST_SNP}/test-vcek.der",
        2,
        "milan",
        Tcb(3, 0, 8, 115),
    ),
    SnpVector(
        "attestation-rs vlek",
        f"{RUST_SNP}/test-vlek-report.bin",
        f"{RUST_SNP}/test-vlek.der",
        3,
        "milan",
        Tcb(4, 0, 24, 217),
        kind="vlek",
        vmpl=1,
    ),
    SnpVector(
        "go-sev-guest debug",
        f"{GO}/testdata/attestation.bin",
        f"{GO}/testdata/vcek.testcer",
        2,
        "milan",
        Tcb(2, 0, 5, 68),
        debug=True,
    ),
    SnpVector(
        "virtee milan",
        f"{VIRTEE}/report_milan.hex",
        f"{VIRTEE}/vcek_milan.der",
        2,
        "milan",
        Tcb(3, 0, 8, 115),
    ),
    SnpVector(
        "dstack",
        f"{DSTACK}/sev_snp_attestation.bin",
        f"{DSTACK}/sev_snp_vcek.pem",
        3,
        "milan",
        Tcb(4, 0, 23, 213),
    ),
)


MEASUREMENT = bytes(range(48))
DIGESTS = {name: sha256(name.encode()).digest() for name in ("model", "policy", "settings")}
SERVICE = sha256(b"service").digest()
PLUGIN = sha256(b"plug-in").digest()


def identity(measurement: bytes = MEASUREMENT, **other: object) -> Identity:
    """Make an identity of a simulated TEE; `other`: what it says otherwise than most."""
    usual: dict[str, object] = {
        **DIGESTS,
        "curve_keys": {"runner": sha256(b"runner").digest(), "service 1": SERVICE},
        "plugins": {"Mine": PLUGIN},
        "version": "1.2.3",
        "attested_services": "none",
    }
    attester = find_attester("simulated", measurement=measurement)
    return Identity(attester, About(**(usual | other)))  # type: ignore[arg-type]


def policy_text(**other: object) -> str:
    """Write an appraisal policy that `identity` passes; `other`: claims that differ."""
    claims: dict[str, object] = {name: [digest.hex()] for name, digest in DIGESTS.items()}
    claims |= {"plugins": [PLUGIN.hex()], "services": [SERVICE.hex()], "version": ["1.2.3"]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in (claims | other).items()]
    head = ['mode = "development"', "max_age_s = 600", "[simulated]"]
    return "\n".join([*head, f'measurements = ["{MEASUREMENT.hex()}"]', "[claims]", *lines])


@dataclass
class AttestedServer:
    """What `serving` gives. `received`: bytes that came through TLS, of all connections."""

    port: int
    received: bytearray = field(default_factory=bytearray)
    asked: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"https://127.0.0.1:{self.port}"


Answer = Callable[[bytes], Statement | bytes]


@contextmanager
def serving(by: Identity, answer: Answer | None = None) -> Iterator[AttestedServer]:
    """Serve with an identity. `answer`: what is answered to a nonce, in its place; or raw bytes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tls_files(by) as names, socket.create_server(("127.0.0.1", 0)) as listening:
        context.load_cert_chain(*names)
        server = AttestedServer(listening.getsockname()[1])
        threads: list[threading.Thread] = []

        def accept() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=carry, args=(plain,)))
                threads[-1].start()

        def carry(plain: socket.socket) -> None:
            with suppress(OSError), context.wrap_socket(plain, server_side=True) as near:
                near.settimeout(30)
                while (request := _request(near)) and server.received.extend(request) is None:
                    near.sendall(_reply(request, answer or by.state, server.asked))

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield server
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(30)


def _request(near: ssl.SSLSocket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        piece = near.recv(4096)
        if not piece:
            break
        found += piece
    return found


def _reply(request: bytes, answer: Answer, asked: list[bytes]) -> bytes:
    path = request.split(b" ")[1]
    if not path.startswith(b"/v1/attestation?nonce="):
        body = b'{"served": true}'
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    asked.append(bytes.fromhex(path.partition(b"=")[2].decode()))
    stated = answer(asked[-1])
    if isinstance(stated, bytes):
        return stated
    fields = {name: b64encode(value).decode() for name, value in stated.model_dump().items()}
    body = json.dumps(fields).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def changed(data: bytes, seed: int) -> bytes:
    """Return other bytes than `data`: mostly a bit is flipped, else some are cut off or doubled."""
    draw = random.Random(seed)
    at, size = draw.randrange(len(data)), draw.randrange(1, 60)
    kind = draw.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[: at + size] + data[at:]
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
