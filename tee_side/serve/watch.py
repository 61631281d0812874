"""The one place that accounts for a request: its key's limits, the audit log and the metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tee_side.serve.audit_log import AuditLog
from tee_side.serve.limits import Admission, Limits, RateLimitError
from tee_side.serve.metrics import Metrics

# Outcomes of an answer, which are no errors: what the audit log says of them, and vLLM's name.
_OUTCOMES = {
    "ok": ("ok", "stop"),
    "stop": ("ok", "stop"),
    "length": ("ok", "length"),
    "cancelled": ("cancelled", "abort"),
}
_ERROR_TYPE = re.compile("[A-Z][A-Za-z0-9]{0,63}")


class Watch:
    """Makes what accounts for each request; of one thread.

    `policy`: its name, for the audit log; `audit`: None without one. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        audit: AuditLog | None,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.metrics, self.audit = limits, metrics, audit
        self.policy, self.clock = policy, clock

    def request(self) -> RequestWatch:
        """Return what accounts for a request that arrives now."""
        return RequestWatch(self)


class RequestWatch:
    """One request: `precheck` before its prompt is read, `begin`, `token` for each delivery, `end`.

    Without `begin`, or where that refuses it, there is no end.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._arrived_s = watch.clock()
        self._token_s: float | None = None
        self._owner = ""
        self._admission: Admission | None = None

    def precheck(self, owner: str) -> None:
        """Raise RateLimitError, as `begin`, where it would whatever the request says."""
        self._owner = owner
        with self._refusing(0):
            self._watch.limits.precheck(owner)

    def begin(self, owner: str, prompt_tokens: int, max_tokens: int) -> None:
        """Let the request in, or raise RateLimitError, which is accounted for: no `end` then.

        `owner`: the name of its API key. `max_tokens`: what it may answer, all samples together.
        """
        self._owner = owner
        with self._refusing(prompt_tokens):
            self._admission = self._watch.limits.begin(owner, prompt_tokens, max_tokens)

    @contextmanager
    def _refusing(self, prompt_tokens: int) -> Iterator[None]:
        try:
            yield
        except RateLimitError as error:
            self._record(type(error).__name__, "error", prompt_tokens, 0)
            raise

    def headers(self) -> dict[str, str]:
        """Return `x-ratelimit-*` for an answer, as they are now."""
        return self._watch.limits.headers(self._owner)

    def token(self, count: int) -> None:
        """Note that a step gave the request `count` new tokens, one or several at a time."""
        if count > 0:
            now_s, before_s, metrics = self._watch.clock(), self._token_s, self._watch.metrics
            self._token_s = now_s
            if before_s is None:
                metrics.first_token(now_s - self._arrived_s)
            else:
                metrics.between_tokens(now_s - before_s)

    def end(
        self, outcome: str, prompt_tokens: int, completion_tokens: int, receipt: bytes | None = None
    ) -> None:
        """Account for the end; a second time, or without a `begin` that let it in: nothing.

        `outcome`: stop, length, ok (as stop), cancelled, or the name of an error's type; anything
        else counts as an error without a name, so that no text gets into the log by mistake.
        `receipt`: SHA-256 of the one that was signed, for the log.
        """
        admission, self._admission = self._admission, None
        if admission is None:
            return
        admission.end(prompt_tokens + completion_tokens)
        said, reason = _OUTCOMES.get(outcome, (outcome, "error"))
        if reason == "error" and not _ERROR_TYPE.fullmatch(said):
            said = "error"
        more = {} if receipt is None else {"receipt": receipt}
        self._record(said, reason, prompt_tokens, completion_tokens, **more)

    def _record(
        self, outcome: str, reason: str, prompt_tokens: int, completion_tokens: int, **more: bytes
    ) -> None:
        duration_s = self._watch.clock() - self._arrived_s
        self._watch.metrics.ended(reason)
        self._watch.metrics.request(duration_s)
        if self._watch.audit is not None:
            self._watch.audit.record(
                "request",
                key=self._owner,
                policy=self._watch.policy,
                outcome=outcome,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                duration_s=round(duration_s, 6),
                **more,
            )
