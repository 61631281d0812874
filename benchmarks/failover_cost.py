"""What it costs, while all is well, that another service could be asked.

    python -m benchmarks.failover_cost [--model DIR] [--transports unix,tcp] [--rounds 300]
        [--calls 20] [--json FILE]

Three ways to the same two services (`--device null`, which answers at once): a plain channel to the
first, one service that nobody stands in for (`Replicas` of one), and two that stand in for each
other. They take turns: `calls` small RPCs each, then the next; and one decoded token each, of one
sequence, in one engine, whose operators alone are exchanged. Every time is set against that of the
plain channel in the same round; the median of these ratios is what is said. Beside it, with turns
of its own, stands another plain channel to the first: how far its ratio is from 1 is noise.

`bookkeeping` is what `Replicas` itself adds to an RPC: around a channel that answers at once, the
fastest of many blocks, which a busy machine disturbs least.
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
from pathlib import Path

# Read once, when torch is imported: the programs have it too (tsqp/cli/program.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

from protocol.channel import Channel, Exchange, Traffic
from protocol.connect import open_connection
from protocol.errors import EndpointError, ReplyError, SettingsError, TsqpError
from protocol.messages import (
    InitReply,
    LinearRequest,
    LMHeadRequest,
    Request,
    Response,
    TensorReply,
)
from protocol.tensors import from_torch, short_name
from tee_side.policy import load_policy
from tee_side.runner import Runner, RunnerSettings
from tee_side.services.member import Connection, Dialling, Line, Member, Roster
from tee_side.services.plan import ReplicaGroup
from tee_side.services.replicas import Replicas
from tsqp.bench.machine import describe_machine
from tsqp.cli.program import model_directory
from tsqp.processes import start_service

POLICY = "attention-in-tee"
BINDS = {"unix": "unix://{folder}/{name}.sock", "tcp": "tcp://127.0.0.1:*"}
WAYS = ("plain", "plain again", "one", "two")
_WARM_UP = 20
_PROMPT = 8
_ONES = from_torch(torch.ones(4))
_REQUEST, _REPLY = LMHeadRequest(hidden_states=_ONES), TensorReply(output=_ONES)


@dataclass(frozen=True)
class Result:
    """What one kind of work takes. `us`: medians by way; `ratios`: to the plain channel's."""

    work: str
    transport: str
    rounds: int
    us: dict[str, float]
    ratios: dict[str, float]


def ratios_of(times: Sequence[Sequence[float]]) -> list[float]:
    """Return for each column of a table the median of its ratios to the first, row by row."""
    return [statistics.median(row[n] / row[0] for row in times) for n in range(len(times[0]))]


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


def _result(work: str, transport: str, times: Sequence[Sequence[float]], calls: int) -> Result:
    medians = [statistics.median(row[n] for row in times) / calls for n in range(len(WAYS))]
    return Result(
        work,
        transport,
        len(times),
        dict(zip(WAYS, medians, strict=True)),
        dict(zip(WAYS[1:], ratios_of(times)[1:], strict=True)),
    )


def measure(model: Path, transport: str, rounds: int, calls: int) -> list[Result]:
    """Measure a small RPC and a decoded token over one transport. Raises TsqpError."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-failover-")))
        endpoints = []
        for name in ("first", "second"):
            bind = BINDS[transport].format(folder=folder, name=name)
            command = [str(model), "--device", "null", "--bind", bind, "--threads", "1"]
            endpoints.append(start_service(closing, [*command, "--arithmetic", "float"])[1])
        plain: list[Channel] = [open_connection(endpoints[0]) for _ in range(2)]
        for channel in plain:
            closing.callback(channel.close)
        policy = load_policy(POLICY)
        one, two = (
            closing.enter_context(Runner(RunnerSettings(model, policy, gpu, threads=1)))
            for gpu in ((endpoints[0],), tuple(endpoints))
        )
        channels = [*plain, one._services.at(0)[0], two._services.at(0)[0]]
        rpc = in_turns([_calls(channel, one, calls) for channel in channels], rounds)
        steps = _steps(two, channels, rounds)
        token = in_turns(steps, rounds)
    return [_result("small RPC", transport, rpc, calls), _result("token", transport, token, 1)]


def bookkeeping_us(blocks: int = 50, calls: int = 2000) -> float:
    """Return the microseconds that an RPC takes longer for being one that could be asked again."""
    channel = _AtOnce()
    group = ReplicaGroup(1, 0, 0, ("nowhere",))
    dialling = Dialling(_nobody, _unchecked)
    member = Member("nowhere", group, dialling, Roster(), Traffic())
    member.line = Line(channel, channel)
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


class _AtOnce:
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

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        return self._exchange

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        return True

    def abandon(self, request_id: int) -> None: ...

    def distrust(self, exchange: Exchange, error: TsqpError) -> None: ...

    def limit_messages(self, max_message_bytes: int) -> None: ...

    def use_one_connection(self) -> None: ...

    def close(self) -> None: ...


def _nobody(endpoint: str) -> Connection:
    raise EndpointError(endpoint, got="nobody", expected="nobody to be asked")


def _unchecked(endpoint: str, _reply: Response, layers: tuple[int, int]) -> InitReply:
    raise ReplyError(endpoint, got=str(layers), expected="nothing to be checked")


def _calls(channel: Channel, runner: Runner, calls: int) -> Callable[[], None]:
    x_TD = torch.ones(1, runner.config.hidden_size, dtype=runner.dtype)
    request = LinearRequest(
        layer_idx=0, module_names=("q_proj", "k_proj", "v_proj"), hidden_states=from_torch(x_TD)
    )

    def work() -> None:
        for _ in range(calls):
            channel.wait(channel.submit(request))

    return work


def _steps(runner: Runner, channels: Sequence[Channel], rounds: int) -> list[Callable[[], None]]:
    """Return what decodes a token, over each of the channels, of one sequence for all of them."""
    tokens = _PROMPT + 1 + len(channels) * (rounds + _WARM_UP)
    if tokens > runner.config.max_position_embeddings:
        most = runner.config.max_position_embeddings
        raise SettingsError("--rounds", got=f"{tokens} tokens", expected=f"at most {most}")
    # Zeros are what a null device computes: the model's own end must not end it.
    sequence = runner._engine.add([1] * _PROMPT, max_new_tokens=tokens, eos_token_ids=frozenset())
    while not sequence.token_ids:
        runner._engine.step()
    lanes = [runner._assembly.lanes(partial(_only, channel)) for channel in channels]

    def step(index: int) -> None:
        runner._engine.lanes = lanes[index]
        runner._engine.step()

    return [partial(step, index) for index in range(len(channels))]


def _only(channel: Channel, _layer: int) -> tuple[Channel]:
    return (channel,)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a directory, or demo")
    parser.add_argument("--transports", default=",".join(BINDS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20, help="small RPCs a turn")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    bookkeeping = bookkeeping_us()
    print(f"bookkeeping of an RPC that could be asked again: {bookkeeping:.2f} us", flush=True)
    try:
        for transport in options.transports.split(","):
            if transport not in BINDS:
                expected = f"of {', '.join(BINDS)}"
                raise SettingsError("--transports", got=repr(transport), expected=expected)
            model = model_directory(options.model)
            for result in measure(model, transport, options.rounds, options.calls):
                ratios = ", ".join(f"{way} {ratio:.3f}" for way, ratio in result.ratios.items())
                print(
                    f"{result.work:9} {transport:5} plain {result.us['plain']:8.1f} us;"
                    f" times that: {ratios}",
                    flush=True,
                )
                results.append(result)
    except TsqpError as error:
        sys.exit(f"failover-cost: error: {error}")
    if options.json:
        document = {
            "machine": describe_machine(),
            "policy": POLICY,
            "dtype": short_name(torch.float32),
            "bookkeeping_us": bookkeeping,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
