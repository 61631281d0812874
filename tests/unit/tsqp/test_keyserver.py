"""A model's key goes to programs that prove what they run; whom it is asked of is not believed."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

from protocol.errors import EndpointError, KeyFileError, ProtocolError, SettingsError
from tee_side.attest.appraisal import AppraisalPolicy
from tee_side.attest.guests import simulate
from tee_side.attest.statement import NONE, Claims, Statement, report_data
from tee_side.serve.sealed import HpkeKey, open_secret, seal, seal_secret
from tests.kit.evidence import DIGESTS, MEASUREMENT, SERVICE, identity
from tests.kit.rows import each_row
from tsqp.keyserver import _STEP, KeyRelease, KeyServer, key_of_server, release_info

WAIT_S = 30
KEY = b"\xa5" * 32
OTHER = b"\1" * 32
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
MINE = HpkeKey(hybrid=False)
SERVED = Claims.decode(identity().state(b"").claims)
GET_NONCE = b"GET /v1/nonce HTTP/1.1\r\nhost: a\r\n\r\n"


class Releasing:
    """A KeyRelease. `said`: its decisions; `clock_s`: how late it is."""

    def __init__(self, policy: AppraisalPolicy) -> None:
        self.clock_s, self.said = 1000.0, list[str]()
        self.by = KeyRelease(KEY, policy, self.said.append, lambda: NOW, lambda: self.clock_s)

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
    return Releasing(policy)


def stated(
    nonce: bytes, *, key: HpkeKey = MINE, measurement: bytes = MEASUREMENT, **other: Any
) -> Statement:
    """State what passes; `other`: claims that differ."""
    usual: dict[str, Any] = {
        "purpose": "key",
        "nonce": nonce,
        "time": round(NOW.timestamp()),
        "hpke_suite": key.suite,
        "hpke_key": key.public,
        "tls_key": NONE,
        "receipt_key": None,
        "curve_keys": {"service 1": SERVICE},
    }
    claims = SERVED.model_copy(update=usual | other).encode()
    evidence = simulate(report_data(claims), measurement)
    return Statement(claims=claims, evidence=evidence.encode())


@each_row("hybrid", [False, True])
def test_the_key_opens_in_the_program_that_asked_for_this_purpose_alone(
    releasing: Releasing, hybrid: bool
) -> None:
    key, nonce = HpkeKey(hybrid=hybrid), releasing.by.nonce()
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
    # Nor is what was sealed as a request a key, of a nonce that a false server could choose.
    nonce = b"TSQP sealed body 1\0/v1/embedding"
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
    others = [Releasing(policy).by.nonce(), *(nonce[:cut] for cut in range(1, len(nonce)))]
    for bit in range(8 * len(nonce)):
        changed = bytearray(nonce)
        changed[bit // 8] ^= 1 << bit % 8
        others.append(bytes(changed))
    for other in others:
        assert releasing.refused(stated(other).encode()) == "nonce", other.hex()
    body = stated(nonce).encode()
    releasing.clock_s += 60.0
    # A sender that repeats it gets what the first sender got.
    assert [releasing.by.answer(body)[0] for _ in range(2)] == [200, 200]
    releasing.clock_s += 0.1
    assert releasing.refused(body) == "age of the nonce"


@each_row("body", [b"", b"\0", b"\xc0", b"\x80", b"\x91" * 500, b"x" * 100_000], ids=repr)
def test_what_is_no_statement_of_the_claims_is_refused(releasing: Releasing, body: bytes) -> None:
    assert releasing.refused(body).startswith("statement")
    about = Statement(claims=body, evidence=b"").encode()
    assert releasing.refused(about).startswith("claims")
    nonce = releasing.by.nonce()
    one, two = stated(nonce, key=HpkeKey(hybrid=False)), stated(nonce)
    without = Statement(claims=one.claims, evidence=b"\x80").encode()
    assert releasing.refused(without).startswith("evidence")
    mixed = Statement(claims=one.claims, evidence=two.evidence).encode()
    assert releasing.refused(mixed) == "claims"


class Serving(NamedTuple):
    """A key server that runs. `said`: what its owner was told of connections."""

    server: KeyServer
    said: list[str]

    def raw(self, sent: bytes) -> bytes:
        """Send bytes, and return all that comes until the server ends the connection."""
        with self.connected() as connection:
            connection.sendall(sent)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), WAIT_S)


@contextmanager
def serving(release: KeyRelease, **limits: Any) -> Iterator[Serving]:
    said = list[str]()
    with KeyServer(("127.0.0.1", 0), release, said.append, **limits) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Serving(server, said)
        finally:
            server.shutdown()
            thread.join(WAIT_S)


def test_what_is_no_request_of_the_two_is_refused(releasing: Releasing) -> None:
    longer = b"content-length: %d\r\n" % (Statement.max_bytes + 1)
    with serving(releasing.by) as found:
        for begin, more, status in (
            (b"GET /v1/nonce", b"", b"200"),
            (b"GET /v1/key", b"", b"404"),
            (b"POST /v1/nonce", b"", b"404"),
            (b"POST /v1/key", b"", b"411"),
            (b"POST /v1/key", b"content-length: -1\r\n", b"411"),
            (b"POST /v1/key", b"content-length: %s\r\n" % (b"9" * 5000), b"411"),
            (b"POST /v1/key", longer, b"413"),
            (b"PUT /v1/key", b"", b"501"),
        ):
            answer = found.raw(begin + b" HTTP/1.1\r\nhost: a\r\n" + more + b"\r\n")
            head = answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
            assert head[0].startswith(b"http/1.1 " + status), (begin, more)
            names = {line.partition(b":")[0] for line in head[1:]}
            assert names == {b"content-length", b"cache-control", b"connection"}
        for sent in (b"secret secret secret secret\r\n\r\n", b"GET secret\0 HTTP/9.9\r\n\r\n"):
            answer = found.raw(sent)
            assert b"secret" not in answer
            assert b" 200 " not in answer
        assert found.raw(GET_NONCE + GET_NONCE).count(b"HTTP/1.1 200") == 1
        with pytest.raises(EndpointError, match=f"--listen .*:{found.server.port}: got Address"):
            KeyServer(("127.0.0.1", found.server.port), releasing.by, print)
    assert found.said == releasing.said == []


def test_a_client_that_is_slow_is_cut_off(
    releasing: Releasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that now and then sends a byte is not cut off by the time of a read.
    monkeypatch.setattr("tsqp.keyserver._Connection.timeout", 2 * WAIT_S)
    begun = b"POST /v1/key HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf"
    with serving(releasing.by, deadline_s=0.05) as found:
        for sent in (b"", b"GET", b"GET /v1/nonce HTTP/1.1\r\na: b\r\n", begun):
            assert found.raw(sent) == b""
    assert found.said == releasing.said == []


def test_connections_beyond_the_most_wait_and_an_error_is_not_quoted(releasing: Releasing) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    def nonce() -> bytes:
        entered.release()
        assert go_on.wait(WAIT_S)
        return bytes(32)

    def fails() -> bytes:
        raise ValueError("secret")

    releasing.by.nonce = nonce  # type: ignore[method-assign]
    with serving(releasing.by, most=2) as found:
        connections = [found.connected() for _ in range(4)]
        for one in connections:
            one.sendall(GET_NONCE)
        assert entered.acquire(timeout=WAIT_S)
        assert entered.acquire(timeout=WAIT_S)
        assert not found.server.places.acquire(blocking=False)
        go_on.set()
        for one in connections:
            assert one.recv(4096).startswith(b"HTTP/1.1 200")
            one.close()
        releasing.by.nonce = fails  # type: ignore[method-assign]
        for _ in range(3):  # its place is free again
            assert found.raw(GET_NONCE) == b""
    assert found.said == ["a connection ended by ValueError"] * 3


NONCE = bytes(range(32, 64))
STATED = Statement(claims=b"claims", evidence=b"evidence")


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def sealed(plain: bytes = KEY, info: bytes = release_info(NONCE)) -> Callable[[HpkeKey], bytes]:
    return lambda key: http(seal(key.suite, key.public, info, plain))


def test_a_false_key_server_is_refused_and_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, asked, said = socket.create_connection, list[HpkeKey](), list[Any]()

    def connected(*given: Any, **options: Any) -> socket.socket:
        """Connect to where the answer to the request lies already."""
        near, far = connect(*given, **options), listening.accept()[0]
        answer = said.pop(0)
        far.sendall(answer if isinstance(answer, bytes) else answer(asked[-1]))
        far.shutdown(socket.SHUT_WR)
        stack.callback(far.close)
        return near

    def state(nonce: bytes, key: HpkeKey) -> Statement:
        assert nonce == NONCE
        asked.append(key)
        return STATED

    honest = http(NONCE.hex().encode())
    nonces = (b"", b"secret", NONCE.hex()[:-1].encode(), NONCE.hex().upper().encode(), b"0" * 65)
    keys = [(http(body), "another answer") for body in (b"", b"secret", b"\0" * 1168, b"x" * 2000)]
    keys += [
        (sealed(info=release_info(bytes(32))), "another answer"),
        (sealed(info=b"TSQP sealed body 1\0" + NONCE), "another answer"),
        (sealed(KEY[:16]), "another answer"),
        (sealed(KEY + b"x"), "another answer"),
        (http(b"key of service 1", 403), "a refusal: the step 'key of service 1' failed"),
        (http(b"\x1b[31msecret", 403), "status 403"),
        (http(b"secret\nsecret", 403), "status 403"),
        (http(b"s" * 101, 403), "status 403"),
        (http(b"secret", 500), "status 500"),
        (http(b"secret", 302), "status 302"),
    ]
    rows = [(http(nonce), sealed(), "another answer") for nonce in nonces]
    rows += [(honest, key, got) for key, got in keys]
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(socket, "create_connection", connected)
        said[:] = [honest, sealed()]
        assert key_of_server(url, state) == KEY
        for nonce, key, got in rows:
            said[:] = [nonce, key]
            with pytest.raises(KeyFileError) as refused:
                key_of_server(url, state)
            assert f"--seal-key-server {url}: got {got}, expected " in str(refused.value)
            assert "secret" not in str(refused.value)
            assert KEY.hex() not in str(refused.value)
        for false in (
            b"secret\r\n\r\n",
            b"HTTP/1.1 secret\r\n\r\n",
            b"HTTP/1.1 200 x\r\n" + b"secret: secret\r\n" * 200,
            b"HTTP/1.1 200 x\r\ncontent-length: 64\r\n\r\nsecret",
            http(b"0" * 5000),
            b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\nsecret\r\n",
            b"",
        ):
            said[:] = [false]
            with pytest.raises(EndpointError, match=f"^--seal-key-server {url}: got ") as failed:
                key_of_server(url, state)
            assert "secret" not in str(failed.value)
    with pytest.raises(EndpointError, match=f"{url}: got Connection refused"):
        key_of_server(url, state)


@each_row(
    "url",
    [
        *("", "host:80", "https://host:80", "http://", "http://:80", "http://host:x"),
        *("http://user:secret@host", "http://host/secret", "http://host?secret", "http://h#secret"),
        *("http://host:65536", "http://host:-1", "http://[secret]", "http://ho st", "HTTP://host"),
        "http://host\n",
    ],
)
def test_another_form_of_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(SettingsError, match="got another form, expected http://HOST") as refused:
        key_of_server(url, lambda _nonce, _key: STATED)
    assert "secret" not in str(refused.value)
