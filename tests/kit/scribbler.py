"""A process that writes over shared memory while others read it.

It has to be one: in this process the interpreter's lock would let nobody write in the middle of a
copy. What is written, and where, is drawn; it goes on until it is closed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.kit.service import Closing

_SCRIPT = """
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


class Scribbler(Closing):
    """Scribbles over one segment after the other; use as a context manager.

    `over`: "requests", what the client wrote, or "replies".
    """

    def __init__(self, over: str) -> None:
        self._orders, theirs = socket.socketpair()
        command = [sys.executable, "-c", _SCRIPT, str(theirs.fileno()), over]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def begin(self, file: int) -> None:
        """Scribble over this segment from now on, and no more over the last one."""
        socket.send_fds(self._orders, [b"x"], [file])
        if not self._orders.recv(1):
            raise RuntimeError(f"scribbler: got exit status {self._process.wait()}, expected it up")

    def close(self) -> None:
        self._orders.close()
        self._process.wait()
        os.sched_yield()
