"""Whom the queue takes for one client, of those that a real listener hears."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from gpu_side.access import ServiceKeys
from gpu_side.queues import FairQueue, QueueLimits
from gpu_side.transport.listener import Incoming
from gpu_side.transport.zmq_listener import ZmqListener

SERVICE, SERVICE_SECRET = zmq.curve_keypair()
ONE = zmq.curve_keypair()
OTHER = zmq.curve_keypair()
KEYS = ServiceKeys(SERVICE_SECRET, frozenset({ONE[0], OTHER[0]}))


@contextmanager
def _heard(
    endpoint: str, keys: ServiceKeys | None, *clients: tuple[bytes, bytes]
) -> Iterator[list[Incoming]]:
    """One message of each of so many connections, in their order."""
    with ExitStack() as stack:
        listener = ZmqListener(endpoint, keys=keys)
        stack.callback(listener.close)
        context = stack.enter_context(zmq.Context())
        heard = []
        for public, secret in clients:
            connection = stack.enter_context(context.socket(zmq.DEALER))
            connection.setsockopt(zmq.LINGER, 0)
            if keys is not None:
                connection.curve_publickey, connection.curve_secretkey = public, secret
                connection.curve_serverkey = SERVICE
            connection.connect(listener.endpoint)
            connection.send(b"message")
            assert listener.wait(timeout_ms=30_000)
            incoming = listener.receive()
            assert incoming is not None
            heard.append(incoming)
        yield heard


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_with_keys_all_connections_of_one_key(tmp_path: Path, transport: str) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s"
    queue = FairQueue(QueueLimits(requests=2))
    with _heard(endpoint, KEYS, ONE, ONE, ONE, OTHER) as heard:
        assert [incoming.client for incoming in heard] == [ONE[0]] * 3 + [OTHER[0]]
        # The replies find their own connections all the same.
        assert len({incoming.route for incoming in heard}) == 4
        refused = [bool(queue.put(incoming)) for incoming in heard]
    assert refused == [False, False, True, False]


def test_without_keys_each_connection(tmp_path: Path) -> None:
    with _heard(f"ipc://{tmp_path}/s", None, ONE, ONE) as heard:
        assert [incoming.client for incoming in heard] == [one.route[0] for one in heard]
        assert len({incoming.client for incoming in heard}) == 2
