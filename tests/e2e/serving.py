"""Real `tee-runner serve` processes, for tests of what clients get over HTTP."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import SIGTERM
from urllib.request import Request, urlopen

from tests.forked import ENVIRONMENT, Forked

WAIT_S = 60
TEE_ONLY = ("--policy", "tee-only", "--dtype", "float32")


@dataclass
class Server:
    """A running server. `address`: without a path; `log`: what it had said when it was ready."""

    process: Forked
    address: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        """What a client of OpenAI's API is given."""
        return f"{self.address}/v1"

    def get(self, path: str, *, key: str = "", tls: ssl.SSLContext | None = None) -> str:
        """Return the body of a path. Raises urllib.error.HTTPError."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = Request(f"{self.address}{path}", headers=headers)
        with urlopen(request, timeout=WAIT_S, context=tls) as reply:
            body: bytes = reply.read()
        return body.decode()

    def metric(self, name: str, label: str = "", *, key: str = "") -> float:
        """Return one number of /metrics, by its name and a part of its labels."""
        (line,) = (
            line
            for line in self.get("/metrics", key=key).splitlines()
            if line.startswith(f"{name}{{") and label in line
        )
        return float(line.rpartition(" ")[2])

    def stop(self, sent: int = SIGTERM) -> int:
        """Send a signal to this process alone, and return its exit status."""
        self.process.send_signal(sent)
        return self.process.wait(WAIT_S)


@contextmanager
def running_server(
    *arguments: str, model: str = "demo", before: str = "", **environment: str
) -> Iterator[Server]:
    """Start a server on a free port, wait until it is ready, and end it. `before`: see `Forked`."""
    given = ("serve", model, "--port", "0", "--threads", "1", *arguments)
    server = Server(Forked("tee-runner", given, {**ENVIRONMENT, **environment}, before=before))
    try:
        deadline = time.monotonic() + WAIT_S
        while not server.log or "  ready: " not in server.log[-1]:
            line = server.process.stderr.readline()
            if not line or time.monotonic() > deadline:
                raise RuntimeError("tee-runner is not ready:\n" + "\n".join(server.log))
            server.log.append(line.rstrip("\n"))
        server.address = server.log[-1].split("  ready: ")[1].removesuffix("/v1")
        yield server
    finally:
        try:
            server.stop()
        finally:
            server.process.kill()


def until(holds: Callable[[], object]) -> None:
    """Ask again until something holds. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"got nothing in {WAIT_S} s, expected what the test waits for")
