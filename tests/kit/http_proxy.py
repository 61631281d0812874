"""Reverse proxies before a server: one ends TLS, one buffers as serverless hosts do."""

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
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_WAIT_S = 30


@dataclass
class HttpProxy:
    """What a proxy has read, and what it does to it; `trusting`: of a client that comes by TLS.

    `buffers`: it passes on whole answers, or else each piece of one at once.
    """

    server: tuple[str, int]
    trusting: ssl.SSLContext | None = None
    buffers: bool = False
    url: str = ""
    path_of: Callable[[str], str] = str
    change: Callable[[bytes], bytes] = bytes
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[list[bytes]] = field(default_factory=list)

    @property
    def seen(self) -> bytes:
        parts = [part for pieces in self.answers for part in pieces]
        for method, path, headers, body in self.requests:
            parts += [f"{method} {path} {headers}".encode(), body]
        return b"\n".join(parts)

    def send(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        """Send a request of its own to the server, and return what it answers."""
        with closing(HTTPConnection(*self.server, timeout=_WAIT_S)) as upstream:
            upstream.request(method, path, body, headers)
            return upstream.getresponse().read()


class _Handler(BaseHTTPRequestHandler):
    """An answer that is not buffered ends with its connection (HTTP/1.0)."""

    proxy: HttpProxy
    disable_nagle_algorithm = True  # an answer is two writes: 40 ms each

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        proxy, pieces = self.proxy, [b""]
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        proxy.requests.append((self.command, self.path, dict(headers), body))
        proxy.answers.append(pieces)
        # A connection of its own for each: no request of a client follows another there.
        with closing(HTTPConnection(*proxy.server, timeout=_WAIT_S)) as upstream:
            body = proxy.change(body)
            headers |= {"x-forwarded-for": "192.0.2.1", "content-length": str(len(body))}
            upstream.request(self.command, proxy.path_of(self.path), body, headers)
            reply = upstream.getresponse()
            whole = reply.read() if proxy.buffers else None
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                pieces[0] += f"{name}: {value}\n".encode()
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name.title() if proxy.buffers else name, value)
            if whole is not None:
                self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            while piece := reply.read1(2**16) if whole is None else whole:
                pieces.append(piece)
                self.wfile.write(piece)
                whole = b"" if proxy.buffers else None

    do_GET = do_POST


@contextmanager
def http_proxy(port: int, folder: Path | None = None) -> Iterator[HttpProxy]:
    """Run one in front of a port: as load balancers are, with a certificate in a folder.

    It ends TLS, and reads what it carries. Without a folder, as serverless hosts have it.
    """
    context, trusting = certificate(folder) if folder else (None, None)
    proxy = HttpProxy(("127.0.0.1", port), trusting, buffers=folder is None)
    version = "HTTP/1.1" if proxy.buffers else "HTTP/1.0"
    handler = type("Handler", (_Handler,), {"proxy": proxy, "protocol_version": version})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        listening.daemon_threads = context is None
        proxy.url = f"http{'s' * bool(context)}://127.0.0.1:{listening.server_port}"
        if context is not None:
            listening.socket = context.wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown()
            thread.join()


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make one of 127.0.0.1 in FOLDER/proxy.pem; return contexts that serve and that trust it."""
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
