"""A proxy that ends TLS, as load balancers do: it reads whatever it carries."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

_WAIT_S = 30


@dataclass
class Proxy:
    """What it has read, and what it does to it.

    `cut`: bytes of an answer's body that it lets through, before an end like every other.
    """

    server: tuple[str, int]
    trusting: ssl.SSLContext
    url: str = ""
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[list[bytes]] = field(default_factory=list)
    path_of: Callable[[str], str] = str
    change: Callable[[bytes], bytes] = bytes
    cut: int | None = None

    @property
    def seen(self) -> bytes:
        """Everything that it has read."""
        parts = [part for pieces in self.answers for part in pieces]
        for method, path, headers, body in self.requests:
            parts += [f"{method} {path} {headers}".encode(), body]
        return b"\n".join(parts)

    def send(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """Send a request of its own to the server, and return what it answers."""
        with closing(HTTPConnection(*self.server, timeout=_WAIT_S)) as upstream:
            upstream.request(method, path, body, headers)
            return upstream.getresponse().read()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            proxy.requests.append((self.command, self.path, dict(headers), body))
            pieces: list[bytes] = [b""]
            proxy.answers.append(pieces)
            with closing(HTTPConnection(*proxy.server, timeout=_WAIT_S)) as upstream:
                body = proxy.change(body)
                headers |= {"x-forwarded-for": "192.0.2.1", "content-length": str(len(body))}
                upstream.request(self.command, proxy.path_of(self.path), body, headers)
                reply = upstream.getresponse()
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    pieces[0] += f"{name}: {value}\n".encode()
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                left = 2**30 if proxy.cut is None else proxy.cut
                while left and (piece := reply.read1(min(left, 2**16))):
                    pieces.append(piece)
                    left -= len(piece)
                    self.wfile.write(piece)
            # Of HTTP/1.0, as it is spoken here, an answer's end is the connection's.

        do_GET = do_POST

    return Handler


@contextmanager
def tls_ending_proxy(server: tuple[str, int], folder: Path) -> Iterator[Proxy]:
    """Run one in front of a server, with a certificate that the client's context trusts."""
    contexts = _contexts(folder)
    proxy = Proxy(server, contexts[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy)) as listening:
        listening.daemon_threads = False
        proxy.url = f"https://127.0.0.1:{listening.server_port}"
        listening.socket = contexts[0].wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown()
            thread.join()


def _contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    key, now = generate_private_key(SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "proxy")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(names, critical=False)
        .sign(key, SHA256())
    )
    both = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    both += made.public_bytes(Encoding.PEM)
    (folder / "proxy.pem").write_bytes(both)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "proxy.pem")
    return serving, ssl.create_default_context(cafile=str(folder / "proxy.pem"))
