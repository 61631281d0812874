"""The tap forwards what it hears unchanged, and says what it shows."""

from __future__ import annotations

import pytest
import torch
import zmq

from protocol.encoding import encode_request
from protocol.messages import (
    EmbeddingRequest,
    InitRequest,
    LinearRequest,
    MatmulRequest,
    Request,
    RingLinearRequest,
)
from protocol.tensors import from_torch
from tsqp.demo.intercepting_proxy import Seen, Tap, describe_request

FLOATS = torch.tensor([[1.5, -2.0, 0.25]])
WORDS = torch.tensor([[-1, 2**31 - 1, -(2**31)]], dtype=torch.int32)
IDS = torch.tensor([7, 8])


@pytest.mark.parametrize(
    ("request_", "what", "layer", "tensors"),
    [
        (
            LinearRequest(
                layer_idx=2,
                module_names=("q_proj", "k_proj", "v_proj"),
                hidden_states=from_torch(FLOATS),
            ),
            "q_proj k_proj v_proj",
            2,
            [FLOATS],
        ),
        (
            RingLinearRequest(layer_idx=0, module_names=("o_proj",), elements=from_torch(WORDS)),
            "o_proj",
            0,
            [WORDS],
        ),
        (
            EmbeddingRequest(input_ids=from_torch(IDS), dtype="float32"),
            "Embedding",
            None,
            [IDS],
        ),
        (
            MatmulRequest(a=from_torch(FLOATS), b=from_torch(FLOATS.T)),
            "Matmul",
            None,
            [FLOATS, FLOATS.T],
        ),
    ],
)
def test_a_request_is_described_with_all_its_tensors(
    request_: Request, what: str, layer: int | None, tensors: list[torch.Tensor]
) -> None:
    seen = describe_request(request_)
    assert seen is not None
    assert (seen.what, seen.layer) == (what, layer)
    assert len(seen.tensors) == len(tensors)
    for ours, theirs in zip(seen.tensors, tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert seen.numbers(2) == tensors[0].flatten()[:2].tolist()


def test_init_shows_nothing() -> None:
    assert describe_request(InitRequest()) is None


def test_frames_pass_unchanged_in_both_directions() -> None:
    heard: list[Seen] = []
    context = zmq.Context()
    service, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket in (service, client):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
    try:
        service.bind("tcp://127.0.0.1:*")
        endpoint = service.getsockopt_string(zmq.LAST_ENDPOINT)
        request = RingLinearRequest(
            layer_idx=1, module_names=("down_proj",), elements=from_torch(WORDS)
        )
        frames = [bytes(frame) for frame in encode_request(request, 1, timeout_ms=1000)]
        with Tap(endpoint, heard.append) as tap:
            client.connect(tap.endpoint)
            # Not a request at all: passes, too, and is not shown.
            for sent in (frames, [b"nonsense"]):
                client.send_multipart(sent)
                sender, *arrived = service.recv_multipart()
                assert arrived == sent
                service.send_multipart([sender, b"reply", b"\x00\xff"])
                assert client.recv_multipart() == [b"reply", b"\x00\xff"]
    finally:
        service.close()
        client.close()
        context.term()
    assert [(seen.what, seen.layer) for seen in heard] == [("down_proj", 1)]
    assert torch.equal(heard[0].first, WORDS)
