"""Row: a service that holds the right key, and lies in every way there is.

Sessions of the demo model under verified policies, over CURVE, to services that compute and lie
once a step. Whatever the lie is, a step ends with the right logits, bit by bit, or with an error of
ours, and the next one is right again. A tenth of the lies are told by Init, to the handshake.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import zmq

from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.curve import ClientKeys, ServiceKeys
from protocol.errors import ProtocolError, TsqpError
from protocol.messages import InitRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest
from protocol.zmq_channel import ZmqChannel
from tee_side.handshake import ServiceCheck
from tee_side.model import load_tee_model
from tee_side.services.connected import Services
from tee_side.services.member import Dialling
from tee_side.services.plan import ReplicaGroup
from tests.soak.demo import DEMO
from tests.soak.row import RowResult, is_full, note, progress
from tests.soak.victims import Outcome, Victim
from tests.tools.lies import INIT_LIES, OVERSIZED_BYTES, REORDERED, RESULT_LIES, WIRE_LIES, Lie
from tests.tools.malicious import MaliciousService, operators_of

NAME = "malicious service behind CURVE"
TEST = (
    "truncated, bit-flipped, replayed, reordered, cross-session, wrong shape or dtype, NaN/Inf,"
    " oversized; wrong results; lies of Init; with and without a second service"
)
PASS = "0 accepted; the right result wherever a second service is there"
FULL, SHORT = 10_000, 75
MINUTES = 8
ALONE = True

# Every lie but those of Init, which are a tenth of all.
LIES = (*WIRE_LIES, *RESULT_LIES)
_INIT_EACH = 10
# After how many of those lies that end a step it is looked at how the session goes on.
_FOLLOWED = 0.25
# Of a request: what answers takes a millisecond, what does not makes us wait.
_DEADLINE_S = 10.0
_SHORT_DEADLINE_S = 0.25
# One more second than the deadline is what is promised.
_GRACE_S = 1.0
_TURN_S = 0.0002
_MAX_MESSAGE_BYTES = OVERSIZED_BYTES // 2


@dataclass
class Tally:
    """What came of the lies. `wrong` and `stuck`: by the name of the lie; both must stay empty."""

    told: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    stuck: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    right: int = 0
    spared: int = 0
    spared_right: int = 0
    slowest_s: float = 0.0

    def note(self, lie: Lie, outcome: Outcome, deadline_s: float) -> None:
        """Count a lie that was told."""
        self.told += 1
        over_s = outcome.seconds - deadline_s
        self.slowest_s = max(self.slowest_s, over_s)
        self.late[lie.name] += over_s > _GRACE_S
        self.accepted[lie.name] += outcome.accepted
        self.right += outcome.right
        if outcome.error is not None:
            self.errors[outcome.error] += 1
        if outcome.accepted:
            note(f"accepted: {lie}")


@dataclass
class Party:
    """A victim and those of its services that may lie. `calls`: requests of a step to one of them.

    `spare`: another service stands in, so that what is no matter of time ends well.
    """

    victim: Victim
    liars: Sequence[MaliciousService]
    calls: int
    deadline: list[float]
    spare: bool = False

    def hear(self, lie: Lie, chance: random.Random, tally: Tally) -> None:
        """Have a lie told in one step, and see that the session goes on."""
        liar = chance.choice(self.liars)
        deadline_s = _SHORT_DEADLINE_S if lie.silent else _DEADLINE_S
        if lie.silent:
            self.deadline[0] = deadline_s
            self.victim.reconnect()
        told = liar.told
        # Never the first: then there is a reply of this session to repeat.
        liar.tell(lie, after=chance.randrange(1, self.calls - 1))
        outcome = self.victim.step()
        liar.be_honest()
        if liar.told > told:
            tally.note(lie, outcome, deadline_s)
            if self.spare and not lie.silent:
                tally.spared += 1
                tally.spared_right += outcome.right
        self.deadline[0] = _DEADLINE_S
        # The same channels as before, where they still work: nothing that comes late fits.
        if not outcome.right and not (lie.silent and chance.random() < 0.5):
            self.victim.reconnect()
        if self.spare:
            # The liar is not asked again: without a new start there is nobody to lie.
            self.victim.reconnect()
        if not (lie.silent or outcome.right or chance.random() < _FOLLOWED):
            return  # the next lie is told in the same step
        # What is late may reach the session after this one, whose id it has not: one error more.
        for _ in range(3):
            after = self.victim.step()
            tally.accepted[lie.name] += after.accepted
            if after.right:
                break
            self.victim.reconnect()
        else:
            tally.stuck[lie.name] += 1
            note(f"stuck after {lie}: {after}")
        if lie.silent:
            self.victim.reconnect()


@contextmanager
def parties() -> Iterator[tuple[list[Party], Party, Sequence[MaliciousService], ClientKeys]]:
    """Set everything up: parties for any lie, the one for replies in disorder, and the services."""
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    service_keys = ServiceKeys(secret, frozenset({client_public}))
    keys = ClientKeys(client_secret, public)
    check, layers = demo_check()
    with ExitStack() as stack:
        # Services and victims take turns in this process, many times a step.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN_S)
        services = [
            stack.enter_context(MaliciousService(operators_of(DEMO), seed=seed, keys=service_keys))
            for seed in range(2)
        ]

        deadline = [_DEADLINE_S]

        def dial(endpoint: str) -> ZmqChannel:
            return ZmqChannel(
                endpoint, timeout_s=deadline[0], max_message_bytes=_MAX_MESSAGE_BYTES, keys=keys
            )

        def alone() -> list[Channel]:
            return [dial(services[0].endpoint)]

        def shares() -> list[Channel]:
            return [dial(service.endpoint) for service in services]

        def with_spare() -> list[Channel]:
            endpoints = tuple(service.endpoint for service in services)
            group = ReplicaGroup(1, 0, layers - 1, endpoints)
            dialling = Dialling(dial, check.verify, timeout_s=deadline[0])
            while True:
                connected = Services([group], layers, dialling)
                try:
                    connected.connect(_DEADLINE_S)
                except ProtocolError:
                    # A late reply, to a session of before: each comes once.
                    connected.close()
                else:
                    return list(connected.at(0))

        def party(
            policy: str, connect: Callable[[], list[Channel]], liars: int = 1, **how: int
        ) -> Party:
            victim = Victim(policy, connect, **how)
            stack.callback(victim.close)
            before = services[0].requests
            victim.step()
            calls = services[0].requests - before
            return Party(victim, services[:liars], calls, deadline, spare=connect is with_spare)

        usual = [
            party("shielded", alone),
            party("two-server", shares, liars=2),
            party("shielded", with_spare),
        ]
        overlapping = party("shielded", alone, sequences=8, micro_batches=2)
        yield usual, overlapping, services, keys


def demo_check() -> tuple[ServiceCheck, int]:
    """Return what the handshake compares with, and the demo model's number of layers."""
    config, checkpoint = read_config(DEMO), Checkpoint(DEMO)
    check = ServiceCheck(
        config,
        checkpoint,
        load_tee_model(config, checkpoint, torch.float32),
        arithmetic="int8",
        linear=linear_digest(config, checkpoint),
    )
    return check, config.num_hidden_layers


def lie_to_handshake(count: int, service: MaliciousService, keys: ClientKeys, tally: Tally) -> None:
    """Lie in so many Init replies: none of them may pass the handshake."""
    check, _ = demo_check()
    try:
        for lie in itertools.islice(itertools.cycle(INIT_LIES), count):
            service.tell_init(lie)
            began, error = time.monotonic(), None
            channel = open_channel(service.endpoint, timeout_s=_DEADLINE_S, keys=keys)
            try:
                check.verify(service.endpoint, channel.call(InitRequest()).response)
            except TsqpError as found:
                error = type(found).__name__
            finally:
                channel.close()
            tally.note(lie, Outcome(error, right=False, seconds=time.monotonic() - began), 0.0)
            progress(tally.told)
    finally:
        service.tell_init(None)


def run(count: int) -> RowResult:
    """Tell so many lies."""
    began = time.monotonic()
    chance = random.Random(30)
    tally = Tally()
    with parties() as (usual, overlapping, services, keys):
        lie_to_handshake(count // _INIT_EACH, services[0], keys, tally)
        for lie in itertools.cycle(LIES):
            if tally.told >= count:
                break
            party = overlapping if lie is REORDERED else chance.choice(usual)
            party.hear(lie, chance, tally)
            progress(tally.told)
    accepted, stuck = tally.accepted.total(), tally.stuck.total()
    late = tally.late.total() if is_full(FULL, count) else 0
    errors = ", ".join(f"{name} {n:,}" for name, n in tally.errors.most_common())
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "accepted": f"{accepted:,} of {tally.told:,}",
            "kinds of lies": len(LIES) + len(INIT_LIES),
            "sessions that did not go on": stuck,
            "right all the same": tally.right,
            "right where a second service was there": f"{tally.spared_right:,} of {tally.spared:,}",
            "refused with": errors,
            "longest wait beyond a deadline, s": tally.slowest_s,
        },
        time.monotonic() - began,
        passed=not accepted and not stuck and not late and tally.spared_right == tally.spared,
    )
