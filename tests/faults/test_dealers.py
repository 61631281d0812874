"""Dealers that are killed, stopped or restarted, or that lie, in the middle of a generation."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from unittest.mock import patch

import torch

from protocol.errors import TsqpError
from tee_side.protect.pads.store import PadStore
from tee_side.runner import Runner
from tests.faults.disturbed import TOKENS, Disturbed, Fault, Peer
from tests.faults.row import Found, Row
from tests.kit.demo import DEMO, expected, prompts, settings, start, watched
from tests.kit.lie import Lying
from tests.kit.model import LoopbackChannel, assemble
from tests.kit.proxy import CLEAN, Proxy
from tests.kit.proxy import Fault as LinkFault
from tests.kit.service import Workers

_TIMEOUT_S, _GRACE_S = 2.0, 1.0
_SLOW_LINK = LinkFault(bytes_per_s=10_000)
SLOW = Fault("10 kB/s", lambda peer: peer.link.set(_SLOW_LINK), lambda peer: peer.link.set(CLEAN))
FAULTS = (
    Fault("kill -9", Peer.kill, Peer.restart),
    Fault("SIGSTOP", lambda peer: peer.service.freeze(), lambda peer: peer.service.thaw()),
    SLOW,
)
LIES = (
    lambda u: u + 1,
    lambda u: u.roll(1, 0),
    lambda u: u ^ torch.full((), -(2**31), dtype=torch.int32),  # the highest bit alone
    lambda u: u[:, :-1],
)


@contextmanager
def drawn() -> Iterator[Counter[tuple[int, int, int]]]:
    """Count how often each site of each pad is drawn while the block runs."""
    counts: Counter[tuple[int, int, int]] = Counter()
    stores: list[PadStore] = []  # kept, so that no other has the same id
    use_up = PadStore._use_up

    def counting(store: PadStore, indices: range, sites: int, where: object) -> None:
        use_up(store, indices, sites, where)
        stores.append(store)
        numbers = [number for number in store.layout.by_number if sites >> number & 1]
        counts.update((id(store), index, number) for index in indices for number in numbers)

    with patch.object(PadStore, "_use_up", counting):
        yield counts


@Row(
    "dealer_faults",
    "dealer killed, restarted, stopped or slow (10 kB/s); dealer that lies",
    "in turns, at random requests of a generation under dealt",
    "outputs identical, or one typed error within 1 s of the deadline, and the next is right;"
    " lies: 0 accepted; 0 pads reused",
    short=6,
    long=100,
    minutes=5,
)
def dealer_faults(count: int, full: bool) -> Found:
    """Disturb the dealer so often, half of the times by a lie, each in a run of its own."""
    found, lies, accepted = Disturbed(), 0, 0
    with Workers() as workers, watched() as sent, drawn() as pads, ExitStack() as stack:
        service, dealer = start(workers).endpoint, Peer(workers, start(workers))
        proxy = dealer.proxy = stack.enter_context(Proxy(dealer.service.endpoint))
        run = settings([service], proxy.endpoint, request_timeout_s=_TIMEOUT_S)
        for number in range(count // 2):
            chance, (ids,) = random.Random(number), prompts(1, 6, number)
            fault = FAULTS[number % len(FAULTS)]
            with Runner(run) as runner:
                found.generate(runner, ids, "before all")
                begun: list[str] = []

                def begin(fault: Fault = fault, begun: list[str] = begun) -> None:
                    begun.append(fault.name)
                    fault.begin(dealer)

                # A generation whose pads are in stock asks for less than the one before it.
                sent.strike({(chance.randrange(len(sent.to()) // 2), chance.random() < 0.5): begin})
                said = found.generate(runner, ids, f"at {fault.name}", may_fail=True)
                sent.strike({})
                if said.error is not None:
                    # Over a slow link each request of a step may take nearly as long.
                    since_last_s = time.monotonic() - sent.last_s
                    took_s = since_last_s if fault is SLOW else said.longest_s
                    found.overdue_s = max(found.overdue_s, took_s - _TIMEOUT_S)
                if not begun:
                    fault.begin(dealer)
                fault.end(dealer)
                found.generate(runner, ids, f"after {fault.name}")
        for number in range(count - count // 2):
            lied, right = _lied_to(number)
            lies += lied
            found.counts["errors"] += right is None
            accepted += right is False
    reused = sum(times > 1 for times in pads.values())
    counts = found.counts
    return Found(
        {
            "faults": count // 2,
            "lies": lies,
            "ended with a typed error": counts["errors"],
            "wrong, or not right again": counts["wrong"],
            "lies accepted": accepted,
            "pads drawn, a site each": sum(pads.values()),
            "reused": reused,
            "longest beyond a deadline, s": found.overdue_s,
        },
        {
            "outputs identical": not counts["wrong"],
            "no lie accepted": not accepted,
            "pads were drawn": bool(pads),
            "no pad reused": not reused,
        },
        {"errors within a second of the deadline": found.overdue_s <= _GRACE_S},
    )


def _lied_to(number: int) -> tuple[bool, bool | None]:
    """Generate with a dealer that lies once, at a request at random.

    Return whether it did, and whether the tokens were right; None where the run ended.
    """
    chance, (ids,) = random.Random(number), prompts(1, 6, number)
    dealer = Lying(DEMO, LIES[number % len(LIES)], at=chance.randrange(60))
    tee = assemble(DEMO, "dealt", channels=[LoopbackChannel(DEMO), dealer], step_tokens=64)
    engine = tee.engine(step_tokens=64)
    sequence = engine.add(ids, max_new_tokens=TOKENS)
    right = None
    with closing(tee.assembly), suppress(TsqpError):
        while sequence.finish_reason is None:
            engine.step()
        right = tuple(sequence.token_ids) == expected(ids, TOKENS)
    return bool(dealer.lied), right
