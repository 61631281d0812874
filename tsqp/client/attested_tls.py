"""TLS to a server that proves what it is, as an `ssl.SSLContext`.

The handshake of each connection goes on until the server has proved itself over it:

1. its certificate has evidence of its own key, which passes the appraisal; or it is, byte for byte,
   one that did;
2. asked over this connection with a new nonce, it gives new evidence with the same claims, unless
   it did so a few minutes ago with the same certificate.

Whatever uses the context sends nothing before. A server in the middle that copied a certificate has
not its key, and ends in the handshake.

A `Proxy` on this machine has any program reach such a server. It takes connections in the clear and
carries their bytes over attested TLS, each over one of its own. It never falls back: where the
server does not prove itself, a connection is closed unread.
"""

from __future__ import annotations

import errno
import json
import secrets
import select
import socket
import ssl
import threading
import time
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from protocol.errors import EndpointError, EvidenceError, SettingsError, TsqpError
from protocol.messages import NONCE_BYTES
from tee_side.attest.appraisal import Appraisal, AppraisalPolicy, Expected, appraise
from tee_side.attest.statement import Claims, Statement, read_certificate

AGAIN_S = 600.0
CONNECT_S = 30.0

_TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 256 * 1024


class NotAttestedError(TsqpError):
    """A server that did not prove to be what was asked for. `appraisal`: None where none was made.

    Nothing was sent to it but a nonce.
    """

    def __init__(self, where: str, got: str, expected: str, appraisal: Appraisal | None) -> None:
        super().__init__(where, got=got, expected=expected)
        self.appraisal = appraisal


def passed(where: str, found: Appraisal) -> Claims:
    """Return the claims of an appraisal. Raises NotAttestedError by the first step that failed."""
    if not found.passed or found.claims is None:
        step = found.failure
        raise NotAttestedError(f"{where}: {step.name}", step.got, step.expected, found)
    return found.claims


@dataclass(frozen=True)
class Proved:
    """What a server proved: its certificate (DER), new evidence, when (monotonic seconds)."""

    certificate: bytes
    fresh: Appraisal
    since_s: float


class AttestedContext(ssl.SSLContext):
    """A client's context for servers that pass an appraisal.

    `again_s`: after how long new evidence is asked for on a new connection. `utc`, `clock`: of
    certificates and of `again_s`. Its sockets raise NotAttestedError, ssl.SSLError and OSError.
    """

    def __new__(cls, *_: object, **__: object) -> AttestedContext:
        """Make a context of TLS 1.3, without authorities: evidence takes their place."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(
        self,
        policy: AppraisalPolicy,
        again_s: float = AGAIN_S,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy, self.again_s, self._utc, self._clock = policy, again_s, utc, clock
        self.proved: Proved | None = None
        self.minimum_version = ssl.TLSVersion.TLSv1_3
        self.check_hostname = False
        self.verify_mode = ssl.CERT_NONE
        self.sslsocket_class = _AttestedSocket

    def wrap_socket(self, sock: socket.socket, *args: Any, **options: Any) -> ssl.SSLSocket:
        """Wrap a client's socket; its handshake cannot be put off. Raises as its handshake does."""
        put_off = not options.pop("do_handshake_on_connect", True)
        if args or put_off or options.pop("server_side", False):
            raise ValueError("AttestedContext: clients alone, whose handshake comes first")
        return super().wrap_socket(sock, **options)

    def wrap_bio(self, *_: Any, **__: Any) -> ssl.SSLObject:
        """Refuse what would not go through the socket that asks."""
        raise NotImplementedError("AttestedContext: sockets alone, not asyncio's objects")

    @property
    def stale(self) -> bool:
        """Whether the server has to prove itself again before more is sent to it."""
        return self.proved is None or self._clock() - self.proved.since_s >= self.again_s

    def require(self, connection: _AttestedSocket) -> None:
        """Have the other end of a connection prove itself. Raises NotAttestedError."""
        certificate = connection.getpeercert(binary_form=True) or b""
        known = None if self.stale else self.proved
        if known is not None and certificate == known.certificate:
            return
        try:
            stated, tls_key = read_certificate(certificate)
            first = self._appraise(stated, b"", tls_key)
            certified = passed("certificate", first)
            nonce = secrets.token_bytes(NONCE_BYTES)
            second = self._appraise(_ask(connection, nonce), nonce, tls_key)
        except EvidenceError as error:
            raise NotAttestedError(error.where, error.got, error.expected, None) from None
        fresh = passed("new evidence", second)
        # Nonce and time of a certificate are its own.
        ours, theirs = (one.model_dump(exclude={"nonce", "time"}) for one in (certified, fresh))
        for name, value in ours.items():
            NotAttestedError.unless(
                theirs[name] == value,
                f"new evidence: {name}",
                "another",
                "the certificate's",
                appraisal=None,
            )
        self.proved = Proved(certificate, second, self._clock())

    def _appraise(self, stated: Statement, nonce: bytes, tls_key: bytes) -> Appraisal:
        return appraise(stated, self.policy, Expected(nonce, tls_key, self._utc(), "serve"))


class _AttestedSocket(ssl.SSLSocket):
    """A socket whose handshake ends when the other end has proved itself.

    It sends through TLS, and only then: `SSLSocket` itself sends in the clear once another thread
    has shut it down.
    """

    _proved = False

    def getpeername(self) -> Any:
        """Return the other end's address; a socket without one is closed before its handshake.

        Python would return it without any, or lose it as it is: the other end has reset it.
        """
        try:
            return super().getpeername()
        except OSError:
            if not self._proved:
                self.close()
            raise

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands, and have the context ask. Raises NotAttestedError."""
        super().do_handshake(block)
        context = self.context
        if not isinstance(context, AttestedContext):
            raise TypeError("AttestedContext: got another context, expected the one that made this")
        timeout_s = self.gettimeout()
        self.settimeout(_TIMEOUT_S if timeout_s is None else timeout_s)
        try:
            with cut_after(_TIMEOUT_S, self):
                context.require(self)
        except BaseException:
            self.close()
            raise
        self.settimeout(timeout_s)
        self._proved = True

    def send(self, data: Any, flags: int = 0) -> int:
        """Send through TLS. Raises OSError before the other end has proved itself, and after."""
        if flags or not self._proved:
            raise OSError(errno.EPERM, "nothing is sent before the other end has proved itself")
        sent: int = self.encrypted().write(data)
        return sent

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all of it, as `send` does."""
        with memoryview(data) as view, view.cast("B") as left:
            at = 0
            while at < len(left):
                at += self.send(left[at:], flags)

    def sendto(self, *_: Any, **__: Any) -> int:
        """Refuse what goes past TLS."""
        raise NotImplementedError("AttestedContext: send and sendall alone")

    sendfile = sendto

    def encrypted(self) -> Any:
        """Return what goes through TLS. Raises OSError after its end."""
        # Taken once: another thread may end it at any time.
        encrypted = getattr(self, "_sslobj", None)
        if encrypted is None:
            raise OSError(errno.ENOTCONN, "TLS is over")
        return encrypted


def cut(connection: socket.socket) -> None:
    """End a connection that another thread uses; its TLS is left as it is."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@contextmanager
def cut_after(seconds: float, connection: socket.socket) -> Iterator[threading.Event]:
    """End a connection where the block takes longer, and tell so by the event.

    The bound holds for all of the block: the other end could send a byte now and then.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        cut(connection)

    ending = threading.Timer(seconds, end)
    ending.daemon = True
    ending.start()
    try:
        yield late
    finally:
        ending.cancel()


def _ask(connection: _AttestedSocket, nonce: bytes) -> Statement:
    """Ask over a connection for a statement of now. Raises EvidenceError."""
    # All that is sent before the other end has proved anything.
    connection.encrypted().write(
        f"GET /v1/attestation?nonce={nonce.hex()} HTTP/1.1\r\nhost: tsqp\r\n\r\n".encode()
    )
    reply, body = HTTPResponse(connection), b""
    with closing(reply), suppress(HTTPException, TypeError, ValueError):
        reply.begin()
        # The connection is used further: its end is where the length says, and not another's.
        most = int(reply.headers["content-length"])
        body = reply.read(most) if 0 <= most <= MAX_ANSWER_BYTES else b""
    EvidenceError.unless(
        reply.status == 200, "new evidence", f"status {reply.status}", "an answer with evidence"
    )
    return read_answer(body)


def read_answer(body: bytes) -> Statement:
    """Read the JSON that `/v1/attestation` answers with. Raises EvidenceError."""
    with EvidenceError.instead_of(
        (ValueError, TypeError, AttributeError, RecursionError, Base64Error),
        "answer",
        "another content",
        "claims and evidence, as /v1/attestation gives them",
    ):
        fields = {name: b64decode(text, validate=True) for name, text in json.loads(body).items()}
        return Statement(**fields)


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        """Read `https://HOST[:PORT]`, with or without a path. Raises SettingsError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 443
        except ValueError:
            host = None
        if host is None or parts.scheme != "https":
            raise SettingsError(
                "URL",
                got=repr(url),
                expected="https://HOST[:PORT], which tee-runner serve --attest prints",
            )
        return cls(host, port)

    def __str__(self) -> str:
        """Return it as a URL has it."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def prove(address: Address, context: AttestedContext) -> Proved:
    """Connect once, and return what the server proved.

    Raises NotAttestedError, and EndpointError where none answers.
    """
    with (
        # A UnicodeError is of a name that no host can have.
        EndpointError.for_os(
            str(address), "a server with TLS 1.3", UnicodeError, UnicodeError.__name__
        ),
        socket.create_connection((address.host, address.port), CONNECT_S) as plain,
    ):
        context.wrap_socket(plain, server_hostname=address.host).close()
    if context.proved is None:
        raise EndpointError(str(address), got="no proof", expected="one")
    return context.proved


_CHUNK_BYTES = 64 * 1024
# Of connections, each with a thread; and how long to wait when none can be accepted.
_MOST, _PAUSE_S = 256, 0.2


class Proxy:
    """Listens at `listen`, and serves until `close`; port 0: one that is free.

    `say`: told what a person should know. Raises EndpointError, and NotAttestedError for a server
    that does not prove itself at the start.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        server: Address,
        context: AttestedContext,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._context, self._say = server, context, say
        self._tunnels: set[socket.socket] = set()
        self._cuts = 0
        self._guard, self._over = threading.Lock(), threading.Event()
        self._places = threading.Semaphore(_MOST)
        self.proved = prove(server, context)
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        with EndpointError.for_os(f"--listen {listen[0]}:{listen[1]}", "an address that is free"):
            self._listening = socket.create_server(listen, family=family)
        self.port: int = self._listening.getsockname()[1]
        self._again = threading.Thread(target=self._prove_again, daemon=True)

    def serve_forever(self) -> None:
        """Carry connections until `close`, which any thread may call."""
        self._again.start()
        while not self._over.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError as error:
                # Closed, or no descriptor is left for now.
                if not self._over.wait(_PAUSE_S):
                    self._say(f"not accepted: {error.strerror or type(error).__name__}")
                continue
            if not self._places.acquire(blocking=False):
                near.close()
                continue
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def close(self) -> None:
        """End, with all connections."""
        self._over.set()
        # To close it alone would leave `accept` waiting.
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._cut()

    def _carry(self, near: socket.socket) -> None:
        with near:
            cuts = self._cuts
            try:
                if self._over.is_set():  # which `cuts` may count by now
                    return
                host, port = self._server
                plain = socket.create_connection((host, port), CONNECT_S)
                with self._context.wrap_socket(plain, server_hostname=host) as far:
                    self._carry_both(near, far, cuts)
            except Exception as error:  # noqa: BLE001 - whatever it is, nothing is carried
                self._say(f"refused: {_words(error)}")
            finally:
                self._places.release()

    def _carry_both(self, near: socket.socket, far: ssl.SSLSocket, cuts: int) -> None:
        both = {near, far}
        with self._guard:
            # All others were cut while this one was being set up.
            if self._cuts != cuts:
                return
            self._tunnels |= both
        try:
            with suppress(OSError):
                _carry_bytes(near, far)
        finally:
            with self._guard:
                self._tunnels -= both

    def _prove_again(self) -> None:
        """Have the server prove itself again and again: connections may last for long."""
        while not self._over.wait(self._context.again_s):
            try:
                self._context.proved = None
                prove(self._server, self._context)
            except Exception as error:  # noqa: BLE001 - without a proof, nothing goes on
                self._say(f"connections are cut: {_words(error)}")
                self._cut()

    def _cut(self) -> None:
        with self._guard:
            self._cuts += 1
            for one in self._tunnels:
                cut(one)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TsqpError) else type(error).__name__


def _carry_bytes(near: socket.socket, far: ssl.SSLSocket) -> None:
    """Carry bytes both ways until the server's side ends; the other may have sent all it has.

    By one thread, as OpenSSL asks for. It sends while it does not read: the server reads a request
    to its end before it answers. TLS has records of its own, so there may be nothing to read.
    """
    near.settimeout(None)
    open_ones: list[socket.socket] = [near, far]
    while True:
        ready = [far] if far.pending() else select.select(open_ones, [], [])[0]
        if near in ready:
            if piece := near.recv(_CHUNK_BYTES):
                far.settimeout(None)
                far.sendall(piece)
            else:
                open_ones.remove(near)
        if far in ready:
            far.settimeout(0.0)
            try:
                piece = far.recv(_CHUNK_BYTES)
            except ssl.SSLWantReadError:
                continue
            if not piece:
                return
            near.sendall(piece)
