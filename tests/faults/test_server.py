"""Rows: a real `tee-runner serve` with many clients, with too many, with ones that leave early, and
with services that are killed under its streams.

Whatever else goes on, an answer is the one that the server gave to the same request alone.
"""

import asyncio
import itertools
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.keys import PREFIX, ApiKey, hash_of
from tests.faults.row import Found, Row, note, percentile
from tests.kit.answers import (
    CHAT,
    COMPLETIONS,
    HANGS_S,
    Answer,
    Fields,
    Job,
    Leave,
    Reply,
    ask,
    is_broken_off,
    judge,
)
from tests.kit.demo import DEMO, expected, prompt, relative_slope, resident_bytes, start
from tests.kit.rows import each_row
from tests.kit.service import Service, Workers

_LOOK_S = 0.01

_STOPS = ((), (), (" the",), (".", " and"), ("\n", " was a"))
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.1},
)
_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"guided_regex": "(once|then) [a-z ]{5,60}[.]"},
)


def any_fields(number: int, most_tokens: int, chance: random.Random) -> tuple[str, Fields]:
    """Return a path and a body of any kind: seeds, samples, stop strings, grammars, logprobs."""
    ids, tokenizer = prompt(chance.randint(3, 40), chance), Tokenizer(DEMO)
    fields: dict[str, Any] = {"seed": chance.randrange(2**31), "n": 1 + (number % 4 == 1)}
    fields |= _SAMPLING[number % len(_SAMPLING)] | {"max_tokens": chance.randint(2, most_tokens)}
    if stop := chance.choice(_STOPS):
        fields["stop"] = list(stop)
    if number % 8 == 3:
        fields |= _GRAMMARS[number // 8 % len(_GRAMMARS)]
    if number % 3:
        fields["prompt"] = ids if number % 5 else tokenizer.decode(ids)
        return COMPLETIONS, fields | ({} if number % 2 else {"logprobs": 0})
    turns = [{"role": "user", "content": tokenizer.decode(ids)}]
    return CHAT, fields | {"messages": turns} | ({} if number % 2 else {"logprobs": True})


def long_fields(new_tokens: int, chance: random.Random, prompt_tokens: int = 6) -> Fields:
    """Return a completion that has exactly so many tokens."""
    sampling = {"temperature": 0.8, "seed": chance.randrange(2**31), "ignore_eos": True}
    return {"prompt": prompt(prompt_tokens, chance), "max_tokens": new_tokens, **sampling}


_SAMPLE = re.compile(r'^(?:vllm|tsqp):(\w+?)(?:_total)?\{model_name="[^"]*"\} (\S+)$', re.MULTILINE)
_ENDED = re.compile(
    r'^vllm:request_success_total\{finished_reason="(\w+)",.*\} (\S+)$', re.MULTILINE
)


def is_idle(metrics: Mapping[str, float]) -> bool:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metrics[name] for name in gauges)


async def until(holds: Callable[[], object], look_s: float = _LOOK_S) -> None:
    """Wait until something holds. Raises TimeoutError."""
    async with asyncio.timeout(HANGS_S):
        while not holds():
            await asyncio.sleep(look_s)


@dataclass
class Clients:
    """Clients of one server, and what came of their answers.

    `counts`: of all that are over, see `judge`; `left` by a client, `hung`, `broken` off by a typed
    error, `refused NNN`, `untyped`, `untold`: not when to come again. `gaps_s`: between events.
    """

    address: str
    log: Path
    pid: int
    workers: Workers
    services: list[Service]
    headers: Mapping[str, str]
    jobs: list[Job] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)

    async def learn(self, asked: Sequence[tuple[str, Fields]]) -> list[Job]:
        """Ask each alone, and take what is answered for right."""
        for path, fields in asked:
            reply = await ask(self.address, path, fields, headers=self.headers)
            assert reply.status == 200, reply
            self.jobs.append(Job(path, fields, Answer.of(reply)))
        return self.jobs

    async def ask(
        self,
        job: Job,
        *,
        streamed: bool = True,
        leave: Leave | None = None,
        headers: Mapping[str, str] | None = None,
        on_events: Callable[[], object] = lambda: None,
        **more: Any,
    ) -> Reply:
        """Ask, and count what comes of it. `more`: fields of the request."""
        fields = {**job.fields, "stream": streamed, **more}
        headers = self.headers if headers is None else headers
        how: dict[str, Any] = {"headers": headers, "leave": leave, "on_events": on_events}
        try:
            reply = await ask(self.address, job.path, fields, **how)
        except TimeoutError:
            note("got nothing, expected an answer, an error or a refusal")
            self.counts["hung"] += 1
            return Reply()
        if reply.left:
            self.counts["left"] += 1
            self.counts["left at once"] += leave is not None and leave.after_s is not None
        elif reply.status in (429, 503):
            self.counts[f"refused {reply.status}"] += 1
            error = json.loads(reply.body)["error"]
            typed = set(error) == {"message", "type", "param", "code"} and error["code"]
            self.counts["untyped"] += not typed
            self.counts["untold"] += not reply.headers.get("retry-after", "").isdigit()
        elif is_broken_off(job, reply):
            self.counts["broken"] += 1
        else:
            counted = judge(job, reply)
            self.counts += counted
            if counted["wrong"]:
                note(f"got status {reply.status}, {Answer.of(reply)}; expected {job}")
            self.gaps_s += [b - a for a, b in itertools.pairwise(reply.times)]
        return reply

    @property
    def over(self) -> int:
        return self.counts["right"] + self.counts["wrong"]

    async def metrics(self) -> dict[str, float]:
        """Return gauges and counters by name, and of requests that ended `ended_HOW`."""
        page = (await ask(self.address, "/metrics", headers=self.headers)).body.decode()
        found = {name: float(value) for name, value in _SAMPLE.findall(page)}
        return found | {f"ended_{how}": float(value) for how, value in _ENDED.findall(page)}

    async def until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Return metrics of which something holds. Raises TimeoutError."""
        async with asyncio.timeout(HANGS_S):
            while not holds(found := await self.metrics()):
                await asyncio.sleep(_LOOK_S)
        return found

    async def until_health(self, status: int) -> None:
        async with asyncio.timeout(HANGS_S):
            while (await ask(self.address, "/health")).status != status:
                await asyncio.sleep(_LOOK_S)

    def logged(self, event: str) -> int:
        return self.log.read_text(encoding="utf-8").count(f" {event} ")


@contextmanager
def clients(
    full: bool,
    *options: str,
    links: Sequence[str] = ("unix",),
    headers: Mapping[str, str] | None = None,
) -> Iterator[Clients]:
    """Start a server, with a service over each link.

    That of the short form computes the same bits, without the work for pads.
    """
    policy = "shielded" if full else "quantized-clear"
    usual = ("--port", "0", "--threads", "1", "--policy", policy, "--no-prefix-reuse")
    with tempfile.TemporaryDirectory(prefix="tsqp-soak-") as name, Workers() as workers:
        log = Path(name, "log")
        services = [
            start(workers, "--arithmetic", "int8", bind=f"{link}://{name}/{link}") for link in links
        ]
        endpoints = [f"--gpu={one.endpoint}" for one in services]
        served = workers.serve("demo", *usual, *options, *endpoints, log=log)
        address = served.address.removeprefix("http://")
        yield Clients(address, log, served.process.pid, workers, services, headers or {})


_SECONDS_EACH = 0.06  # 10 minutes for 10,000
# In less, warm-up is no small part of it.
_JUDGED_S = 600.0
_MAX_SLOPE = 0.01


def _as_sent(before: Mapping[str, float], after: Mapping[str, float], of: Counter[str]) -> bool:
    """Say whether the counters are what was sent; of those that left, what they may be."""
    more = {name: after[name] - before[name] for name in after}
    done, ended = of["right"], more["ended_stop"] + more["ended_length"]
    known = ended + more["ended_abort"]
    beyond = more["generation_tokens"] - of["tokens"], more["prompt_tokens"] - of["prompt_tokens"]
    # One that leaves before the request is read is not counted; one that leaves late may have had
    # it all.
    agrees = (
        done <= ended
        and done + of["left"] - of["left at once"] <= known <= done + of["left"]
        and not more["ended_error"]
        and min(beyond) >= 0
        and (of["left"] > 0 or not any(beyond))
    )
    if not agrees:
        note(f"counters: got {more} more, expected {of}")
    return agrees


async def _serve(many: Clients, count: int, full: bool) -> tuple[bool, list[tuple[float, int]]]:
    """Return whether gauges and counters are right, and how large the server was when."""
    chance, rss = random.Random(1), list[tuple[float, int]]()
    kinds = [any_fields(n, 48 if full else 8, chance) for n in range(240 if full else 12)]
    # That the server says to a prompt alone what the model does, too.
    ids, tokenizer = prompt(6, chance), Tokenizer(DEMO)
    kinds.append((COMPLETIONS, {"prompt": ids, "max_tokens": 12, "temperature": 0}))
    *_, greedy = await many.learn(kinds)
    assert [text for text, *_ in greedy.right.choices] == [tokenizer.decode(expected(ids, 12))]
    until_s = time.monotonic() + (count * _SECONDS_EACH if full else 0.0)

    async def client(chance: random.Random) -> None:
        while many.over < count or time.monotonic() < until_s:
            leave = None
            if chance.random() < 0.1:
                leave = chance.choice([Leave(events=1), Leave(chance.uniform(0, 0.5))])
            more: dict[str, Any] = {"streamed": leave is not None or chance.random() < 0.75}
            if more["streamed"] and chance.random() < 0.5:
                more["stream_options"] = {"include_usage": True}
            await many.ask(chance.choice(many.jobs), leave=leave, **more)

    async def sample() -> None:
        while True:
            rss.append((time.monotonic(), resident_bytes(many.pid)))
            await asyncio.sleep(1.0)

    first, sampling = await many.metrics(), asyncio.create_task(sample())
    await asyncio.gather(*(client(random.Random(n)) for n in range(64 if full else 8)))
    sampling.cancel()
    between, counts = await many.until(is_idle), many.counts.copy()
    # Where all stay to the end, the counters are exact.
    for job in many.jobs[: len(many.jobs) // 4]:
        await many.ask(job)
    last = await many.until(is_idle)
    more = many.counts - counts
    more["left"] = 0
    return _as_sent(first, between, counts) and _as_sent(between, last, more), rss


@Row(
    "serving",
    "serving: 64 concurrent streams over HTTP, 10 min",
    "at least so many answers, each compared with what the model says to its prompt alone",
    "0 other than alone: none lost, duplicated or crossed; gauges back at zero, counters as sent;"
    " memory slope < 1 % after warm-up",
    short=24,
    long=10_000,
    minutes=11,
)
def serving(count: int, full: bool) -> Found:
    """Ask for some minutes, and judge whether that were enough answers and right."""
    with clients(full) as many:
        agrees, rss = asyncio.run(_serve(many, count, full))
    counts, slope = many.counts, relative_slope(rss)
    return Found(
        {
            "answers": many.over,
            "other than alone": counts["wrong"],
            "left before the end": counts["left"],
            "tokens": counts["tokens"],
            "gauges and counters": "as sent" if agrees else "other than sent",
            "memory slope of the server, %": 100 * slope,
            "MiB of the server": rss[-1][1] / 2**20,
        },
        {
            "enough right": counts["right"] >= count,
            "none wrong": not (counts["wrong"] or counts["hung"] or counts["broken"]),
            "some left": counts["left"] > 0,
            "gauges and counters as sent": agrees,
        },
        {"memory": slope < _MAX_SLOPE or count * _SECONDS_EACH < _JUDGED_S},
    )


_FREE_S = 1.0
_OTHERS = 2
# How a client leaves: at once, behind some events, or once its request runs; streamed or not; and
# the length of the prompt, of which a long one takes tens of steps. None: from the queue.
_WAYS: tuple[tuple[Leave | None, bool, int] | None, ...] = (
    (Leave(after_s=0.0), True, 6),
    (None, False, 6),
    (Leave(events=5), True, 6),
    (None, True, 480),
    (None, False, 480),
    None,
)


async def _leave_so_often(
    stay: Clients, leavers: Clients, count: int, full: bool
) -> tuple[bool, list[float]]:
    """Leave in every way in turn, beside two that stay, which leave one place.

    Return whether the counters agree, and how long it took until the place had another client.
    """
    chance, free_s, over = random.Random(1), list[float](), False
    new_tokens, jobs = (400, 8) if full else (80, _OTHERS)
    await stay.learn([(COMPLETIONS, long_fields(new_tokens, chance)) for _ in range(jobs)])
    *_, short = await stay.learn([(COMPLETIONS, long_fields(1, chance))])
    before = await stay.metrics()

    async def stays(number: int) -> None:
        for turn in itertools.count(number, _OTHERS):
            if over:
                return
            await stay.ask(stay.jobs[turn % jobs])

    def asks(prompt_tokens: int, streamed: bool, leave: Leave | None) -> asyncio.Task[Reply]:
        fields = long_fields(min(450, 512 - prompt_tokens), chance, prompt_tokens)
        job = Job(COMPLETIONS, fields, Answer([]))
        return asyncio.create_task(leavers.ask(job, streamed=streamed, leave=leave))

    async with asyncio.TaskGroup() as group:
        for number in range(_OTHERS):
            group.create_task(stays(number))
        for number in range(count):
            way = _WAYS[number % len(_WAYS)]
            leave, streamed, prompt_tokens = way or (None, True, 6)
            asking = [asks(prompt_tokens, streamed, leave)]
            if leave is None:
                await stay.until(lambda now: now["num_requests_running"] > _OTHERS)
            if way is None:
                asking.append(asks(prompt_tokens, streamed, leave))
                await stay.until(lambda now: now["num_requests_waiting"] > 0)
            for task in reversed(asking):
                if leave is None:
                    task.cancel()
                await asyncio.wait([task])
                leavers.counts["left"] += task.cancelled()
            began = time.monotonic()
            await stay.ask(short)
            free_s.append(time.monotonic() - began)
        over = True
    after = await stay.until(is_idle)
    aborted, counts = after["ended_abort"] - before["ended_abort"], stay.counts + leavers.counts
    agrees = aborted >= counts["left"] - counts["left at once"]
    return agrees and _as_sent(before, after, counts), free_s


@Row(
    "cancelled",
    "requests cancelled by their clients",
    "streamed and whole; at once, before the first byte, mid-stream, in a prompt, in the queue",
    "places free within 1 s each, gauges back at zero, other streams' tokens unaffected",
    short=len(_WAYS),
    long=200,
    minutes=2,
)
def cancelled(count: int, full: bool) -> Found:
    with clients(full, "--max-sequences", str(_OTHERS + 1), "--step-tokens", "16") as stay:
        leavers = replace(stay, counts=Counter())
        agrees, free_s = asyncio.run(_leave_so_often(stay, leavers, count, full))
    counts, left = stay.counts, leavers.counts["left"]
    return Found(
        {
            "left before the end": left,
            "p95 until free, s": percentile(free_s, 95),
            "longest until free, s": max(free_s),
            "other answers right": f"{counts['right']} of {stay.over}",
            "gauges and counters": "as sent" if agrees else "other than sent",
        },
        {
            "all left": left >= count,
            "other answers right": counts["right"] == stay.over >= count + _OTHERS
            and not (counts["hung"] or counts["broken"]),
            "gauges and counters as sent": agrees,
        },
        {"free within a second": max(free_s) <= _FREE_S},
    )


_SEQUENCES, _WAITING, _TIMES = 8, 8, 4
_LIMITED, _AT_A_TIME = 6, 2
_MAX_RATIO = 1.5
_KEYS = {name: f"{PREFIX}{name * 4}" for name in ("unlimited", "limited")}
_UNLIMITED, _LIMITED_KEY = ({"authorization": f"Bearer {key}"} for key in _KEYS.values())


async def _ask_at_once(
    many: Clients, side_by_side: int, count: int, limited: int, full: bool
) -> None:
    """Ask until so many requests are over, `limited` of the clients with a key that has a limit.

    Refused clients come again when they were told to; in the short form, soon.
    """
    begun = itertools.count()

    async def client(number: int) -> None:
        headers = _LIMITED_KEY if number < limited else _UNLIMITED
        for turn in itertools.count(number):
            if next(begun) >= count:
                return
            reply = await many.ask(many.jobs[turn % len(many.jobs)], headers=headers)
            if reply.status in (429, 503):
                await asyncio.sleep(float(reply.headers["retry-after"]) if full else 0.05)

    await asyncio.gather(*(client(number) for number in range(side_by_side)))
    await many.until(is_idle)


@Row(
    "overload",
    "overload: four times as many clients as sequences",
    "so many requests, some with a key that allows two at a time; then as many as at capacity",
    "admitted: right, p95 between two tokens <= 1.5 x that at capacity; refused: 429 or 503 with"
    " Retry-After; none hangs",
    short=60,
    long=2000,
    minutes=3,
)
def overload(count: int, full: bool) -> Found:
    async def run() -> None:
        chance = random.Random(3)
        jobs = [long_fields(48 if full else 8, chance) for _ in range(24 if full else 8)]
        over.jobs = await usual.learn([(COMPLETIONS, fields) for fields in jobs])
        await _ask_at_once(usual, _SEQUENCES, count // 4, 0, full)
        await _ask_at_once(over, _TIMES * _SEQUENCES, count, _LIMITED, full)

    with tempfile.NamedTemporaryFile("w") as keys:
        for name, key in _KEYS.items():
            most = _AT_A_TIME if name == "limited" else None
            keys.write(ApiKey(name=name, sha256=hash_of(key), concurrent=most).entry() + "\n")
        keys.flush()
        options = ("--max-sequences", str(_SEQUENCES), "--max-waiting", str(_WAITING))
        with clients(full, *options, "--api-keys", keys.name, headers=_UNLIMITED) as usual:
            over = replace(usual, counts=Counter(), gaps_s=[])
            asyncio.run(run())
    p95_s = [percentile(one.gaps_s, 95) for one in (usual, over)]
    both, ratio = usual.counts + over.counts, p95_s[1] / p95_s[0]
    refused = [over.counts[f"refused {status}"] for status in (503, 429)]
    return Found(
        {
            "answered right": both["right"],
            "other than alone": both["wrong"],
            "refused with 503": refused[0],
            "refused with 429": refused[1],
            "without Retry-After": both["untold"],
            "hung": both["hung"],
            "p95 between two tokens at capacity, ms": 1e3 * p95_s[0],
            "overloaded, ms": 1e3 * p95_s[1],
            "ratio": ratio,
        },
        {
            "none refused at capacity": usual.counts["right"] == usual.over >= count // 4,
            "all answered or refused": over.counts["right"] + sum(refused) >= count,
            "some of each": min(over.counts["right"], *refused) > 0,
            "none wrong, untold or hung": not any(
                both[kind] for kind in ("wrong", "untyped", "untold", "hung", "broken")
            ),
        },
        {"as fast": ratio <= _MAX_RATIO},
    )


_STREAMS = 6
_PATIENT_S, _IMPATIENT_S, _IMPATIENT_SHORT_S = 60.0, 1.0, 0.3
_AWAY_S, _AWAY_SHORT_S = 5.0, 0.1


class Killed(NamedTuple):
    """`hits`: which some stream had in use; `back_s`: until right again.

    `as_due`: there were errors where they may be, and nowhere else.
    """

    hits: int
    back_s: list[float]
    as_due: bool


async def _kill(many: Clients, kills: int, full: bool, patient: bool, jobs: list[Job]) -> Killed:
    """Kill the services of a server in turn, under streams.

    With a second service, or where the server waits longer than its only one is away, every stream
    goes on. One that waits for less ends each request by one typed error at most.
    """
    if not jobs:
        chance, (some, more) = random.Random(4), (16, 8) if full else (4, 4)
        asked = [any_fields(n, 40, chance) for n in range(some)]
        asked += [(COMPLETIONS, long_fields(40, chance)) for _ in range(more)]
        jobs += await many.learn(asked)
    chance, begun, back_s = random.Random(3), set[int](), list[float]()
    hits, over = 0, False

    async def client(number: int) -> None:
        chance = random.Random(number)
        while not over:
            job, streamed = chance.choice(jobs), chance.random() < 0.75
            reply = await many.ask(job, streamed=streamed, on_events=lambda: begun.add(number))
            begun.discard(number)
            await asyncio.sleep(_LOOK_S if reply.status == 503 else 0)

    def errors() -> int:
        return many.counts["broken"] + many.counts["refused 503"]

    async with asyncio.TaskGroup() as group:
        for number in range(_STREAMS):
            group.create_task(client(number))
        for number in range(kills):
            await until(lambda: begun, _LOOK_S / 5)
            await asyncio.sleep(chance.uniform(0, 0.1))
            at, known = number % len(many.services), errors()
            lost, streaming = many.logged("service_lost"), bool(begun)
            many.services[at].kill()
            if len(many.services) == 1:
                await many.until_health(503)
            if patient:
                await asyncio.sleep(chance.uniform(0, _AWAY_S if full else _AWAY_SHORT_S))
            else:
                # /health says 503 as soon as a step waits; here it is to wait in vain.
                await until(lambda known=known: errors() > known)  # type: ignore[misc]
            many.services[at] = await asyncio.to_thread(many.workers.restart, many.services[at])
            began, right = time.monotonic(), many.counts["right"]
            await many.until_health(200)
            await until(lambda right=right: many.counts["right"] > right)  # type: ignore[misc]
            back_s.append(time.monotonic() - began)
            # The other one of two was in use since the last time.
            hits += streaming and many.logged("service_lost") > lost
        over = True
    await many.until(is_idle)
    return Killed(hits, back_s, (errors() == 0) == patient)


@Row(
    "serving_faults",
    "services killed (kill -9) under a server's streams",
    "in turns: a second one present; the only one, with a deadline longer and shorter than that",
    "tokens as alone, or one typed error where no service was there; /health 503, then 200 again",
    short=3,
    long=90,
    minutes=4,
)
def serving_faults(count: int, full: bool) -> Found:
    """Kill so often: a third with a second service, and two thirds the only one."""
    jobs, counts, killed = list[Job](), Counter[str](), list[Killed]()
    impatient_s = _IMPATIENT_S if full else _IMPATIENT_SHORT_S
    for number, links in enumerate((("unix", "shm"), ("shm",), ("unix",))):
        patient = number < 2
        kills = count // 3 if number else count - 2 * (count // 3)
        timeout_s = str(_PATIENT_S if patient else impatient_s)
        with clients(full, "--request-timeout-s", timeout_s, links=links) as many:
            killed.append(asyncio.run(_kill(many, kills, full, patient, jobs)))
        counts += many.counts
    wrong = sum(counts[kind] for kind in ("wrong", "hung", "untyped"))
    hits, back_s = sum(one.hits for one in killed), [s for one in killed for s in one.back_s]
    return Found(
        {
            "killed under streams": f"{hits} of {count}",
            "right": counts["right"],
            "ended by one typed error": counts["broken"],
            "refused meanwhile": counts["refused 503"],
            "wrong": wrong,
            "p95 until right again, s": percentile(back_s, 95),
        },
        {
            "every one hits": hits == len(back_s) == count,
            "none wrong": counts["right"] > 0 and not wrong,
            "errors where no service was there, and only there": all(one.as_due for one in killed),
        },
    )


_BODY = """\
data: {"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": "length",
    "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5]}}]}

data: {"id": "1", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}

data: [DONE]

"""


@each_row(
    ("old", "new"),
    [
        *(("[DONE]", "{}"), ('"id": "1"', '"id": "2"'), ('"length"', "null")),
        *(('"a"', '"b"'), ("-0.5", "-0.25"), ('_tokens": 1', '_tokens": 2')),
    ],
)
def test_what_is_wrong_of_an_answer_is_noticed(old: str, new: str) -> None:
    used = {"prompt_tokens": 5, "completion_tokens": 1}
    job = Job(COMPLETIONS, {}, Answer([("a", ["a"], [-0.5], "length")], used))
    for body in (_BODY, _BODY.replace(old, new, 1)):
        reply = Reply(200, {"content-type": "text/event-stream"}, body.encode())
        assert ("right" in judge(job, reply)) == (body == _BODY)
