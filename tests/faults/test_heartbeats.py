"""A peer that is stopped is noticed long before any deadline; one that is only busy is not cut.

Nothing here takes an hour, which every deadline is: what is noticed, heartbeats have noticed, or
what a stream has in their place.
"""

from __future__ import annotations

import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from gpu_side.transport.zmq_listener import ZmqListener
from protocol.connect import open_channel
from protocol.curve import ClientKeys, read_public_key, read_secret_key
from protocol.errors import AbsentError, EndpointError
from protocol.messages import InitReply, InitRequest
from protocol.pending import PendingChannel
from tee_side.runner import Runner
from tests.faults.row import Found, Row, note, percentile
from tests.kit.demo import Said, Sent, asked, generate, prompts, settings, start, watched
from tests.kit.model import make_model
from tests.kit.proxy import HOLD, Proxy
from tests.kit.service import ENVIRONMENT, Forked, Service, Workers, running_service
from tsqp.key_files import new_key_pair

# ------------------------------------------------------------------------- row: peers that stop

_TOKENS = 8
_LIMIT_S = 2.0
_SIDE_BY_SIDE = 8


@dataclass(frozen=True)
class Fault:
    """Something that stops a peer: `begin` and `end` get its process and the proxy before it.

    `lasts_s`: how long after its beginning it ends; None where it ends once it was noticed.
    """

    name: str
    begin: Callable[[Service, Proxy], object]
    end: Callable[[Service, Proxy], object]
    lasts_s: float | None = None


def _hole(lasts_s: float) -> Fault:
    return Fault(
        f"black hole of {lasts_s:g} s",
        lambda _, proxy: proxy.set(HOLD),
        lambda _, proxy: proxy.set(),
        lasts_s,
    )


# A hole of a second may heal before heartbeats notice it: then it is only waited for.
_SHORT_HOLE = _hole(1.0)
FAULTS = (
    Fault("SIGSTOP", lambda service, _: service.freeze(), lambda service, _: service.thaw()),
    Fault("half-open", lambda _, proxy: proxy.half_open(), lambda *_: None),
    _SHORT_HOLE,
    _hole(5.0),
    _hole(30.0),
)


@dataclass
class Stops:
    """What came of all faults: how long each that hit went unnoticed, by its name."""

    still_s: dict[str, list[float]] = field(default_factory=dict)
    generations: int = 0
    wrong: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generate(self, runner: Runner, ids: tuple[int, ...], when: str) -> Said:
        said = generate(runner, ids, _TOKENS)
        right = said.is_right(ids, _TOKENS)
        with self.lock:
            self.generations += 1
            self.wrong += not right
        if not right:
            note(f"{when}: got {said}, expected the right tokens")
        return said

    def session(
        self, workers: Workers, faults: list[Fault], seed: int, sent: Sent, at: str
    ) -> None:
        """Go through some faults in one session with two services, over TCP or a Unix socket."""
        chance, ids = random.Random(seed), prompts(1, 6, seed)[0]
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-soak-"))
            services: dict[str, tuple[Service, Proxy]] = {}
            for number in range(2):
                bind = f"unix://{folder}/{number}" if at else "tcp://127.0.0.1:*"
                service = start(workers, bind=bind)
                proxy = stack.enter_context(Proxy(service.endpoint))
                services[proxy.endpoint] = service, proxy
            runner = stack.enter_context(Runner(settings(list(services))))
            usual = self.generate(runner, ids, "before all")
            step_s, requests = percentile(usual.gaps_s, 50), len(sent.to())
            for fault in faults:
                point = chance.randrange(requests * 3 // 4), chance.random() < 0.5
                name, endpoint = fault.name + at, asked(runner)
                peer = services[endpoint]
                over = threading.Timer(fault.lasts_s or 0.0, fault.end, peer)

                def begin(fault: Fault = fault, over: threading.Timer = over) -> None:
                    fault.begin(*peer)  # noqa: B023 - it is called in this turn
                    if fault.lasts_s is not None:
                        over.start()

                sent.strike({point: begin})
                still_s = self.generate(runner, ids, f"at {name}").longest_s - step_s
                moved = asked(runner) != endpoint
                self.generate(runner, ids, f"beside {name}")
                if fault.lasts_s is None:
                    over.start()
                over.join()
                self.generate(runner, ids, f"after {name}")
                if moved or (fault is _SHORT_HOLE and still_s > 0.5 * (fault.lasts_s or 0.0)):
                    with self.lock:
                        self.still_s.setdefault(name, []).append(still_s)


@Row(
    "peer_stopped",
    "SIGSTOP, half-open connection, black hole of 1/5/30 s",
    "each as often (the short form: no hole), a fifth over unix://, the others over"
    " tcp://, at random points of a generation, second worker present; holes heal",
    "every one hits; noticed <= 2 s; outputs identical",
    short=4,
    long=320,
    minutes=14,
)
def peer_stopped(count: int, full: bool) -> Found:
    """Stop so many peers, in several sessions side by side."""
    over_unix = count // (5 if full else 2)
    faults, lanes = (FAULTS, _SIDE_BY_SIDE) if full else (FAULTS[:2], 1)
    found = Stops()
    with Workers() as workers, watched() as sent, ThreadPoolExecutor(2 * lanes) as pool:
        ended = []
        for at, points in (("", count - over_unix), (" over unix", over_unix)):
            for lane in range(lanes):
                share = [faults[place % len(faults)] for place in range(lane, points, lanes)]
                seed = 2 * lane + bool(at)
                ended.append(pool.submit(found.session, workers, share, seed, sent, at))
        for one in ended:
            one.result()
    times = [still_s for times in found.still_s.values() for still_s in times]
    slow = sum(still_s > _LIMIT_S for still_s in times)
    return Found(
        {
            "hits": f"{len(times)} of {count}",
            "noticed in time": f"{len(times) - slow} of {len(times)}",
            "outputs identical": f"{found.generations - found.wrong} of {found.generations}",
            **{f"{name}, longest s": max(times) for name, times in sorted(found.still_s.items())},
        },
        {"every one hits": len(times) == count, "outputs identical": not found.wrong},
        {"noticed in time": not slow},
    )


# ------------------------------------------------------------------------ clients and services

HOUR_S = 3600.0
# Of the clients that are to notice something.
SOON_S = 0.1
LINKS = ("tcp", "tcp with keys", "unix", "shm")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process give up early on handshakes, and on streams without signs of life."""
    monkeypatch.setattr("protocol.zmq_sockets.HANDSHAKE_TIMEOUT_MS", 200)
    monkeypatch.setattr("protocol.liveness.PROBE_AFTER_S", SOON_S / 4)
    monkeypatch.setattr("protocol.liveness._ANSWER_WITHIN_S", SOON_S)


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Service, ClientKeys | None]]]:
    """A service over each link, and the keys of its clients."""
    folder = tmp_path_factory.mktemp("services")
    make_model(folder / "model")
    for name in ("service", "client"):
        new_key_pair(folder / name)
    keys = ClientKeys(
        read_secret_key(folder / "client.key"), read_public_key(folder / "service.pub")
    )
    with ExitStack() as stack:
        found: dict[str, tuple[Service, ClientKeys | None]] = {}
        for link in LINKS:
            options, bind = ["--threads", "1"], f"{link}://{folder}/{link}"
            if link == "tcp with keys":
                options += ["--identity", str(folder / "service.key")]
                options += ["--allow", str(folder / "client.pub")]
            if link.startswith("tcp"):
                bind = "tcp://127.0.0.1:*"
            made = stack.enter_context(running_service(folder / "model", bind, *options))
            found[link] = made, keys if "keys" in link else None
        yield found


def is_served(channel: PendingChannel) -> bool:
    return isinstance(channel.call(InitRequest()).response, InitReply)


@pytest.mark.parametrize("link", LINKS)
def test_a_stopped_service_is_noticed_by_all_that_wait_and_used_again(
    services: dict[str, tuple[Service, ClientKeys | None]], link: str
) -> None:
    service, keys = services[link]
    other, _ = services["shm" if link == "unix" else "unix"]
    with ExitStack() as stack:

        def client(endpoint: str, heartbeat_s: float = SOON_S) -> PendingChannel:
            return stack.enter_context(
                open_channel(endpoint, timeout_s=HOUR_S, keys=keys, heartbeat_timeout_s=heartbeat_s)
            )

        channel, elsewhere = client(service.endpoint), None
        if keys is None:
            elsewhere = client(other.endpoint, HOUR_S)
        assert is_served(channel)
        service.freeze()
        try:
            waiting = [channel.submit(InitRequest()) for _ in range(3)]
            for request_id in waiting:
                with pytest.raises(EndpointError, match="a lost connection while Init") as caught:
                    channel.wait(request_id)
                assert caught.value.retryable
            # Nor does it answer a new connection, of this client or of one that it never knew.
            with pytest.raises(EndpointError):
                channel.call(InitRequest())
            with pytest.raises((AbsentError, EndpointError)):
                client(service.endpoint).call(InitRequest())
            assert elsewhere is None or is_served(elsewhere)
        finally:
            service.thaw()
        assert is_served(client(service.endpoint, HOUR_S))
        assert is_served(channel)


CLIENT = """
import sys, time, zmq
client = zmq.Context().socket(zmq.DEALER)
client.connect(sys.argv[1])
client.send(b"hello")
time.sleep(3600)
"""


def test_a_stopped_client_is_noticed_by_the_service() -> None:
    listener = ZmqListener("tcp://127.0.0.1:*", heartbeat_timeout_s=SOON_S)
    client = Forked("tsqp", [listener.endpoint], ENVIRONMENT, before=CLIENT)
    try:
        assert listener.wait(timeout_ms=30_000)
        incoming = listener.receive()
        assert incoming is not None
        client.send_signal(signal.SIGSTOP)
        # Its kernel would take replies for a long time.
        while listener.send(incoming.route, [b"x"]):
            listener.wait(timeout_ms=20)
    finally:
        client.kill()
        listener.close()
