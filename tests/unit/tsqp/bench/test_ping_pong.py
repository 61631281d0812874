"""Ping-pongs: what comes back is what was sent, and ours carries the frames that raw carries."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path

import pytest
import torch

from protocol.connect import open_channel
from protocol.errors import SettingsError
from protocol.messages import LinearRequest
from protocol.tensors import from_torch
from tsqp.lab.bench.ping_pong import (
    TRANSPORTS,
    frames_of,
    interleaved,
    main,
    our_pings,
    our_service,
    raw_pings,
    running,
)
from tsqp.lab.bench.random_model import write_random_model
from tsqp.lab.bench.raw_echo import receive_exactly, send_frames


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("spin_us", [0.0, 200.0])
def test_raw_echoes_frames_of_the_sizes_of_a_reply(
    tmp_path: Path, name: str, spin_us: float
) -> None:
    request, reply = frames_of(torch.ones(256, 2048, dtype=torch.bfloat16))
    address = TRANSPORTS[name].raw.format(folder=tmp_path / "echo")
    with raw_pings(address, request, reply, spin_us) as round_trip:
        for _ in range(3):
            got = round_trip()
            assert isinstance(got, list)
            if name.startswith(("zeromq", "shm")):
                assert [len(frame) for frame in got] == [len(frame) for frame in reply]
                assert bytes(got[1]) == bytes(request[1])
            else:
                assert len(got[0]) == sum(map(len, reply))
                assert bytes(got[0]) == b"".join(map(bytes, request))[: len(got[0])]


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


def test_turns_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsqp.lab.bench.ping_pong.SETTLE", 2)
    turns: list[str] = []
    contenders = [lambda: turns.append("a"), lambda: turns.append("b")]
    times = interleaved(contenders, 7, block=3)
    assert [len(found) for found in times] == [9, 9]
    blocks = [(who, len(list(run))) for who, run in itertools.groupby(turns)]
    assert blocks == [("a", 5), ("b", 5)] * 3


def test_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--transports", "zeromq-tcp,tcp", "--payloads", "4096,8192", "--round-trips", "4"])
    found = json.loads(capsys.readouterr().out)
    assert [(p["transport"], p["payload_bytes"], p["kind"]) for p in found] == [
        ("zeromq-tcp", 4096, "ours"),
        ("zeromq-tcp", 4096, "raw"),
        ("zeromq-tcp", 8192, "ours"),
        ("zeromq-tcp", 8192, "raw"),
        ("tcp", 4096, "raw"),
        ("tcp", 8192, "raw"),
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


def test_a_server_that_does_not_start_is_an_error() -> None:
    with (
        pytest.raises(SettingsError, match="echo: got nonsense, expected a line with 'ready'"),
        running(["/bin/echo", "nonsense"], "ready ", "stdout"),
    ):
        pass


def test_a_partial_send_is_finished() -> None:
    class Slow:
        """Takes five bytes in the first call, as a full socket buffer would."""

        def __init__(self) -> None:
            self.taken = b""

        def sendmsg(self, frames: list[bytes]) -> int:
            self.taken = b"".join(frames)[:5]
            return 5

        def sendall(self, data: memoryview) -> None:
            self.taken += bytes(data)

    for frames in ([b"abc", b"defgh", b"ij"], [b"abcde", b"f"], [b"abcdefg"]):
        stream = Slow()
        send_frames(stream, frames)  # type: ignore[arg-type]
        assert stream.taken == b"".join(frames)


@pytest.mark.parametrize("spin_ns", [0, 10**9])
def test_receiving_ends_with_the_peer(spin_ns: int) -> None:
    ours, theirs = socket.socketpair()
    buffer = memoryview(bytearray(6))
    with ours:
        with theirs:
            theirs.sendall(b"abcdefgh")
            assert receive_exactly(ours, buffer, spin_ns)
        assert bytes(buffer) == b"abcdef"
        assert not receive_exactly(ours, buffer, spin_ns)
