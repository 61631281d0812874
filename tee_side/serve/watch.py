"""The one place that accounts for a request: its key's limits, the audit log and the metrics.

`/metrics` has counts and times of the engine and of requests, in vLLM's names: dashboards for vLLM
read them as they are, and what vLLM has not begins with `tsqp:`. The label is the served model's
name: nothing that a client can choose, and nothing by API key.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tee_side.serve.audit_log import AuditLog
from tee_side.serve.background import EngineStats
from tee_side.serve.keys import Admission, Limits, RateLimitError

_LABELS = ("model_name",)

# By field of the engine's stats; what is None there is left out.
_GAUGES = {
    "running": ("vllm:num_requests_running", "Requests with a sequence in the engine's steps."),
    "waiting": ("vllm:num_requests_waiting", "Requests that wait to be admitted."),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Memory of keys and values in use; 1 is all of it."),
    "pads_ready": ("tsqp:pads_ready", "Tokens for which pads are made and unused."),
    "services": ("tsqp:services", "Services that are connected."),
}

_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Tokens of prompts that were read."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens that were made."),
    "prefix_queries": ("vllm:prefix_cache_queries", "Tokens looked up among earlier prompts."),
    "prefix_hits": ("vllm:prefix_cache_hits", "Tokens that were found there."),
    "steps": ("tsqp:steps", "Steps of the engine."),
    "draft_tokens": ("tsqp:draft_tokens", "Tokens that were proposed by speculation."),
    "accepted_tokens": ("tsqp:accepted_tokens", "Proposed tokens that the sampler drew as well."),
    "pads_made": ("tsqp:pads_made", "Tokens for which pads were made."),
    "pads_used": ("tsqp:pads_used", "Tokens that pads were used up for, wrong guesses as well."),
    "pads_waited": ("tsqp:pads_waited", "Steps that waited for pads."),
    "pads_in_tee": ("tsqp:pads_in_tee", "Steps computed in the TEE for want of pads."),
    "round_trips": ("tsqp:round_trips", "Round trips to services."),
    "bytes_sent": ("tsqp:bytes_sent", "Bytes sent to services."),
    "bytes_received": ("tsqp:bytes_received", "Bytes received from services."),
}

_AUDIT = (
    ("tsqp:audit_errors", "Writes of the audit log that the disk refused."),
    ("tsqp:audit_lost", "Records of the audit log that were lost."),
)
# Of seconds; with the upper ends of their buckets.
_HISTOGRAMS = (
    (
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token.",
        (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
            *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
        ),
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Between deliveries of tokens to one request.",
        (
            *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
            *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
        ),
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "From arrival to the end.",
        (
            *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
            *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
        ),
    ),
)
FINISHED_REASONS = ("stop", "length", "abort", "error")

_RATE_OVER_S = 60.0


class Metrics(Collector):
    """The metrics of one server, in a registry of their own; the engine's are made when asked for.

    `stats`: returns the engine's stats as they are now. `audit`: returns how often the disk refused
    the audit log, and how many records were lost; None without a log. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        audit: Callable[[], tuple[int, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Without it the engine would be asked as the collector is registered.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._labels = (model_name,)
        self._stats, self._audit, self._clock = stats, audit, clock
        # (seconds, pads made) of earlier scrapes, the oldest a minute old or a little more.
        self._made: deque[tuple[float, int]] = deque([(clock(), 0)])

        # Looked up once: they are called for every token.
        self.first_token, self.between_tokens, self.request = (
            Histogram(name, text, _LABELS, buckets=bounds, registry=self._registry)
            .labels(model_name)
            .observe
            for name, text, bounds in _HISTOGRAMS
        )
        ended = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._ended = {reason: ended.labels(model_name, reason) for reason in FINISHED_REASONS}

    def ended(self, reason: str) -> None:
        """Count a request that ended, by one of FINISHED_REASONS."""
        self._ended[reason].inc()

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type, in a format that a scraper's `Accept` names."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        """Return all metrics of the engine."""
        stats = self._stats()
        for family, fields in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, (name, text) in fields.items():
                if (value := getattr(stats, field)) is not None:
                    yield self._metric(family, name, text, value)
        rate = self._made_per_second(stats.pads_made)
        text = "Tokens for which pads were made, each second of the last minute."
        yield self._metric(GaugeMetricFamily, "tsqp:pads_made_per_second", text, rate)
        counts = () if self._audit is None else zip(_AUDIT, self._audit(), strict=True)
        for (name, text), count in counts:
            yield self._metric(CounterMetricFamily, name, text, count)

    def _metric(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        made = family(name, text, labels=_LABELS)
        made.add_metric(self._labels, value)
        return made

    def _made_per_second(self, made: int) -> float:
        """Return the rate since the scrape that is a minute ago, or since the last one before."""
        now_s = self._clock()
        # The second one is old enough to measure from.
        while len(self._made) > 1 and now_s - self._made[1][0] >= _RATE_OVER_S:
            self._made.popleft()
        then_s, before = self._made[0]
        # Scrapes in quick succession keep one a second.
        if now_s - self._made[-1][0] >= 1:
            self._made.append((now_s, made))
        return (made - before) / (now_s - then_s) if now_s > then_s else 0.0


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

    def request(self, owner: str) -> RequestWatch:
        """Return what accounts for a request that arrives now; `owner`: the name of its key."""
        return RequestWatch(self, owner)


class RequestWatch:
    """One request: `precheck` before its prompt is read, `begin`, `token` for each delivery, `end`.

    Without `begin`, or where that refuses it, there is no end.
    """

    def __init__(self, watch: Watch, owner: str) -> None:
        self._watch, self.owner = watch, owner
        self._arrived_s = watch.clock()
        self._token_s: float | None = None
        self._admission: Admission | None = None

    def precheck(self) -> None:
        """Raise RateLimitError, as `begin`, where it would whatever the request says."""
        with self._refusing(0):
            self._watch.limits.precheck(self.owner)

    def begin(self, prompt_tokens: int, max_tokens: int) -> None:
        """Let the request in, or raise RateLimitError, which is accounted for: no `end` then.

        `max_tokens`: what it may answer, all samples together.
        """
        with self._refusing(prompt_tokens):
            self._admission = self._watch.limits.begin(self.owner, prompt_tokens, max_tokens)

    @contextmanager
    def _refusing(self, prompt_tokens: int) -> Iterator[None]:
        try:
            yield
        except RateLimitError as error:
            self._record(type(error).__name__, "error", prompt_tokens, 0)
            raise

    def headers(self) -> dict[str, str]:
        """Return `x-ratelimit-*` for an answer, as they are now."""
        return self._watch.limits.headers(self.owner)

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
                key=self.owner,
                policy=self._watch.policy,
                outcome=outcome,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                duration_s=round(duration_s, 6),
                **more,
            )
