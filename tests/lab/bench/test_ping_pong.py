"""Ping-pongs: what comes back is what was sent, and ours carries the frames that raw carries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from protocol.connect import open_channel
from protocol.messages import LinearRequest
from protocol.tensors import from_torch
from tsqp.lab.bench.ping_pong import (
    TRANSPORTS,
    frames_of,
    main,
    our_pings,
    our_service,
)
from tsqp.lab.bench.random_model import write_random_model


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


def test_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--transports", "zeromq-tcp,tcp", "--payloads", "4096", "--round-trips", "4"])
    found = json.loads(capsys.readouterr().out)
    assert [(p["transport"], p["payload_bytes"], p["kind"]) for p in found] == [
        ("zeromq-tcp", 4096, "ours"),
        ("zeromq-tcp", 4096, "raw"),
        ("tcp", 4096, "raw"),
    ]
    assert all(0 < p["p50_us"] <= p["p90_us"] and p["round_trips"] == 50 for p in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--payloads", "5000"], "--payloads: got 5000, expected multiples of 4096"),
        (["--payloads", "0"], "--payloads: got 0"),
        (["--transports", "pigeon"], "--transports: got 'pigeon', expected of zeromq-ipc, "),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="ping_pong: error: ") as ended:
        main(arguments)
    assert message in str(ended.value.code)
