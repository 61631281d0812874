"""Sessions of the demo model whose services are killed or stopped in the middle of a generation."""

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tee_side.runner import Runner
from tests.faults.row import note, percentile
from tests.kit.demo import Said, Sent, Tokens, asked, generate, prompts, settings, start
from tests.kit.proxy import Proxy
from tests.kit.service import Service, Workers

PATIENT_S = 60.0
TOKENS = 8
# Of a fault that hits, though the same peer is asked in the end: it has healed, or answers over
# another connection. Steps take a tenth.
_GAP_S = 0.5


@dataclass
class Peer:
    """A service, and the proxy before it if there is one. It may be another process in time."""

    workers: Workers
    service: Service
    proxy: Proxy | None = None

    @property
    def link(self) -> Proxy:
        assert self.proxy is not None
        return self.proxy

    def kill(self) -> None:
        self.service.kill()

    def restart(self) -> None:
        self.service = self.workers.restart(self.service)


@dataclass(frozen=True)
class Fault:
    """Something that happens to a peer.

    `lasts_s`: how long after its beginning it ends; None where it ends once it was noticed.
    """

    name: str
    begin: Callable[[Peer], object]
    end: Callable[[Peer], object]
    lasts_s: float | None = None


@dataclass
class Disturbed:
    """What came of all faults: how long each that hit went unnoticed, by its name.

    `counts`: generations, those that were `wrong`, and those that ended by an `error` where they
    may; `overdue_s`: how long after its deadline such an error came.
    """

    still_s: dict[str, list[float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    overdue_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def times_s(self) -> list[float]:
        return [still_s for times in self.still_s.values() for still_s in times]

    def generate(self, runner: Runner, ids: Tokens, when: str, *, may_fail: bool = False) -> Said:
        said = generate(runner, ids, TOKENS)
        failed = may_fail and said.error is not None
        wrong = not failed and not said.is_right(ids, TOKENS)
        with self.lock:
            self.counts.update(generations=1, errors=failed, wrong=wrong)
        if wrong:
            note(f"{when}: got {said}, expected the right tokens")
        return said

    def session(
        self,
        workers: Workers,
        sent: Sent,
        schemes: Sequence[str],
        faults: Sequence[Fault],
        seed: int,
        *,
        proxied: bool = False,
        timeout_s: float = PATIENT_S,
        dealt: bool = False,
        at: str = "",
    ) -> None:
        """Go through some faults in one session with a service over each scheme.

        One that waits for less than is usual may end by an error. `dealt`: its pads are, by a
        dealer that is well, over the last scheme. `at`: added to names of faults.
        """
        chance, (ids,) = random.Random(seed), prompts(1, 6, seed)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-soak-"))
            peers: dict[str, Peer] = {}
            binds = [
                "tcp://127.0.0.1:*" if scheme == "tcp" else f"{scheme}://{folder}/{number}"
                for number, scheme in enumerate([*schemes, schemes[-1]])
            ]
            for bind in binds[:-1]:
                peer = Peer(workers, start(workers, bind=bind))
                endpoint = peer.service.endpoint
                if proxied:
                    peer.proxy = stack.enter_context(Proxy(endpoint))
                    endpoint = peer.proxy.endpoint
                peers[endpoint] = peer
            dealer = start(workers, bind=binds[-1]).endpoint if dealt else ""
            run = settings(list(peers), dealer, request_timeout_s=timeout_s)
            runner = stack.enter_context(Runner(run))
            # Whose pads are dealt asks for more now than with some in stock.
            self.generate(runner, ids, "before all")
            sent.strike({})
            usual = self.generate(runner, ids, "before all")
            step_s, requests = percentile(usual.gaps_s, 50), len(sent.to())
            for fault in faults:
                point = chance.randrange(requests * 3 // 4), chance.random() < 0.5
                name, endpoint = fault.name + at, asked(runner)
                peer = peers[endpoint]
                over = threading.Timer(fault.lasts_s or 0.0, fault.end, [peer])

                def begin(
                    fault: Fault = fault, peer: Peer = peer, over: threading.Timer = over
                ) -> None:
                    fault.begin(peer)
                    if fault.lasts_s is not None:
                        over.start()

                sent.strike({point: begin})
                may_fail = timeout_s < PATIENT_S
                said = self.generate(runner, ids, f"at {name}", may_fail=may_fail)
                still_s = said.longest_s - step_s
                hit = len(peers) == 1 or asked(runner) != endpoint
                if len(peers) > 1:
                    self.generate(runner, ids, f"beside {name}")
                if fault.lasts_s is None:
                    over.start()
                over.join()
                self.generate(runner, ids, f"after {name}")
                with self.lock:
                    if said.error is not None:
                        self.overdue_s = max(self.overdue_s, said.longest_s - timeout_s)
                    if hit or still_s > _GAP_S:
                        self.still_s.setdefault(name, []).append(still_s)
