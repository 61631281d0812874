"""The key of sealed models for programs that prove what they run: `tsqp keyserver`, and its client.

    GET  /v1/nonce      64 hexadecimal digits: 32 bytes
    POST /v1/key        a statement (`tee_side.attest.statement`) with that nonce in its claims
         200            the key, sealed by HPKE to the key in the claims; its `info` is a domain tag
                        and the nonce, so that it opens for no other purpose, and the reverse
         403            the name of the first step that failed

- Plain HTTP: the key opens in the attested program alone. TLS would prove a name, which a program
  in a TEE cannot check: its disk and its clock are the host's.
- A false server can give another key. It opens nothing, unless the sealed model was changed for one
  of that key; then files differ from the manifest, which the asking program has to have, and whose
  digest its clients are told. `--seal-digest` shows it at once.
- A nonce is a time and a MAC, by a key of this process: nothing is kept. A
  statement that is sent again gets the same key, sealed to the same program.
- The claims say that their `purpose` is a key. A server gives statements to every client that
  asks, for any nonce: one of those gets no key.

The library's HTTP server is enough, and needs no extra. What it lacks is here: a bound for
connections, each of which has a thread, and for the time of each as a whole.
"""

import hashlib
import hmac
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, IncompleteRead
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeAlias

from protocol.errors import (
    EndpointError,
    EvidenceError,
    KeyFileError,
    ProtocolError,
    SettingsError,
)
from protocol.messages import NONCE_BYTES
from tee_side.attest.appraisal import AppraisalPolicy, AppraisalStep, Expected, appraise
from tee_side.attest.statement import Claims, Evidence, Statement
from tee_side.serve.sealed import KEY_BYTES, HpkeKey, seal
from tsqp.client.attested_tls import Address, cut_after

NONCE_PATH, KEY_PATH = "/v1/nonce", "/v1/key"
NONCE_LASTS_S = 60.0

_TIME_BYTES = 8
_SIZE = re.compile("[0-9]{1,9}")
_OK, _REFUSED, _NO_PATH, _NO_SIZE, _TOO_LONG = 200, 403, 404, 411, 413


class KeyRelease:
    """Decides which program gets `key`; any thread may ask. `say`: told each decision, in one line.

    `utc`, `clock`: the time of day, and the seconds by which nonces grow old.
    """

    def __init__(
        self,
        key: bytes,
        policy: AppraisalPolicy,
        say: Callable[[str], object],
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key, self._policy, self._say, self._utc, self._clock = key, policy, say, utc, clock
        self._mac_key = secrets.token_bytes(32)

    def nonce(self) -> bytes:
        """Return a nonce of now."""
        now = int(self._clock() * 1000).to_bytes(_TIME_BYTES)
        return now + self._mac(now)

    def answer(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a statement."""
        try:
            stated = Statement.decode(body)
            claims = Claims.decode(stated.claims)
            # First, what costs nothing.
            then, mac = claims.nonce[:_TIME_BYTES], claims.nonce[_TIME_BYTES:]
            ours = hmac.compare_digest(mac, self._mac(then))
            age_s = self._clock() - int.from_bytes(then) / 1000
            most = f"one of this server, {NONCE_LASTS_S:g} s old at most"
            for step in (
                AppraisalStep("nonce", ours, "ours" if ours else "another", most),
                AppraisalStep("age of the nonce", age_s <= NONCE_LASTS_S, f"{age_s:.0f} s", most),
            ):
                if not step.passed:
                    return self._refuse(step)
            found = appraise(stated, self._policy, Expected(claims.nonce, None, self._utc(), "key"))
            if not found.passed:
                return self._refuse(found.failure)
            sealed = seal(claims.hpke_suite, claims.hpke_key, release_info(claims.nonce), self._key)
        except (EvidenceError, ProtocolError) as error:
            return self._refuse(AppraisalStep(error.where, False, error.got, error.expected))
        said = {"model": claims.model, "policy": claims.policy, "settings": claims.settings}
        digests = ", ".join(f"{name} {digest.hex()}" for name, digest in said.items())
        self._tell(f"released to {Evidence.decode(stated.evidence).kind}: {digests}")
        return _OK, sealed

    def _mac(self, moment: bytes) -> bytes:
        return hmac.digest(self._mac_key, moment, hashlib.sha256)[: NONCE_BYTES - _TIME_BYTES]

    def _refuse(self, step: AppraisalStep) -> tuple[int, bytes]:
        self._tell(f"refused: {step.name}: got {step.got}, expected {step.expected}")
        return _REFUSED, step.name.encode()

    def _tell(self, decision: str) -> None:
        self._say(f"{self._utc().isoformat(timespec='seconds')} {decision}")


class KeyServer(ThreadingMixIn, TCPServer):
    """Speaks HTTP for a KeyRelease; port 0: one that is free. Raises EndpointError.

    `most`: connections at once; others wait. `deadline_s`: of a connection, from its first byte to
    its last.
    """

    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        listen: tuple[str, int],
        release: KeyRelease,
        say: Callable[[str], object],
        *,
        most: int = 128,
        deadline_s: float = 10.0,
    ) -> None:
        self.release, self._say, self.deadline_s = release, say, deadline_s
        self.places = threading.BoundedSemaphore(most)
        self.address_family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        with EndpointError.for_os(f"--listen {listen[0]}:{listen[1]}", "an address that is free"):
            super().__init__(listen, _Connection)
        self.port: int = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, when there is a place for it."""
        self.places.acquire()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads for now
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and end it when its time is over."""
        try:
            with cut_after(self.deadline_s, request):
                super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Name an error that ended a connection, unless it is one of the network."""
        error = sys.exception()
        if not isinstance(error, OSError):
            self._say(f"a connection ended by {type(error).__name__}")


class _Connection(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: KeyServer
    timeout = 2.0  # of a read: a client that sends nothing holds no place
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Give a nonce."""
        if self.path == NONCE_PATH:
            self._answer(_OK, self.server.release.nonce().hex().encode())
        else:
            self._answer(_NO_PATH)

    def do_POST(self) -> None:
        """Answer a statement."""
        length = self.headers.get("content-length", "")
        size = int(length) if _SIZE.fullmatch(length) else None
        if self.path != KEY_PATH:
            self._answer(_NO_PATH)
        elif size is None:
            self._answer(_NO_SIZE)
        elif size > Statement.max_bytes:
            self._answer(_TOO_LONG)
        elif len(body := self.rfile.read(size)) == size:
            self._answer(*self.server.release.answer(body))
        else:
            self.close_connection = True

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "no-store")
        self.send_header("connection", "close")  # one request for each
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, without a word of it."""
        self._answer(code)

    def log_message(self, *_: Any) -> None:
        """Log nothing of a request."""


# Makes a statement of a key server's nonce and of the key that it is to seal its answer to.
State: TypeAlias = Callable[[bytes, HpkeKey], Statement]

# Of each of the two requests to a key server.
_SERVER_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 4096
_URL = re.compile(r"http://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?/?")
_NONCE = re.compile(rb"[0-9a-f]{64}")
_STEP = re.compile(rb"[A-Za-z][A-Za-z0-9 '_.:-]{0,99}")
_DOMAIN = b"TSQP release of a model's key 1\0"


def key_of_server(url: str, state: State) -> bytes:
    """Have a `tsqp keyserver` give the key to what runs here. Takes 60 s at most, and `state`'s.

    What it says is not quoted, but for the name of the step that this program failed. Raises
    SettingsError, EndpointError, KeyFileError, EvidenceError.
    """
    at = _URL.fullmatch(url)
    if at is None or (port := int(at[3] or 80)) > 65535:
        # Not quoted: a password may stand in it.
        raise SettingsError(
            "--seal-key-server",
            got="another form",
            expected="http://HOST[:PORT], without TLS: the key comes sealed to this program",
        )
    address = Address(at[1] or at[2], port)
    where = f"--seal-key-server http://{address}"
    found = _ask(where, address, "GET", NONCE_PATH)
    KeyFileError.unless(
        _NONCE.fullmatch(found), where, "another answer", "a nonce, as tsqp keyserver gives"
    )
    nonce, key = bytes.fromhex(found.decode()), HpkeKey()
    sealed = _ask(where, address, "POST", KEY_PATH, state(nonce, key).encode())
    try:
        opened = key.open(sealed, release_info(nonce))
    except ProtocolError:
        opened = b""
    KeyFileError.unless(
        len(opened) == KEY_BYTES,
        where,
        "another answer",
        "a key that is sealed to this program, for this nonce",
    )
    return opened


def release_info(nonce: bytes) -> bytes:
    """Return what a released key is bound to by HPKE: a purpose, and the nonce of a statement."""
    return _DOMAIN + nonce


def _ask(where: str, address: Address, method: str, path: str, body: bytes | None = None) -> bytes:
    late: threading.Event | None = None
    try:
        with closing(HTTPConnection(*address, timeout=_SERVER_TIMEOUT_S)) as connection:
            began_s = time.monotonic()
            connection.connect()
            # The library lets go of the socket where a reply is the last one.
            left_s = began_s + _SERVER_TIMEOUT_S - time.monotonic()
            with cut_after(left_s, connection.sock) as late:
                connection.request(method, path, body)
                reply = connection.getresponse()
                answer = reply.read(_MAX_ANSWER_BYTES)
        if late.is_set() or reply.length:
            raise IncompleteRead(b"")
    except (OSError, HTTPException, UnicodeError) as error:
        got = getattr(error, "strerror", None) or type(error).__name__
        # Of a connection that is not made, or of one read that the library ended first.
        if (late and late.is_set()) or isinstance(error, TimeoutError):
            got = f"no whole answer within {_SERVER_TIMEOUT_S:g} s"
        raise EndpointError(where, got=got, expected="an answer of tsqp keyserver") from None
    if reply.status == 403 and _STEP.fullmatch(answer):
        raise KeyFileError(
            where,
            got=f"a refusal: the step {answer.decode()!r} failed",
            expected="a key (its own output says what differs)",
        )
    KeyFileError.unless(reply.status == 200, where, f"status {reply.status}", "200")
    return answer
