"""Starts our programs for the demo, ends them whatever happens, and chats over HTTP.

The chat needs the standard library alone, and does what any client of OpenAI's API does. The `Tap`
stands on the wire between one tee-runner and a gpu-service, as the owner of the GPU can. Frames are
forwarded untouched unless it is told to tamper with replies, as the `Liar` does once; a copy of
each request is decoded with the public schema alone.
"""

from __future__ import annotations

import codecs
import itertools
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors.torch import load_file

from gpu_side.encoding import open_request, read_request
from gpu_side.service import open_listener
from protocol import native
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, decode_reply
from protocol.errors import ProtocolError, TsqpError
from protocol.messages import TensorReply
from protocol.tensors import to_torch
from protocol.transport import open_channel
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import ProvisionedMask
from tsqp.lab.research.provisioning import provision
from tsqp.page.seen import ReceivedTensors, Seen, describe_request
from tsqp.processes import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    ProcessError,
    child,
    program,
    start_service,
)
from tsqp.run.settings import model_directory

DTYPE = "float32"
# The model is tiny, and two processes share the cores: threads cost more than they bring.
COMPUTING = ("--dtype", DTYPE, "--threads", "1")


@dataclass(frozen=True)
class Tokens:
    """What a run came to. `logits`: float32 [tokens, V], those that each token was chosen from."""

    name: str
    ids: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class Reach:
    """Where a policy's service is, and behind it its dealers; and the key that it needs, if any."""

    endpoints: tuple[str, ...]
    key: Path | None = None

    def options(self, first: str | None = None) -> list[str]:
        """Return options for tee-runner; `first` stands in for the first endpoint."""
        key = ["--key", str(self.key)] if self.key else []
        dealers = [word for endpoint in self.endpoints[1:] for word in ("--dealer", endpoint)]
        return ["--gpu", first or self.endpoints[0], *dealers, *key]


class DemoServices:
    """The gpu-service processes of a demo, each started when a policy first needs it.

    Policies without a feature mask share theirs. `folder`: for weights and keys of the others.
    `say` is told about every start. All end with `running`.
    """

    def __init__(self, running: ExitStack, folder: Path, say: Callable[[str], None]) -> None:
        self._running, self._folder, self._say = running, folder, say
        self._numbers = itertools.count(1)
        self._plain: list[str] = []
        self._provisioned: dict[ProvisionedMask, Reach] = {}

    def reach(self, policy: Policy) -> Reach:
        """Start what a policy needs and is not there yet. Raises ProcessError."""
        if not policy.services:
            # Nothing listens there, and such a policy is not to connect to it either.
            return Reach(("tcp://127.0.0.1:9",))
        if (mask := policy.feature_mask) is not None:
            if mask not in self._provisioned:
                number = len(self._provisioned)
                directory, key = self._folder / f"server-{number}", self._folder / f"key-{number}"
                provision(model_directory("demo"), mask, directory, key)
                self._say(f"weights provisioned under {mask.name}, for a gpu-service of their own")
                self._provisioned[mask] = Reach((self._start(str(directory)),), key)
            return self._provisioned[mask]
        while len(self._plain) < policy.services:
            self._plain.append(self._start("demo"))
        return Reach(tuple(self._plain[: policy.services]))

    def endpoint(self, name: str) -> str:
        """Return where the next tap, or service, is to listen."""
        path = self._folder / f"{name}-{next(self._numbers)}"
        return f"{'unix' if native.library is None else 'shm'}://{path}"

    def _start(self, model: str) -> str:
        if native.library is None and not self._plain and not self._provisioned:
            self._say("no shared memory: kernels are not compiled here (tsqp doctor says how)")
        pid, endpoint = start_service(
            self._running, [model, "--bind", self.endpoint("gpu"), *COMPUTING]
        )
        self._say(f"gpu-service: process {pid}, ready at {endpoint}")
        return endpoint


def generate(
    arguments: list[str], folder: Path, show: Callable[[str], None]
) -> tuple[dict[str, Any], Tokens]:
    """Run `tee-runner generate demo`; return its report, and what it came to.

    `folder`: where a new directory is made for its files. `show` gets the text as it comes.
    Raises ProcessError.
    """
    made = Path(tempfile.mkdtemp(dir=folder, prefix="run-"))
    path, logits = made / "report.json", made / "logits.safetensors"
    status, last = run_generate(
        ["--report", str(path), "--save-logits", str(logits), *arguments], show
    )
    ProcessError.unless(status == 0, "tee-runner", last, "exit status 0")
    report = json.loads(path.read_text(encoding="utf-8"))
    return report, Tokens(report["policy"], report["token_ids"], load_file(logits)["logits"])


def run_generate(arguments: list[str], show: Callable[[str], None]) -> tuple[int, str]:
    """Run `tee-runner generate demo`; return its exit status, and its last line on stderr."""
    command = [program("tee-runner"), "generate", "demo", *COMPUTING, *arguments]
    # It keeps a character together that is split over reads.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with child(command, stdout=subprocess.PIPE) as (process, errors):
        while process.stdout is not None and (chunk := os.read(process.stdout.fileno(), 4096)):
            show(decoder.decode(chunk))
        status = process.wait(START_TIMEOUT_S)
        errors.join(END_TIMEOUT_S)
    return status, errors.last


def stream_chat(
    base_url: str, said: str, max_tokens: int, show: Callable[[str], None]
) -> list[bytes]:
    """Say something and return the bytes of each token of the answer; `show` gets its text.

    Raises ProcessError for an answer that is none.
    """
    body = {
        "messages": [{"role": "user", "content": said}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "stream": True,
    }
    tokens: list[bytes] = []
    url = urlsplit(base_url)
    with closing(HTTPConnection(url.netloc, timeout=START_TIMEOUT_S)) as connection:
        connection.request(
            "POST",
            f"{url.path}/chat/completions",
            json.dumps(body),
            {"content-type": "application/json"},
        )
        with connection.getresponse() as reply:
            for line in reply:
                kind, _, event = line.decode().strip().partition(": ")
                if kind != "data":
                    continue  # nothing, or a comment such as a receipt
                if event == "[DONE]":
                    return tokens
                content = json.loads(event)
                if "choices" not in content:
                    break  # an error ends it, and so does a lost connection
                for choice in content["choices"]:
                    show(choice["delta"]["content"])
                    logprobs = choice["logprobs"] or {"content": []}
                    tokens += [bytes(token["bytes"]) for token in logprobs["content"]]
    raise ProcessError(
        "tee-runner serve", got=f"status {reply.status} and no end", expected="a whole answer"
    )


# Longer than any of the demo model's requests takes.
_TIMEOUT_S = 60.0
# Late enough that there is a story, early enough that it is still being told.
LIES_AT = 150

# Gets the frames of a reply, returns those to forward instead.
Tamper: TypeAlias = Callable[[list[bytes]], list[bytes]]


class Tap:
    """Forwards between a client and `service`, calling `on_request` from a thread of its own.

    It listens at `endpoint`, over the transport of the service's; "" for a free port of this host.
    `tamper`: called from the same thread, with each reply. A request is shown before its reply is.
    """

    def __init__(
        self,
        service: str,
        on_request: Callable[[Seen], None],
        tamper: Tamper = lambda frames: frames,
        endpoint: str = "",
    ) -> None:
        self._on_request = on_request
        self._tamper = tamper
        self._front = open_listener(endpoint or "tcp://127.0.0.1:*")
        self.endpoint = self._front.endpoint
        self._back = open_channel(service)
        self._wakeup, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._forward, name="tap", daemon=True)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        self._wakeup.close()
        self._front.close()
        self._back.close()

    def _forward(self) -> None:
        while self._front.wait(wakeup=self._wakeup):
            while (incoming := self._front.receive()) is not None:
                # Copies: what a client shares is another message's after the reply.
                frames = list(map(bytes, incoming.frames))
                if (reply := self._exchange(frames)) is not None:
                    self._front.send(incoming.route, self._tamper(reply))

    def _exchange(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the service's reply, whatever it is; None for none, as the client will notice."""
        # Below what a channel makes of a request and its reply: these are others'.
        with suppress(TsqpError):
            self._back._send("a request", frames, sum(map(len, frames)), _TIMEOUT_S)
            # After forwarding, so that looking at a request does not delay it.
            seen = None
            with suppress(ProtocolError):
                seen = describe_request(
                    read_request(open_request(frames, DEFAULT_MAX_MESSAGE_BYTES))
                )
            if seen is not None:
                self._on_request(seen)
            until = time.monotonic() + _TIMEOUT_S
            while time.monotonic() < until:
                if (received := self._back._receive(until)) is not None:
                    return list(map(bytes, received[0]))
        return None


@dataclass(eq=False)
class TapFeed(ReceivedTensors):
    """Collects what a tap sees in one act.

    `first`, `last`: up to `kept` requests each. `dtypes`: names, of all tensors.
    """

    kept: int = 4
    first: list[Seen] = field(default_factory=list)
    last: list[Seen] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Take note of a request; called from the tap's thread."""
        super().add(seen)
        self.first = [*self.first, seen][: self.kept]
        self.last = [*self.last, seen][-self.kept :]
        for tensor in seen.tensors:
            if (name := str(tensor.dtype).removeprefix("torch.")) not in self.dtypes:
                self.dtypes.append(name)


@dataclass(frozen=True)
class Lie:
    """What was changed: one number, in the reply to `asked`, from `true` to `told`."""

    asked: Seen
    index: int
    count: int
    true: int
    told: int


class Liar:
    """Changes one number of the reply to the request number `at`, by 1, and never lies again.

    One runner that asks one thing after another is listened to: a reply belongs to the last
    request. `lie`: None until it was told.
    """

    def __init__(self, at: int) -> None:
        self.lie: Lie | None = None
        self._at = at
        self._asked: Seen | None = None
        self._count = 0

    def hear(self, asked: Seen) -> None:
        """Take note of a request."""
        self._asked = asked
        self._count += 1

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """Forward a reply, or the lie instead."""
        if self.lie is not None or self._asked is None or self._count < self._at:
            return frames
        try:
            reply = decode_reply([memoryview(frame) for frame in frames]).response
        except ProtocolError:
            return frames
        if not isinstance(reply, TensorReply) or reply.output.dtype != "int32":
            return frames
        numbers = to_torch(reply.output).numpy().copy().reshape(-1)
        index = len(numbers) // 2
        true = int(numbers[index])
        with np.errstate(over="ignore"):
            numbers[index] += 1
        self.lie = Lie(self._asked, index, len(numbers), true, int(numbers[index]))
        return [frames[0], numbers.tobytes()]
