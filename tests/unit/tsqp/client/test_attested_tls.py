"""Tests of connections that end in the handshake where the server does not prove itself."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from protocol.errors import EndpointError, SettingsError
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.statement import read_certificate
from tee_side.serve.identity import Identity, certify
from tests.kit.evidence import MEASUREMENT, Answer, identity, policy_text, serving
from tests.kit.rows import each_row
from tsqp.client import AttestedContext, NotAttestedError, connect
from tsqp.client.connection import Address, prove

OTHER = bytes(32)


def _policy(folder: Path, text: str) -> AppraisalPolicy:
    path = folder / "appraisal.toml"
    path.write_text(text)
    return AppraisalPolicy.load(path)


@pytest.fixture
def policy(tmp_path: Path) -> AppraisalPolicy:
    """What `identity` passes."""
    return _policy(tmp_path, policy_text())


@pytest.fixture(scope="module")
def honest() -> Identity:
    """One that passes."""
    return identity()


def test_a_server_that_proves_itself_is_served_over_the_connection_that_was_asked(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    with serving(honest) as server:
        context = AttestedContext(policy)
        plain = socket.create_connection(("127.0.0.1", server.port))
        with closing(context.wrap_socket(plain)) as connection:
            connection.sendall(b"GET /else HTTP/1.1\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert len(server.asked) == 1
    assert context.proved is not None
    assert context.proved.fresh.passed
    assert context.proved.fresh.claims is not None
    assert context.proved.fresh.claims.nonce == server.asked[0]
    assert context.proved.certificate == honest.certificate


@each_row(
    ("other", "step"),
    [
        ({"model": OTHER}, "model"),
        ({"policy": OTHER}, "policy"),
        ({"settings": OTHER}, "settings"),
        ({"version": "1.2.4"}, "version"),
        ({"plugins": {"Mine": OTHER}}, "plug-in Mine"),
        ({"curve_keys": {"service 1": OTHER}}, "key of service 1"),
        ({"measurement": bytes(48)}, "measurement"),
    ],
)
def test_another_server_gets_no_byte(
    policy: AppraisalPolicy, other: dict[str, object], step: str
) -> None:
    with serving(identity(**other)) as server:  # type: ignore[arg-type]
        with pytest.raises(NotAttestedError) as refused:
            prove(Address.of(server.url), AttestedContext(policy))
        assert refused.value.where == f"certificate: {step}"
        assert refused.value.appraisal is not None
        assert [one.name for one in refused.value.appraisal.steps if not one.passed] == [step]
    assert not server.received


def test_a_server_in_the_middle_that_copies_the_evidence_gets_no_byte(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    stated, _ = read_certificate(honest.certificate)
    middle = identity()
    middle.tls_key = generate_private_key(SECP256R1())
    now = datetime.now(UTC)
    middle.certificate = certify(middle.tls_key, stated, now, timedelta(days=1))
    # It may well ask the honest server for an answer to the client's nonce.
    with (
        serving(middle, honest.state) as server,
        pytest.raises(NotAttestedError, match=r"certificate: TLS key: got [0-9a-f]{64}"),
    ):
        prove(Address.of(server.url), AttestedContext(policy))
    assert not server.received


def test_a_certificate_without_evidence_gets_no_byte(policy: AppraisalPolicy) -> None:
    plain = identity()
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "example")])
    now = datetime.now(UTC)
    plain.certificate = (
        x509.CertificateBuilder(name, name, plain.tls_key.public_key(), 1, now, now)
        .sign(plain.tls_key, SHA256())
        .public_bytes(Encoding.DER)
    )
    with (
        serving(plain) as server,
        pytest.raises(NotAttestedError, match="a certificate with evidence"),
    ):
        prove(Address.of(server.url), AttestedContext(policy))
    assert not server.received


def _old(honest: Identity) -> Answer:
    stated = honest.state(bytes(32))
    return lambda _: stated


def _of_another(honest: Identity) -> Answer:
    other = identity()
    other.tls_key = honest.tls_key
    return other.state


def _http(text: bytes) -> Callable[[Identity], Answer]:
    return lambda _: lambda _: text


@each_row(
    ("answer", "where"),
    [
        (_old, "new evidence: nonce"),
        (_of_another, "new evidence: hpke_key"),
        (_http(b"HTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n"), "new evidence"),
        (_http(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"), "answer"),
        (_http(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"), "answer"),
        (_http(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n"), "answer"),
        (_http(b"HTTP/1.1 200 OK\r\n\r\n"), "answer"),
        (_http(b"nonsense\r\n\r\n"), "new evidence"),
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
    with serving(identity()) as server:
        prove(Address.of(server.url), context)
        assert len(server.asked) == 1
    with serving(identity(model=OTHER)) as server:
        with pytest.raises(NotAttestedError, match="certificate: model"):
            prove(Address.of(server.url), context)
        assert not server.received


def test_a_certificate_may_be_old_and_new_evidence_may_not(
    honest: Identity, policy: AppraisalPolicy
) -> None:
    later = datetime.now(UTC) + timedelta(seconds=700)
    context = AttestedContext(policy, utc=lambda: later)
    with serving(honest) as server, pytest.raises(NotAttestedError, match="new evidence: age"):
        prove(Address.of(server.url), context)


def test_no_simulated_tee_in_production(tmp_path: Path, honest: Identity) -> None:
    text = policy_text().replace("development", "production")
    with pytest.raises(SettingsError, match="no table \\[simulated\\]"):
        _policy(tmp_path, text)
    head, _, claims = text.partition("[simulated]")
    strict = _policy(tmp_path, head + "[claims]" + claims.partition("[claims]")[2])
    with (
        serving(honest) as server,
        pytest.raises(NotAttestedError, match="kind of TEE: got simulated"),
    ):
        prove(Address.of(server.url), AttestedContext(strict))
    assert not server.received


def test_an_http_client_goes_through_it(tmp_path: Path, honest: Identity) -> None:
    path = tmp_path / "appraisal.toml"
    path.write_text(policy_text())
    with serving(honest) as server:
        connection = connect(server.url, path)
        assert connection.base_url == f"{server.url}/v1"
        with connection.http_client as client:
            assert client.get(f"{connection.base_url}/models").json() == {"served": True}
    with (
        serving(identity(policy=OTHER)) as server,
        pytest.raises(NotAttestedError, match="certificate: policy"),
    ):
        connect(server.url, path)


def test_nothing_goes_to_another_address(policy: AppraisalPolicy, honest: Identity) -> None:
    with serving(honest) as server, socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.0)
        connection = connect(server.url, policy)
        port = other.getsockname()[1]
        with connection.http_client as client:
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


def test_connections_that_are_kept_are_asked_again(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    with serving(honest) as server:
        connection = connect(server.url, policy, again_s=1e-6)
        with connection.http_client as client:
            for asked in (2, 3, 4):
                client.get(f"{connection.base_url}/models")
                assert len(server.asked) >= asked


def test_a_handshake_cannot_be_put_off(policy: AppraisalPolicy, honest: Identity) -> None:
    context = AttestedContext(policy)
    with serving(honest) as server:
        for options in ({"do_handshake_on_connect": False}, {"server_side": True}):
            with (
                socket.create_connection(("127.0.0.1", server.port)) as plain,
                pytest.raises(ValueError, match="whose handshake comes first"),
            ):
                context.wrap_socket(plain, **options)
    unconnected = context.wrap_socket(socket.socket())
    with unconnected, pytest.raises(OSError, match="before the other end has proved itself"):
        unconnected.send(b"a prompt")


def test_nothing_is_sent_in_the_clear_when_tls_is_over(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    with serving(honest) as server:
        plain = socket.create_connection(("127.0.0.1", server.port))
        with AttestedContext(policy).wrap_socket(plain) as connection:
            # As another thread may leave it at any time: `SSLSocket` would send past TLS now.
            connection._sslobj = None  # type: ignore[attr-defined]
            for send in (connection.send, connection.sendall):
                with pytest.raises(OSError, match="TLS is over"):
                    send(b"a prompt")
            with pytest.raises(NotImplementedError):
                connection.sendto(b"a prompt", ("127.0.0.1", server.port))
            with pytest.raises(NotImplementedError):
                connection.sendfile(None)  # type: ignore[arg-type]


def test_only_sockets_can_be_asked(policy: AppraisalPolicy) -> None:
    with pytest.raises(NotImplementedError, match="sockets alone"):
        AttestedContext(policy).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO())


@each_row("url", ["http://127.0.0.1:1", "127.0.0.1:1", "https://", "https://host:port", "ftp://a"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="https://HOST"):
        Address.of(url)


def test_nothing_there_is_an_endpoint_error(policy: AppraisalPolicy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(EndpointError, match="Connection refused"):
        prove(Address("127.0.0.1", port), AttestedContext(policy))


def test_measurement_is_that_of_the_policy() -> None:
    assert MEASUREMENT.hex() in policy_text()
