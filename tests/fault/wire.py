"""Raw sockets and hand-made messages for the fault tests: nothing of ours encodes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

TIMEOUT_MS = 30_000
HIDDEN = 48
HIDDEN_BYTES = HIDDEN * 4


@contextmanager
def connected(kind: int, endpoint: str, linger_ms: int = 0) -> Iterator[zmq.Socket[bytes]]:
    """Yield a client socket with a context of its own."""
    context = zmq.Context()
    client = context.socket(kind)
    client.setsockopt(zmq.LINGER, linger_ms)
    client.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    client.connect(endpoint)
    try:
        yield client
    finally:
        client.close()
        context.term()


def exchange(kind: int, endpoint: str, frames: list[bytes]) -> list[bytes]:
    """Send one message and return the reply's frames."""
    with connected(kind, endpoint) as client:
        client.send_multipart(frames)
        return client.recv_multipart()


def inline(method: object, request: object, **more: object) -> bytes:
    """Return a message of the published schema."""
    return bytes(msgpack.packb({"method": method, "request": request, **more}))


def linear_body(**changes: Any) -> dict[str, Any]:
    """Return a good inline Linear body, changed; `...` removes a field."""
    body = {
        "layer_idx": 0,
        "module_name": "q_proj",
        "hidden_states": bytes(HIDDEN_BYTES),
        "shape": [1, HIDDEN],
        "dtype": "torch.float32",
    } | changes
    return {key: value for key, value in body.items() if value is not ...}


def embedding_body(ids: list[int], **changes: Any) -> dict[str, Any]:
    """Return an inline Embedding body."""
    data = b"".join(n.to_bytes(8, "little", signed=True) for n in ids)
    return {"input_ids": data, "input_shape": [1, len(ids)], "dtype": "torch.float32"} | changes


def matmul_body(a: list[int], b: list[int]) -> dict[str, Any]:
    """Return an inline Matmul body of zeros."""
    sizes = {"a_buffer": a, "b_buffer": b}
    buffers = {}
    for name, shape in sizes.items():
        elements = 1
        for n in shape:
            elements *= n
        buffers[name] = bytes(4 * elements)
    return {**buffers, "a_shape": a, "b_shape": b, "dtype": "torch.float32"}


def header(**changes: Any) -> bytes:
    """Return a good framed Linear header, changed; `...` removes a field."""
    fields = {
        "version": 1,
        "request_id": 7,
        "timeout_ms": TIMEOUT_MS,
        "method": "Linear",
        "request": {
            "layer_idx": 0,
            "module_names": ["q_proj"],
            "hidden_states": {"dtype": "float32", "shape": [1, HIDDEN], "frame": 1},
        },
    } | changes
    return bytes(msgpack.packb({k: v for k, v in fields.items() if v is not ...}))


def framed_linear(**changes: Any) -> bytes:
    """Return a framed Linear header with changed fields of the message itself."""
    fields = msgpack.unpackb(header())["request"] | changes
    return header(request={k: v for k, v in fields.items() if v is not ...})


def is_healthy(endpoint: str) -> bool:
    """Whether a client of each form gets a good answer."""
    (reply,) = exchange(zmq.REQ, endpoint, [inline("Linear", linear_body())])
    framed = exchange(zmq.DEALER, endpoint, [header(), bytes(HIDDEN_BYTES)])
    statuses = {msgpack.unpackb(reply)["status"], msgpack.unpackb(framed[0])["status"]}
    return statuses == {"success"} and len(framed) == 2
