"""Rows: a service that holds the right key and lies in every way there is, and wrong results.

Sessions under verified policies, of the demo model or in short of a small one, to services that
compute and lie once a step. Whatever the lie is, a step ends with the right logits, bit by bit, or
with an error in which this lie may end, and the next one is right again.
"""

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import zmq
from torch.nn.functional import linear

from gpu_side.access import ServiceKeys
from gpu_side.kernels import exact_product
from protocol.channel import Channel, PendingChannel
from protocol.curve import ClientKeys
from protocol.errors import ProtocolError, TsqpError
from protocol.messages import FUSED_MODULES, InitRequest, LinearRequest, RingLinearRequest
from protocol.model.checkpoint import Checkpoint, linear_digest
from protocol.model.config import read_config
from protocol.model.weights import CPU, load_linear, load_quantized
from protocol.tensors import to_torch
from protocol.transport import open_channel
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import ExactCheck
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions, ServiceCheck
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.words import Site
from tests.faults.row import Found, Row, note
from tests.kit.demo import DEMO, prompt
from tests.kit.lie import MaliciousService, Outcome, Victim, operators_of
from tests.kit.lies import (
    CROSS_SESSION,
    INIT_LIES,
    NEEDY,
    OVERSIZED_BYTES,
    REORDERED,
    RESULT_LIES,
    WIRE_LIES,
    WRONG,
    Lie,
    surely_wrong,
)
from tests.kit.model import LoopbackChannel, assemble, make_model
from tsqp.lab.research.float_check import FloatCheck, Tolerance

# Every lie but those of Init.
LIES = (*WIRE_LIES, *RESULT_LIES)
# Of a request: what answers takes a millisecond, what does not makes us wait.
_DEADLINE_S, _SHORT_DEADLINE_S = 10.0, 0.25
# One more second than the deadline is what is promised.
_GRACE_S = 1.0


@dataclass
class Tally:
    """What came of the lies, by their names. What is in `bad` must not have been.

    `counts`: steps that were `right`, and those `spared`, where a second service was there to end
    them well.
    """

    told: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def blame(self, what: str, lie: Lie, outcome: Outcome) -> None:
        self.bad[what] += 1
        note(f"{lie}: {what}: {outcome}, expected one of {lie.endings}")

    def note(self, lie: Lie, outcome: Outcome, over_s: float, *, spare: bool = False) -> None:
        """Count a lie that was told. `over_s`: beyond a deadline; `spare`: a service stood in."""
        self.told[lie.name] += 1
        self.slowest_s = max(self.slowest_s, over_s)
        self.counts["right"] += outcome.right
        if outcome.error is not None:
            self.errors[outcome.error] += 1
            if outcome.error not in [kind.__name__ for kind in lie.endings]:
                self.blame("unfit", lie, outcome)
        if spare and not lie.silent:
            self.counts.update(spared=1, spared_right=outcome.right)
        elif outcome.right and lie.errors and not lie.harmless:
            self.blame("no lie", lie, outcome)

    def found(self, had: Counter[str]) -> Found:
        """Judge. `had`: how often lies had what they tell of, where that has to be there."""
        counts, told = self.counts, self.told.total()
        errors = ", ".join(f"{name} {n:,}" for name, n in self.errors.most_common())
        spared = f"{counts['spared_right']:,} of {counts['spared']:,}"
        missing = {lie.name for lie in (*INIT_LIES, *LIES)} - self.told.keys()
        missing |= {lie.name for lie in NEEDY} - had.keys()
        if missing:
            note(f"never told: {', '.join(missing)}")
        return Found(
            {
                "accepted": f"{self.bad['accepted']:,} of {told:,}",
                "kinds of lies": len(self.told),
                "replies that were swapped": had[REORDERED.name],
                "replies of another session": sum(had[lie.name] for lie in CROSS_SESSION),
                "sessions that did not go on": self.bad["stuck"],
                "right all the same": counts["right"],
                "right where a second service was there": spared,
                "refused with": errors,
                "refused with an error of something else": self.bad["unfit"],
                "longest wait beyond a deadline, s": self.slowest_s,
            },
            {
                "none accepted, unfit, stuck or harmless": not self.bad.total(),
                "every lie told": not missing,
                "right where a second service was there": counts["spared_right"]
                == counts["spared"]
                > 0,
            },
            {"deadlines": self.slowest_s <= _GRACE_S},
        )


@dataclass
class Party:
    """A victim and those of its services that may lie. `calls`: requests of a step to one of them.

    `deadline`: of the channels that are opened next. `spare`: another service stands in.
    """

    victim: Victim
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
        if lie.silent:
            self.deadline[0] = deadline_s
            self.victim.reconnect()
        told = liar.told
        # Never the first: then there is a reply of this session to repeat. One that is held back
        # needs another request beside its own, which the LM head is not.
        last = self.calls - (2 if lie is REORDERED else 1)
        liar.tell(lie, after=chance.randrange(1, last))
        outcome = self.victim.step()
        liar.be_honest()
        if outcome.accepted:
            tally.blame("accepted", lie, outcome)
        was_told = liar.told > told
        if was_told:
            tally.note(lie, outcome, outcome.seconds - deadline_s, spare=self.spare)
        self.deadline[0] = _DEADLINE_S
        # Often the same channels as before, where they still work: nothing that comes late fits.
        # But a liar is not asked again where another stands in: there would be no lie.
        if self.spare or not (outcome.right or (lie.silent and chance.random() < 0.5)):
            self.victim.reconnect()
        if lie.silent or outcome.right or chance.random() < 0.25:
            _go_on(self.victim, lie, tally)
        if lie.silent:
            self.victim.reconnect()
        return was_told


def _go_on(victim: Victim, lie: Lie, tally: Tally) -> None:
    # What is late may reach the session after that one, whose id it has not: one error more.
    for _ in range(3):
        after = victim.step()
        if after.accepted:
            tally.blame("accepted", lie, after)
        if after.right:
            return
        victim.reconnect()
    tally.blame("stuck", lie, after)


class Parties(NamedTuple):
    """`usual`: for any lie, the first for replies in disorder; what tells lies of Init."""

    usual: list[Party]
    services: Sequence[MaliciousService]
    dial: Callable[[str], PendingChannel]
    check: ServiceCheck


@contextmanager
def parties(directory: Path, *, over_shm: bool) -> Iterator[Parties]:
    """Set everything up: over CURVE, or over shared memory, which has no keys."""
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    service_keys = None if over_shm else ServiceKeys(secret, frozenset({client_public}))
    keys = None if over_shm else ClientKeys(client_secret, public)
    config, checkpoint = read_config(directory), Checkpoint(directory)
    digest = linear_digest(config, checkpoint)
    check = ServiceCheck(config, checkpoint, arithmetic="int8", linear=digest)
    deadline, layers = [_DEADLINE_S], config.num_hidden_layers
    with ExitStack() as stack:
        # Services and victims take turns in this process, many times a step.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(0.0002)
        folder = stack.enter_context(TemporaryDirectory(prefix="tsqp-soak-"))
        binds = [f"shm://{folder}/{n}" if over_shm else "tcp://127.0.0.1:*" for n in range(2)]
        services = [
            stack.enter_context(
                MaliciousService(operators_of(directory), bind, seed=seed, keys=service_keys)
            )
            for seed, bind in enumerate(binds)
        ]
        endpoints = tuple(service.endpoint for service in services)

        def dial(endpoint: str) -> PendingChannel:
            most = OVERSIZED_BYTES // 2
            return open_channel(endpoint, timeout_s=deadline[0], max_message_bytes=most, keys=keys)

        def with_spare() -> list[Channel]:
            group = ReplicaGroup(0, 0, layers - 1, endpoints)
            while True:
                # Whom one run bars, the next one asks.
                options = ConnectOptions(dial, check.verify, timeout_s=deadline[0])
                connected = Services([group], layers, options)
                try:
                    connected.connect(_DEADLINE_S)
                except ProtocolError:
                    # A late reply, to a session of before: each comes once.
                    connected.close()
                else:
                    return list(connected.at(0))

        def party(policy: str, connect: Any, liars: int = 1, **how: int) -> Party:
            victim = Victim(policy, connect, directory=directory, **how)
            stack.callback(victim.close)
            before = services[0].requests
            victim.step()
            calls, spare = services[0].requests - before, connect is with_spare
            return Party(victim, services[:liars], calls, deadline, spare)

        usual = [
            party("shielded", lambda: [dial(endpoints[0])], sequences=8, micro_batches=2),
            party("dealt", lambda: [dial(one) for one in endpoints]),
            party("shielded", with_spare),
        ]
        yield Parties(usual, services, dial, check)


def lie_to_handshake(count: int, to: Parties, tally: Tally) -> None:
    """Lie in so many Init replies: none of them may pass the handshake."""
    service, *_ = to.services
    for lie in itertools.islice(itertools.cycle(INIT_LIES), count):
        service.lying_init = lie
        began, error = time.monotonic(), None
        channel = to.dial(service.endpoint)
        try:
            to.check.verify(service.endpoint, channel.call(InitRequest()).response)
        except TsqpError as found:
            error = type(found).__name__
        finally:
            channel.close()
        outcome = Outcome(error, False, time.monotonic() - began)
        if outcome.accepted:
            tally.blame("accepted", lie, outcome)
        tally.note(lie, outcome, outcome.seconds - _DEADLINE_S)
    service.be_honest()


def small_model(directory: Path) -> Path:
    """Make a model with the demo's tokens, in the fewest layers that can be swapped."""
    size = read_config(DEMO).vocab_size
    make_model(directory, num_hidden_layers=2, vocab_size=size)
    return directory


def lie_so_often(count: int, full: bool, *, over_shm: bool) -> Found:
    """Tell so many lies: a tenth, and each of its own once, by Init, to the handshake."""
    chance, tally = random.Random(30), Tally()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        directory = DEMO if full else small_model(Path(folder, "model"))
        to = stack.enter_context(parties(directory, over_shm=over_shm))
        lie_to_handshake(max(count // 10, len(INIT_LIES)), to, tally)
        for lie in itertools.cycle(LIES):
            if tally.told.total() >= count:
                break
            # The step may not ask the one that was to lie.
            for _ in range(10):
                # Its service is the one that all sessions ask.
                first = lie is REORDERED or lie in CROSS_SESSION
                party = to.usual[0] if first else chance.choice(to.usual)
                if party.hear(lie, chance, tally):
                    break
        had = sum((service.memory.had for service in to.services), Counter[str]())
    return tally.found(had)


malicious_service = Row(
    "malicious_service",
    "malicious service behind CURVE",
    "truncated, bit-flipped, replayed, reordered, cross-session, wrong shape or dtype, NaN/Inf,"
    " oversized; wrong results; lies of Init; with and without a second service",
    "0 accepted; the right result wherever a second service is there",
    short=50,
    long=10_000,
    minutes=10,
    run=partial(lie_so_often, over_shm=False),
)
malicious_shm = replace(
    malicious_service,
    name="malicious_shm",
    title="malicious service over shared memory",
    test="the same lies",
    long=1000,
    minutes=2,
    run=partial(lie_so_often, over_shm=True),
)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Honest checks for each wrong result: 1,000,000 in all.
_HONEST_FOR_EACH = 100
Holds = Callable[[torch.Tensor, torch.Tensor], bool]


class Arithmetic(NamedTuple):
    """A site in one arithmetic: inputs that the model feeds it, and what is right of them.

    `draw`: returns a check with secrets of its own, as every run has one.
    """

    inputs: torch.Tensor
    product: Callable[[torch.Tensor], torch.Tensor]
    draw: Callable[[], Holds]

    def varied(self, rows: int, chance: random.Random) -> torch.Tensor:
        """Return inputs that differ from each other and from all before."""
        picked = torch.tensor([chance.randrange(len(self.inputs)) for _ in range(rows)])
        x_TI: torch.Tensor = self.inputs[picked]
        if x_TI.is_floating_point():
            factor = 2.0 ** chance.uniform(-4, 4)
            return (x_TI * factor * (1 + 0.1 * torch.randn(x_TI.shape))).to(x_TI.dtype)
        # Smaller in places, never larger: sums that fit the ring fit it still.
        return (x_TI * torch.rand(x_TI.shape)).round().to(torch.int32)


def _in_integers(x_TI: torch.Tensor, weight: torch.Tensor) -> Arithmetic:
    return Arithmetic(
        x_TI,
        lambda x_TI: exact_product(x_TI, weight),
        lambda: ExactCheck.draw(weight, Randomness()).holds,
    )


def _in_floats(x_TI: torch.Tensor, weight: torch.Tensor) -> Arithmetic:
    tolerance = Tolerance.of(weight.dtype, None)

    def draw() -> Holds:
        check = FloatCheck.draw(weight, Randomness())
        return lambda x_TI, y_TO: check.holds(x_TI, y_TO, [x_TI], tolerance)

    return Arithmetic(x_TI.to(weight.dtype), lambda x_TI: linear(x_TI, weight), draw)


def _inputs(policy: str) -> dict[Site, torch.Tensor]:
    """Return what a policy that hides nothing sends for some text, by site."""
    channel = LoopbackChannel(DEMO)
    assemble(DEMO, policy, channel=channel).logits(list(prompt(200, random.Random(1))))
    found = {}
    for request in channel.requests:
        if isinstance(request, LinearRequest | RingLinearRequest):
            sent = request.hidden_states if isinstance(request, LinearRequest) else request.elements
            for operator, modules in FUSED_MODULES.items():
                if request.module_names == modules:
                    found[request.layer_idx, operator] = to_torch(sent).clone()
    return found


def load_products() -> dict[tuple[Site, str], Arithmetic]:
    config, checkpoint = read_config(DEMO), Checkpoint(DEMO)
    integers, floats = _inputs("quantized-clear"), _inputs("attention-in-tee")
    found: dict[tuple[Site, str], Arithmetic] = {}
    for site, x_TI in integers.items():
        quantized = load_quantized(checkpoint, config, *site).weight
        found[site, "int8"] = _in_integers(x_TI, quantized)
        for dtype in DTYPES:
            loaded = load_linear(checkpoint, config, *site, dtype=dtype, device=CPU)
            found[site, str(dtype)] = _in_floats(floats[site], loaded.weight)
    return found


@Row(
    "wrong_results",
    "wrong results, verified policy",
    "one element, low-rank error, swapped layer, stale reply, sign, x(1 + 1e-3), zeros, in int8 or"
    " float32 by chance; honest checks in bfloat16 and float16, too",
    "0 missed; 0 false alarms in 1,000,000 honest checks",
    short=14,
    long=10_000,
    minutes=3,
)
def wrong_results(count: int, full: bool) -> Found:
    chance, told, missed = random.Random(20), Counter[str](), Counter[str]()
    checks, alarms = Counter[str](), Counter[str]()
    torch.manual_seed(20)
    with torch.inference_mode():
        products = load_products()
        checks_of = {place: one.draw() for place, one in products.items()}
        # In half precision x(1 + 1e-3) is what rounding does.
        exact = [place for place in products if place[1] in ("int8", "torch.float32")]
        kinds = itertools.cycle((*WRONG, "swapped layer", "stale reply"))
        for _ in range(count):
            ((layer, operator), name), kind = chance.choice(exact), next(kinds)
            one = products[(layer, operator), name]
            x_TI = one.varied(chance.choice([1, 1, 4]), chance)
            right = one.product(x_TI)
            if kind == "swapped layer":
                other = (layer - 1 if layer else 1, operator)
                wrong = products[other, name].product(x_TI)
            elif kind == "stale reply":
                wrong = one.product(one.varied(len(x_TI), chance))
            else:
                wrong = WRONG[kind](right, chance)
            told[name] += 1
            if checks_of[(layer, operator), name](x_TI, surely_wrong(wrong, right, chance)):
                missed[name] += 1
                note(f"missed: {kind} at {operator} of layer {layer} in {name}")
        rows = max(1, min(125, count * _HONEST_FOR_EACH // len(products)))
        while checks.total() < count * _HONEST_FOR_EACH:
            for (_, name), one in products.items():
                x_TI, holds = one.varied(rows, chance), one.draw()
                y_TO = one.product(x_TI)
                # One row, one check, as at decode.
                held = [holds(x_TI[at : at + 1], y_TO[at : at + 1]) for at in range(rows)]
                checks[name] += rows
                alarms[name] += held.count(False)
    return Found(
        {
            "missed in int8": f"{missed['int8']:,} of {told['int8']:,}",
            "missed in float32": f"{missed['torch.float32']:,} of {told['torch.float32']:,}",
            "false alarms": f"{alarms.total():,} of {checks.total():,}",
            "of them in integers": f"{alarms['int8']:,} of {checks['int8']:,}",
        },
        {
            "none missed": not missed.total() and min(told.values()) > 0 and len(told) == 2,
            "no false alarm": not alarms.total() and min(checks.values()) > 0,
        },
    )
