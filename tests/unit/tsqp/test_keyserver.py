"""Who gets a model's key, and who does not: the decision, and the HTTP around it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EndpointError, KeyFileError, ProtocolError
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.claims import NONE, Claims, report_data
from tee_side.attest.simulated import simulate
from tee_side.attest.statement import Statement
from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.sealed_bodies import open_secret, seal_secret
from tests.kit.evidence import DIGESTS, MEASUREMENT, PLUGIN, SERVICE, policy_text
from tests.kit.rows import each_row
from tsqp.keyserver import KeyRelease, KeyServer
from tsqp.seal_keys import _STEP, key_of_server, release_info

WAIT_S = 30
KEY = b"\xa5" * 32
OTHER = b"\1" * 32
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
MINE = HpkeKey(hybrid=False)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> AppraisalPolicy:
    """What `stated` passes."""
    path = tmp_path_factory.mktemp("policy") / "appraisal.toml"
    path.write_text(policy_text())
    return AppraisalPolicy.load(path)


class Times:
    """Says what time it is, as the test has it."""

    def __init__(self) -> None:
        self.utc, self.clock_s = NOW, 1000.0


class Releasing:
    """A KeyRelease. `said`: its decisions."""

    def __init__(self, policy: AppraisalPolicy) -> None:
        self.times, self.said = Times(), list[str]()
        self.by = KeyRelease(
            KEY, policy, self.said.append, lambda: self.times.utc, lambda: self.times.clock_s
        )

    def refused(self, body: bytes) -> str:
        """Have a body refused, and return the name of the step, which is all that is told."""
        status, answer = self.by.answer(body)
        assert status == 403
        assert _STEP.fullmatch(answer)
        step = answer.decode()
        assert self.said[-1].startswith(f"2026-05-04T03:02:01+00:00 refused: {step}: got ")
        assert KEY.hex() not in "".join(self.said)
        return step


@pytest.fixture
def releasing(policy: AppraisalPolicy) -> Releasing:
    """One that gives the key to what `stated` says."""
    return Releasing(policy)


def stated(
    nonce: bytes, *, key: HpkeKey = MINE, measurement: bytes = MEASUREMENT, **other: Any
) -> Statement:
    """State what passes; `other`: claims that differ."""
    usual: dict[str, Any] = {
        **DIGESTS,
        "purpose": "key",
        "nonce": nonce,
        "time": round(NOW.timestamp()),
        "hpke_suite": key.suite,
        "hpke_key": key.public,
        "tls_key": NONE,
        "receipt_key": None,
        "curve_keys": {"service 1": SERVICE},
        "plugins": {"Mine": PLUGIN},
        "version": "1.2.3",
        "attested_services": "none",
    }
    claims = Claims(**(usual | other)).encode()
    evidence = simulate(report_data(claims), measurement)
    return Statement(claims=claims, evidence=evidence.encode())


@each_row("hybrid", [False, True])
def test_the_key_opens_in_the_program_that_asked_for_this_purpose_alone(
    releasing: Releasing, hybrid: bool
) -> None:
    key = HpkeKey(hybrid=hybrid)
    nonce = releasing.by.nonce()
    status, sealed = releasing.by.answer(stated(nonce, key=key).encode())
    assert status == 200
    assert key.open(sealed, b"TSQP release of a model's key 1\0" + nonce) == KEY
    for by, info in ((HpkeKey(hybrid=hybrid), release_info(nonce)), (key, release_info(OTHER))):
        with pytest.raises(ProtocolError):
            by.open(sealed, info)
    for target in (b"", nonce):
        with pytest.raises(ProtocolError):
            open_secret(key, sealed, target)
    digests = ", ".join(f"{name} {digest.hex()}" for name, digest in DIGESTS.items())
    assert releasing.said[-1] == f"2026-05-04T03:02:01+00:00 released to simulated: {digests}"


def test_what_was_sealed_as_a_request_is_no_key() -> None:
    nonce = b"TSQP sealed body 1\0/v1/embedding"  # as a false server could choose it
    secret, front = seal_secret(MINE.suite, MINE.public, nonce[19:])
    assert MINE.open(front, nonce) == secret
    with pytest.raises(ProtocolError):
        MINE.open(front, release_info(nonce))


@each_row(
    ("other", "step"),
    [
        ({"model": OTHER}, "model"),
        ({"policy": OTHER}, "policy"),
        ({"settings": OTHER}, "settings"),
        ({"version": "1.2.4"}, "version"),
        ({"plugins": {"'Mi_ne' 0a1b2c3d": OTHER}}, "plug-in 'Mi_ne' 0a1b2c3d"),
        ({"curve_keys": {"service 1": OTHER}}, "key of service 1"),
        ({"measurement": bytes(48)}, "measurement"),
        ({"time": round(NOW.timestamp()) - 601}, "age"),
        ({"hpke_key": b"short"}, "HPKE"),
        ({"nonce": b""}, "nonce"),  # as in a certificate
        ({"nonce": bytes(32)}, "nonce"),
    ],
)
def test_another_program_gets_no_key(
    releasing: Releasing, other: dict[str, Any], step: str
) -> None:
    assert releasing.refused(stated(**{"nonce": releasing.by.nonce(), **other}).encode()) == step


def test_a_nonce_is_of_this_server_and_not_old(
    releasing: Releasing, policy: AppraisalPolicy
) -> None:
    nonce = releasing.by.nonce()
    assert releasing.refused(stated(Releasing(policy).by.nonce()).encode()) == "nonce"
    for bit in range(8 * len(nonce)):
        changed = bytearray(nonce)
        changed[bit // 8] ^= 1 << bit % 8
        assert releasing.refused(stated(bytes(changed)).encode()) == "nonce"
    for cut in range(1, len(nonce)):
        assert releasing.refused(stated(nonce[:cut]).encode()) == "nonce"
    body = stated(nonce).encode()
    releasing.times.clock_s += 60.0
    # Whoever sends it again gets what the first sender got.
    assert [releasing.by.answer(body)[0] for _ in range(2)] == [200, 200]
    releasing.times.clock_s += 0.1
    assert releasing.refused(body) == "age of the nonce"


def test_claims_that_the_evidence_is_not_of_get_no_key(releasing: Releasing) -> None:
    nonce = releasing.by.nonce()
    one, two = stated(nonce, key=HpkeKey(hybrid=False)), stated(nonce)
    body = Statement(claims=one.claims, evidence=two.evidence).encode()
    assert releasing.refused(body) == "claims"


@each_row("mode", ["production", "gpu-confidential"])
def test_a_simulated_tee_gets_no_key_but_in_development(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "appraisal.toml"
    claims = policy_text().partition("[claims]")[2]
    path.write_text(f'mode = "{mode}"\nmax_age_s = 600\n[claims]{claims}')
    releasing = Releasing(AppraisalPolicy.load(path))
    assert releasing.refused(stated(releasing.by.nonce()).encode()) == "kind of TEE"


@each_row("body", [b"", b"\0", b"\xc0", b"\x80", b"\x91" * 500, b"x" * 100_000], ids=repr)
def test_what_is_no_statement_is_refused(releasing: Releasing, body: bytes) -> None:
    assert releasing.refused(body).startswith("statement")
    about = Statement(claims=body, evidence=b"").encode()
    assert releasing.refused(about).startswith("claims")


def test_evidence_that_is_none_is_refused(releasing: Releasing) -> None:
    claims = stated(releasing.by.nonce()).claims
    body = Statement(claims=claims, evidence=b"\x80").encode()
    assert releasing.refused(body).startswith("evidence")


class Serving:
    """A key server that runs. `said`: what its owner was told of connections."""

    def __init__(self, release: KeyRelease, **limits: Any) -> None:
        self.said = list[str]()
        self.server = KeyServer(("127.0.0.1", 0), release, self.said.append, **limits)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> int:
        """Send a request without a body, and return the status."""
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=WAIT_S)
        connection.putrequest(method, path)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        reply.read()
        assert set(reply.headers) == {"content-length", "cache-control", "connection"}
        connection.close()
        return reply.status

    def raw(self, sent: bytes) -> bytes:
        """Send bytes, and return all that comes until the server ends the connection."""
        with self.connected() as connection:
            connection.sendall(sent)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    def connected(self) -> socket.socket:
        """Connect."""
        return socket.create_connection(("127.0.0.1", self.server.port), WAIT_S)


@contextmanager
def serving(release: KeyRelease, **limits: Any) -> Iterator[Serving]:
    found = Serving(release, **limits)
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        thread.join(WAIT_S)
        found.server.server_close()


def test_a_runner_gets_the_key_and_another_a_name(policy: AppraisalPolicy) -> None:
    releasing = Releasing(policy)
    with serving(releasing.by) as found:
        assert key_of_server(found.url, lambda nonce, key: stated(nonce, key=key)) == KEY
        with pytest.raises(
            KeyFileError, match=r"^--seal-key-server http.*: got a refusal: the step 'model' failed"
        ) as refused:
            key_of_server(found.url, lambda nonce, key: stated(nonce, key=key, model=OTHER))
    assert OTHER.hex() not in str(refused.value)  # which is told to the server's owner alone
    assert f"model: got {OTHER.hex()}" in releasing.said[-1]
    assert found.said == []


def test_what_is_no_request_of_the_two_is_refused(releasing: Releasing) -> None:
    with serving(releasing.by) as found:
        for method, path, length, status in (
            ("GET", "/v1/nonce", None, 200),
            ("GET", "/v1/key", None, 404),
            ("GET", "/v1/nonce?", None, 404),
            ("POST", "/v1/nonce", None, 404),
            ("POST", "/v1/key", None, 411),
            ("POST", "/v1/key", "-1", 411),
            ("POST", "/v1/key", "1e3", 411),
            ("POST", "/v1/key", "9" * 5000, 411),
            ("POST", "/v1/key", str(Statement.max_bytes + 1), 413),
            ("PUT", "/v1/key", None, 501),
        ):
            headers = {} if length is None else {"content-length": length}
            assert found.ask(method, path, headers) == status, (method, path, length)
        for sent in (b"secret secret secret secret\r\n\r\n", b"GET secret\0 HTTP/9.9\r\n\r\n"):
            answer = found.raw(sent)
            assert b"secret" not in answer
            assert b" 200 " not in answer
    assert found.said == releasing.said == []


def test_a_client_that_is_slow_is_cut_off(releasing: Releasing) -> None:
    begun = b"POST /v1/key HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf"
    with serving(releasing.by, deadline_s=0.05) as found:
        for sent in (b"", b"GET", b"GET /v1/nonce HTTP/1.1\r\na: b\r\n", begun):
            assert found.raw(sent) == b""
    assert found.said == releasing.said == []


def test_one_request_is_answered_for_each_connection(releasing: Releasing) -> None:
    request = b"GET /v1/nonce HTTP/1.1\r\nhost: a\r\n\r\n"
    with serving(releasing.by) as found:
        assert found.raw(request + request).count(b"HTTP/1.1 200") == 1


def test_connections_beyond_the_most_wait(releasing: Releasing) -> None:
    request = b"GET /v1/nonce HTTP/1.1\r\nhost: a\r\n\r\n"
    entered, go_on = threading.Semaphore(0), threading.Event()

    def nonce() -> bytes:
        entered.release()
        assert go_on.wait(WAIT_S)
        return bytes(32)

    releasing.by.nonce = nonce  # type: ignore[method-assign]
    with serving(releasing.by, most=2) as found:
        connections = [found.connected() for _ in range(4)]
        for one in connections:
            one.sendall(request)
        assert entered.acquire(timeout=WAIT_S)
        assert entered.acquire(timeout=WAIT_S)
        assert not found.server.places.acquire(blocking=False)
        go_on.set()
        for one in connections:
            assert one.recv(4096).startswith(b"HTTP/1.1 200")
            one.close()
        assert found.ask("GET", "/v1/nonce") == 200


def test_an_error_in_a_connection_is_named_and_not_quoted(releasing: Releasing) -> None:
    def nonce() -> bytes:
        raise ValueError("secret")

    releasing.by.nonce = nonce  # type: ignore[method-assign]
    with serving(releasing.by) as found:
        assert found.raw(b"GET /v1/nonce HTTP/1.1\r\nhost: a\r\n\r\n") == b""
    assert found.said == ["a connection ended by ValueError"]


def test_an_address_that_is_in_use_is_refused(releasing: Releasing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EndpointError, match=f"--listen 127.0.0.1:{port}: got Address already"):
            KeyServer(("127.0.0.1", port), releasing.by, print)
