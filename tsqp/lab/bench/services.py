"""The services that a benchmark asks: its own, or those that were given."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tee_side.policy.placement import Policy
from tsqp.lab.bench.settings import BenchSettings
from tsqp.processes import start_service

_LOADING_TIMEOUT_S = 600.0


def start_services(
    running: ExitStack,
    settings: BenchSettings,
    folder: Path,
    model: Path,
    policy: Policy,
    transport: str,
) -> list[tuple[int, str]]:
    """Start the services of a policy, which end with `running`; their sockets are in `folder`.

    Returns process ids (0: not ours) and endpoints. Raises ProcessError.
    """
    if settings.endpoints:
        return [(0, endpoint) for endpoint in settings.endpoints[: policy.services]]
    served = settings.server_model if policy.feature_mask else None
    return [
        start_service(
            running,
            [
                *(str(served or model), "--device", settings.device),
                *("--bind", _bind(transport, folder, number)),
                *("--kernels", settings.kernels),
                *("--threads", str(settings.gpu_threads)),
                *("--arithmetic", policy.arithmetic),
                *("--spin-us", str(settings.spin_us)),
                *(("--dtype", settings.dtype) if settings.dtype else ()),
            ],
            timeout_s=_LOADING_TIMEOUT_S,
        )
        for number in range(policy.services)
    ]


def _bind(transport: str, folder: Path, number: int) -> str:
    """Return where a service is to listen."""
    if transport == "tcp":
        return "tcp://127.0.0.1:*"
    return f"{transport}://{folder}/gpu-{number}.sock"
