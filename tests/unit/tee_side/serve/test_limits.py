"""The limits of a key, on a clock of the test's."""

from __future__ import annotations

import pytest

from tee_side.serve.keys import ApiKey
from tee_side.serve.limits import Admission, Limits, RateLimitError
from tests.kit.serve import Clock


class World:
    """Keys whose limits the test changes, and a clock that it moves."""

    def __init__(self) -> None:
        self.clock, self.keys = Clock(), dict[str, ApiKey]()
        self.limits = Limits(self.keys.get, self.clock)

    def key(self, name: str = "alice", **limits: int) -> None:
        self.keys[name] = ApiKey(name=name, sha256="0" * 64, **limits)

    def begin(self, tokens: int = 1, owner: str = "alice", prompt: int = 0) -> Admission:
        return self.limits.begin(owner, prompt, tokens)

    def refused(self, tokens: int = 1, prompt: int = 0) -> RateLimitError:
        """Refuse a request, which takes nothing."""
        before = self.limits.running("alice"), self.limits.headers("alice")
        with pytest.raises(RateLimitError) as refused:
            self.begin(tokens, prompt=prompt)
        assert (self.limits.running("alice"), self.limits.headers("alice")) == before
        return refused.value

    def left(self, what: str = "tokens") -> int:
        return int(self.limits.headers("alice")[f"x-ratelimit-remaining-{what}"])


@pytest.fixture
def world() -> World:
    return World()


def test_a_key_without_limits_has_none_and_keys_do_not_share(world: World) -> None:
    world.key()
    for owner in ("alice", "", "removed"):
        for _ in range(100):
            world.begin(10**9, owner)
        assert world.limits.headers(owner) == {}
        assert world.limits.running(owner) == 100
    world.key("bob", concurrent=1, requests_per_minute=1)
    world.begin(owner="bob")
    world.begin()


def test_requests_a_minute_refill_steadily(world: World) -> None:
    world.key(requests_per_minute=6)
    for _ in range(6):
        world.begin().end(2)
    refused = world.refused()
    assert str(refused) == (
        "API key alice: got no room for 1, expected at most 6 (requests a minute)"
    )
    assert (refused.retryable, refused.retry_after_s) == (True, 10)
    for wait_s, told in ((0, "10"), (8.5, "2"), (1.25, "1")):
        world.clock.wait(wait_s)
        assert world.refused().headers["retry-after"] == told
    world.clock.wait(0.25)
    world.begin()
    world.refused()
    world.clock.wait(3600)  # no more than a minute's worth comes together
    for _ in range(6):
        world.begin()
    world.refused()


def test_tokens_are_reserved_and_settled(world: World) -> None:
    world.key(tokens_per_minute=600)
    first = world.begin(400, prompt=100)
    assert world.left() == 100
    refused = world.refused(200)
    assert (refused.retry_after_s, refused.headers["retry-after"]) == (10, "10")
    for used in (150, 0):  # a second end is none
        first.end(used)
        assert world.left() == 450
    world.begin(450).end(750)  # more than it reserved is owed
    assert world.left() == 0
    assert world.refused(0).retry_after_s == 30
    world.clock.wait(30)
    # What comes back never exceeds the budget.
    held = world.begin(0)
    world.clock.wait(60)
    held.end(0)
    assert world.left() == 600
    world.refused(601)


def test_what_can_never_fit_is_not_to_be_retried(world: World) -> None:
    world.key(tokens_per_minute=100, max_tokens=60)
    for refused, got in (
        (world.refused(61), "got 61, expected at most 60 (max_tokens)"),
        (world.refused(60, prompt=50), "got no room for 110, expected at most 100 (tokens a"),
    ):
        assert got in str(refused)
        assert (refused.retryable, refused.retry_after_s) == (False, None)
        assert "retry-after" not in refused.headers


def test_concurrent_requests(world: World) -> None:
    world.key(concurrent=2)
    held = [world.begin() for _ in range(2)]
    refused = world.refused()
    assert (refused.retryable, refused.headers) == (True, {"retry-after": "1"})
    held[0].end(2)
    held[0].end(2)
    world.begin()
    world.refused()


def test_what_nothing_would_be_let_in_for_is_known_before_the_tokens_are(world: World) -> None:
    for limits in ({"concurrent": 1}, {"requests_per_minute": 1}, {"tokens_per_minute": 60}):
        world.limits = Limits(world.keys.get, world.clock)
        world.key(**limits)
        for _ in range(3):  # takes nothing
            world.limits.precheck("alice")
        world.begin(60)
        with pytest.raises(RateLimitError) as refused:
            world.limits.precheck("alice")
        assert refused.value.retryable
    world.clock.wait(1)
    world.limits.precheck("alice")
    world.refused(2)
    world.limits.precheck("removed")


def test_headers_as_openai_names_them(world: World) -> None:
    world.key(requests_per_minute=40, tokens_per_minute=7000)
    world.begin(25, prompt=10)
    for wait_s, requests, tokens in ((0, "1.5s", "0.3s"), (0.75, "0.75s", "0s")):
        world.clock.wait(wait_s)
        assert world.limits.headers("alice") == {
            "x-ratelimit-limit-requests": "40",
            "x-ratelimit-remaining-requests": "39",
            "x-ratelimit-reset-requests": requests,
            "x-ratelimit-limit-tokens": "7000",
            "x-ratelimit-remaining-tokens": "7000" if wait_s else "6965",
            "x-ratelimit-reset-tokens": tokens,
        }


def test_what_a_key_took_outlives_a_change_of_its_limits(world: World) -> None:
    world.key(requests_per_minute=10, tokens_per_minute=100, concurrent=2)
    held = [world.begin(30), world.begin(30)]
    world.key(requests_per_minute=3, tokens_per_minute=70, concurrent=3)
    assert (world.left("requests"), world.left()) == (1, 10)
    held.append(world.begin(0))
    world.refused(0)
    # Its entry is removed while requests run, and comes back.
    world.keys.clear()
    held.append(world.begin(10**6))
    for one in held:
        one.end(30)
    assert world.limits.running("alice") == 0
    world.key(tokens_per_minute=100)
    # Two of 30, and one that took 30 and had reserved none; the fourth had no limit.
    assert world.left() == 10
    # What began without a limit gives nothing back.
    world.key("alice", requests_per_minute=10)
    free = world.begin(50)
    world.key(tokens_per_minute=100)
    free.end(0)
    assert world.left() == 10
