"""`gpu-service`: hold the weights and answer the TEE's requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click
from click.core import ParameterSource

from gpu_side.defaults import DRAIN_S, QUEUED_REQUESTS, QUEUED_TOTAL_REQUESTS, SESSION_TTL_S
from protocol.errors import SettingsError
from tsqp.cli.attesting import attest_options
from tsqp.cli.logs import configure
from tsqp.cli.options import use
from tsqp.cli.program import (
    DEFAULT_ENDPOINT,
    model_directory,
    run,
)
from tsqp.cli.settings import (
    CONTEXT,
    PATH,
    FiniteFloatRange,
    config_option,
    model_argument,
    version_option,
)

if TYPE_CHECKING:
    from tee_side.words import LayerRange

MIB = 1024 * 1024


def _layers(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> LayerRange | None:
    """Read layers as `tee-runner --gpu` reads them behind `=`."""
    from tee_side.words import LayerRange

    try:
        return None if text is None else LayerRange.parse(text)
    except ValueError as error:
        raise SettingsError("--layers", got=repr(text)[:60], expected=str(error)) from None


def _columns(_context: click.Context, _parameter: click.Parameter, text: str | None) -> None:
    """Refuse an option that was removed."""
    from tee_side.remote.services.plan import WITHOUT_COLUMNS

    if text is not None:
        raise SettingsError("--columns", got=repr(text)[:60], expected=WITHOUT_COLUMNS)


def _held(layers: LayerRange | None, model: Path) -> tuple[int, int] | None:
    """Return the first and last of these layers; None for all. Raises ModelError."""
    if layers is None:
        return None
    if layers.last is not None:
        return layers.first, layers.last
    from protocol.model.config import read_config

    # A first one beyond it is refused with the others that the model has not.
    return layers.first, max(layers.first, read_config(model).num_hidden_layers - 1)


def _bound_at(bind: str, http: str | None) -> str:
    """Return the endpoint to bind. Raises SettingsError where both are given."""
    if http is None:
        return bind
    source = click.get_current_context().get_parameter_source("bind")
    if source is not ParameterSource.DEFAULT:
        raise SettingsError("--http", got=f"--bind {bind} as well", expected="one of them")
    return f"http://{http}" if ":" in http else f"http://127.0.0.1:{http}"


@click.command("gpu-service", context_settings=CONTEXT)
@model_argument()
@click.option(
    "--bind",
    default=DEFAULT_ENDPOINT,
    metavar="ENDPOINT",
    help="Where to listen: tcp://HOST:PORT (PORT * takes a free one) or ipc://PATH over ZeroMQ, or"
    " unix://PATH or vsock://CID:PORT, plain streams that cost less, on one machine; or"
    " shm://PATH, shared memory, which costs least. ivshmem://MEMORY,PATH (or ,CID:PORT) is memory"
    " that one virtual machine has as a device, beside a stream on a Unix socket (or vsock).",
)
@click.option(
    "--http",
    metavar="[HOST:]PORT",
    help="Listen there for HTTP in place of --bind, for hosts that let nothing else through (extra"
    " http). On loopback unless HOST says otherwise. GET /health says whether it is ready.",
)
@click.option(
    "--http-tokens",
    type=PATH,
    metavar="FILE",
    help="SHA-256 of the bearer tokens to let in, one a line (tsqp api-key NAME --digest). SIGHUP"
    " reads it again.",
)
@click.option(
    "--http-cert",
    type=PATH,
    metavar="FILE",
    help="Our certificate (PEM), for https://. Without it, TLS is left to a proxy before us.",
)
@click.option("--http-key", type=PATH, metavar="FILE", help="Its key (PEM).")
@click.option(
    "--device",
    default="cpu",
    help="cpu, cuda or cuda:N. For measurements, null answers zeros at once and model:PROFILE after"
    " as long as an accelerator would take: h100, h200, a100, l4, rtx-4090, or a TOML file that"
    " describes one. Both compute nothing.",
)
@use("dtype")
@click.option(
    "--arithmetic",
    type=click.Choice(["float", "int8", "both"]),
    default="both",
    help="Which linear weights to hold. Both take 1.5 times the memory of a bfloat16 model; float"
    " alone is enough for policies that compute in float.",
)
@use("kernels", "threads", "max-message-mib", "spin-us")
@click.option(
    "--layers",
    metavar="LAYERS",
    callback=_layers,
    help="Hold the linear weights of these layers only (0-7, 8- or 3, counted from 0); the"
    " embedding goes with layer 0 and the LM head with the last. Default: all.",
)
@click.option("--columns", callback=_columns, hidden=True, expose_value=False)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Compute with N processes, each with 1/N of the output columns: on CPUs, or with --device"
    " cuda on a GPU each. They are started by this one, or all of them by torchrun.",
)
@click.option(
    "--sessions-mib",
    type=click.IntRange(1, 64 * 1024 * 1024),
    help="Memory for the KV caches that policies with segments leave here, of all clients. Default:"
    " half of what is free once the weights are there.",
)
@click.option(
    "--session-client-mib",
    type=click.IntRange(1, 64 * 1024 * 1024),
    help="The same, of one client; default: half of that, so that none evicts all others.",
)
@click.option(
    "--session-ttl-s",
    type=FiniteFloatRange(1, 31_536_000),
    default=SESSION_TTL_S,
    help="How long after its last use a KV cache is kept.",
)
@click.option(
    "--session-spill",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write KV caches that must make room to files without a name in this directory, encrypted"
    " with keys that live in memory alone. It protects the disk, not the client against this"
    " service, which sees every KV cache. Without it they are dropped, and sent again.",
)
@click.option(
    "--session-spill-mib",
    type=click.IntRange(1, 64 * 1024 * 1024),
    help="How much of them to keep on disk; default: as much as in memory.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve Prometheus metrics at http://HOST:PORT/metrics (PORT * takes a free one). On"
    " loopback unless HOST says otherwise; without a password.",
)
@click.option(
    "--max-queued-requests",
    type=click.IntRange(1, 65536),
    default=QUEUED_REQUESTS,
    help="How many requests of one client may wait; others are refused.",
)
@click.option(
    "--max-queued-mib",
    type=click.IntRange(1, 1024 * 1024),
    help="The same in MiB; default: as --max-message-mib.",
)
@click.option(
    "--max-queued-total-requests",
    type=click.IntRange(1, 2**20),
    default=QUEUED_TOTAL_REQUESTS,
    help="How many requests of all clients may wait.",
)
@click.option(
    "--max-queued-total-mib",
    type=click.IntRange(1, 1024 * 1024),
    help="The same in MiB; default: four times --max-queued-mib.",
)
@click.option(
    "--drain-timeout-s",
    type=FiniteFloatRange(0, 86_400),
    default=DRAIN_S,
    help="How long to go on, once told to stop, with requests that were taken before. A second"
    " signal ends it at once.",
)
@click.option(
    "--identity",
    type=PATH,
    metavar="FILE",
    help="Our secret key (tsqp keys new), by which clients know us: connections are encrypted, and"
    " only clients on the --allow list are let in.",
)
@click.option(
    "--allow",
    type=PATH,
    metavar="FILE",
    help="Public keys of the clients to let in, one a line. SIGHUP reads it again.",
)
@click.option(
    "--allow-anyone",
    is_flag=True,
    help="Let in every client that reaches the address, from other machines as well.",
)
@use("heartbeat-timeout-s")
@attest_options("runners")
@click.option(
    "--attest-gpus",
    is_flag=True,
    help="Give evidence of this machine's GPUs as well (NVIDIA, in confidential mode).",
)
@click.option(
    "--public-key",
    type=PATH,
    metavar="FILE",
    allow_from_autoenv=False,
    help="With --attest, where to write our public key: it is made at each start.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info"
)
@config_option
@version_option
def command(
    *,
    model: str,
    bind: str,
    http: str | None,
    http_tokens: Path | None,
    http_cert: Path | None,
    http_key: Path | None,
    device: str,
    dtype: str | None,
    arithmetic: Literal["float", "int8", "both"],
    kernels: str,
    threads: int | None,
    max_message_mib: int,
    spin_us: float,
    layers: LayerRange | None,
    tensor_parallel: int,
    sessions_mib: int | None,
    session_client_mib: int | None,
    session_ttl_s: float,
    session_spill: Path | None,
    session_spill_mib: int | None,
    metrics: str | None,
    max_queued_requests: int,
    max_queued_mib: int | None,
    max_queued_total_requests: int,
    max_queued_total_mib: int | None,
    drain_timeout_s: float,
    identity: Path | None,
    allow: Path | None,
    allow_anyone: bool,
    heartbeat_timeout_s: float,
    log_level: str,
    **evidence: Any,
) -> None:
    """Hold the weights of MODEL and do the heavy operators for tee-runner.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". The process needs no
    secret and is trusted with none: what it gets to see is the runner's policy.
    """
    configure(log_level)
    from gpu_side.service import ServiceSettings, serve
    from gpu_side.sessions import SessionSettings
    from tsqp.service_attestation import attested_service

    directory = model_directory(model)
    held = _held(layers, directory)
    computes = {
        "device": device,
        "dtype": dtype,
        "arithmetic": arithmetic,
        "layers": held,
        "tensor_parallel": tensor_parallel,
    }
    attested = attested_service(evidence, computes)
    serve(
        ServiceSettings(
            model=directory,
            bind=_bound_at(bind, http),
            http_tokens=http_tokens,
            http_cert=http_cert,
            http_key=http_key,
            device=device,
            dtype=dtype,
            arithmetic=arithmetic,
            kernels=kernels,
            threads=threads,
            max_message_bytes=max_message_mib * MIB,
            spin_us=spin_us,
            layers=held,
            tensor_parallel=tensor_parallel,
            sessions=SessionSettings(
                bytes=sessions_mib and sessions_mib * MIB,
                client_bytes=session_client_mib and session_client_mib * MIB,
                ttl_s=session_ttl_s,
                spill=session_spill,
                spill_bytes=session_spill_mib and session_spill_mib * MIB,
            ),
            metrics=metrics,
            max_queued_requests=max_queued_requests,
            max_queued_bytes=max_queued_mib and max_queued_mib * MIB,
            max_queued_total_requests=max_queued_total_requests,
            max_queued_total_bytes=max_queued_total_mib and max_queued_total_mib * MIB,
            drain_timeout_s=drain_timeout_s,
            identity=identity,
            secret=attested and attested.secret,
            allow=allow,
            allow_anyone=allow_anyone,
            heartbeat_timeout_s=heartbeat_timeout_s,
        ),
        attested and attested.attest,
    )


def main() -> NoReturn:
    """Entry point."""
    run(command, "gpu-service")
