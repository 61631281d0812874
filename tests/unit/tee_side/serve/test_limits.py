"""Tests of the limits of a key, on a clock of the test's."""

from __future__ import annotations

import pytest

from tee_side.serve.keys import ApiKey
from tee_side.serve.limits import Limits, RateLimitError


class World:
    """Keys whose limits the test changes, and a clock that it moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.keys: dict[str, ApiKey] = {}
        self.limits = Limits(self.keys.get, lambda: self.now_s)

    def key(self, name: str = "alice", **limits: int) -> None:
        self.keys[name] = ApiKey(name=name, sha256="0" * 64, **limits)

    def refused(self, tokens: int = 1, owner: str = "alice") -> RateLimitError:
        before = self.limits.running(owner)
        with pytest.raises(RateLimitError) as refused:
            self.limits.begin(owner, 0, tokens)
        assert self.limits.running(owner) == before
        return refused.value


@pytest.fixture
def world() -> World:
    return World()


def test_a_key_without_limits_has_none(world: World) -> None:
    world.key()
    for owner in ("alice", "", "removed"):
        for _ in range(100):
            world.limits.begin(owner, 10**9, 10**9)
        assert world.limits.headers(owner) == {}
        assert world.limits.running(owner) == 100


def test_requests_a_minute_refill_steadily(world: World) -> None:
    world.key(requests_per_minute=6)
    for _ in range(6):
        world.limits.begin("alice", 1, 1).end(2)
    refused = world.refused()
    assert str(refused) == (
        "API key alice: got no room for 1, expected at most 6 (requests a minute)"
    )
    assert refused.retryable
    assert refused.retry_after_s == 10
    assert refused.headers["retry-after"] == "10"
    world.now_s += 8.5
    assert world.refused().retry_after_s == pytest.approx(1.5)
    assert world.refused().headers["retry-after"] == "2"
    world.now_s += 1.25
    assert world.refused().headers["retry-after"] == "1"
    world.now_s += 0.25
    world.limits.begin("alice", 1, 1)
    world.refused()
    world.now_s += 3600  # no more than a minute's worth comes together
    for _ in range(6):
        world.limits.begin("alice", 1, 1)
    world.refused()


def test_a_refused_request_takes_nothing(world: World) -> None:
    world.key(requests_per_minute=10, tokens_per_minute=100, concurrent=5)
    world.limits.begin("alice", 40, 20)
    before = world.limits.headers("alice")
    world.refused(50)
    assert world.limits.headers("alice") == before
    assert before["x-ratelimit-remaining-requests"] == "9"


def test_tokens_are_reserved_and_settled(world: World) -> None:
    world.key(tokens_per_minute=600)
    first = world.limits.begin("alice", 100, 400)
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "100"
    refused = world.refused(200)
    assert (refused.retry_after_s, refused.headers["retry-after"]) == (10, "10")
    first.end(150)
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "450"
    first.end(0)  # a second end is none
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "450"
    second = world.limits.begin("alice", 0, 450)
    second.end(750)  # more than it reserved is owed
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "0"
    assert world.refused(0).retry_after_s == 30
    world.now_s += 30
    world.limits.begin("alice", 0, 0)


def test_what_comes_back_never_exceeds_the_budget(world: World) -> None:
    world.key(tokens_per_minute=60)
    held = world.limits.begin("alice", 0, 60)
    world.now_s += 60
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "60"
    held.end(0)
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "60"
    world.refused(61)


def test_what_can_never_fit_is_not_to_be_retried(world: World) -> None:
    world.key(tokens_per_minute=100, max_tokens=60)
    for refused in (world.refused(61), world.refused(101)):
        assert not refused.retryable
        assert refused.retry_after_s is None
        assert "retry-after" not in refused.headers
    assert "got 61, expected at most 60 (max_tokens)" in str(world.refused(61))
    with pytest.raises(
        RateLimitError, match=r"got no room for 110, .*\(tokens a minute\)"
    ) as too_large:
        world.limits.begin("alice", 50, 60)
    assert not too_large.value.retryable


def test_concurrent_requests(world: World) -> None:
    world.key(concurrent=2)
    held = [world.limits.begin("alice", 1, 1) for _ in range(2)]
    refused = world.refused()
    assert refused.retryable
    assert refused.headers == {"retry-after": "1"}
    held[0].end(2)
    held[0].end(2)
    world.limits.begin("alice", 1, 1)
    world.refused()


def test_what_nothing_would_be_let_in_for_is_known_before_the_tokens_are(world: World) -> None:
    for limits in ({"concurrent": 1}, {"requests_per_minute": 1}, {"tokens_per_minute": 60}):
        world.key(**limits)
        world.limits = Limits(world.keys.get, lambda: world.now_s)
        for _ in range(3):  # takes nothing
            world.limits.precheck("alice")
        world.limits.begin("alice", 0, 60)
        with pytest.raises(RateLimitError) as refused:
            world.limits.precheck("alice")
        assert refused.value.retryable
    world.now_s += 1
    world.limits.precheck("alice")
    world.refused(2)
    world.limits.precheck("removed")


def test_keys_do_not_share(world: World) -> None:
    world.key(concurrent=1, requests_per_minute=1)
    world.key("bob", concurrent=1, requests_per_minute=1)
    world.limits.begin("alice", 1, 1)
    world.limits.begin("bob", 1, 1)
    world.refused()


def test_headers_as_openai_names_them(world: World) -> None:
    world.key(requests_per_minute=40, tokens_per_minute=7000)
    world.limits.begin("alice", 10, 25)
    assert world.limits.headers("alice") == {
        "x-ratelimit-limit-requests": "40",
        "x-ratelimit-remaining-requests": "39",
        "x-ratelimit-reset-requests": "1.5s",
        "x-ratelimit-limit-tokens": "7000",
        "x-ratelimit-remaining-tokens": "6965",
        "x-ratelimit-reset-tokens": "0.3s",
    }
    world.now_s += 0.75
    found = world.limits.headers("alice")
    assert found["x-ratelimit-remaining-requests"] == "39"
    assert found["x-ratelimit-reset-requests"] == "0.75s"
    assert found["x-ratelimit-reset-tokens"] == "0s"


def test_what_a_key_took_outlives_a_change_of_its_limits(world: World) -> None:
    world.key(requests_per_minute=10, tokens_per_minute=100, concurrent=2)
    held = [world.limits.begin("alice", 0, 30), world.limits.begin("alice", 0, 30)]
    world.key(requests_per_minute=3, tokens_per_minute=70, concurrent=3)
    found = world.limits.headers("alice")
    assert found["x-ratelimit-remaining-requests"] == "1"
    assert found["x-ratelimit-remaining-tokens"] == "10"
    held.append(world.limits.begin("alice", 0, 0))
    world.refused(0)
    # Its entry is removed while requests run, and comes back.
    world.keys.clear()
    held.append(world.limits.begin("alice", 0, 10**6))
    for one in held:
        one.end(30)
    assert world.limits.running("alice") == 0
    world.key(tokens_per_minute=100)
    # Two of 30, and one that took 30 and had reserved none; the fourth had no limit.
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "10"


def test_what_began_without_a_limit_gives_nothing_back(world: World) -> None:
    world.key(requests_per_minute=10)
    held = world.limits.begin("alice", 50, 50)
    world.key(tokens_per_minute=100)
    world.limits.begin("alice", 0, 30)
    held.end(0)
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "70"


def test_two_hundred_requests_leave_nothing_behind(world: World) -> None:
    world.key(tokens_per_minute=1000, concurrent=200)
    held = [world.limits.begin("alice", 1, 4) for _ in range(200)]
    world.refused()
    for one in held:
        one.end(0)
    assert world.limits.running("alice") == 0
    assert world.limits.headers("alice")["x-ratelimit-remaining-tokens"] == "1000"
