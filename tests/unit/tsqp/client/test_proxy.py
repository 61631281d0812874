"""Tests of the proxy on this machine: bytes of any program, and none without a proof."""

from __future__ import annotations

import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from protocol.errors import EndpointError
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.statement import Statement
from tee_side.serve.identity import Identity
from tests.kit.evidence import AttestedServer, identity, policy_text, serving
from tsqp.client import AttestedContext, NotAttestedError
from tsqp.client.connection import Address
from tsqp.client.proxy import Proxy

WAIT_S = 30
REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.fixture(scope="module")
def honest() -> Identity:
    """One that passes."""
    return identity()


@pytest.fixture
def policy(tmp_path: Path) -> AppraisalPolicy:
    """What `identity` passes."""
    path = tmp_path / "appraisal.toml"
    path.write_text(policy_text())
    return AppraisalPolicy.load(path)


@contextmanager
def proxied(
    server: AttestedServer,
    policy: AppraisalPolicy,
    again_s: float = 600.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Proxy, list[str]]]:
    said: list[str] = []

    def say(line: str) -> None:
        time.sleep(0.2)  # what is done before it is said is seen by then
        said.append(line)

    context = AttestedContext(policy, again_s, clock=clock)
    proxy = Proxy(("127.0.0.1", 0), Address.of(server.url), context, say)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy, said
    finally:
        proxy.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def _connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), WAIT_S)


def test_bytes_go_both_ways_over_a_connection_of_their_own(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    with serving(honest) as server, proxied(server, policy) as (proxy, said):
        for _ in range(2):
            with _connect(proxy) as near:
                for _ in range(2):
                    near.sendall(REQUEST)
                    assert near.recv(1000).endswith(b'{"served": true}')
        assert bytes(server.received).count(REQUEST) == 4
    assert len(server.asked) == 1
    assert not said


def test_a_client_may_take_its_time_and_end_its_side(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    with serving(honest) as server, proxied(server, policy) as (proxy, _):
        for _ in range(2):  # of the second connection, nothing but tickets has been read
            with _connect(proxy) as near, selectors.DefaultSelector() as waiting:
                waiting.register(near, selectors.EVENT_READ)
                assert not waiting.select(0.3)
                near.sendall(REQUEST)
                near.shutdown(socket.SHUT_WR)
                assert near.recv(1000).endswith(b'{"served": true}')


def test_whatever_fails_it_goes_on_and_cuts(
    policy: AppraisalPolicy, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("a mistake")

    with serving(honest) as server, proxied(server, policy, 0.2) as (proxy, said):
        with _connect(proxy) as near:
            near.sendall(REQUEST)
            assert near.recv(1000).endswith(b'{"served": true}')
            monkeypatch.setattr("tsqp.client.proxy.prove", fail)
            assert near.recv(1000) == b""
        assert failed.wait(WAIT_S)
    assert "connections are cut: RuntimeError" in said


def test_it_outlives_a_lack_of_descriptors(
    policy: AppraisalPolicy, honest: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files")])

    def sometimes(listening: socket.socket) -> object:
        if listening is proxy._listening and (failure := next(failures, None)) is not None:
            raise failure
        return accept(listening)

    with serving(honest) as server, proxied(server, policy) as (proxy, said):
        monkeypatch.setattr(socket.socket, "accept", sometimes)
        for _ in range(2):
            with _connect(proxy) as near:
                near.sendall(REQUEST)
                assert near.recv(1000).endswith(b'{"served": true}')
    assert said == ["not accepted: Too many open files"]


def test_it_does_not_start_without_a_proof(policy: AppraisalPolicy) -> None:
    with (
        serving(identity(model=bytes(32))) as server,
        pytest.raises(NotAttestedError, match="certificate: model"),
    ):
        Proxy(("127.0.0.1", 0), Address.of(server.url), AttestedContext(policy), print)
    assert not server.received


def test_a_connection_without_a_proof_is_closed_unread(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    lies = threading.Event()
    old = honest.state(bytes(32))

    def answer(nonce: bytes) -> Statement:
        return old if lies.is_set() else honest.state(nonce)

    clock = itertools.count(step=600.0)
    with (
        serving(honest, answer) as server,
        proxied(server, policy, clock=lambda: next(clock)) as (proxy, said),
    ):
        lies.set()
        with _connect(proxy) as near:
            near.sendall(REQUEST)
            # The request is left unread, which the kernel may tell as a reset.
            with suppress(ConnectionResetError):
                assert near.recv(1000) == b""
        assert REQUEST not in server.received
    assert any("refused: new evidence: nonce" in line for line in said)


def test_connections_are_cut_when_the_server_proves_nothing_any_more(
    policy: AppraisalPolicy, honest: Identity
) -> None:
    lies, asked = threading.Event(), threading.Event()
    old = honest.state(bytes(32))

    def answer(nonce: bytes) -> Statement:
        if lies.is_set():
            asked.set()
            return old
        return honest.state(nonce)

    with serving(honest, answer) as server, proxied(server, policy, 0.2) as (proxy, said):
        with _connect(proxy) as near:
            near.sendall(REQUEST)
            assert near.recv(1000).endswith(b'{"served": true}')
            lies.set()
            assert near.recv(1000) == b""
        assert asked.is_set()
    assert any("connections are cut: new evidence: nonce" in line for line in said)


def test_an_address_in_use_is_named(policy: AppraisalPolicy, honest: Identity) -> None:
    with serving(honest) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=f"--listen 127.0.0.1:{port}"):
            Proxy(("127.0.0.1", port), Address.of(server.url), AttestedContext(policy), print)
