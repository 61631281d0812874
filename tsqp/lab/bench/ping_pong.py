"""One RPC of ours beside a raw ping-pong of the same frames on the same transport.

    python -m tsqp.lab.bench.ping_pong [--transports zeromq-ipc,zeromq-tcp,unix,shm,tcp]
        [--payloads 4096,65536,1048576] [--round-trips 1000] [--spin-us 0] [--json FILE]

`ours`: a Linear through `protocol.channel` to `gpu-service --device null`, from tensor to tensor:
encoding, checks and decoding of both sides are in it. Its module is as wide as it is high, so that
as many bytes come back. `raw`: an echo of frames of these sizes with nothing of ours; of `shm`,
with nothing above the slots. For `tcp`, a plain socket, there is only that. Both servers are
processes of their own. The two alternate in short blocks, so that what else the machine does meets
both, and the first round trips of each block do not count.

Prints a list of `tsqp.lab.bench.results.PingPong` as JSON.
"""

from __future__ import annotations

import gc
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
import zmq

from gpu_side.encoding import encode_reply
from gpu_side.transport.stream_client import adopt
from protocol.encoding import encode_request
from protocol.errors import SettingsError
from protocol.messages import LinearRequest, TensorReply, Timing
from protocol.prepared import PreparedRequest
from protocol.shared_memory import ATTACH, WAKE_UP, Lane, create
from protocol.stream_wire import frames_in
from protocol.tensors import Buffer, from_torch, short_name
from protocol.transport import open_channel
from tsqp.lab.bench.prepare import write_random_model
from tsqp.lab.bench.results import PingPong
from tsqp.lab.bench.shapes import Shape
from tsqp.lab.measure import (
    elapsed_us,
    in_fresh_process,
    in_turns,
    processes,
    script,
    write_results,
)
from tsqp.processes import start_service

R = TypeVar("R")

_WIDTH = 2048
_ROW_BYTES = _WIDTH * torch.bfloat16.itemsize
# Until a process that has been asked to echo does so: it imports torch first.
_TIMEOUT_MS = 60_000
# o_proj is square: 32 heads of 64 in, 2048 out.
_SHAPE = Shape(
    "square",
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": _WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
)


# Where our service binds (None: it has no such transport), which end of the raw echo is used, and
# where that listens; `{folder}` filled in.
TRANSPORTS: dict[str, tuple[str | None, Literal["zeromq", "stream", "shm"], Any]] = {
    "zeromq-ipc": ("ipc://{folder}/ours.ipc", "zeromq", "ipc://{folder}.ipc"),
    "zeromq-tcp": ("tcp://127.0.0.1:*", "zeromq", "tcp://127.0.0.1:*"),
    "unix": ("unix://{folder}/ours.sock", "stream", "{folder}.sock"),
    "shm": ("shm://{folder}/ours.sock", "shm", "{folder}.sock"),
    "tcp": (None, "stream", ("127.0.0.1", 0)),
}


# Payloads are bytes each way; the device is that of our service; both sides of both spin.
OPTIONS: dict[str, Any] = {
    "transports": ",".join(TRANSPORTS),
    "payloads": (4096, 65536, 1048576),
    "round_trips": 1000,
    "device": "null",
    "spin_us": 0.0,
}


def raw_pings(
    running: ExitStack,
    submit: Callable[..., object],
    kind: str,
    place: Any,
    request: Sequence[Buffer],
    reply: Sequence[Buffer],
    spin_us: float,
) -> Callable[[], object]:
    """Have a process echo frames of these sizes, and return what makes one round trip."""
    sizes = sum(map(len, request)), sum(map(len, reply))
    begin = partial(submit, serve, kind, sizes[0], [*map(len, reply)], spin_us)
    frames, end = [bytes(frame) for frame in request], open_end(kind, place, sizes, spin_us, begin)

    def round_trip() -> None:
        end.send(frames)
        if end.receive() is None:
            raise ConnectionError("the echo server has gone")

    running.callback(end.close)
    return round_trip


def our_pings(
    running: ExitStack, endpoint: str, request: LinearRequest, hidden: torch.Tensor, spin_us: float
) -> Callable[[], object]:
    """Return what sends a tensor through the square module and returns what comes back."""
    # As a call plan has it: the module is square, and its reply like its request.
    prepared = PreparedRequest(request, tuple(hidden.shape), short_name(hidden.dtype))
    channel = running.enter_context(open_channel(endpoint, spin_us=spin_us))

    def round_trip() -> torch.Tensor:
        return prepared.output(channel.wait(channel.start(prepared, hidden)))

    return round_trip


def frames_of(request: LinearRequest) -> tuple[list[Buffer], list[Buffer]]:
    """Return the frames of a request and of its reply, as they are on the wire."""
    output = TensorReply(output=request.hidden_states)
    reply = encode_reply("framed", 1, request.method, output, Timing(queue_us=1, compute_us=1))
    return list(encode_request(request, 1, _TIMEOUT_MS)), list(reply)


def interleaved(
    contenders: Sequence[Callable[[], object]],
    round_trips: int,
    block: int = 50,
    settle: int = 5,
) -> list[list[float]]:
    """Return microseconds of at least so many round trips of each, in turns of short blocks.

    The first `settle` of a block are not counted.
    """

    def block_us(round_trip: Callable[[], object]) -> list[float]:
        for _ in range(settle):
            round_trip()
        return [elapsed_us(round_trip) for _ in range(block)]

    rows = in_turns([partial(block_us, one) for one in contenders], -(-round_trips // block))
    return [[*chain.from_iterable(blocks)] for blocks in zip(*rows, strict=True)]


def measure(name: str, submit: Callable[..., object], options: Any) -> Iterator[PingPong]:
    """Measure one transport with every payload. Raises EndpointError, SettingsError."""
    (ours, end, raw), spin_us = TRANSPORTS[name], options.spin_us
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if ours is not None:
            write_random_model(folder, _SHAPE)
            service = [
                *(str(folder), "--bind", ours.format(folder=folder), "--device", options.device),
                *("--arithmetic", "float", "--spin-us", str(spin_us)),
            ]
            _, endpoint = start_service(stack, service)
        for payload in options.payloads:
            hidden = torch.zeros(payload // _ROW_BYTES, _WIDTH, dtype=torch.bfloat16)
            tensor = from_torch(hidden)
            request = LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=tensor)
            with ExitStack() as of_payload:
                kinds: dict[Literal["ours", "raw"], Callable[[], object]] = {}
                if ours is not None:
                    kinds["ours"] = our_pings(of_payload, endpoint, request, hidden, spin_us)
                place = raw.format(folder=f"{folder}/{payload}") if isinstance(raw, str) else raw
                kinds["raw"] = raw_pings(
                    of_payload, submit, end, place, *frames_of(request), spin_us
                )
                times = interleaved(list(kinds.values()), options.round_trips)
            for kind, found in zip(kinds, times, strict=True):
                yield PingPong(
                    transport=name,
                    payload_bytes=payload,
                    kind=kind,
                    p50_us=statistics.median(found),
                    p90_us=statistics.quantiles(found, n=10)[-1],
                    round_trips=len(found),
                )


def measure_round_trips(options: Any) -> list[PingPong]:
    """Measure what the command line asks for."""
    for size in options.payloads:
        SettingsError.unless(
            size > 0 and size % _ROW_BYTES == 0,
            "--payloads",
            str(size),
            f"multiples of {_ROW_BYTES}",
        )
    names = options.transports.split(",")
    for name in names:
        SettingsError.unless(
            name in TRANSPORTS, "--transports", repr(name), f"of {', '.join(TRANSPORTS)}"
        )
    with processes(1, "raw_echo", lambda _: None) as submit:
        return [found for name in names for found in measure(name, submit, options)]


# ----------------------------------------------------------------------------------- raw echo


def serve(
    kind: str, request_bytes: int, reply_sizes: Sequence[int], spin_us: float, place: Any
) -> None:
    """Answer each request of the one that listens there, until it has gone."""
    reply = [bytes(size) for size in reply_sizes]
    gc.collect()
    gc.freeze()  # as gpu-service does
    end = open_end(kind, place, (request_bytes, sum(reply_sizes)), spin_us)
    while end.receive() is not None:
        end.send(reply)
    end.close()


def open_end(
    kind: str,
    place: Any,
    sizes: tuple[int, int],
    spin_us: float,
    begin: Callable[[Any], object] | None = None,
) -> _Zmq | _Stream:
    """Return the end that echoes, or the one that pings: it listens, and has the other `begin`.

    `kind`: "zeromq" (zero-copy receive), a plain "stream" socket, or "shm": one slot of a segment,
    with a socket to wake up by. `place`: an endpoint of ZeroMQ, a path, or a host and a port.
    `sizes`: of a request and a reply in bytes. An end's `receive` returns None once the peer has
    gone.
    """
    if kind == "zeromq":
        return _Zmq(place, spin_us, begin)
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    if begin is None:
        stream = socket.socket(family)
        stream.connect(place)
    else:
        with socket.create_server(place, family=family) as listener:
            begin(listener.getsockname())
            listener.settimeout(_TIMEOUT_MS / 1e3)
            stream, _ = listener.accept()
    if kind == "stream":
        return _Stream(stream, sizes[0 if begin is None else 1], spin_us)
    if begin is None:
        _, (file,), _, _ = socket.recv_fds(stream, len(ATTACH), 1)
        return _Shm(stream, adopt(file, os.getuid()), spin_us)
    lane, file = create(*sizes)
    socket.send_fds(stream, [ATTACH], [file])
    os.close(file)
    return _Shm(stream, lane, spin_us)


class _Zmq:
    """A DEALER socket, whose peer is another. An empty message says that the peer has gone."""

    def __init__(self, address: str, spin_us: float, begin: Callable[[str], object] | None) -> None:
        self._spin_us, self._pings = spin_us, begin is not None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
        if begin is None:
            self._socket.connect(address)
        else:
            self._socket.bind(address)
            begin(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(frames, copy=False)

    def receive(self) -> Sequence[object] | None:
        look = partial(self._socket.recv_multipart, copy=False)
        frames = _spinning(look, zmq.NOBLOCK, self._spin_us)
        return frames if len(frames[0]) else None

    def close(self) -> None:
        if self._pings:
            self._socket.send(b"")
        self._socket.close(linger=1000)


class _Stream:
    """A stream socket: frames one behind the other, and both ends know how long a message is."""

    def __init__(self, stream: socket.socket, receives: int, spin_us: float) -> None:
        self._socket, self._spin_us = stream, spin_us
        self._buffer = memoryview(bytearray(receives))
        if stream.family == socket.AF_INET:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frames: Sequence[bytes]) -> None:
        # A socket that blocks takes all of them, one behind the other.
        self._socket.sendmsg(frames)

    def receive(self) -> Sequence[object] | None:
        got = 0
        while got < len(self._buffer):
            look = partial(self._socket.recv_into, self._buffer[got:], 0)
            count = _spinning(look, socket.MSG_DONTWAIT, self._spin_us)
            if count == 0:
                return None
            got += count
        return [self._buffer]

    def close(self) -> None:
        self._socket.close()


class _Shm(_Stream):
    """One slot of shared memory, and nothing else; the stream wakes up."""

    def __init__(self, stream: socket.socket, lane: Lane, spin_us: float) -> None:
        super().__init__(stream, 0, spin_us)
        self._lane = lane

    def send(self, frames: Sequence[bytes]) -> None:
        if self._lane.put(0, frames):
            self._socket.send(WAKE_UP)

    def receive(self) -> Sequence[object] | None:
        lane = self._lane
        while lane.look(int(self._spin_us)) < 0:
            lane.sleeps(True)
            try:
                if lane.look() >= 0:
                    break
                if not self._socket.recv(1024):
                    return None
            finally:
                lane.sleeps(False)
        return frames_in(lane.view(0), "peer", max_frames=8, max_message_bytes=2**30)


def _spinning(look: Callable[[int], R], at_once: int, spin_us: float) -> R:
    """Look for so long with the flag that does not wait, then without it."""
    until_ns = time.perf_counter_ns() + int(spin_us * 1000)
    while spin_us and time.perf_counter_ns() < until_ns:
        try:
            return look(at_once)
        except (zmq.Again, BlockingIOError):
            os.sched_yield()  # as ours does: other threads may need this core
    return look(0)


def ping_pong(spin_us: float = 0.0) -> tuple[PingPong, ...]:
    """Measure every transport in a process of its own, by few round trips. Raises ProcessError."""
    options = OPTIONS | {"round_trips": 300, "spin_us": spin_us}
    return tuple(
        in_fresh_process(
            measure_round_trips, SimpleNamespace(**options), where="baseline raw ping-pong"
        )
    )


if __name__ == "__main__":
    write_results(*script(__doc__, measure_round_trips, **OPTIONS))
