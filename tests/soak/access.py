"""Row: who is served by a service with keys.

Clients with every kind of key, all at once, at a service whose ZAP handler is there, has died, or
does not answer. Raw sockets, so that nothing of our own client refuses before the service does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal
from unittest.mock import PropertyMock, patch

import zmq

from gpu_side.access import ServiceKeys
from gpu_side.handler import RequestHandler
from gpu_side.transport.zap import ZapHandler
from protocol.encoding import encode_request
from protocol.messages import InitRequest
from tests.kit.lie import MaliciousService, operators_of
from tests.soak.demo import DEMO
from tests.soak.row import RowResult, note, progress

NAME = "access"
TEST = (
    "no key, NULL, PLAIN, random, revoked, another service's key, right key, with ZAP up, dead and"
    " silent: the full matrix, again and again"
)
PASS = "only the right key is ever served"
MINUTES = 1

Doorkeeping = Literal["up", "dead", "silent"]
STATES: tuple[Doorkeeping, ...] = ("up", "dead", "silent")
CLIENTS = ("no key", "NULL", "PLAIN", "random", "revoked", "another service", "right")
FULL, SHORT = 20 * len(STATES) * len(CLIENTS), len(STATES) * len(CLIENTS)

# As long as somebody who is not served waits; who is served waits for milliseconds.
_UNSERVED_S = 0.5
_SERVED_S = 20.0


@dataclass(frozen=True)
class Key:
    """A key pair, Z85."""

    public: bytes
    secret: bytes

    @staticmethod
    def new() -> Key:
        """Make one."""
        return Key(*zmq.curve_keypair())


class Client:
    """A raw client of one kind. `key`: its own, where it has one; `server`: whom it expects."""

    def __init__(self, kind: str, endpoint: str, key: Key | None, server: bytes) -> None:
        self.kind = kind
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if kind == "PLAIN":
            self._socket.setsockopt(zmq.PLAIN_USERNAME, b"admin")
            self._socket.setsockopt(zmq.PLAIN_PASSWORD, b"admin")
        elif kind == "no key":
            # The mechanism, and a key pair of zeros.
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, b"0" * 40)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, b"0" * 40)
        elif key is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self._socket.connect(endpoint)

    def ask(self, request_id: int) -> None:
        """Send a request, or leave it in the queue of a connection that never comes."""
        with suppress(zmq.Again):  # it was turned away, and has no queue any more
            frames = encode_request(InitRequest(), request_id, 10_000)
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def is_served(self, within_s: float) -> bool:
        """Wait for a reply, and say whether there was one."""
        if not self._socket.poll(int(1000 * within_s)):
            return False
        self._socket.recv_multipart()
        return True

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
        self._context.term()


@cache
def _operators() -> RequestHandler:
    return operators_of(DEMO)


@contextmanager
def service_in(state: Doorkeeping, keys: ServiceKeys) -> Iterator[MaliciousService]:
    """Run an honest service whose ZAP handler is in some state."""
    with ExitStack() as stack:
        service = stack.enter_context(MaliciousService(_operators(), keys=keys))
        handler = service.listener._zap_handler
        if handler is None:
            raise RuntimeError("a service with keys: got no ZAP handler, expected one")
        closing = threading.Event()
        stack.callback(closing.set)

        def die(_: list[bytes]) -> list[bytes]:
            raise RuntimeError("died")

        def say_nothing(_: list[bytes]) -> list[bytes]:
            closing.wait()
            return [b""]

        answers = {"dead": die, "silent": say_nothing}
        if state in answers:
            stack.enter_context(patch.object(handler, "_answer", answers[state]))
            # A listener that sees its handler dead ends. This one does not see it: ZeroMQ itself
            # has to let nobody in.
            unseen = PropertyMock(return_value=False)
            stack.enter_context(patch.object(ZapHandler, "failed", unseen, create=True))
        yield service


def served(state: Doorkeeping, stack: ExitStack) -> tuple[dict[str, bool], bool]:
    """Have a client of every kind ask, and say who got an answer.

    And whether the revoked one was served before it was, as it has to be with somebody at the door.
    """
    own, right, revoked = Key.new(), Key.new(), Key.new()
    keys = ServiceKeys(own.secret, frozenset({right.public, revoked.public}))
    service = stack.enter_context(service_in(state, keys))
    pairs = {"random": Key.new(), "revoked": revoked, "another service": right, "right": right}

    def client(kind: str) -> Client:
        server = Key.new().public if kind == "another service" else own.public
        made = Client(kind, service.endpoint, pairs.get(kind), server)
        stack.callback(made.close)
        return made

    live = client("revoked")
    live.ask(1)
    # With nobody at the door it never gets in at all.
    got_in = live.is_served(_SERVED_S if state == "up" else _UNSERVED_S)
    if got_in != (state == "up"):
        note(f"before it was revoked, ZAP {state}: got served {got_in}")
    cut, cut_connections = threading.Event(), service.listener._cut_connections

    def cutting() -> None:
        cut_connections()
        cut.set()

    stack.enter_context(patch.object(service.listener, "_cut_connections", cutting))
    service.listener.allow(frozenset({right.public}))
    live.ask(2)
    # All connections are cut when the listener is next used: what somebody else had asked by then
    # would have to be asked again.
    if got_in and not cut.wait(_SERVED_S):
        raise TimeoutError("got connections as before, expected them cut")
    clients = [client(kind) for kind in CLIENTS]
    for one in clients:
        one.ask(3)
    # The one that is to be served first: meanwhile the others have time to get in, too.
    found = {"right": clients[-1].is_served(_SERVED_S if state == "up" else _UNSERVED_S)}
    until = time.monotonic() + _UNSERVED_S
    for one in clients[:-1]:
        found[one.kind] = one.is_served(max(0.0, until - time.monotonic()))
    found["revoked"] = found["revoked"] or live.is_served(0) or (got_in and state != "up")
    return found, got_in


def run(count: int) -> RowResult:
    """Go through the matrix as often as makes so many cells."""
    began = time.monotonic()
    cells = wrongly = rightly = before = rounds = 0
    # A ZAP handler that dies says so with a traceback.
    logging.getLogger("gpu_service").setLevel(logging.CRITICAL)
    try:
        while cells < count:
            rounds += 1
            for state in STATES:
                with ExitStack() as stack:
                    found, got_in = served(state, stack)
                before += got_in and state == "up"
                for kind, got in found.items():
                    # Where nobody can be asked, not even the right key is let in.
                    if kind == "right" and state == "up":
                        rightly += got
                    else:
                        wrongly += got
                    if got != (kind == "right" and state == "up"):
                        note(f"{kind}, ZAP {state}: got served {got}")
                cells += len(found)
                progress(cells)
    finally:
        logging.getLogger("gpu_service").setLevel(logging.NOTSET)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "clients": len(CLIENTS),
            "cells": cells,
            "wrongly served": wrongly,
            "right key served with ZAP up": f"{rightly} of {rounds}",
            "served before it was revoked": f"{before} of {rounds}",
        },
        time.monotonic() - began,
        passed=not wrongly and rightly == rounds == before,
    )
