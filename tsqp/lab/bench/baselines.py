"""What policies are compared with: transformers, the published client, a GPU alone, no work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, linear_tensors
from protocol.model.config import ModelConfig
from tee_side.policy.placement import load_policy
from tsqp.lab.bench.job import BenchSettings
from tsqp.lab.bench.model import Baseline, PingPong
from tsqp.lab.bench.prepare import start_services
from tsqp.processes import child, failure

_BASELINES = TypeAdapter(tuple[Baseline, ...])
_PING_PONG = TypeAdapter(tuple[PingPong, ...])
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
) -> Iterator[tuple[Baseline, ...]]:
    """Measure those that can be: of the same cases, with the same threads and dtype.

    Each is a script's. `folder`: for the sockets of services. Raises ProcessError.
    """
    if Checkpoint(model).holds(linear_tensors(config, FUSED_MODULES)):
        say("baseline: transformers")
        yield _transformers(settings, config, model)
    if not settings.endpoints:
        say("baseline: the published client")
        yield _published_client(settings, folder, model)
    if on_the_gpu(settings):
        say("baseline: the GPU alone, unmasked")
        yield _unmasked(settings, model)


def ping_pong(spin_us: float = 0.0) -> tuple[PingPong, ...]:
    """Measure one round trip of each transport, ours and a raw one. Raises ProcessError."""
    options = ["--round-trips", str(_ROUND_TRIPS), "--spin-us", str(spin_us)]
    return _PING_PONG.validate_json(_script("tsqp.lab.bench.ping_pong", *options))


def on_the_gpu(settings: BenchSettings) -> bool:
    """Say whether there is an accelerator here, that of our own services."""
    return settings.device.startswith("cuda") and not settings.endpoints


def _unmasked(settings: BenchSettings, model: Path) -> tuple[Baseline, ...]:
    contexts = _joined(sorted({context for context, _ in settings.plan.decode}))
    if not contexts:
        return ()
    options = ["--device", settings.device, "--context", contexts]
    found = _script("tsqp.lab.bench.unmasked_gpu", str(model), *options)
    return _BASELINES.validate_json(found)


def _transformers(
    settings: BenchSettings, config: ModelConfig, model: Path
) -> tuple[Baseline, ...]:
    plan = settings.plan
    contexts = _joined(sorted({context for context, _ in plan.decode}))
    options = ["--tokens", _joined(plan.prefill), "--dtype", settings.dtype or config.dtype]
    options += ["--repeats", str(plan.repeats), "--case-s", str(_CASE_S)]
    options += ["--threads", str(settings.threads)]
    options += ["--context", contexts] if contexts else []
    options += ["--new-tokens", str(plan.decode_steps if contexts else 0)]
    found = _script("tsqp.lab.bench.transformers_baseline", str(model), *options)
    return _BASELINES.validate_json(found)


def _published_client(settings: BenchSettings, folder: Path, model: Path) -> tuple[Baseline, ...]:
    options = ["--tokens", _joined(settings.plan.prefill), "--threads", str(settings.threads)]
    options += ["--against", "cpu" if settings.computes else "null"]
    options += ["--new-tokens", str(_PUBLISHED_NEW_TOKENS)]
    options += ["--sampled", "2", "--case-s", str(_CASE_S)]
    with ExitStack() as running:
        # Its socket is ZeroMQ's, whatever ours is.
        policy = load_policy("published")
        served = replace(settings.served, transport="tcp")
        ((_, endpoint),) = start_services(running, policy, model, folder, served)
        found = _script("tsqp.lab.bench.published_client", endpoint, *options)
    return _BASELINES.validate_json(found)


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _script(module: str, *arguments: str) -> str:
    """Run one of our scripts, and return what it prints. Raises ProcessError."""
    command = [sys.executable, "-m", module, *arguments]
    with child(command, stdout=subprocess.PIPE) as (process, errors):
        output = process.stdout.read().decode() if process.stdout else ""
        status = process.wait()
        errors.join()
    if status != 0:
        raise failure(module, status, errors.last, expected="exit status 0")
    return output
