"""Row: a service that holds the right key, and lies in every way there is.

Sessions of the demo model under verified policies, over CURVE (the row `malicious_shm`: over shared
memory), to services that compute and lie once a step. Whatever the lie is, a step ends with the
right logits, bit by bit, or with an error in which this lie may end, and the next one is right
again. A tenth of the lies, and each of its own once, are told by Init, to the handshake. Another
session of the same services goes on beside those that are lied to: its replies are what the lies
across sessions tell.
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
from tempfile import TemporaryDirectory

import torch
import zmq

from gpu_side.access import ServiceKeys
from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.curve import ClientKeys
from protocol.errors import DeadlineExceededError, ProtocolError, TsqpError
from protocol.messages import InitRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest
from protocol.pending import PendingChannel
from tee_side.model.layers import load_tee_model
from tee_side.remote.handshake import ServiceCheck
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup
from tests.kit.lie import MaliciousService, operators_of
from tests.kit.lies import (
    CROSS_SESSION,
    INIT_LIES,
    NEEDY,
    OVERSIZED_BYTES,
    REORDERED,
    RESULT_LIES,
    WIRE_LIES,
    Lie,
)
from tests.soak.demo import DEMO
from tests.soak.row import RowResult, is_full, note, progress
from tests.soak.victims import Outcome, Victim

NAME = "malicious service behind CURVE"
TEST = (
    "truncated, bit-flipped, replayed, reordered, cross-session, wrong shape or dtype, NaN/Inf,"
    " oversized; wrong results; lies of Init; with and without a second service"
)
PASS = "0 accepted; the right result wherever a second service is there"
FULL, SHORT = 10_000, 75
MINUTES = 10
ALONE = True

# Every lie but those of Init, which are a tenth of all.
LIES = (*WIRE_LIES, *RESULT_LIES)
_INIT_EACH = 10
# How often it is tried to have a lie told: the step may not ask the one that was to lie.
_ATTEMPTS = 10
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
    """What came of the lies, by their names. `accepted`, `unfit`, `stuck`, `late`: must stay empty.

    `unfit`: ended in an error that has nothing to do with them.

    `had`: of those that tell of something that has to be there, how often it was. `spared`: told
    where a second service was there, for a step to end well.
    """

    told: Counter[str] = field(default_factory=Counter)
    had: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    unfit: Counter[str] = field(default_factory=Counter)
    stuck: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    right: int = 0
    spared: int = 0
    spared_right: int = 0
    slowest_s: float = 0.0

    def see(self, lie: Lie, outcome: Outcome) -> None:
        """Look at a step in which, or before which, a lie was to be told."""
        self.accepted[lie.name] += outcome.accepted
        if outcome.accepted:
            note(f"accepted: {lie}")

    def note(self, lie: Lie, outcome: Outcome, deadline_s: float) -> None:
        """Count a lie that was told."""
        self.told[lie.name] += 1
        over_s = outcome.seconds - deadline_s
        self.slowest_s = max(self.slowest_s, over_s)
        self.late[lie.name] += over_s > _GRACE_S
        self.right += outcome.right
        if outcome.error is not None:
            self.errors[outcome.error] += 1
            endings = [kind.__name__ for kind in lie.endings]
            if outcome.error not in endings:
                self.unfit[lie.name] += 1
                note(f"{lie}: got {outcome.error}, expected one of {endings}")

    def missing(self) -> list[str]:
        """Return what was never told, or never had what it tells of."""
        lies = (*INIT_LIES, *LIES)
        return [
            *(lie.name for lie in lies if not self.told[lie.name]),
            *(
                f"{lie} (made up)"
                for lie in NEEDY
                if self.told[lie.name] and not self.had[lie.name]
            ),
        ]

    def passed(self, *, timed: bool) -> bool:
        """Say whether nothing was accepted, and everything tried. `timed`: deadlines are judged."""
        wrong = self.accepted.total() + self.unfit.total() + self.stuck.total()
        wrong += self.late.total() if timed else 0
        spared = self.spared_right == self.spared > 0
        return not wrong and spared and not self.missing()


@dataclass
class Party:
    """A victim and those of its services that may lie. `calls`: requests of a step to one of them.

    `bystander`: another session of theirs. `spare`: another service stands in, so that what is no
    matter of time ends well.
    """

    victim: Victim
    bystander: Victim
    liars: Sequence[MaliciousService]
    calls: int
    deadline: list[float]
    spare: bool = False

    def hear(self, lie: Lie, chance: random.Random, tally: Tally) -> bool:
        """Have a lie told in one step, and see that the session goes on; False if it was not."""
        liar = chance.choice(self.liars)
        # Swapped replies come at once, unless nothing is there to be swapped.
        waits = lie.silent and lie is not REORDERED
        deadline_s = _SHORT_DEADLINE_S if waits else _DEADLINE_S
        if lie in CROSS_SESSION:
            self._go_on(self.bystander, lie, tally)
            liar.overhear()
        if lie.silent:
            self.deadline[0] = deadline_s
            self.victim.reconnect()
        told, had = liar.told, liar.memory.had[lie.name]
        # Never the first: then there is a reply of this session to repeat. One that is held back
        # needs another request beside its own, which the LM head is not.
        last = self.calls - (2 if lie is REORDERED else 1)
        liar.tell(lie, after=chance.randrange(1, last))
        outcome = self.victim.step()
        liar.be_honest()
        tally.see(lie, outcome)
        was_told = liar.told > told
        if was_told:
            tally.note(lie, outcome, deadline_s)
            # Of what came too late, nobody knows what would have become.
            in_time = waits or outcome.error != DeadlineExceededError.__name__
            tally.had[lie.name] += in_time and liar.memory.had[lie.name] > had
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
            return was_told  # the next lie is told in the same step
        self._go_on(self.victim, lie, tally)
        if lie.silent:
            self.victim.reconnect()
        return was_told

    @staticmethod
    def _go_on(victim: Victim, lie: Lie, tally: Tally) -> None:
        """See that a session goes on."""
        # What is late may reach the session after that one, whose id it has not: one error more.
        for _ in range(3):
            after = victim.step()
            tally.see(lie, after)
            if after.right:
                return
            victim.reconnect()
        tally.stuck[lie.name] += 1
        note(f"stuck after {lie}: {after}")


@contextmanager
def parties(
    *, over_shm: bool
) -> Iterator[tuple[list[Party], Party, Sequence[MaliciousService], ClientKeys | None]]:
    """Set everything up: parties for any lie, the one for replies in disorder, and the services."""
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    service_keys = None if over_shm else ServiceKeys(secret, frozenset({client_public}))
    keys = None if over_shm else ClientKeys(client_secret, public)
    check, layers = demo_check()
    with ExitStack() as stack:
        # Services and victims take turns in this process, many times a step.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN_S)
        folder = stack.enter_context(TemporaryDirectory(prefix="tsqp-soak-"))
        services = [
            stack.enter_context(
                MaliciousService(operators_of(DEMO), bind, seed=seed, keys=service_keys)
            )
            for seed in range(2)
            for bind in [f"shm://{folder}/{seed}" if over_shm else "tcp://127.0.0.1:*"]
        ]

        deadline = [_DEADLINE_S]

        def dial(endpoint: str) -> PendingChannel:
            return open_channel(
                endpoint, timeout_s=deadline[0], max_message_bytes=_MAX_MESSAGE_BYTES, keys=keys
            )

        def alone() -> list[Channel]:
            return [dial(services[0].endpoint)]

        def shares() -> list[Channel]:
            return [dial(service.endpoint) for service in services]

        def with_spare() -> list[Channel]:
            endpoints = tuple(service.endpoint for service in services)
            group = ReplicaGroup(1, 0, layers - 1, endpoints)
            options = ConnectOptions(dial, check.verify, timeout_s=deadline[0])
            while True:
                connected = Services([group], layers, options)
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
            spare = connect is with_spare
            return Party(victim, bystander, services[:liars], calls, deadline, spare=spare)

        bystander = Victim("two-server", shares)
        stack.callback(bystander.close)
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
        load_tee_model(config, checkpoint, torch.float32).norm_weights(),
        arithmetic="int8",
        linear=linear_digest(config, checkpoint),
    )
    return check, config.num_hidden_layers


def lie_to_handshake(
    count: int, service: MaliciousService, keys: ClientKeys | None, tally: Tally
) -> None:
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
            outcome = Outcome(error, right=False, seconds=time.monotonic() - began)
            tally.see(lie, outcome)
            tally.note(lie, outcome, 0.0)
            progress(tally.told.total())
    finally:
        service.tell_init(None)


def run(count: int) -> RowResult:
    """Tell so many lies."""
    return told(NAME, TEST, count, full=is_full(FULL, count), over_shm=False)


def told(name: str, test: str, count: int, *, full: bool, over_shm: bool) -> RowResult:
    """Tell so many lies over either link, and return the row of this name."""
    began = time.monotonic()
    chance = random.Random(30)
    tally = Tally()
    with parties(over_shm=over_shm) as (usual, overlapping, services, keys):
        lie_to_handshake(max(count // _INIT_EACH, len(INIT_LIES)), services[0], keys, tally)
        for lie in itertools.cycle(LIES):
            if tally.told.total() >= count:
                break
            for _ in range(_ATTEMPTS):
                party = overlapping if lie is REORDERED else chance.choice(usual)
                if party.hear(lie, chance, tally):
                    break
            progress(tally.told.total())
    if missing := tally.missing():
        note(f"never told: {', '.join(missing)}")
    errors = ", ".join(f"{name} {n:,}" for name, n in tally.errors.most_common())
    return RowResult(
        name,
        test,
        PASS,
        count,
        {
            "accepted": f"{tally.accepted.total():,} of {tally.told.total():,}",
            "kinds of lies": len(+tally.told),
            "replies that were swapped": tally.had[REORDERED.name],
            "replies of another session": sum(tally.had[lie.name] for lie in CROSS_SESSION),
            "sessions that did not go on": tally.stuck.total(),
            "right all the same": tally.right,
            "right where a second service was there": f"{tally.spared_right:,} of {tally.spared:,}",
            "refused with": errors,
            "refused with an error of something else": tally.unfit.total(),
            "longest wait beyond a deadline, s": tally.slowest_s,
        },
        time.monotonic() - began,
        passed=tally.passed(timed=full),
    )
