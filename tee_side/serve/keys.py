"""API keys: which clients are served, and how much of it each may have.

The file holds hashes alone, so a copy of it lets no client in:

    [keys.alice]
    sha256 = "<SHA-256 of the key, 64 hex digits>"    # tsqp api-key alice
    requests_per_minute = 60                          # these four as wished
    tokens_per_minute = 100000
    concurrent = 8
    max_tokens = 2048                                 # of one request, all its samples together

A plain hash is enough: keys are 32 random bytes, which are not guessed.

A minute's budget refills steadily. A request takes one request, and its prompt with all tokens that
it may answer; at its end, what was reserved and not used comes back.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.curve import read_text, require_only_we_read
from protocol.errors import KeyFileError, LimitError
from protocol.validation import expectation

log = logging.getLogger("tee_side")

PREFIX = "tsqp-"

_MAX_FILE_BYTES = 2**20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")

_Count = Annotated[int, Field(ge=1, le=10**9)]


class ApiKey(BaseModel):
    """One key's hash, and its limits; None: without one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(exclude=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent: _Count | None = None
    max_tokens: _Count | None = None

    def entry(self) -> str:
        """Return the key's table in the file."""
        fields = self.model_dump(exclude_none=True) | {"sha256": f'"{self.sha256}"'}
        lines = (f"{name} = {value}" for name, value in fields.items())
        return "\n".join([f"[keys.{self.name}]", *lines, ""])


class ApiKeys:
    """The keys of a file, which can be read again while requests are served.

    Raises KeyFileError, in which nothing is quoted that could be a key: others than its owner may
    use the file, it is no TOML, a field is unknown or wrong, a name or a hash stands twice, or
    there is no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_keys(path)

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key that a header `Authorization: Bearer KEY` presents; None: none of ours.

        The time depends on the number of entries, not on which one it is.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hash_of(key.strip())
        found = None
        for entry in self._keys.values():
            if hmac.compare_digest(digest, entry.sha256):
                found = entry
        return found

    def of(self, name: str) -> ApiKey | None:
        """Return the key of a name; None: it was removed."""
        return self._keys.get(name)

    def reload(self) -> bool:
        """Read the file again. If it is bad, log so, keep the keys as they were, return False."""
        try:
            self._keys = read_keys(self._path)
        except KeyFileError as error:
            log.error("api_keys_unchanged", extra={"fields": {"detail": str(error)}})
            return False
        log.info("api_keys", extra={"fields": {"keys": len(self._keys)}})
        return True


def hash_of(key: str) -> str:
    """Return what the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def check_name(name: str, where: str) -> str:
    """Return a key's name. Raises KeyFileError, which does not quote it: it may be a key."""
    KeyFileError.unless(
        _NAME.fullmatch(name) and not name.startswith(PREFIX),
        f"{where}: name of a key",
        f"{len(name)} characters",
        f"1 to 32 of A-Z, a-z, 0-9, - and _, not {PREFIX} in front",
    )
    return name


def read_keys(path: Path) -> Mapping[str, ApiKey]:
    """Read a key file: keys by their names. Raises KeyFileError as `ApiKeys`."""
    where = str(path)
    text, status = read_text(path, _MAX_FILE_BYTES)
    require_only_we_read(path, status)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Its own message may quote the file.
        place = re.search(r"\(at [a-z0-9 ,]+\)$", str(error))
        raise KeyFileError(
            where,
            got=f"invalid TOML {place[0] if place else ''}".rstrip(),
            expected="TOML, each name once",
        ) from None
    entries = tables.pop("keys", None)
    KeyFileError.unless(
        not tables and isinstance(entries, dict) and entries,
        where,
        "other keys or tables" if tables else "no key",
        "a table [keys.NAME] for each key",
    )
    keys: dict[str, ApiKey] = {}
    names: dict[str, str] = {}
    known = [field for field in ApiKey.model_fields if field != "name"]
    for name, fields in entries.items():
        entry = f"{where}: {check_name(name, where)}"
        KeyFileError.unless(
            isinstance(fields, dict) and fields.keys() <= set(known),
            entry,
            "an unknown field",
            f"a table of {', '.join(known)}",
        )
        try:
            keys[name] = key = ApiKey(name=name, **fields)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            field = str(fault["loc"][0])
            raise KeyFileError(
                f"{entry}: {field}",
                got="nothing" if fault["type"] == "missing" else "another value",
                expected="the 64 hex digits of the key's SHA-256 (tsqp api-key)"
                if field == "sha256"
                else expectation(fault["type"], fault["msg"]),
            ) from None
        other = names.setdefault(key.sha256, name)
        KeyFileError.unless(
            other == name, f"{entry}: sha256", f"the key of {other}", "a key of its own"
        )
    return keys


# Of an owner without a key, or whose key was removed.
_UNLIMITED = ApiKey(name="", sha256="0" * 64)

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
        self._check(owner, *self._found(owner), tokens=1, max_tokens=0)

    def begin(self, owner: str, prompt_tokens: int, max_tokens: int) -> Admission:
        """Let a request in, or raise RateLimitError; then it has taken nothing.

        `max_tokens`: what it may answer, all samples together.
        """
        state, limits = self._found(owner)
        tokens = prompt_tokens + max_tokens
        self._check(owner, state, limits, tokens, max_tokens)
        for _, _, budget, cost in _budgets(state, limits, tokens):
            budget.spent += cost
        state.running += 1
        return Admission(state, None if limits.tokens_per_minute is None else tokens)

    def headers(self, owner: str) -> dict[str, str]:
        """Return `x-ratelimit-*` of the limits that a key has, as OpenAI names them."""
        found: dict[str, str] = {}
        for what, size, budget, _ in _budgets(*self._found(owner), tokens=0):
            left = budget.left(size, self._clock())
            reset_s = math.ceil((size - left) * 60_000 / size) / 1000
            found[f"x-ratelimit-limit-{what}"] = str(size)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(left)))
            found[f"x-ratelimit-reset-{what}"] = f"{reset_s:.15g}s"
        return found

    def _found(self, owner: str) -> tuple[_State, ApiKey]:
        return self._states.setdefault(owner, _State()), self._limits_of(owner) or _UNLIMITED

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
            raise refuse(
                "concurrent requests",
                f"{state.running} under way",
                limits.concurrent,
                _RETRY_CONCURRENT_S,
            )
        now_s = self._clock()
        for what, size, budget, cost in _budgets(state, limits, tokens):
            after_s = budget.wait_s(cost, size, now_s)
            if after_s != 0:
                raise refuse(f"{what} a minute", f"no room for {cost}", size, after_s)


@dataclass(slots=True)
class Admission:
    """One request that was let in. `reserved`: tokens; None: the key has no limit on them."""

    _state: _State | None
    reserved: int | None

    def end(self, used_tokens: int) -> None:
        """Give back what was not used; the second time does nothing."""
        state, self._state = self._state, None
        if state is None:
            return
        state.running -= 1
        if self.reserved is not None:
            state.tokens.spent = max(0.0, state.tokens.spent + used_tokens - self.reserved)


def _budgets(state: _State, limits: ApiKey, tokens: int) -> list[tuple[str, int, _Budget, int]]:
    """Return the budgets that a key has: name, size, what of it is used, cost of a request."""
    both = (
        ("requests", limits.requests_per_minute, state.requests, 1),
        ("tokens", limits.tokens_per_minute, state.tokens, tokens),
    )
    return [(what, size, budget, cost) for what, size, budget, cost in both if size is not None]
