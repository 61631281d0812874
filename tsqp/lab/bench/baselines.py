"""What policies are compared with: transformers, the published client, a GPU alone, no work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from protocol.model.checkpoint import Checkpoint, linear_tensors
from protocol.model.config import ModelConfig
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.job import BenchSettings
from tsqp.lab.bench.model import Baseline, PingPong
from tsqp.lab.bench.ping_pong import PAYLOADS, TRANSPORTS
from tsqp.lab.bench.prepare import start_services
from tsqp.lab.measure import processes

# Of the tokens after a prompt, for a client without a KV cache: it recomputes all of them.
_PUBLISHED_NEW_TOKENS = 64
# For one length of one baseline; the slowest take 6 s a pass.
_CASE_S = 5.0
_ROUND_TRIPS = 300


def measure(
    settings: BenchSettings,
    config: ModelConfig,
    folder: Path,
    model: Path,
    say: Callable[[str], None],
) -> Iterator[Sequence[Baseline]]:
    """Measure those that can be: of the same cases, with the same threads and dtype.

    `folder`: for the sockets of services. Raises ProcessError.
    """
    plan, threads = settings.plan, settings.threads
    contexts = tuple(sorted({context for context, _ in plan.decode}))
    if Checkpoint(model).holds(linear_tensors(config)):
        say("baseline: transformers")
        yield _measured(
            "transformers_baseline",
            model=model,
            dtype=settings.dtype or config.dtype,
            attention="sdpa",
            threads=threads,
            tokens=plan.prefill,
            context=contexts,
            new_tokens=plan.decode_steps if contexts else 0,
            repeats=plan.repeats,
            case_s=_CASE_S,
        )
    if not settings.endpoints:
        say("baseline: the published client")
        with ExitStack() as running:
            # Its socket is ZeroMQ's, whatever ours is.
            policy, served = load_policy("published"), replace(settings, transport="tcp")
            ((_, endpoint),) = start_services(running, policy, model, folder, served)
            yield _measured(
                "published_client",
                endpoint=endpoint,
                threads=threads,
                tokens=plan.prefill,
                new_tokens=_PUBLISHED_NEW_TOKENS,
                sampled=2,
                repeats=5,
                case_s=_CASE_S,
                against="cpu" if settings.computes else "null",
                timeout_s=120.0,
            )
    # There is an accelerator here, that of our own services.
    if settings.device.startswith("cuda") and not settings.endpoints and contexts:
        say("baseline: the GPU alone, unmasked")
        yield _measured(
            "unmasked_gpu", model=model, device=settings.device, context=contexts, steps=50
        )


def ping_pong(spin_us: float = 0.0) -> tuple[PingPong, ...]:
    """Measure one round trip of each transport, ours and a raw one. Raises ProcessError."""
    found = _measured(
        "ping_pong",
        transports=",".join(TRANSPORTS),
        payloads=PAYLOADS,
        round_trips=_ROUND_TRIPS,
        device="null",
        spin_us=spin_us,
    )
    return tuple(found)


def _measured(module: str, **options: Any) -> Any:
    """Return what a script measures, in a process of its own. Raises ProcessError."""
    name = f"tsqp.lab.bench.{module}"
    with processes(1, name, lambda _: None) as submit:
        return submit(_measure_all, name, options).result()


def _measure_all(module: str, options: dict[str, Any]) -> Any:
    return import_module(module).measure_all(SimpleNamespace(**options))
