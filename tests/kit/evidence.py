"""Genuine evidence of hardware (tests/vectors), and an attested server of a simulated TEE."""

import json
import random
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tee_side.attest.attesters import find_attester
from tee_side.attest.guests import Product, SigningKey, Tcb
from tee_side.attest.statement import About, Statement
from tee_side.serve.identity import Identity
from tsqp.run.server import tls_files

VECTORS = Path(__file__).parents[1] / "vectors"
PRODUCTS: tuple[Product, ...] = ("milan", "genoa", "turin")


def read_vector(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def authority(product: Product, which: str) -> bytes:
    return read_vector(f"snp/{product}-{which}.der")


class SnpVector(NamedTuple):
    """A report, and what it says. `now`: a time at which its certificates are valid."""

    name: str
    product: Product
    version: int
    tcb: Tcb
    kind: SigningKey = "vcek"
    vmpl: int = 0
    debug: bool = False
    now: datetime = datetime(2026, 7, 1, tzinfo=UTC)

    @property
    def report(self) -> bytes:
        return read_vector(f"snp/{self.name}-report.bin")

    @property
    def leaf(self) -> bytes:
        return read_vector(f"snp/{self.name}-leaf.der")

    @property
    def chain(self) -> tuple[bytes, bytes, bytes]:
        return self.chain_of(self.leaf)

    def chain_of(self, leaf: bytes) -> tuple[bytes, bytes, bytes]:
        intermediate = authority(self.product, "asvk" if self.kind == "vlek" else "ask")
        return leaf, intermediate, authority(self.product, "ark")


_IN_2025 = datetime(2025, 7, 1, tzinfo=UTC)
SNP_VECTORS = (
    SnpVector("milan", "milan", 3, Tcb(4, 0, 24, 219)),
    SnpVector("genoa", "genoa", 3, Tcb(10, 0, 23, 84)),
    SnpVector("turin", "turin", 5, Tcb(1, 1, 4, 81, fmc=1)),
    SnpVector("genoa-v5", "genoa", 5, Tcb(10, 0, 27, 27)),
    SnpVector("milan-v2", "milan", 2, Tcb(3, 0, 8, 115)),
    SnpVector("milan-vlek", "milan", 3, Tcb(4, 0, 24, 217), "vlek", vmpl=1, now=_IN_2025),
    SnpVector("milan-debug", "milan", 2, Tcb(2, 0, 5, 68), debug=True),
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
    return Identity(attester, About.model_validate(usual | other))


def policy_text(measurements: object = (MEASUREMENT.hex(),), **other: object) -> str:
    """Write an appraisal policy that `identity` passes; `other`: claims that differ."""
    claims: dict[str, object] = {name: [digest.hex()] for name, digest in DIGESTS.items()}
    claims |= {"plugins": [PLUGIN.hex()], "services": [SERVICE.hex()], "version": ["1.2.3"]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in (claims | other).items()]
    head = ['mode = "development"', "max_age_s = 600", "[simulated]"]
    return "\n".join([*head, f"measurements = {json.dumps(measurements)}", "[claims]", *lines])


@dataclass
class AttestedServer:
    """What `serving` gives. `received`: bytes that came through TLS, of all connections."""

    port: int
    received: bytearray = field(default_factory=bytearray)
    asked: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
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
        connections: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=carry, args=(plain,)))
                threads[-1].start()

        def carry(plain: socket.socket) -> None:
            connections.append(plain)
            with suppress(OSError), context.wrap_socket(plain, server_side=True) as near:
                connections.append(near)
                near.settimeout(30)
                while request := _request(near):
                    server.received.extend(request)
                    near.sendall(_reply(request, answer or by.state, server.asked))

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield server
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            # What a client has left open would be waited for.
            for one in connections:
                with suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)
            for thread in threads:
                thread.join(30)


def body_of(stated: Statement) -> bytes:
    """Return the body of an answer of `/v1/attestation`."""
    fields = {name: b64encode(value).decode() for name, value in stated.model_dump().items()}
    return json.dumps(fields).encode()


def _request(near: ssl.SSLSocket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found and (piece := near.recv(4096)):
        found += piece
    return found


def _reply(request: bytes, answer: Answer, asked: list[bytes]) -> bytes:
    path, body = request.split(b" ")[1], b'{"served": true}'
    if path.startswith(b"/v1/attestation?nonce="):
        asked.append(bytes.fromhex(path.partition(b"=")[2].decode()))
        stated = answer(asked[-1])
        if isinstance(stated, bytes):
            return stated
        body = body_of(stated)
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
