"""Services that answer Init rightly and then misbehave, over real sockets: what becomes of each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request
from gpu_side.transport.bind import open_listener
from protocol.connect import open_channel
from protocol.errors import EndpointError, ErrorCode, ProtocolError, ServiceError, TsqpError
from protocol.messages import (
    InitConfig,
    InitReply,
    LMHeadRequest,
    NormWeight,
    Response,
    RotaryParams,
    TensorReply,
    Timing,
)
from protocol.pending import PendingChannel
from protocol.tensors import from_torch
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import Replicas

MOST_REPLY_BYTES = 2**16
# Of a request: nothing here waits for as long.
TIMEOUT_S = 30.0
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(4)))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Rogue:
    """A service in a thread of its own. `answer`: to whatever is no Init.

    `asked`: how often it was, `most_descriptors`: of this process, whenever Init was asked.
    """

    def __init__(self, endpoint: str, answer: Response | ErrorCode, number: int) -> None:
        self.asked = 0
        self.most_descriptors = 0
        self._answer = answer
        self._instance = f"{number:032x}"
        self._stop = threading.Event()
        self._listener = open_listener(endpoint)
        self.endpoint = self._listener.endpoint
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._listener.wait(timeout_ms=20)
            while (incoming := self._listener.receive()) is not None:
                opened = open_request(incoming.frames, 2**20)
                result: Response | ErrorCode = self._answer
                if opened.method == "Init":
                    self.most_descriptors = max(self.most_descriptors, _descriptors())
                    result = _init_reply(self._instance)
                else:
                    self.asked += 1
                timing = Timing(queue_us=1, compute_us=1)
                frames = encode_reply(Form.FRAMED, opened.request_id, opened.method, result, timing)
                self._listener.send(incoming.route, frames)
        self._listener.close()


def _init_reply(instance: str) -> InitReply:
    return InitReply(
        config=InitConfig(num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2),
        rotary_emb_params=RotaryParams(inv_freq=from_torch(torch.ones(1)), attention_scaling=1.0),
        norm_weights={"final_norm": NormWeight(weight=from_torch(torch.ones(4)), eps=1e-5)},
        model_digest="a" * 64,
        linear_digest="b" * 64,
        max_message_bytes=2**20,
        arithmetic=("float", "int8"),
        provision_id=None,
        instance_id=instance,
        layers=(0, 0),
        max_queued_requests=1,
        max_queued_bytes=1,
    )


def _bytes(size: int) -> TensorReply:
    return TensorReply(output=from_torch(torch.zeros(size // 4)))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rogue]]:
    """Return a function that starts a service with an answer, over a transport."""
    started: list[Rogue] = []

    def go(answer: Response | ErrorCode, transport: str = "tcp") -> Rogue:
        path = f"{transport}://{tmp_path}/{len(started)}"
        bind = "tcp://127.0.0.1:*" if transport == "tcp" else path
        rogue = Rogue(bind, answer, len(started))
        started.append(rogue)
        return rogue

    yield go
    for rogue in started:
        rogue.close()


@contextmanager
def _replicas(*rogues: Rogue) -> Iterator[Replicas]:
    def connect(endpoint: str) -> PendingChannel:
        channel = open_channel(endpoint, timeout_s=TIMEOUT_S)
        channel.limit_replies(MOST_REPLY_BYTES)
        return channel

    def verify(_endpoint: str, reply: Response, *_held: tuple[int, int]) -> InitReply:
        assert isinstance(reply, InitReply)
        return reply

    group = ReplicaGroup(1, 0, 0, tuple(rogue.endpoint for rogue in rogues))
    services = Services([group], 1, ConnectOptions(connect, verify, timeout_s=TIMEOUT_S))
    try:
        services.connect(10.0)
        (channel,) = services.at(0)
        assert isinstance(channel, Replicas)
        yield channel
    finally:
        services.close()


def _error(replicas: Replicas) -> TsqpError:
    with pytest.raises(TsqpError) as caught:
        replicas.call(REQUEST)
    return caught.value


@pytest.mark.parametrize("transport", ["tcp", "ipc", "unix", "shm"])
def test_who_always_says_that_it_is_about_to_end_does_not_use_up_descriptors(
    start: Callable[..., Rogue], transport: str
) -> None:
    rogue = start(ErrorCode.SHUTTING_DOWN, transport)
    with _replicas(rogue) as replicas:
        connected = _descriptors()
        for _ in range(2):
            error = _error(replicas)
            assert isinstance(error, ServiceError)
            assert error.code is ErrorCode.SHUTTING_DOWN
    assert rogue.asked == 10
    # Beside the first connection a second, at both of its ends; over ZeroMQ each end has several.
    assert rogue.most_descriptors <= connected + 20


@pytest.mark.parametrize("code", [ErrorCode.SHUTTING_DOWN, ErrorCode.QUEUE_FULL])
def test_a_good_one_answers_instead(start: Callable[..., Rogue], code: ErrorCode) -> None:
    rogue, good = start(code), start(_bytes(4))
    with _replicas(rogue, good) as replicas:
        assert replicas.call(REQUEST).endpoint == good.endpoint
        assert replicas.call(REQUEST).endpoint == good.endpoint
    assert rogue.asked == 1


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_frame_beyond_the_limit_is_a_lost_connection_over_zeromq(
    start: Callable[..., Rogue], transport: str
) -> None:
    """libzmq ends the connection, and says no more than that."""
    rogue = start(_bytes(2 * MOST_REPLY_BYTES), transport)
    with _replicas(rogue) as replicas:
        assert isinstance(_error(replicas), EndpointError)
        assert replicas.members[0].quarantined is None
    assert rogue.asked == 5


@pytest.mark.parametrize(
    ("transport", "size"),
    [
        # No frame is too large, both together are.
        ("tcp", MOST_REPLY_BYTES - 4),
        ("ipc", MOST_REPLY_BYTES - 4),
        ("unix", MOST_REPLY_BYTES - 4),
        ("unix", 2 * MOST_REPLY_BYTES),
        ("shm", MOST_REPLY_BYTES - 4),
        ("shm", 2 * MOST_REPLY_BYTES),
    ],
)
def test_a_reply_beyond_the_limit_is_quarantined(
    start: Callable[..., Rogue], transport: str, size: int
) -> None:
    rogue = start(_bytes(size), transport)
    with _replicas(rogue) as replicas:
        error = _error(replicas)
        assert isinstance(error, ProtocolError)
        assert error.code is ErrorCode.LIMIT_EXCEEDED
        assert replicas.members[0].quarantined is error
    assert rogue.asked == 1
