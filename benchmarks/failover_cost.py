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

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

# Read once, when torch is imported: the programs have it too (tsqp/cli/program.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.errors import EndpointError, ReplyError, SettingsError, TsqpError
from protocol.messages import (
    FUSED_MODULES,
    InitReply,
    LinearRequest,
    LMHeadRequest,
    Request,
    Response,
    TensorReply,
)
from protocol.model.config import ModelConfig, read_config
from protocol.pending import PendingChannel
from protocol.prepared import Exchange, PreparedRequest, Traffic
from protocol.tensors import from_torch, short_name
from tee_side.policy.placement import load_policy
from tee_side.remote.services.member import ConnectOptions, Instances, Member, Session
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import Replicas
from tee_side.runner import Runner, RunnerSettings
from tsqp.lab.bench.machine import describe_machine
from tsqp.processes import start_service
from tsqp.run.settings import model_directory

POLICY = "attention-in-tee"
BINDS = {"unix": "unix://{folder}/{name}.sock", "tcp": "tcp://127.0.0.1:*"}
WAYS = ("plain", "plain again", "one", "two")
MOST_BOOKKEEPING_US = 2.0
MOST_NOISE = 0.2
_WARM_UP = 20
_PROMPT = 8
# Medians of fewer rounds than this are far from each other whatever was measured.
_BLOCKS, _LEAST_BLOCK = 10, 5
_ONES = from_torch(torch.ones(4))
_REQUEST, _REPLY = LMHeadRequest(hidden_states=_ONES), TensorReply(output=_ONES)


@dataclass(frozen=True)
class Result:
    """What one kind of work takes. `us`: medians by way; the rest: see the module."""

    work: str
    transport: str
    rounds: int
    us: dict[str, float]
    ratios: dict[str, float]
    noise: float
    two_to_again: float

    @property
    def ok(self) -> bool:
        """Whether another plain channel differs as much, and little enough to tell."""
        return self.two_to_again <= 1 + self.noise and self.noise <= MOST_NOISE


def ratios_of(times: Sequence[Sequence[float]]) -> list[float]:
    """Return for each column of a table the median of its ratios to the first, row by row."""
    return [statistics.median(row[n] / row[0] for row in times) for n in range(len(times[0]))]


def noise_of(times: Sequence[Sequence[float]]) -> float:
    """Return how far the second column's ratio to the first is from 1 in all but two blocks."""
    count = max(1, min(_BLOCKS, len(times) // _LEAST_BLOCK))
    edges = [len(times) * n // count for n in range(count + 1)]
    blocks = [times[first:last] for first, last in pairwise(edges)]
    distances = sorted(abs(ratios_of(block)[1] - 1) for block in blocks)
    # Something else may have run for a moment; not all the time.
    return distances[count - 1 - count * 2 // _BLOCKS]


def in_turns(work: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Return microseconds, a row a round; each round begins with another of them."""
    found = []
    for one in work:
        for _ in range(_WARM_UP):
            one()
    gc.collect()
    gc.freeze()  # as tee-runner does
    try:
        for number in range(rounds):
            row = [0.0] * len(work)
            for turn in range(len(work)):
                index = (turn + number) % len(work)
                started_ns = time.perf_counter_ns()
                work[index]()
                row[index] = (time.perf_counter_ns() - started_ns) / 1e3
            found.append(row)
    finally:
        gc.unfreeze()
    return found


def result_of(work: str, transport: str, times: Sequence[Sequence[float]], calls: int) -> Result:
    """Return what a table of microseconds says: a row a round of `calls`, a column each of WAYS."""
    medians = [statistics.median(row[n] for row in times) / calls for n in range(len(WAYS))]
    return Result(
        work,
        transport,
        len(times),
        dict(zip(WAYS, medians, strict=True)),
        dict(zip(WAYS[1:], ratios_of(times)[1:], strict=True)),
        noise_of(times),
        ratios_of([(row[WAYS.index("plain again")], row[WAYS.index("two")]) for row in times])[1],
    )


def measure(model: Path, transport: str, rounds: int, calls: int) -> list[Result]:
    """Measure a small RPC and a decoded token over one transport. Raises TsqpError."""
    _rounds_in_a_sequence(read_config(model))
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-failover-")))
        endpoints = []
        for name in ("first", "second"):
            bind = BINDS[transport].format(folder=folder, name=name)
            command = [str(model), "--device", "null", "--bind", bind, "--threads", "1"]
            endpoints.append(start_service(closing, [*command, "--arithmetic", "float"])[1])
        plain: list[Channel] = [open_channel(endpoints[0]) for _ in range(2)]
        for channel in plain:
            closing.callback(channel.close)
        policy = load_policy(POLICY)
        one, two = (
            closing.enter_context(Runner(RunnerSettings(model, policy, gpu, threads=1)))
            for gpu in ((endpoints[0],), tuple(endpoints))
        )
        channels = [*plain, one._services.at(0)[0], two._services.at(0)[0]]
        rpc = in_turns([_calls(channel, one, calls) for channel in channels], rounds)
        token = _tokens(two, channels, rounds)
    return [result_of("small RPC", transport, rpc, calls), result_of("token", transport, token, 1)]


def bookkeeping_us(blocks: int = 50, calls: int = 2000) -> float:
    """Return the microseconds that an RPC takes longer for being one that could be asked again."""
    channel = _AtOnce()
    group = ReplicaGroup(1, 0, 0, ("nowhere",))
    options = ConnectOptions(_nobody, _unchecked)
    member = Member("nowhere", group, options, Instances(), Traffic())
    member.session = Session(member, cast("PendingChannel", channel), channel)
    replicas = Replicas([member], timeout_s=60.0, traffic=Traffic())
    found: list[float] = []
    for asked in (channel, replicas):
        fastest = float("inf")
        for _ in range(blocks):
            started_ns = time.perf_counter_ns()
            for _ in range(calls):
                asked.wait(asked.submit(_REQUEST))
            fastest = min(fastest, (time.perf_counter_ns() - started_ns) / calls)
        found.append(fastest / 1e3)
    return found[1] - found[0]


class _AtOnce(Channel):
    """A connection whose replies are there before they are waited for."""

    endpoint = "nowhere"
    traffic = Traffic()
    _exchange = Exchange(_REPLY, 0, 0, 0, 0, 0, None, 0, endpoint)

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

    def abandon(self, request_id: int) -> None: ...

    def distrust(self, exchange: Exchange, error: TsqpError) -> None: ...

    def limit_messages(self, max_message_bytes: int) -> None: ...

    def use_one_connection(self) -> None: ...

    def close(self) -> None: ...


def _nobody(endpoint: str) -> PendingChannel:
    raise EndpointError(endpoint, got="no service", expected="none to be asked")


def _unchecked(endpoint: str, _reply: Response | None, layers: tuple[int, int]) -> InitReply:
    raise ReplyError(endpoint, got=str(layers), expected="nothing to be checked")


def _calls(channel: Channel, runner: Runner, calls: int) -> Callable[[], None]:
    config, names = runner.config, FUSED_MODULES["qkv_proj"]
    x_TD = torch.ones(1, config.hidden_size, dtype=runner.dtype)
    request = LinearRequest(layer_idx=0, module_names=names, hidden_states=from_torch(x_TD))
    # As a call plan has it.
    outputs = sum(config.module_shape(name)[0] for name in names)
    prepared = PreparedRequest(request, (1, outputs), short_name(runner.dtype))

    def work() -> None:
        for _ in range(calls):
            channel.wait(channel.start(prepared, x_TD))

    return work


def _rounds_in_a_sequence(config: ModelConfig) -> int:
    """Return how many rounds a sequence has positions for. Raises SettingsError for none."""
    positions, prompt = config.context_length, _PROMPT + 1
    rounds = (positions - prompt) // len(WAYS) - _WARM_UP
    if rounds < 1:
        needed = prompt + len(WAYS) * (_WARM_UP + 1)
        raise SettingsError(
            "--model", got=f"{positions} positions", expected=f"at least {needed} to decode into"
        )
    return rounds


def _tokens(runner: Runner, channels: Sequence[Channel], rounds: int) -> list[list[float]]:
    """Return microseconds of a decoded token over each of the channels, a row a round.

    One sequence for all channels, and another one when its positions are used up.
    """
    most = _rounds_in_a_sequence(runner.config)
    lanes = [runner._assembly.lanes(partial(_only, channel)) for channel in channels]

    def step(index: int) -> None:
        runner.engine.lanes = lanes[index]
        runner.engine.step()

    work = [partial(step, index) for index in range(len(channels))]
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
        times += in_turns(work, part)
        runner.engine.remove(sequence)
    return times


def _only(channel: Channel, _layer: int) -> tuple[Channel]:
    return (channel,)


def _verdict(result: Result) -> str:
    if result.noise > MOST_NOISE:
        return f"no, with noise {result.noise:.3f}"
    return "yes" if result.ok else "no"


def measure_all(options: argparse.Namespace) -> list[Result]:
    """Measure over each transport, and print. Raises TsqpError."""
    for name in ("rounds", "calls"):
        if (value := getattr(options, name)) < 1:
            raise SettingsError(f"--{name}", got=str(value), expected="1 or more")
    results: list[Result] = []
    for transport in options.transports.split(","):
        if transport not in BINDS:
            expected = f"of {', '.join(BINDS)}"
            raise SettingsError("--transports", got=repr(transport), expected=expected)
        model = model_directory(options.model)
        for result in measure(model, transport, options.rounds, options.calls):
            ratios = ", ".join(f"{way} {ratio:.3f}" for way, ratio in result.ratios.items())
            print(
                f"{result.work:9} {transport:5} plain {result.us['plain']:8.1f} us; times that:"
                f" {ratios}; two to plain again {result.two_to_again:.3f}, wanted <="
                f" {1 + min(result.noise, MOST_NOISE):.3f}: {_verdict(result)}",
                flush=True,
            )
            results.append(result)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; exit status 1 if failover costs something while all is well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a directory, or demo")
    parser.add_argument("--transports", default=",".join(BINDS))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20, help="small RPCs a turn")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    try:
        results = measure_all(options)
    except TsqpError as error:
        sys.exit(f"failover_cost: error: {error}")
    bookkeeping = bookkeeping_us()
    cheap = bookkeeping <= MOST_BOOKKEEPING_US
    print(
        f"bookkeeping of an RPC that could be asked again: {bookkeeping:.2f} us, wanted <="
        f" {MOST_BOOKKEEPING_US:g}: {'yes' if cheap else 'no'}"
    )
    if options.json:
        document = {
            "machine": describe_machine(),
            "policy": POLICY,
            "dtype": short_name(torch.float32),
            "bookkeeping_us": bookkeeping,
            "most_bookkeeping_us": MOST_BOOKKEEPING_US,
            "most_noise": MOST_NOISE,
            "results": [{**asdict(result), "ok": result.ok} for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if cheap and all(result.ok for result in results) else 1)


if __name__ == "__main__":
    main()
