"""One end writes over shared memory while the other reads: that hurts itself alone.

It has to be a process: in this one the interpreter's lock would let nobody write in the middle of a
copy. What is written, and where, is drawn; it goes on until it is closed.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from protocol.errors import TsqpError
from protocol.messages import EmbeddingRequest
from protocol.shm import create
from protocol.tensors import from_torch
from protocol.transport import open_channel
from tests.kit.demo import DEMO
from tests.kit.lie import MaliciousService, Victim, operators_of
from tests.kit.model import SIZES, make_model
from tests.kit.service import running_service

SCRIPT = """
import mmap, os, random, select, socket, struct, sys
orders = socket.socket(fileno=int(sys.argv[1]))
request_side = sys.argv[2] == "requests"
chance = random.Random(1)
noise = chance.randbytes(1 << 16)
memory = None
while True:
    if memory is None or select.select([orders], [], [], 0)[0]:
        said, files, _, _ = socket.recv_fds(orders, 1, 1)
        if not said:
            break
        memory = mmap.mmap(files[0], 0)
        os.close(files[0])
        slots, requests, replies = struct.unpack_from("<IxxxxQQ", memory, 8)
        first = -(-(192 + 128 * slots) // mmap.PAGESIZE) * mmap.PAGESIZE
        orders.send(b"x")
    for _ in range(200):
        # The last one is used first.
        slot = slots - 1 if chance.random() < 0.8 else chance.randrange(slots)
        area = first + slot * (requests + replies) + (0 if request_side else requests)
        line = 192 + 64 * (slot + (0 if request_side else slots))
        kind, size, place = chance.randrange(500), chance.randrange(1, 96), chance.randrange(3000)
        if kind == 0:
            memory[line : line + 4] = struct.pack("<I", chance.randrange(1 << 32))
        elif kind == 1:
            bits = chance.randrange(65)
            memory[line + 8 : line + 16] = struct.pack("<Q", chance.getrandbits(bits))
        elif kind == 2:
            memory[area : area + 20] = noise[place : place + 20]
        elif kind < 20:
            memory[area + 64 + place % 128] = noise[place]
        else:
            # Behind the header: numbers of tensors.
            at = area + 256 + place
            memory[at : at + size] = noise[place : place + size]
"""


@contextmanager
def scribbling(over: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Give what begins to scribble over the newest segment, and no more over the one before it.

    `over`: "requests", what the client wrote, or "replies".
    """
    files: list[int] = []

    def kept(*sizes: int) -> object:
        lane, file = create(*sizes)
        files.append(os.dup(file))
        return lane, file

    def begin() -> None:
        if files:
            socket.send_fds(orders, [b"x"], files[-1:])
            assert orders.recv(1), "the process that scribbles has ended"
        while files:
            os.close(files.pop())

    monkeypatch.setattr("protocol.shm.create", kept)
    orders, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", SCRIPT, str(theirs.fileno()), over]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        yield begin
    finally:
        orders.close()
        process.wait()
        for file in files:
            os.close(file)


def test_a_client_that_changes_requests_while_they_are_read_hurts_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens, headers, sizes and numbers change all the time; the service goes on."""
    ids = from_torch(torch.randint(0, SIZES["vocab_size"], (1000,)))
    request = EmbeddingRequest(input_ids=ids, dtype="float32")
    make_model(tmp_path)
    with ExitStack() as stack:
        endpoint = f"shm://{tmp_path}/s"
        service = stack.enter_context(running_service(tmp_path, endpoint, "--threads", "1"))
        other = stack.enter_context(closing(open_channel(service.endpoint, timeout_s=60)))
        right = other.call(request).response
        begin = stack.enter_context(scribbling("requests", monkeypatch))
        answered = errors = 0
        while answered + errors < 400 or not (answered and errors):
            with open_channel(service.endpoint, timeout_s=0.1) as wild:
                for _ in range(20):
                    try:
                        request_id = wild.submit(request)
                        begin()
                        wild.wait(request_id)
                        answered += 1
                    except TsqpError:
                        errors += 1
                        break
        assert other.call(request).response == right
        assert service.is_running


@pytest.mark.parametrize("lent_bytes", [0, 2**20])
def test_results_that_change_while_they_are_read_are_right_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lent_bytes: int
) -> None:
    """A shielded session whose service writes over its replies as they are read, or copied."""
    monkeypatch.setattr("protocol.shm._LENT_BYTES", lent_bytes)
    right = refused = 0
    with (
        scribbling("replies", monkeypatch) as begin,
        MaliciousService(operators_of(DEMO), f"shm://{tmp_path}/s") as service,
        closing(
            Victim("shielded", lambda: [open_channel(service.endpoint, timeout_s=0.1)])
        ) as victim,
    ):
        while right + refused < 30 or not (right and refused):
            step = victim.step()
            assert not step.accepted
            right += step.right
            if step.error is None:
                begin()
            else:
                refused += 1
                victim.reconnect()
