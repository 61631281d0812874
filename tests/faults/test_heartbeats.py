"""A peer that is stopped is noticed long before any deadline; one that is only busy is not cut.

Nothing here takes an hour, which every deadline is: what is noticed, heartbeats have noticed, or
what a stream has in their place.
"""

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from gpu_side.access import ServiceKeys
from gpu_side.encoding import open_request
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.channel import PendingChannel
from protocol.curve import ClientKeys, read_key
from protocol.errors import AbsentError, EndpointError
from protocol.messages import InitReply, InitRequest, LMHeadRequest
from protocol.native import usable_cores
from protocol.tensors import from_torch
from protocol.transport import open_channel
from protocol.zmq_channel import ZmqChannel
from tests.faults.disturbed import Disturbed, Fault
from tests.faults.row import Found, Row
from tests.kit.demo import watched
from tests.kit.model import SavedModel
from tests.kit.proxy import CLEAN, HOLD
from tests.kit.service import ENVIRONMENT, Forked, Workers, running_service
from tests.kit.wire import tensor_reply
from tsqp.key_files import new_key_pair

_LIMIT_S = 2.0
# More would measure how long sessions wait for each other's processors.
_SIDE_BY_SIDE = min(8, 2 * usable_cores())


FAULTS = (
    Fault("SIGSTOP", lambda peer: peer.service.freeze(), lambda peer: peer.service.thaw()),
    Fault("half-open", lambda peer: peer.link.half_open(), lambda _: None),
    # A hole of a second may heal before heartbeats notice it: then it is only waited for.
    *(
        Fault(
            f"black hole of {s:g} s",
            lambda peer: peer.link.set(HOLD),
            lambda peer: peer.link.set(CLEAN),
            s,
        )
        for s in (1.0, 5.0, 30.0)
    ),
)


@Row(
    "peer_stopped",
    "SIGSTOP, half-open connection, black hole of 1/5/30 s",
    "each as often (the short form: no hole), a fifth over unix://, the others over tcp://, at"
    " random points of a generation, half under dealt, second worker present; holes heal",
    "every one hits; noticed <= 2 s; outputs identical",
    short=4,
    long=320,
    minutes=14,
)
def peer_stopped(count: int, full: bool) -> Found:
    over_unix = count // (5 if full else 2)
    faults, lanes = (FAULTS, _SIDE_BY_SIDE) if full else (FAULTS[:2], 1)
    found = Disturbed()

    def session(lane: int, at: str) -> None:
        points = over_unix if at else count - over_unix
        share = [faults[place % len(faults)] for place in range(lane, points, lanes)]
        schemes, seed = ("unix" if at else "tcp",) * 2, 2 * lane + bool(at)
        dealt = (lane + bool(at)) % 2 == 1
        found.session(workers, sent, schemes, share, seed, proxied=True, dealt=dealt, at=at)

    with Workers() as workers, watched() as sent, ThreadPoolExecutor(2 * lanes) as pool:
        list(pool.map(session, [*range(lanes)] * 2, [""] * lanes + [" over unix"] * lanes))
    times_s, counts = found.times_s, found.counts
    slow = sum(still_s > _LIMIT_S for still_s in times_s)
    return Found(
        {
            "hits": f"{len(times_s)} of {count}",
            "noticed in time": f"{len(times_s) - slow} of {len(times_s)}",
            "outputs identical": f"{counts['generations'] - counts['wrong']} of"
            f" {counts['generations']}",
            **{f"{name}, longest s": max(times) for name, times in sorted(found.still_s.items())},
        },
        {"outputs identical": not counts["wrong"]},
        {"every one hits": len(times_s) == count, "noticed in time": not slow},
    )


HOUR_S = 3600.0
# Of the clients that are to notice something.
SOON_S = 0.1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process give up early on handshakes, and on streams without signs of life."""
    monkeypatch.setattr("protocol.zmq_channel.HANDSHAKE_TIMEOUT_MS", 200)
    monkeypatch.setattr("protocol.liveness.PROBE_AFTER_S", SOON_S / 4)
    monkeypatch.setattr("protocol.liveness._ANSWER_WITHIN_S", SOON_S)


def is_served(channel: PendingChannel) -> bool:
    return isinstance(channel.call(InitRequest()).response, InitReply)


@pytest.mark.parametrize("link", ["tcp with keys", "shm"])
def test_a_stopped_service_is_noticed_by_all_that_wait_and_used_again(
    saved_model: Callable[[], SavedModel], tmp_path: Path, link: str
) -> None:
    bind, options, keys = f"shm://{tmp_path}/s", ["--threads", "1"], None
    if link != "shm":
        for name in ("service", "client"):
            new_key_pair(tmp_path / name)
        public = read_key(tmp_path / "service.pub", secret=False)
        keys = ClientKeys(read_key(tmp_path / "client.key", secret=True), public)
        bind = "tcp://127.0.0.1:*"
        options += ["--identity", str(tmp_path / "service.key")]
        options += ["--allow", str(tmp_path / "client.pub")]
    with ExitStack() as stack:
        made = running_service(saved_model().directory, bind, *options)
        service = stack.enter_context(made)

        def client(heartbeat_s: float = SOON_S) -> PendingChannel:
            how: dict[str, Any] = {"timeout_s": HOUR_S, "heartbeat_timeout_s": heartbeat_s}
            return stack.enter_context(open_channel(service.endpoint, keys=keys, **how))

        channel = client()
        assert is_served(channel)
        service.freeze()
        try:
            waiting = [channel.submit(InitRequest()) for _ in range(3)]
            for request_id in waiting:
                with pytest.raises(EndpointError, match="a lost connection while Init") as caught:
                    channel.wait(request_id)
                assert caught.value.retryable
            # Nor does it answer a new connection, of this client or of one that it never knew.
            with pytest.raises(EndpointError):
                channel.call(InitRequest())
            with pytest.raises((AbsentError, EndpointError)):
                client().call(InitRequest())
        finally:
            service.thaw()
        assert is_served(client(HOUR_S))
        assert is_served(channel)


@pytest.mark.parametrize("with_keys", [False, True])
def test_one_that_is_busy_is_not_cut_off_on_either_side(with_keys: bool) -> None:
    public, secret = zmq.curve_keypair()
    keys = ServiceKeys(secret, frozenset({public})) if with_keys else None
    mine = ClientKeys(secret, public) if with_keys else None
    limit_s = 1.0
    with (
        closing(ZmqListener("tcp://127.0.0.1:*", keys=keys, heartbeat_timeout_s=limit_s)) as made,
        ZmqChannel(
            made.endpoint, timeout_s=HOUR_S, keys=mine, heartbeat_timeout_s=limit_s
        ) as channel,
    ):
        waiting = channel.submit(LMHeadRequest(hidden_states=from_torch(torch.ones(4))))
        assert made.wait(timeout_ms=30_000)
        incoming = made.receive()
        assert incoming is not None
        until = time.monotonic() + 2 * limit_s
        while time.monotonic() < until:
            pow(3, 200_003)  # holds Python's lock while it lasts
        number = open_request(incoming.frames, 2**20).request_id
        assert made.send(incoming.route, tensor_reply(number, torch.ones(2)))
        channel.wait(waiting)
        channel._note_events()
        assert channel._connection == 0


CLIENT = """
import sys, time, zmq
client = zmq.Context().socket(zmq.DEALER)
client.connect(sys.argv[1])
client.send(b"hello")
time.sleep(3600)
"""


def test_a_stopped_client_is_noticed_by_the_service() -> None:
    listener = ZmqListener("tcp://127.0.0.1:*", heartbeat_timeout_s=SOON_S)
    client = Forked("tsqp", [listener.endpoint], ENVIRONMENT, before=CLIENT)
    try:
        assert listener.wait(timeout_ms=30_000)
        incoming = listener.receive()
        assert incoming is not None
        client.send_signal(signal.SIGSTOP)
        # Its kernel would take replies for a long time.
        while listener.send(incoming.route, [b"x"]):
            listener.wait(timeout_ms=20)
    finally:
        client.kill()
        listener.close()
