"""What one API key may have at a time: requests and tokens a minute, and concurrent requests.

A minute's budget refills steadily. A request takes one request, and its prompt with all tokens that
it may answer; at its end, what was reserved and not used comes back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import LimitError
from tee_side.serve.keys import ApiKey

# Nothing says when another request of the key ends.
_RETRY_CONCURRENT_S = 1.0


class RateLimitError(LimitError):
    """A request beyond its key's limits.

    `retry_after_s`: when it may be let in; None: never (and `retryable` is False). `headers`: what
    HTTP says of it, `retry-after` among them.
    """

    def __init__(
        self, where: str, *, got: str, expected: str, after_s: float | None, headers: dict[str, str]
    ) -> None:
        super().__init__(where, got=got, expected=expected)
        self.retryable = after_s is not None
        self.retry_after_s = after_s
        retry = {} if after_s is None else {"retry-after": str(max(1, math.ceil(after_s)))}
        self.headers = headers | retry


@dataclass(slots=True)
class _Budget:
    """How much of a minute's budget is used. Without its size, which the file may change."""

    spent: float = 0.0
    at_s: float = 0.0

    def left(self, size: int, now_s: float) -> float:
        """Return what is left now, below 0 where more was used than there was."""
        self.spent = max(0.0, self.spent - (now_s - self.at_s) * size / 60)
        self.at_s = now_s
        return size - self.spent

    def wait_s(self, cost: float, size: int, now_s: float) -> float | None:
        """Return how long until `cost` fits; None: it never does."""
        if cost > size:
            return None
        wait_s = (cost - self.left(size, now_s)) * 60 / size
        # A caller that waited so long is not refused for a rounding.
        return wait_s if wait_s > 1e-6 else 0.0


@dataclass(slots=True)
class _State:
    """What a key has taken. It outlives the key's entry, which may be read anew."""

    running: int = 0
    requests: _Budget = field(default_factory=_Budget)
    tokens: _Budget = field(default_factory=_Budget)


class Limits:
    """Lets requests in, key by key; of one thread.

    `limits_of`: a key's limits as they are now, None for a key without any. `clock`: monotonic
    seconds.
    """

    def __init__(
        self,
        limits_of: Callable[[str], ApiKey | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._states: dict[str, _State] = {}

    def precheck(self, owner: str) -> None:
        """Raise RateLimitError where not even a request of one token would be let in."""
        state, limits = self._states.setdefault(owner, _State()), self._limits_of(owner)
        if limits is not None:
            self._check(owner, state, limits, tokens=1, max_tokens=0)

    def begin(self, owner: str, prompt_tokens: int, max_tokens: int) -> Admission:
        """Let a request in, or raise RateLimitError; then it has taken nothing.

        `max_tokens`: what it may answer, all samples together.
        """
        state, limits = self._states.setdefault(owner, _State()), self._limits_of(owner)
        tokens = prompt_tokens + max_tokens
        held = Admission(state)
        if limits is not None:
            self._check(owner, state, limits, tokens, max_tokens)
            costs = {"requests": 1, "tokens": tokens}
            for what, _, budget in _budgets(state, limits):
                budget.spent += costs[what]
            held.reserved = None if limits.tokens_per_minute is None else tokens
        state.running += 1
        return held

    def running(self, owner: str) -> int:
        """Return how many requests of a key are under way."""
        state = self._states.get(owner)
        return state.running if state else 0

    def headers(self, owner: str) -> dict[str, str]:
        """Return `x-ratelimit-*` of the limits that a key has, as OpenAI names them."""
        state, limits = self._states.setdefault(owner, _State()), self._limits_of(owner)
        if limits is None:
            return {}
        found: dict[str, str] = {}
        for what, size, budget in _budgets(state, limits):
            left = budget.left(size, self._clock())
            reset_s = math.ceil((size - left) * 60_000 / size) / 1000
            found[f"x-ratelimit-limit-{what}"] = str(size)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(left)))
            found[f"x-ratelimit-reset-{what}"] = f"{reset_s:.15g}s"
        return found

    def _check(
        self, owner: str, state: _State, limits: ApiKey, tokens: int, max_tokens: int
    ) -> None:
        def refuse(what: str, got: str, most: int, after_s: float | None) -> RateLimitError:
            return RateLimitError(
                f"API key {owner}",
                got=got,
                expected=f"at most {most} ({what})",
                after_s=after_s,
                headers=self.headers(owner),
            )

        if limits.max_tokens is not None and max_tokens > limits.max_tokens:
            raise refuse("max_tokens", str(max_tokens), limits.max_tokens, None)
        if limits.concurrent is not None and state.running >= limits.concurrent:
            got = f"{state.running} under way"
            raise refuse("concurrent requests", got, limits.concurrent, _RETRY_CONCURRENT_S)
        now_s, costs = self._clock(), {"requests": 1, "tokens": tokens}
        for what, size, budget in _budgets(state, limits):
            after_s = budget.wait_s(costs[what], size, now_s)
            if after_s != 0:
                got = f"no room for {costs[what]}"
                raise refuse(f"{what} a minute", got, size, after_s)


class Admission:
    """One request that was let in. `reserved`: tokens; None: the key has no limit on them."""

    def __init__(self, state: _State) -> None:
        self._state: _State | None = state
        self.reserved: int | None = None

    def end(self, used_tokens: int) -> None:
        """Give back what was not used; the second time does nothing."""
        state, self._state = self._state, None
        if state is None:
            return
        state.running -= 1
        if self.reserved is not None:
            state.tokens.spent = max(0.0, state.tokens.spent + used_tokens - self.reserved)


def _budgets(state: _State, limits: ApiKey) -> list[tuple[str, int, _Budget]]:
    """Return the budgets that a key has: name, size, and what of it is used."""
    both = (
        ("requests", limits.requests_per_minute, state.requests),
        ("tokens", limits.tokens_per_minute, state.tokens),
    )
    return [(what, size, budget) for what, size, budget in both if size is not None]
