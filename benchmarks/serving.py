"""What serving costs: the HTTP layer, streams side by side, overload, prefix reuse, speculation.

    python -m benchmarks.serving [--shape llama-3.2-1b] [--seconds 20] [--json FILE]

`tee-runner serve` in a process of its own, over a null device and a Unix socket, policy
`attention-in-tee`; of the engine alone the same requests run in this process's child, without HTTP.
The client of this benchmark reads sockets and looks for the beginnings of events, as cheaply as it
can: it runs on the same cores. Ratios are of the same run.

- `streams`: tokens a second of 1 and of 16 streams, and of 16 sequences of the engine alone.
- `overload`: 95 % of the times between two tokens, with as many clients as there are sequences and
  with four times as many.
- `prefix`: time to the first token of a second turn behind a history of 1,000 tokens, with and
  without `--prefix-reuse`.
- `speculation`: round trips a token of a text that repeats itself, guesses that were taken, and
  pads a token, also of a story that does not: the demo model under `shielded`.
"""

import asyncio
import json
import math
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.harness import Fields, Found, Options, Place, main
from protocol.model.config import read_config
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.lab.bench import prepare
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.measure import in_fresh_process, rounds
from tsqp.processes import program, start_server

POLICY = "attention-in-tee"
STREAMS = 16
PROMPT_TOKENS, NEW_TOKENS = 32, 128
HISTORY_TOKENS = 1000
# Two processes share two cores with the kernel: of one round the ratio differs by a tenth.
_ROUNDS = 5
# More than there is time for.
_MANY = 10**6
# Waits for a token of the largest prompts on a busy machine.
_LIMIT_S = 120.0
# A text that repeats itself, whatever the model would say.
_REPETITIVE = {"guided_regex": "( the dog and the cat, a small boy and a girl){12}"}
_TEXT_TOKENS = 96


@contextmanager
def server(model: str | Path, endpoint: str, policy: str, *options: str) -> Iterator[str]:
    """Run `tee-runner serve`, and yield its address once it is ready."""
    command = [str(model), "--port", "0", "--gpu", endpoint, "--policy", policy]
    with ExitStack() as running:
        _, url = start_server(running, [*command, "--spin-us", "50", *options])
        yield url.removesuffix("/v1")


@dataclass
class TimedAnswer:
    """One answer: `times`: of its tokens, after the beginning of its request."""

    status: int
    times: list[float]
    retry_after_s: float = 0.0


async def ask(address: str, prompt: list[int], new_tokens: int) -> TimedAnswer:
    """Stream a completion of token ids; every token is an event."""
    host, port = address.removeprefix("http://").split(":")
    fields = {"model": _model(address), "prompt": prompt, "max_tokens": new_tokens}
    body = json.dumps(fields | {"stream": True, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    began, times = time.perf_counter(), []
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            rest = (await asyncio.wait_for(reader.read(), _LIMIT_S)).lower()
            wait = re.search(rb"retry-after: (\d+)", rest)
            return TimedAnswer(status, [], float(wait[1]) if wait else 0.0)
        while block := await asyncio.wait_for(reader.read(1 << 16), _LIMIT_S):
            now = time.perf_counter() - began
            times += [now] * block.count(b"data: {")
    finally:
        writer.close()
    return TimedAnswer(status, times)


@cache
def _model(address: str) -> str:
    return str(json.loads(_get(f"{address}/v1/models"))["data"][0]["id"])


def _get(request: str | urllib.request.Request) -> bytes:
    """Ask our own server."""
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        return bytes(reply.read())


def prompt_of(stream: int, turn: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that no other stream has."""
    return [1 + (stream * 7919 + turn * 104729 + at * 31) % 30_000 for at in range(tokens)]


async def crowd(address: str, clients: int, seconds: float) -> list[TimedAnswer]:
    """Ask again and again with so many clients; return what was answered."""
    until = time.perf_counter() + seconds
    found: list[TimedAnswer] = []

    async def client(number: int) -> None:
        turn = 0
        while time.perf_counter() < until:
            found.append(await ask(address, prompt_of(number, turn), NEW_TOKENS))
            turn += 1
            # As the SDKs do.
            await asyncio.sleep(found[-1].retry_after_s)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return found


def tokens_per_s(address: str, streams: int, seconds: float) -> float:
    """Return the rate of streams that start together and have as many tokens each."""

    async def together() -> float:
        answers = (ask(address, prompt_of(n, 0), NEW_TOKENS) for n in range(streams))
        found = await asyncio.gather(*answers)
        first = max(one.times[0] for one in found)
        # Between the last stream's first token and the first one's last.
        last = min(one.times[-1] for one in found)
        count = sum(first < at <= last for one in found for at in one.times)
        return count / (last - first)

    return median(asyncio.run(together()) for _ in rounds(_MANY, seconds))


def engine_alone(model: Path, endpoint: str, streams: int, seconds: float) -> float:
    """Return the rate of as many sequences of an engine in this process."""
    settings = RunnerSettings(model=model, policy=load_policy(POLICY), gpu=(endpoint,), spin_us=50)
    rates: list[float] = []
    with Runner(settings) as runner:
        engine = runner.engine
        for _ in rounds(_MANY, seconds):
            for stream in range(streams):
                engine.add(prompt_of(stream, 0), max_new_tokens=NEW_TOKENS)
            while any(not sequence.token_ids for sequence in engine.running):
                engine.step()
            began, count = time.perf_counter(), 0
            while len(engine.running) == streams:
                count += len(engine.step())
            rates.append(count / (time.perf_counter() - began))
    return median(rates)


def streams_case(model: Path, endpoint: str, seconds: float) -> Fields:
    """Measure one stream, sixteen, and the engine alone, in turns: medians of all rounds."""
    rates = []
    for _ in range(_ROUNDS):
        alone = in_fresh_process(engine_alone, model, endpoint, STREAMS, seconds)
        with server(model, endpoint, POLICY) as address:
            asyncio.run(crowd(address, 2, 1.0))
            one = tokens_per_s(address, 1, seconds)
            rates.append((alone, one, tokens_per_s(address, STREAMS, seconds)))
    alone, one, many = (median(found) for found in zip(*rates, strict=True))
    return {
        "engine_alone_tokens_per_s": alone,
        "one_stream_tokens_per_s": one,
        "streams": STREAMS,
        "streams_tokens_per_s": many,
        "http_costs": 1 - many / alone,
        "http_costs_of_rounds": sorted(1 - streams / engine for engine, _, streams in rates),
        "streams_by_one": many / one,
    }


def overload_case(model: Path, endpoint: str, seconds: float) -> Fields:
    """Measure the time between tokens at capacity and at four times as many clients."""
    options = ("--max-sequences", str(STREAMS), "--max-waiting", str(STREAMS))
    found = {}
    with server(model, endpoint, POLICY, *options) as address:
        asyncio.run(crowd(address, 2, 1.0))
        for name, clients in (("at_capacity", STREAMS), ("overloaded", 4 * STREAMS)):
            answers = asyncio.run(crowd(address, clients, seconds))
            gaps = sorted(
                b - a for one in answers for a, b in zip(one.times, one.times[1:], strict=False)
            )
            found[name] = {
                "clients": clients,
                "answered": sum(one.status == 200 for one in answers),
                "refused": sum(one.status in (429, 503) for one in answers),
                "p95_inter_token_ms": 1e3 * gaps[math.floor(0.95 * len(gaps))],
            }
    at_capacity, overloaded = (found[n]["p95_inter_token_ms"] for n in found)
    return {**found, "p95_ratio": overloaded / at_capacity}


def prefix_case(model: Path, endpoint: str, turns: int) -> Fields:
    """Measure the time to the first token of a second turn."""
    ms: dict[str, float] = {}
    for option in ("--prefix-reuse", "--no-prefix-reuse"):
        with server(model, endpoint, POLICY, option) as address:
            times = []
            for turn in range(turns):
                history = prompt_of(turn, 1, HISTORY_TOKENS)
                asyncio.run(ask(address, history, 2))
                followed = asyncio.run(ask(address, [*history, *prompt_of(turn, 2, 16)], 2))
                times.append(1e3 * followed.times[0])
            ms[option] = median(times)
    with_reuse, without = ms.values()
    return {"with_ms": with_reuse, "without_ms": without, "ratio": with_reuse / without}


def speculation_case(place: Place) -> Fields:
    """Count round trips a token of a repetitive text, with and without speculation."""
    found: Fields = {}
    endpoint = place.service("demo", "--arithmetic", "int8")
    for name, options in (("without", ()), ("with", ("--speculative", "ngram"))):
        # Speculation stops where less than half of the pads are left.
        bank = ("--bank", f"{place.folder}/{name}", "--bank-key-beside-bank")
        making = [program("tee-runner"), "pads", "make", "demo", "--tokens", "2048", *bank]
        subprocess.run(making, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with server("demo", endpoint, "shielded", *bank, *options) as address:
            found[name] = _counted(address, _REPETITIVE)
            found[f"story_{name}"] = _counted(address, {})
    same = [
        found[name].pop("text") == found[f"{name[: -len('with')]}without"].pop("text")
        for name in ("with", "story_with")
    ]
    fewer = found["without"]["round_trips_per_token"] / found["with"]["round_trips_per_token"]
    return {**found, "same_text": all(same), "fewer": fewer}


def _counted(address: str, fields: Fields) -> Fields:
    """Ask for a text, and say what its tokens took."""
    common = {"model": "demo", "prompt": "They saw", "temperature": 0, "max_tokens": _TEXT_TOKENS}
    body = json.dumps(common | fields).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", body, headers)  # noqa: S310
    before = _metrics(address)
    text = str(json.loads(_get(request))["choices"][0]["text"])
    after = _metrics(address)
    more = {name: after[name] - before[name] for name in after}
    tokens = more["generation_tokens"]
    return {
        "round_trips_per_token": more["round_trips"] / tokens,
        "accepted": more["accepted_tokens"] / max(1, more["draft_tokens"]),
        "pads_per_token": more["pads_used"] / tokens,
        "text": text,
    }


def _metrics(address: str) -> dict[str, float]:
    text = _get(f"{address}/metrics").decode()
    found = re.findall(r"^(?:tsqp|vllm):(\w+?)(?:_total)?\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def measure(options: Options, place: Place) -> Found:
    """Measure everything."""
    model = prepare.endless(place.model(find_shape(options.shape), linear=False), place.folder)
    # Token N is the word `tN`.
    ids = {f"t{n}": n for n in range(read_config(model).vocab_size)}
    words = Tokenizer(models.WordLevel(ids, unk_token="t0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    endpoint = place.service(model, "--device", "null", "--spin-us", "50")
    return {
        "shape": options.shape,
        "policy": POLICY,
        "streams": streams_case(model, endpoint, options.seconds / 3),
        "overload": overload_case(model, endpoint, 3 * options.seconds),
        "prefix": prefix_case(model, endpoint, 5),
        "speculation": speculation_case(place),
    }, True


if __name__ == "__main__":
    main(__doc__, measure, shape="llama-3.2-1b", seconds=20.0)
