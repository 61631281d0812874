"""What it costs, while all is well, that another service could be asked.

    python -m benchmarks.failover_cost [--model DIR] [--transports unix,tcp] [--rounds 300]
        [--calls 20] [--json FILE]

Three ways to the same two services (`--device null`, which answers at once): a plain channel to the
first, one service without a stand-in (`Replicas` of one), and two that stand in for each
other. They take turns: `calls` small RPCs each, then the next; and one decoded token each, of one
sequence (as many after one another as the rounds need), in one engine, whose operators alone are
exchanged. Beside it, with turns of its own, stands another plain channel to the first.

`ratios`: every time set against that of the plain channel in the same round, the median over all.
`noise`: how far one plain channel is from the other, which is nothing but the machine: the distance
from 1 within which their ratio's median is in eight of ten blocks of rounds. `two_to_again`: the
median ratio of two services to the other plain channel; more than 1 + `noise` is a cost.

`bookkeeping` is what `Replicas` itself adds to an RPC: around a channel that answers at once, the
fastest of many blocks, which a busy machine disturbs least.

Exit status 1 if two services cost more than noise, in anything that was measured, or bookkeeping is
more than 2 us; also if noise is more than 0.2, on a machine that is too busy to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NoReturn, cast

import torch

from benchmarks.harness import TRANSPORTS, Fields, Found, Options, Place, main, noted, transports
from protocol.channel import Channel, PendingChannel
from protocol.errors import EndpointError, SettingsError
from protocol.messages import (
    FUSED_MODULES,
    LinearRequest,
    LMHeadRequest,
    Request,
    TensorReply,
)
from protocol.prepared import Exchange, PreparedRequest, Traffic
from protocol.tensors import from_torch, short_name
from protocol.transport import open_channel
from tee_side.policy.placement import load_policy
from tee_side.remote.services.member import ConnectOptions, Instances, Member, Session
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import Replicas
from tee_side.runner import Runner, RunnerSettings
from tsqp.lab.explain.traffic import AtOnce
from tsqp.lab.measure import elapsed_us, in_turns
from tsqp.run.settings import model_directory

POLICY = "attention-in-tee"
WAYS = ("plain", "plain again", "one", "two")
MOST_BOOKKEEPING_US = 2.0
MOST_NOISE = 0.2
_WARM_UP, _PROMPT = 20, 8
# Medians of fewer rounds than this are far from each other whatever was measured.
_BLOCKS, _LEAST_BLOCK = 10, 5
_ONES = from_torch(torch.ones(4))
_REQUEST, _REPLY = LMHeadRequest(hidden_states=_ONES), TensorReply(output=_ONES)

Times = Sequence[Sequence[float]]


def _ratio(times: Times, way: str, to: str = WAYS[0]) -> float:
    """Return the median over all rounds of what one way takes by what another does."""
    return median(row[WAYS.index(way)] / row[WAYS.index(to)] for row in times)


def _noise(times: Times) -> float:
    """Return how far the other plain channel's ratio is from 1 in all but two blocks."""
    count = max(1, min(_BLOCKS, len(times) // _LEAST_BLOCK))
    edges = [len(times) * n // count for n in range(count + 1)]
    blocks = [times[first:last] for first, last in pairwise(edges)]
    distances = sorted(abs(_ratio(block, "plain again") - 1) for block in blocks)
    # Something else may have run for a moment; not all the time.
    return distances[count - 1 - count * 2 // _BLOCKS]


def _result(work: str, transport: str, times: Times, calls: int) -> Fields:
    """Return what microseconds say: a row a round of `calls`, a column each of WAYS."""
    noise, two_to_again = _noise(times), _ratio(times, "two", "plain again")
    line = "{work} over {transport}: plain {us[plain]:.1f} us; two to plain again"
    return noted(
        line + " {two_to_again:.3f}, noise {noise:.3f}",
        {
            "work": work,
            "transport": transport,
            "rounds": len(times),
            "us": {way: median(row[n] for row in times) / calls for n, way in enumerate(WAYS)},
            "ratios": {way: _ratio(times, way) for way in WAYS[1:]},
            "noise": noise,
            "two_to_again": two_to_again,
            # Another plain channel differs as much, and little enough to tell.
            "ok": two_to_again <= 1 + noise and noise <= MOST_NOISE,
        },
    )


def _measure(model: Path, transport: str, rounds: int, calls: int) -> list[Fields]:
    """Measure a small RPC and a decoded token over one transport. Raises TsqpError."""
    with Place() as place:
        device = ("--device", "null", "--arithmetic", "float")
        endpoints = [place.service(model, *device, transport=transport) for _ in range(2)]
        plain = [place.enter_context(open_channel(endpoints[0])) for _ in range(2)]
        settings = (
            RunnerSettings(model, load_policy(POLICY), gpu, threads=1)
            for gpu in ((endpoints[0],), tuple(endpoints))
        )
        one, two = (place.enter_context(Runner(each)) for each in settings)
        channels = [*plain, one.services.at(0)[0], two.services.at(0)[0]]
        rpc = in_turns([_calls(channel, one, calls) for channel in channels], rounds, _WARM_UP)
        token = _tokens(two, channels, rounds)
    return [_result("small RPC", transport, rpc, calls), _result("token", transport, token, 1)]


def _bookkeeping_us(blocks: int = 50, calls: int = 2000) -> float:
    """Return the microseconds that an RPC takes longer for being one that could be asked again."""
    channel = _AtOnce("nowhere")
    group = ReplicaGroup(1, 0, 0, ("nowhere",))
    member = Member("nowhere", group, ConnectOptions(_never, _never), Instances(), Traffic())
    member.session = Session(member, cast("PendingChannel", channel), channel)
    replicas = Replicas([member], timeout_s=60.0, traffic=Traffic())

    def work(asked: Channel | Replicas) -> None:
        for _ in range(calls):
            asked.wait(asked.submit(_REQUEST))

    both = (channel, replicas)
    fastest = [min(elapsed_us(partial(work, one)) for _ in range(blocks)) for one in both]
    return (fastest[1] - fastest[0]) / calls


class _AtOnce(AtOnce):
    """A connection, to nowhere, with one reply to all requests."""

    _exchange = Exchange(_REPLY, endpoint="nowhere")

    def submit(
        self,
        request: Request,
        timeout_s: float | None = None,
        *,
        send_within_s: float | None = None,
    ) -> int:
        return 1

    def wait(self, request_id: int) -> Exchange:
        return self._exchange

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        return True

    def limit_messages(self, max_message_bytes: int) -> None: ...

    def use_one_connection(self) -> None: ...


def _never(endpoint: str, *_given: object) -> NoReturn:
    raise EndpointError(endpoint, got="no service", expected="none to be asked or checked")


def _calls(channel: Channel, runner: Runner, calls: int) -> Callable[[], float]:
    config, names = runner.config, FUSED_MODULES["qkv_proj"]
    x_TD = torch.ones(1, config.hidden_size, dtype=runner.dtype)
    request = LinearRequest(layer_idx=0, module_names=names, hidden_states=from_torch(x_TD))
    # As a call plan has it.
    outputs = sum(config.module_shape(name)[0] for name in names)
    prepared = PreparedRequest(request, (1, outputs), short_name(runner.dtype))

    def work() -> None:
        for _ in range(calls):
            channel.wait(channel.start(prepared, x_TD))

    return partial(elapsed_us, work)


def _tokens(runner: Runner, channels: Sequence[Channel], rounds: int) -> list[list[float]]:
    """Return microseconds of a decoded token over each of the channels, a row a round.

    One sequence for all channels, and another one when its positions are used up. Raises
    SettingsError where they are too few for a round.
    """
    positions, least = runner.config.context_length, _PROMPT + 1 + len(WAYS) * (_WARM_UP + 1)
    SettingsError.unless(
        positions >= least, "--model", f"{positions} positions", f"at least {least} to decode into"
    )
    most = (positions - _PROMPT - 1) // len(WAYS) - _WARM_UP
    lanes = [runner._assembly.lanes(partial(_only, channel)) for channel in channels]

    def step(index: int) -> float:
        runner.engine.lanes = lanes[index]
        return elapsed_us(runner.engine.step)

    times: list[list[float]] = []
    while len(times) < rounds:
        part = min(most, rounds - len(times))
        # Zeros are what a null device computes: the model's own end must not end it.
        tokens = len(channels) * (part + _WARM_UP) + 1
        sequence = runner.engine.add(
            [1] * _PROMPT, max_new_tokens=tokens, eos_token_ids=frozenset()
        )
        while not sequence.token_ids:
            runner.engine.step()
        times += in_turns([partial(step, index) for index in range(len(channels))], part, _WARM_UP)
        runner.engine.remove(sequence)
    return times


def _only(channel: Channel, _layer: int) -> tuple[Channel]:
    return (channel,)


def measure(options: Options, _place: Place) -> Found:
    """Measure over each transport. Raises TsqpError."""
    for name in ("rounds", "calls"):
        given = getattr(options, name)
        SettingsError.unless(given >= 1, f"--{name}", str(given), "1 or more")
    model = model_directory(options.model)
    results: list[Fields] = []
    for transport in transports(options.transports):
        results += _measure(model, transport, options.rounds, options.calls)
    bookkeeping = _bookkeeping_us()
    return {
        "policy": POLICY,
        "dtype": short_name(torch.float32),
        "bookkeeping_us": bookkeeping,
        "most_bookkeeping_us": MOST_BOOKKEEPING_US,
        "most_noise": MOST_NOISE,
        "results": results,
    }, bookkeeping <= MOST_BOOKKEEPING_US and all(one["ok"] for one in results)


if __name__ == "__main__":
    main(__doc__, measure, model="demo", transports=",".join(TRANSPORTS), rounds=300, calls=20)
