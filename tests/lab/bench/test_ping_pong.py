"""Ping-pongs: what comes back is what was sent, and ours carries the frames that raw carries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocol.connect import open_channel
from protocol.messages import LinearRequest
from protocol.tensors import from_torch
from tsqp.lab.bench.ping_pong import TRANSPORTS, frames_of, our_pings, our_service
from tsqp.lab.bench.random_model import write_random_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["zeromq-ipc", "unix", "shm"])
def test_ours_sends_and_receives_as_many_bytes_as_raw(tmp_path: Path, name: str) -> None:
    from tsqp.lab.bench.ping_pong import _SETTINGS

    write_random_model(tmp_path, _SETTINGS)
    hidden = torch.ones(4, 2048, dtype=torch.bfloat16)
    request, reply = frames_of(hidden)
    endpoint = str(TRANSPORTS[name].ours).format(folder=tmp_path)
    with our_service(endpoint, tmp_path, "null", 0.0) as bound:
        with our_pings(bound, hidden, 0.0) as round_trip:
            output = round_trip()
        assert isinstance(output, torch.Tensor)
        assert (output.shape, output.dtype) == (hidden.shape, hidden.dtype)
        channel = open_channel(bound)
        exchange = channel.call(
            LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=from_torch(hidden))
        )
        channel.close()
    assert exchange.bytes_sent == sum(map(len, request))
    # Microseconds are as long as they are large in some spellings of a header.
    assert abs(exchange.bytes_received - sum(map(len, reply))) <= 16
