"""Secrets that are known, the search for them everywhere, and faults that could bring them there.

Prompts and answers, as text and as token ids; what the model's layers read; keys of pads, of the
bank, and the vectors that results are verified with. `Places` says where they are looked for.
"""

from __future__ import annotations

import os
import random
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from protocol.encoding import decode_reply
from protocol.pending import NOT_PUT
from protocol.stream import StreamChannel

PLACES = ("runner log", "service log", "metrics", "errors", "disk", "shared memory")
KINDS = {"prompt", "answer", "token ids", "activation", "key"}
FAULTS = (
    "lost connection",
    "lost connection",
    "cut request",
    "garbled request",
    "request with a secret for a field's name",
    "cut reply",
    "garbled reply",
    "wrong number",
    "no reply",
)
_SHARED = Path("/dev/shm")
# Of an answer: a short one stands in a log by chance.
_ANSWER_CHARACTERS = 8
_WINDOW = 6
_HEAD_BYTES, _BITS = 4, 20
_MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass
class Canaries:
    """What is looked for: patterns by kind. Text is compared without spaces."""

    patterns: list[tuple[str, bytes]] = field(default_factory=list)

    def add_prompt(self, words: Sequence[str], ids: Sequence[int]) -> None:
        for word in words:
            self._add_bytes("prompt", word.encode())
        self.add_ids(ids)

    def add_ids(self, ids: Sequence[int]) -> None:
        last = len(ids) - _WINDOW
        for start in {0, last // 2, last} if last >= 0 else set():
            window = list(ids[start : start + _WINDOW])
            self.patterns.append(("token ids", torch.tensor(window).numpy().tobytes()))
            self.patterns.append(("token ids", ",".join(map(str, window)).encode()))

    def add_answer(self, said: str, token_ids: Sequence[int]) -> None:
        """Look for an answer, if it is long and not the same again and again."""
        if len(said) >= _ANSWER_CHARACTERS and len(set(said)) > _ANSWER_CHARACTERS // 2:
            self._add_bytes("answer", said.encode())
            self.add_ids(token_ids)

    def add_activation(self, row: torch.Tensor) -> None:
        """Look for the beginning of a row, in its own bytes and as people print it."""
        first = row[:4].contiguous()
        if bool(first.any()):
            self.patterns.append(("activation", first.view(torch.uint8).numpy().tobytes()))
            if first.is_floating_point():
                text = ",".join(f"{value:.4f}" for value in first.tolist())
                self.patterns.append(("activation", text.encode()))

    def add_secret(self, secret: bytes) -> None:
        self._add_bytes("key", secret)

    def _add_bytes(self, kind: str, content: bytes) -> None:
        self.patterns += [(kind, content), (kind, content.hex().encode())]

    def found_in(self, content: bytes) -> list[str]:
        found = self._places_in(content) | self._places_in(content.translate(None, b" \n\t\r"))
        return [self.patterns[place][0] for place in sorted(found)]

    def _places_in(self, content: bytes) -> set[int]:
        """Return which patterns stand there: one pass over it for all that begin with a head."""
        heads: dict[bytes, list[int]] = {}
        for place, (_, pattern) in enumerate(self.patterns):
            heads.setdefault(pattern[:_HEAD_BYTES], []).append(place)
        short = [head for head in heads if len(head) < _HEAD_BYTES]
        found = {place for head in short if head in content for place in heads.pop(head)}
        may_begin = np.zeros(1 << _BITS, dtype=np.bool_)
        may_begin[_hashed(b"".join(heads))] = True
        for offset in range(min(_HEAD_BYTES, len(content))):
            for at in np.flatnonzero(may_begin[_hashed(content, offset)]).tolist():
                start = offset + at * _HEAD_BYTES
                for place in heads.get(content[start : start + _HEAD_BYTES], ()):
                    if content.startswith(self.patterns[place][1], start):
                        found.add(place)
        return found


def _hashed(content: bytes, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return `_BITS` bits for every four bytes from there on."""
    whole = (len(content) - offset) // _HEAD_BYTES
    heads = np.frombuffer(content, np.uint32, whole, offset)
    return (heads * np.uint32(2654435761)) >> np.uint32(32 - _BITS)


class Places:
    """Everywhere that the secrets may not be; each is looked at from where it was left."""

    def __init__(self, folder: Path, metrics: Sequence[str]) -> None:
        self.errors: list[str] = []
        self.fetch: Callable[[str], bytes] = _fetch
        self._folder, self._metrics = folder, metrics
        self._read: dict[Path, int] = {}
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._shared = set(_SHARED.iterdir())

    def contents(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted((self._folder / "logs").iterdir()):
            with path.open("rb") as file:
                # A little from before: a line may have been written in two halves.
                file.seek(max(0, self._read.get(path, 0) - 4096))
                content = file.read()
                self._read[path] = file.tell()
            yield "runner log" if path.name == "runner.log" else "service log", content
        for url in self._metrics:
            yield "metrics", self.fetch(url)
        yield "errors", "\n".join(self.errors).encode("utf-8", "backslashreplace")
        self.errors.clear()
        for name in ("work", "home", "tmp", "bank"):
            for path in sorted((self._folder / name).rglob("*")):
                # Keys are in their own files, rightly; nothing else is.
                if path.is_file() and path.name != "bank.key" and self._is_new(path):
                    yield "disk", path.read_bytes()
        for path in set(_SHARED.iterdir()) - self._shared:
            with suppress(OSError):
                if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                    yield "shared memory", path.read_bytes()

    def _is_new(self, path: Path) -> bool:
        """Say whether a file was written to since the last look: what is new is in no other."""
        status = path.stat()
        now = status.st_ino, status.st_size, status.st_mtime_ns
        known, self._seen[path] = self._seen.get(path), now
        return known != now

    def plants(self, ids: Sequence[int], row: torch.Tensor, key: bytes) -> dict[str, Any]:
        """Return what puts a secret into each place but the runner's log; "" cleans up."""
        shared = _SHARED / f"tsqp-canary-{os.getpid()}"
        content = torch.tensor(ids).numpy().tobytes()

        def append() -> None:
            with (self._folder / "logs" / "service-0.log").open("a", encoding="utf-8") as file:
                file.write(f"ids={ids[:9]}\n")

        return {
            "service log": append,
            "metrics": lambda: setattr(self, "fetch", lambda _: b'x="%s"' % str(row).encode()),
            "errors": lambda: self.errors.append(key.hex()),
            "disk": lambda: (self._folder / "tmp" / "x").write_bytes(content),
            "shared memory": lambda: shared.write_bytes(row.numpy().tobytes()),
            "": lambda: shared.unlink(missing_ok=True),
        }


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: bytes = answer.read()
    return content


class Faults:
    """Makes one request of a generation go wrong.

    `made`: how often, by policy, fault and which request of its generation, from 1.
    """

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._left = -1
        self._fault = self._policy = self._secret = ""
        self._at = self.count = 0
        self._on_reply: tuple[Any, int] | None = None
        self.made: Counter[tuple[str, str, int]] = Counter()

    def arm(self, policy: str, fault: str, at: int, secret: str) -> None:
        """Let the request with this number, counted from now on, go wrong; "" for none."""
        self._policy, self._fault, self._secret = policy, fault, secret
        self._left = self._at = at
        self.count, self._on_reply = 0, None

    def install(self) -> None:
        """Stand between the runner and its transport."""
        faults, send, receive = self, StreamChannel._send, StreamChannel._receive
        put, take = StreamChannel._put, StreamChannel._take

        def _put(channel: Any, *request: Any) -> int:
            """Leave the request that a fault is meant for, and those before it, to `_send`."""
            place = NOT_PUT if faults._fault else put(channel, *request)
            faults.count += place != NOT_PUT
            return place

        def _take(channel: Any, *request: Any) -> None:
            if faults._on_reply is None:
                take(channel, *request)

        def _send(channel: Any, method: str, frames: Any, size: int, timeout_s: float) -> int:
            if method not in ("Init", "Health"):
                frames = faults.sending(channel, frames)
            sent = send(channel, method, frames, size, timeout_s)
            if faults._left == 0 and faults._fault == "lost connection":
                faults._done()
                channel._socket.shutdown(socket.SHUT_RDWR)
            return sent

        def _receive(channel: Any, deadline: float) -> Any:
            received = receive(channel, deadline)
            if received is None or faults._on_reply is None:
                return received
            frames, when = received
            # Of several that are on their way, the one to the request that was counted.
            if faults._on_reply != (channel, decode_reply(frames).request_id):
                return received
            changed = faults._received(frames)
            return changed and (changed, when)

        for replaced in (_put, _take, _send, _receive):
            setattr(StreamChannel, replaced.__name__, replaced)

    def _done(self) -> None:
        self.made[self._policy, self._fault, self._at] += 1
        self._fault, self._left, self._on_reply = "", -1, None

    def sending(self, channel: Any, frames: list[Any]) -> list[Any]:
        self.count += 1
        if self._left > 0:
            self._left -= 1
        if self._left != 0 or not self._fault or self._on_reply is not None:
            return frames
        header, *rest = [bytes(frame) for frame in frames]
        if self._fault == "cut request":
            rest = [frame[:-1] for frame in rest]
        elif self._fault == "garbled request":
            at = self._choose.randrange(len(header))
            header = header[:at] + bytes([header[at] ^ 0x55]) + header[at + 1 :]
        elif self._fault.startswith("request with"):
            fields = msgpack.unpackb(header)
            fields["request"][self._secret[:40]] = self._secret[:100]
            header = msgpack.packb(fields)
        else:
            if self._fault != "lost connection":
                self._on_reply = channel, channel._last_id
            return frames
        self._done()
        return [header, *rest]

    def _received(self, frames: list[Any]) -> list[memoryview] | None:
        *rest, last = [bytearray(frame) for frame in frames]
        fault = self._fault
        self._done()
        if fault == "no reply":
            return None
        if fault == "cut reply":
            del last[-1:]
        elif fault == "garbled reply":
            rest[0][self._choose.randrange(len(rest[0]))] ^= 0x55
        else:
            last[self._choose.randrange(len(last))] ^= 0x11
        return [memoryview(frame) for frame in (*rest, last)]
