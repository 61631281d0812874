"""Starts our programs for the demo, ends them whatever happens, and chats over HTTP.

The chat needs the standard library alone, and does what any client of OpenAI's API does.
"""

from __future__ import annotations

import codecs
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from protocol import native
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import ProvisionedMask
from tsqp.lab.research.provisioning import provision
from tsqp.processes import (
    START_TIMEOUT_S,
    ProcessError,
    child,
    program,
    start_server,
    start_service,
)
from tsqp.run.settings import model_directory

DTYPE = "float32"
# The model is tiny, and two processes share the cores: threads cost more than they bring.
COMPUTING = ("--dtype", DTYPE, "--threads", "1")


@dataclass(frozen=True)
class Reach:
    """Where a policy's services are, and the key that they need, if any."""

    endpoints: tuple[str, ...]
    key: Path | None = None

    def options(self, first: str | None = None) -> list[str]:
        """Return options for tee-runner; `first` stands in for the first endpoint."""
        endpoints = (first or self.endpoints[0], *self.endpoints[1:])
        key = ["--key", str(self.key)] if self.key else []
        return [word for endpoint in endpoints for word in ("--gpu", endpoint)] + key


# Nothing listens there; a policy that needs no service is not to connect to it either.
NOWHERE = Reach(("tcp://127.0.0.1:9",))


class DemoServices:
    """The gpu-service processes of a demo, each started when a policy first needs it.

    Policies without a feature mask share theirs. `folder`: for weights and keys of the others.
    `say` is told about every start. All end with `running`.
    """

    def __init__(self, running: ExitStack, folder: Path, say: Callable[[str], None]) -> None:
        self._running, self._folder, self._say = running, folder, say
        self._started = self._taps = 0
        self._plain: list[str] = []
        self._provisioned: dict[ProvisionedMask, Reach] = {}

    def reach(self, policy: Policy) -> Reach:
        """Start what a policy needs and is not there yet. Raises ProcessError."""
        if not policy.services:
            return NOWHERE
        if (mask := policy.feature_mask) is not None:
            return self._with_key(mask)
        while len(self._plain) < policy.services:
            self._plain.append(self._start("demo"))
        return Reach(tuple(self._plain[: policy.services]))

    def _with_key(self, mask: ProvisionedMask) -> Reach:
        if mask not in self._provisioned:
            number = len(self._provisioned)
            directory, key = self._folder / f"server-{number}", self._folder / f"key-{number}"
            provision(model_directory("demo"), mask, directory, key)
            self._say(f"weights provisioned under {mask.name}, for a gpu-service of their own")
            self._provisioned[mask] = Reach((self._start(str(directory)),), key)
        return self._provisioned[mask]

    def tap_endpoint(self) -> str:
        """Return where the next tap is to listen."""
        self._taps += 1
        return self._at(f"tap-{self._taps}")

    def _at(self, name: str) -> str:
        return f"{'unix' if native.library is None else 'shm'}://{self._folder / name}"

    def _start(self, model: str) -> str:
        if native.library is None and not self._started:
            self._say("no shared memory: kernels are not compiled here (tsqp doctor says how)")
        self._started += 1
        bind = self._at(f"gpu-{self._started}")
        pid, endpoint = start_service(self._running, [model, "--bind", bind, *COMPUTING])
        self._say(f"gpu-service: process {pid}, ready at {endpoint}")
        return endpoint


@contextmanager
def serving(arguments: list[str], say: Callable[[str], None]) -> Iterator[str]:
    """Run `tee-runner serve demo`; yield its base URL. Raises ProcessError."""
    with ExitStack() as running:
        pid, url = start_server(running, ["demo", "--port", "0", *COMPUTING, *arguments])
        say(f"tee-runner serve: process {pid}, ready at {url}")
        yield url


def generate(
    arguments: list[str], folder: Path, show: Callable[[str], None]
) -> tuple[dict[str, Any], Path]:
    """Run `tee-runner generate demo`; return its report, and the file with its logits.

    `folder`: a new directory for both. `show` gets the text as it comes. Raises ProcessError.
    """
    folder.mkdir()
    report, logits = folder / "report.json", folder / "logits.safetensors"
    files = ["--report", str(report), "--save-logits", str(logits)]
    status, last = run_generate([*files, *arguments], show)
    ProcessError.unless(status == 0, "tee-runner", last, "exit status 0")
    return json.loads(report.read_text(encoding="utf-8")), logits


def run_generate(arguments: list[str], show: Callable[[str], None]) -> tuple[int, str]:
    """Run `tee-runner generate demo`; return its exit status, and its last line on stderr."""
    command = [program("tee-runner"), "generate", "demo", *COMPUTING, *arguments]
    with child(command, stdout=subprocess.PIPE) as (process, errors):
        for piece in _pieces(process):
            show(piece)
        status = process.wait(START_TIMEOUT_S)
        errors.join()
    return status, errors.last


def _pieces(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield decoded output as it comes, keeping a character together that is split over reads."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if process.stdout is None:
        return
    while chunk := os.read(process.stdout.fileno(), 4096):
        yield decoder.decode(chunk)


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
    tokens = []
    for choice in _choices(base_url, body):
        show(choice["delta"]["content"])
        logprobs = choice["logprobs"] or {"content": []}
        tokens += [bytes(token["bytes"]) for token in logprobs["content"]]
    return tokens


def _choices(base_url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the events of a stream hold. An error ends it, and so does a lost connection."""
    url = urlsplit(base_url)
    with closing(HTTPConnection(url.netloc, timeout=START_TIMEOUT_S)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        with connection.getresponse() as reply:
            for line in reply:
                kind, _, event = line.decode().strip().partition(": ")
                if kind != "data":
                    continue  # nothing, or a comment such as a receipt
                if event == "[DONE]":
                    return
                content = json.loads(event)
                if "choices" not in content:
                    break
                yield from content["choices"]
        raise ProcessError(
            "tee-runner serve", got=f"status {reply.status} and no end", expected="a whole answer"
        )
