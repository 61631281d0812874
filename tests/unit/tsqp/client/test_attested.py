"""A server that does not prove itself gets no byte: by TLS, an HTTP client and a local proxy."""

import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EndpointError, SettingsError
from tee_side.attest.appraisal import AppraisalPolicy
from tee_side.attest.statement import Statement, read_certificate
from tee_side.serve.identity import Identity, certify
from tests.kit.evidence import Answer, AttestedServer, body_of, identity, policy_text, serving
from tests.kit.rows import each_row
from tsqp.client import AttestedContext, NotAttestedError, attested_tls, connect
from tsqp.client.attested_tls import Address, Proxy, prove

OTHER = bytes(32)
WAIT_S = 20  # less than `serving` leaves a silent connection open
REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(scope="module")
def honest() -> Identity:
    return identity()


def copied() -> Identity:
    """A server in the middle: the certificate has the evidence of an honest one."""
    stated, _ = read_certificate(identity().certificate)
    found = identity()
    found.tls_key = generate_private_key(SECP256R1())
    found.certificate = certify(found.tls_key, stated, datetime.now(UTC), timedelta(days=1))
    return found


def without_evidence() -> Identity:
    found, now = identity(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "example")])
    made = x509.CertificateBuilder(name, name, found.tls_key.public_key(), 1, now, now)
    found.certificate = made.sign(found.tls_key, SHA256()).public_bytes(Encoding.DER)
    return found


@each_row(
    ("make", "text"),
    [
        (lambda: identity(model=OTHER), "certificate: model: got 0000"),
        (lambda: identity(measurement=bytes(48)), "certificate: measurement: got 0000"),
        (lambda: identity(curve_keys={"service 1": OTHER}), "certificate: key of service 1: got"),
        (copied, "certificate: TLS key: got "),
        (without_evidence, "expected a certificate with evidence"),
    ],
)
def test_another_server_gets_no_byte(
    policy: AppraisalPolicy, honest: Identity, make: Callable[[], Identity], text: str
) -> None:
    # It may well ask an honest server for an answer to the client's nonce.
    with serving(make(), honest.state) as server:
        with pytest.raises(NotAttestedError) as refused:
            prove(Address.of(server.url), AttestedContext(policy))
        assert text in str(refused.value)
        for start in (
            lambda: connect(server.url, policy),
            lambda: Proxy(("127.0.0.1", 0), Address.of(server.url), AttestedContext(policy), print),
        ):
            with pytest.raises(NotAttestedError):
                start()
    assert not server.received


def old(honest: Identity) -> Answer:
    stated = honest.state(bytes(32))
    return lambda _: stated


def of_another(honest: Identity) -> Answer:
    other = identity()
    other.tls_key = honest.tls_key
    return other.state


def longer(honest: Identity) -> Answer:
    """What it should, and more blanks behind it than any answer has."""

    def answer(nonce: bytes) -> bytes:
        body = body_of(honest.state(nonce)).ljust(attested_tls.MAX_ANSWER_BYTES + 1)
        return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body

    return answer


def raw(text: bytes) -> Callable[[Identity], Answer]:
    return lambda _: lambda _: text


@each_row(
    ("answer", "where"),
    [
        (old, "new evidence: nonce"),
        (of_another, "new evidence: hpke_key"),
        (longer, "answer"),
        (raw(b"HTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n"), "new evidence"),
        (raw(HEAD + b"content-length: 2\r\n\r\n{}"), "answer"),
        (raw(HEAD + b"content-length: -1\r\n\r\n"), "answer"),
        (raw(b"nonsense\r\n\r\n"), "new evidence"),
    ],
)
def test_without_new_evidence_nothing_else_is_sent(
    policy: AppraisalPolicy, honest: Identity, answer: Callable[[Identity], Answer], where: str
) -> None:
    with serving(honest, answer(honest)) as server:
        with pytest.raises(NotAttestedError) as refused:
            prove(Address.of(server.url), AttestedContext(policy))
        assert refused.value.where == where
    assert bytes(server.received).count(b"HTTP/1.1") == 1
    assert b"GET /v1/attestation?nonce=" in server.received


def test_a_server_that_does_not_answer_is_not_waited_for(
    policy: AppraisalPolicy, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def answer(nonce: bytes) -> Statement:
        assert over.wait(WAIT_S)
        return honest.state(nonce)

    # Of the proof as a whole: the connection itself would wait for each piece.
    monkeypatch.setattr(attested_tls, "_TIMEOUT_S", 0.05)
    with serving(honest, answer) as server:
        with pytest.raises((EndpointError, NotAttestedError)):
            prove(Address.of(server.url), AttestedContext(policy))
        over.set()


def test_new_evidence_is_asked_for_after_a_while_and_of_another_certificate(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    now_s = 0.0
    context = AttestedContext(policy, 60.0, clock=lambda: now_s)
    with serving(honest) as server:
        for now_s, asked in ((0.0, 1), (59.0, 1), (60.0, 2), (119.0, 2)):  # noqa: B007
            prove(Address.of(server.url), context)
            assert len(server.asked) == asked
        assert len(set(server.asked)) == 2
        assert context.proved is not None
        assert context.proved.certificate == honest.certificate
        assert context.proved.fresh.claims is not None
        assert context.proved.fresh.claims.nonce == server.asked[1]
        # The certificate may be old, and new evidence may not.
        later = datetime.now(UTC) + timedelta(seconds=700)
        with pytest.raises(NotAttestedError, match="new evidence: age"):
            prove(Address.of(server.url), AttestedContext(policy, utc=lambda: later))
    with serving(identity()) as server:
        prove(Address.of(server.url), context)
        assert len(server.asked) == 1
    with serving(identity(model=OTHER)) as server:
        with pytest.raises(NotAttestedError, match="certificate: model"):
            prove(Address.of(server.url), context)
        assert not server.received


def test_an_http_client_reaches_that_server_alone_and_asks_it_again(
    tmp_path: Path, honest: Identity
) -> None:
    path = tmp_path / "appraisal.toml"
    path.write_text(policy_text())
    with serving(honest) as server, socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.0)
        connection = connect(server.url, path, again_s=1e-6)
        assert connection.base_url == f"{server.url}/v1"
        port = other.getsockname()[1]
        with connection.http_client as client:
            for asked in (2, 3, 4):
                found = client.get(f"{connection.base_url}/models")
                assert found.json() == {"served": True}
                assert len(server.asked) >= asked
            for url in (
                f"http://127.0.0.1:{server.port}/v1/models",
                f"https://127.0.0.1:{port}/v1/models",
                f"https://localhost:{server.port}/v1/models",
                f"http://127.0.0.1:{port}/v1/models",
            ):
                with pytest.raises(NotAttestedError, match="another scheme, host or port"):
                    client.post(url, content=b"a prompt")
            with pytest.raises(BlockingIOError):
                other.accept()
        assert b"a prompt" not in server.received


def test_nothing_is_sent_before_a_proof_or_past_tls(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    context = AttestedContext(policy)
    with serving(honest) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address) as plain:
            for option in ({"do_handshake_on_connect": False}, {"server_side": True}):
                with pytest.raises(ValueError, match="whose handshake comes first"):
                    context.wrap_socket(plain, **option)
        with context.wrap_socket(socket.create_connection(address)) as connection:
            connection._proved = False  # type: ignore[attr-defined]
            with pytest.raises(OSError, match="before the other end has proved itself"):
                connection.send(b"a prompt")
            connection._proved = True  # type: ignore[attr-defined]
            # As another thread may leave it at any time: `SSLSocket` would send past TLS now.
            connection._sslobj = None  # type: ignore[attr-defined]
            for send in (connection.send, connection.sendall):
                with pytest.raises(OSError, match="TLS is over"):
                    send(b"a prompt")
            with pytest.raises(NotImplementedError):
                connection.sendto(b"a prompt", address)
    # As one that the other end has reset.
    with pytest.raises(OSError, match="Bad file descriptor"):
        context.wrap_socket(socket.socket())
    with pytest.raises(NotImplementedError, match="sockets alone"):
        context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO())


def test_other_addresses_are_refused() -> None:
    for url in ("http://127.0.0.1:1", "127.0.0.1:1", "https://", "https://host:port", "ftp://a"):
        with pytest.raises(SettingsError, match="https://HOST"):
            Address.of(url)


@contextmanager
def proxied(
    server: AttestedServer, policy: AppraisalPolicy, again_s: float = 600.0
) -> Iterator[tuple[Proxy, list[str]]]:
    said: list[str] = []
    context = AttestedContext(policy, again_s)
    proxy = Proxy(("127.0.0.1", 0), Address.of(server.url), context, said.append)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy, said
    finally:
        proxy.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def ask(near: socket.socket) -> None:
    near.sendall(REQUEST)
    assert near.recv(1000).endswith(b'{"served": true}')


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), WAIT_S)


def test_bytes_go_both_ways_over_a_connection_of_their_own(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    with serving(honest) as server, proxied(server, policy) as (proxy, said):
        for _ in range(2):
            with connected(proxy) as near:
                ask(near)
                ask(near)
        assert bytes(server.received).count(REQUEST) == 4
        # A client may take its time, and end its side; nothing but tickets has been read by then.
        with connected(proxy) as near, selectors.DefaultSelector() as waiting:
            waiting.register(near, selectors.EVENT_READ)
            assert not waiting.select(0.1)
            near.sendall(REQUEST)
            near.shutdown(socket.SHUT_WR)
            assert near.recv(1000).endswith(b'{"served": true}')
    assert len(server.asked) == 1
    assert not said


def test_the_proxy_outlives_a_lack_of_descriptors_and_of_places(
    policy: AppraisalPolicy, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files")])

    def sometimes(listening: socket.socket) -> object:
        if listening is proxy._listening and (failure := next(failures, None)) is not None:
            raise failure
        return accept(listening)

    monkeypatch.setattr(attested_tls, "_MOST", 1)
    monkeypatch.setattr(attested_tls, "_PAUSE_S", 0.01)
    with serving(honest) as server, proxied(server, policy) as (proxy, said):
        monkeypatch.setattr(socket.socket, "accept", sometimes)
        with connected(proxy) as near:
            ask(near)
            with connected(proxy) as beyond, suppress(ConnectionResetError):
                beyond.sendall(REQUEST)
                assert beyond.recv(1000) == b""
        assert bytes(server.received).count(REQUEST) == 1
    assert said == ["not accepted: Too many open files"]


@each_row("lies", [True, False])
def test_connections_are_cut_and_refused_when_the_server_proves_nothing_any_more(
    policy: AppraisalPolicy, honest: Identity, monkeypatch: pytest.MonkeyPatch, lies: bool
) -> None:
    begun = threading.Event()
    stale = honest.state(bytes(32))

    def answer(nonce: bytes) -> Statement:
        return stale if lies and begun.is_set() else honest.state(nonce)

    with (
        serving(honest, answer) as server,
        proxied(server, policy, 0.1) as (proxy, said),
        connected(proxy) as near,
    ):
        ask(near)
        begun.set()
        if not lies:
            monkeypatch.setattr(attested_tls, "prove", mock.Mock(side_effect=RuntimeError))
        assert near.recv(1000) == b""
        with connected(proxy) as late:
            late.sendall(b"GET /late" + REQUEST[4:])
            # The request is left unread, which the kernel may tell as a reset.
            with suppress(ConnectionResetError):
                assert not lies or late.recv(1000) == b""
    assert not lies or b"/late" not in server.received
    reason = "new evidence: nonce" if lies else "RuntimeError"
    assert any(line.startswith(f"connections are cut: {reason}") for line in said)
    assert not lies or any("refused: new evidence: nonce" in line for line in said)


def test_a_connection_that_is_set_up_while_all_are_cut_carries_nothing(
    honest: Identity, policy: AppraisalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(honest) as server, proxied(server, policy) as (proxy, said):
        carry = proxy._carry_both

        def late(*given: Any) -> None:
            proxy.close()
            carry(*given)

        monkeypatch.setattr(proxy, "_carry_both", late)
        with connected(proxy) as near, suppress(ConnectionResetError):
            near.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert near.recv(1) == b""
        # One whose thread begins after the end.
        near, other = socket.socketpair()
        proxy._places.acquire()
        monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=AssertionError))
        proxy._carry(near)
        assert (other.recv(1), said) == (b"", [])
        other.close()
