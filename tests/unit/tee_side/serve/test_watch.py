"""Keys and their limits, and what accounts for a request in limits, log and metrics: once."""

import hmac
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import KeyFileError
from tee_side.serve.audit_log import AuditLog, AuditReader, open_log
from tee_side.serve.keys import Admission, ApiKey, ApiKeys, Limits, RateLimitError, hash_of
from tee_side.serve.watch import FINISHED_REASONS, Metrics, Watch
from tests.kit.rows import each_row
from tests.kit.serve import Clock, engine_stats

KEY = bytes(32)
LIMITS = {"requests_per_minute": 6, "tokens_per_minute": 100, "concurrent": 2}


def scrape(metrics: Metrics) -> dict[str, Metric]:
    body, content_type = metrics.page()
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def running(limits: Limits, owner: str = "alice") -> int:
    state = limits._states.get(owner)
    return state.running if state else 0


class World:
    def __init__(self, path: Path) -> None:
        self.clock, self.path = Clock(), path
        key = ApiKey(name="alice", sha256="0" * 64, **LIMITS)
        self.limits = Limits({"alice": key}.get, self.clock)
        self.metrics = Metrics("demo", engine_stats)
        self.audit = AuditLog(path, KEY)
        self.watch = Watch(self.limits, self.metrics, self.audit, "shielded", self.clock)

    def records(self) -> list[dict[str, Any]]:
        with open_log(self.path) as file:
            found = list(AuditReader(file, KEY, "log"))
        for record in found:
            assert record.pop("kind") == "request"
            assert record.pop("time")
        return found

    def told(self) -> dict[str, float]:
        """Return what a scrape says of requests: counts by outcome, counts and sums of times."""
        return {
            sample.labels.get("finished_reason", sample.name.partition(":")[2]): sample.value
            for family in scrape(self.metrics).values()
            for sample in family.samples
            if sample.value and sample.name.endswith(("success_total", "_seconds_count", "_sum"))
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "audit.log")
    yield made
    made.audit.close()
    # However it ended, nothing of it runs on.
    assert running(made.limits) == 0


def test_an_answer(world: World) -> None:
    one = world.watch.request("alice")
    world.clock.wait(0.5)
    one.begin(10, 20)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert running(world.limits) == 1
    one.token(0)  # a step that read a part of the prompt
    for seconds, count in ((1.5, 1), (0.25, 1), (0.25, 3)):
        world.clock.wait(seconds)
        one.token(count)
    one.end("length", 10, 5, receipt=KEY)
    said = {"key": "alice", "policy": "shielded", "outcome": "ok"}
    counts = {"prompt_tokens": 10, "completion_tokens": 5, "duration_s": 2.5}
    assert world.records() == [said | counts | {"receipt": KEY}]
    assert world.told() == {
        "length": 1,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 2.0,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.5,
        "e2e_request_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 2.5,
    }
    world.clock.wait(60)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "100"


def test_an_end_counts_once_and_no_text_of_it_is_in_the_log(world: World) -> None:
    texts = ("", "My password is", "password", "A" * 65)
    for outcome in ("stop", "cancelled", "PadsExhaustedError", *texts):
        one = world.watch.request("alice")
        one.end("length", 1, 1)  # it has not begun
        one.begin(1, 1)
        one.end(outcome, 1, 0)
        one.end("length", 1, 1)
        world.clock.wait(60)
    recorded = ["ok", "cancelled", "PadsExhaustedError", *["error"] * 4]
    records = world.records()
    assert [record["outcome"] for record in records] == recorded
    assert not any("receipt" in record for record in records)
    counted = {name: n for name, n in world.told().items() if name in FINISHED_REASONS}
    assert counted == {"stop": 1, "abort": 1, "error": 5}


def test_a_refusal_is_accounted_for_at_once(world: World) -> None:
    first, second = world.watch.request("alice"), world.watch.request("alice")
    with pytest.raises(RateLimitError):
        first.begin(90, 11)
    first.end("RateLimitError", 90, 0)
    second.precheck()
    assert len(world.records()) == 1
    # Before its prompt is read as well.
    held = world.limits.begin("alice", 90, 10)
    with pytest.raises(RateLimitError):
        second.precheck()
    second.end("RateLimitError", 0, 0)
    held.end(0)
    names = ("key", "outcome", "prompt_tokens", "completion_tokens")
    assert [tuple(record[name] for name in names) for record in world.records()] == [
        ("alice", "RateLimitError", 90, 0),
        ("alice", "RateLimitError", 0, 0),
    ]
    assert world.told()["error"] == 2


# The names of vLLM; others are ours.
VLLM = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_usage": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
}
GAUGES = {"running", "waiting", "kv_usage", "pads_ready", "services"}


def test_every_number_of_the_engine_is_told_as_it_is_at_the_scrape() -> None:
    told = [engine_stats(running=100), engine_stats()]
    metrics = Metrics("demo", told.pop, lambda: (18, 19))
    scrape(metrics)
    (stats,) = told
    found = scrape(metrics)
    for name, number in asdict(stats).items():
        family = found.pop(f"vllm:{VLLM[name]}" if name in VLLM else f"tsqp:{name}")
        assert family.type == ("gauge" if name in GAUGES else "counter")
        assert [sample.value for sample in family.samples] == [number], name
    assert found.pop("tsqp:audit_errors").samples[0].value == 18
    assert found.pop("tsqp:audit_lost").samples[0].value == 19
    # Nothing that a client can choose, and nothing by key, is a label.
    labels = {"model_name", "le", "finished_reason"}
    told.append(stats)
    samples = [sample for family in scrape(metrics).values() for sample in family.samples]
    assert all(sample.labels.keys() <= labels for sample in samples)
    assert {sample.labels["model_name"] for sample in samples} == {"demo"}
    with pytest.raises(KeyError):
        metrics.ended("a text")


def test_pads_made_per_second_of_the_last_minute() -> None:
    total, clock = 0, Clock()
    metrics = Metrics("demo", lambda: engine_stats(pads_made=total), clock=clock)
    for step_s, made, rate in (
        (10, 100, 10),  # since the start
        (20, 0, 100 / 30),
        (30, 200, 300 / 60),
        # What was made in the first 10 s is more than a minute ago.
        (10, 0, 200 / 60),
        (300, 600, 2),  # scrapes that are rare: since the last one
        (60, 0, 0),
    ):
        clock.wait(step_s)
        total += made
        (sample,) = scrape(metrics)["tsqp:pads_made_per_second"].samples
        assert sample.value == pytest.approx(rate)


class Keyed:
    """A key whose limits the test changes, and a clock that it moves."""

    def __init__(self, **limits: int) -> None:
        self.clock, self.keys = Clock(), dict[str, ApiKey]()
        self.limits = Limits(self.keys.get, self.clock)
        self.key(**limits)

    def key(self, name: str = "alice", /, **limits: int) -> None:
        self.keys[name] = ApiKey(name=name, sha256="0" * 64, **limits)

    def begin(self, tokens: int = 1, prompt: int = 0) -> Admission:
        return self.limits.begin("alice", prompt, tokens)

    def refused(self, tokens: int = 1, prompt: int = 0) -> RateLimitError:
        before = running(self.limits), self.limits.headers("alice")
        with pytest.raises(RateLimitError) as refused:
            self.begin(tokens, prompt=prompt)
        assert (running(self.limits), self.limits.headers("alice")) == before
        return refused.value

    def left(self, what: str = "tokens") -> int:
        return int(self.limits.headers("alice")[f"x-ratelimit-remaining-{what}"])


def test_requests_a_minute_refill_steadily() -> None:
    keyed = Keyed(requests_per_minute=6)
    for _ in range(6):
        keyed.begin().end(2)
    refused = keyed.refused()
    assert str(refused) == (
        "API key alice: got no room for 1, expected at most 6 (requests a minute)"
    )
    assert (refused.retryable, refused.retry_after_s) == (True, 10)
    for wait_s, told in ((0, "10"), (8.5, "2"), (1.25, "1")):
        keyed.clock.wait(wait_s)
        assert keyed.refused().headers["retry-after"] == told
    keyed.clock.wait(3600)  # no more than a minute's worth comes together
    for _ in range(6):
        keyed.begin()
    keyed.refused()
    # What one key has taken is nothing to another.
    keyed.key("bob", requests_per_minute=1, concurrent=1)
    keyed.limits.precheck("bob")
    keyed.limits.begin("bob", 0, 1)
    assert keyed.limits.headers("bob")["x-ratelimit-remaining-requests"] == "0"
    assert running(keyed.limits, "bob") == 1


def test_tokens_are_reserved_and_settled() -> None:
    keyed = Keyed(tokens_per_minute=600)
    first = keyed.begin(400, prompt=100)
    assert keyed.left() == 100
    refused = keyed.refused(200)
    assert (refused.retry_after_s, refused.headers["retry-after"]) == (10, "10")
    for used in (150, 0):  # a second end is none
        first.end(used)
        assert keyed.left() == 450
    keyed.begin(450).end(750)  # more than it reserved is owed
    assert keyed.left() == 0
    assert keyed.refused(0).retry_after_s == 30


def test_what_can_never_fit_is_not_to_be_retried() -> None:
    keyed = Keyed(tokens_per_minute=100, max_tokens=60)
    for refused, got in (
        (keyed.refused(61), "got 61, expected at most 60 (max_tokens)"),
        (keyed.refused(60, prompt=50), "got no room for 110, expected at most 100 (tokens a"),
    ):
        assert got in str(refused)
        assert (refused.retryable, refused.retry_after_s) == (False, None)
        assert "retry-after" not in refused.headers


def test_concurrent_requests() -> None:
    keyed = Keyed(concurrent=2)
    held = [keyed.begin() for _ in range(2)]
    refused = keyed.refused()
    assert (refused.retryable, refused.headers) == (True, {"retry-after": "1"})
    held[0].end(2)
    held[0].end(2)
    keyed.begin()
    keyed.refused()


def test_what_a_key_took_outlives_a_change_of_its_limits() -> None:
    keyed = Keyed(requests_per_minute=10, tokens_per_minute=100, concurrent=2)
    held = [keyed.begin(30), keyed.begin(30)]
    keyed.key(requests_per_minute=3, tokens_per_minute=70, concurrent=3)
    assert (keyed.left("requests"), keyed.left()) == (1, 10)
    held.append(keyed.begin(0))
    keyed.refused(0)
    # Its entry is removed while requests run, and comes back.
    keyed.keys.clear()
    held.append(keyed.begin(10**6))
    for one in held:
        one.end(30)
    assert running(keyed.limits) == 0
    keyed.key(tokens_per_minute=100)
    # Two of 30, and one that took 30 and had reserved none; the fourth had no limit.
    assert keyed.left() == 10


ALICE, BOB = "tsqp-alice", "tsqp-bob"
ENTRIES = (
    ApiKey(name="alice", sha256=hash_of(ALICE), requests_per_minute=60, concurrent=2).entry()
    + ApiKey(name="bob", sha256=hash_of(BOB), tokens_per_minute=1000, max_tokens=16).entry()
)


def write(path: Path, text: str = ENTRIES) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys(write(tmp_path / "keys.toml"))


def test_a_key_is_found_with_its_limits(keys: ApiKeys) -> None:
    alice, bob = keys.find(f"Bearer {ALICE}"), keys.find(f"bearer  {BOB} ")
    assert alice is keys.of("alice")
    assert bob is not None
    assert (bob.name, bob.tokens_per_minute, bob.max_tokens) == ("bob", 1000, 16)
    others = (None, "", ALICE, "Bearer", "Bearer ", f"Basic {ALICE}", "Bearer \udcff\u00e9")
    # The hash itself is no key.
    for header in (*others, f"Bearer {ALICE}x", f"Bearer {hash_of(ALICE)}"):
        assert keys.find(header) is None


def test_every_entry_is_compared_whichever_it_is(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (ALICE, BOB, "tsqp-nobody"):
        keys.find(f"Bearer {key}")
    compared = [call.args[1] for call in compare.call_args_list]
    assert compared == [hash_of(ALICE), hash_of(BOB)] * 3


SECRET = "tsqp-do-not-quote-me-0123456789abcdef0123456789"
GOOD = f'sha256 = "{"0" * 64}"'


@each_row(
    ("text", "message"),
    [
        (f"{SECRET} = 1\n[keys.a]\n{GOOD}", "got other keys or tables"),
        (f"[keys.{SECRET}]\n{GOOD}\n[keys.{SECRET}]", "got invalid TOML (at line 3"),
        (f"[keys.{SECRET}]\n{GOOD}", "name of a key: got 47 characters"),
        (f"[keys.'a b']\n{GOOD}", "name of a key: got 3 characters"),
        ("[keys]\na = 3", "a: got an unknown field, expected a table of sha256"),
        (f"[keys.a]\n{GOOD}\n{SECRET} = 3", "a: got an unknown field, expected a table of sha256"),
        ("[keys.a]\nconcurrent = 1", "a: sha256: got nothing, expected the 64 hex digits"),
        (f"[keys.a]\nsha256 = '{SECRET}'", "a: sha256: got another value, expected the 64 hex"),
        (f"[keys.a]\n{GOOD}\nconcurrent = 0", "a: concurrent: got another value, expected greater"),
        (f"[keys.a]\n{GOOD}\nmax_tokens = '{SECRET}'", "a: max_tokens: got another value"),
        (f"[keys.a]\n{GOOD}\n[keys.b]\n{GOOD}", "b: sha256: got the key of a"),
    ],
)
def test_a_bad_file_is_refused_and_not_quoted(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(KeyFileError) as refused:
        ApiKeys(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert SECRET[5:] not in str(refused.value)


def test_a_file_that_others_may_use_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml")
    for mode in (0o640, 0o604, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match=f"got mode {mode:04o}, expected 0600"):
            ApiKeys(path)


def test_reading_again_adds_and_removes_and_a_bad_file_changes_nothing(
    tmp_path: Path, keys: ApiKeys, caplog: pytest.LogCaptureFixture
) -> None:
    path, carol = tmp_path / "keys.toml", ApiKey(name="carol", sha256=hash_of("tsqp-carol"))
    write(path, f"[keys.a]\nsha256 = '{SECRET}'")
    with caplog.at_level(logging.ERROR, "tee_side"):
        assert not keys.reload()
    [record] = caplog.records
    assert record.message == "api_keys_unchanged"
    assert SECRET not in str(record.__dict__)
    assert keys.find(f"Bearer {ALICE}") is not None
    write(path, carol.entry())
    assert keys.reload()
    assert keys.find(f"Bearer {ALICE}") is None
    assert keys.find("Bearer tsqp-carol") == carol
