"""`gpu-service`: hold the weights and answer the TEE's requests.

Here is what it is told, and what it says of itself (`--attest`).

The key of its links is made here, at each start, and is on no disk: one that its host had given
would let that host stand in between, with genuine evidence.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TypeAlias

import click
from annotated_types import Interval
from click.core import ParameterSource

from gpu_side.defaults import (
    ALL_CLIENTS,
    DRAIN_S,
    QUEUED_REQUESTS,
    QUEUED_TOTAL_REQUESTS,
    SESSION_TTL_S,
)
from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, config_option, takes, version_option
from tsqp.run.process import configure, run
from tsqp.run.server_settings import AttesterKind, EvidenceSettings
from tsqp.run.settings import (
    DEFAULT_ENDPOINT,
    DIRECTORY,
    MIB,
    ComputeSettings,
    Count,
    Kernels,
    again,
    local,
    local_file,
    model_directory,
    option_of,
    setting,
)

if TYPE_CHECKING:
    from gpu_side.handler import QueueLimits

log = logging.getLogger("gpu_service")

_Mebibytes: TypeAlias = Annotated[int, Interval(ge=1, le=64 * 1024 * 1024)]
_QueuedMebibytes: TypeAlias = Annotated[int, Interval(ge=1, le=1024 * 1024)]


@dataclass(frozen=True, kw_only=True)
class GpuServiceSettings(EvidenceSettings, ComputeSettings):
    """What `gpu-service` is told. Claimed is how it computes, and of which layers."""

    bind: str = local(
        DEFAULT_ENDPOINT,
        "Where to listen: tcp://HOST:PORT (PORT * takes a free one) or ipc://PATH over ZeroMQ, or"
        " unix://PATH or vsock://CID:PORT, plain streams that cost less, on one machine; or"
        " shm://PATH, shared memory, which costs least. ivshmem://MEMORY,PATH (or ,CID:PORT) is"
        " memory that one virtual machine has as a device, beside a stream on a Unix socket (or"
        " vsock).",
        metavar="ENDPOINT",
    )
    http: str | None = local(
        None,
        "Listen there for HTTP in place of --bind, for hosts that let nothing else through (extra"
        " http). On loopback unless HOST says otherwise. GET /health says whether it is ready.",
        metavar="[HOST:]PORT",
    )
    http_tokens: Path | None = local_file(
        "SHA-256 of the bearer tokens to let in, one a line (tsqp api-key NAME --digest). SIGHUP"
        " reads it again."
    )
    http_cert: Path | None = local_file(
        "Our certificate (PEM), for https://. Without it, TLS is left to a proxy before us."
    )
    http_key: Path | None = local_file("Its key (PEM).", secret=True)
    device: str = setting(
        "cpu",
        "cpu, cuda or cuda:N. For measurements, null answers zeros at once and model:PROFILE after"
        " as long as an accelerator would take: h100, h200, a100, l4, rtx-4090, or a TOML file that"
        " describes one. Both compute nothing.",
    )
    arithmetic: Literal["float", "int8", "both"] = setting(
        "both",
        "Which linear weights to hold. Both take 1.5 times the memory of a bfloat16 model; float"
        " alone is enough for policies that compute in float.",
    )
    kernels: Kernels = again(ComputeSettings, "kernels", claim=False)
    layers: str | None = setting(
        None,
        "Hold the linear weights of these layers only (0-7, 8- or 3, counted from 0); the"
        " embedding goes with layer 0 and the LM head with the last. Default: all.",
        metavar="LAYERS",
    )
    tensor_parallel: Count = setting(
        1,
        "Compute with N processes, each with 1/N of the output columns: on CPUs, or with --device"
        " cuda on a GPU each. They are started by this one, or all of them by torchrun.",
        metavar="N",
    )
    sessions_mib: _Mebibytes | None = local(
        None,
        "Memory for the KV caches that policies with segments leave here, of all clients. Default:"
        " half of what is free once the weights are there.",
    )
    session_client_mib: _Mebibytes | None = local(
        None, "The same, of one client; default: half of that, so that none evicts all others."
    )
    session_ttl_s: Annotated[float, Interval(ge=1, le=31_536_000)] = local(
        SESSION_TTL_S, "How long after its last use a KV cache is kept."
    )
    session_spill: Annotated[Path, DIRECTORY] | None = local(
        None,
        "Write KV caches that must make room to files without a name in this directory, encrypted"
        " with keys that live in memory alone. It protects the disk, not the client against this"
        " service, which sees every KV cache. Without it they are dropped, and sent again.",
        metavar="DIR",
    )
    session_spill_mib: _Mebibytes | None = local(
        None, "How much of them to keep on disk; default: as much as in memory."
    )
    metrics: str | None = local(
        None,
        "Serve Prometheus metrics at http://HOST:PORT/metrics (PORT * takes a free one). On"
        " loopback unless HOST says otherwise; without a password.",
        metavar="[HOST:]PORT",
    )
    max_queued_requests: Annotated[int, Interval(ge=1, le=65536)] = local(
        QUEUED_REQUESTS, "How many requests of one client may wait; others are refused."
    )
    max_queued_mib: _QueuedMebibytes | None = local(
        None, "The same in MiB; default: as --max-message-mib."
    )
    max_queued_total_requests: Annotated[int, Interval(ge=1, le=2**20)] = local(
        QUEUED_TOTAL_REQUESTS, "How many requests of all clients may wait."
    )
    max_queued_total_mib: _QueuedMebibytes | None = local(
        None, "The same in MiB; default: four times --max-queued-mib."
    )
    drain_timeout_s: Annotated[float, Interval(ge=0, le=86_400)] = local(
        DRAIN_S,
        "How long to go on, once told to stop, with requests that were taken before. A second"
        " signal ends it at once.",
    )
    identity: Path | None = local_file(
        "Our secret key (tsqp keys new), by which clients know us: connections are encrypted, and"
        " only clients on the --allow list are let in.",
        secret=True,
    )
    allow: Path | None = local_file(
        "Public keys of the clients to let in, one a line. SIGHUP reads it again."
    )
    allow_anyone: bool = local(
        False, "Let in every client that reaches the address, from other machines as well."
    )
    attest: AttesterKind | None = again(
        EvidenceSettings,
        "attest",
        help="Prove to runners what runs here, by evidence of this hardware.",
    )
    attest_gpus: bool = local(
        False, "Give evidence of this machine's GPUs as well (NVIDIA, in confidential mode)."
    )
    public_key: Path | None = local_file(
        "With --attest, where to write our public key: it is made at each start.", variable=False
    )
    log_level: Literal["debug", "info", "warning", "error"] = local("info")


def held_layers(settings: GpuServiceSettings) -> tuple[int, int] | None:
    """Read layers as `tee-runner --gpu` reads them behind `=`; None: all.

    Raises SettingsError, ModelError.
    """
    from tee_side.words import LayerRange

    if settings.layers is None:
        return None
    try:
        layers = LayerRange.parse(settings.layers)
    except ValueError as error:
        raise SettingsError(
            "--layers", got=repr(settings.layers)[:60], expected=str(error)
        ) from None
    if layers.last is not None:
        return layers.first, layers.last
    from protocol.model.config import read_config

    # A first one beyond it is refused with the others that the model has not.
    last = read_config(model_directory(settings.model)).num_hidden_layers - 1
    return layers.first, max(layers.first, last)


def attested_service(
    settings: GpuServiceSettings, held: tuple[int, int] | None
) -> tuple[bytes, Callable[[bytes, str], bytes]] | None:
    """Make a service's key, and what gives evidence of it; None for one without `--attest`.

    The key is the secret one of its links. Evidence is given for a nonce and the digest of the
    service's weights. `held`: its layers, which are claimed. Evidence is asked for once: raises
    EvidenceError, SettingsError, and KeyFileError where the public key cannot be written.
    """
    with_gpus = settings.attest_gpus
    if settings.attest is None:
        for name in ("attest_certificate", "attest_collateral", "attest_gpus", "public_key"):
            SettingsError.unless(
                not getattr(settings, name),
                option_of(name),
                "it alone",
                "--attest as well, or nothing",
            )
        return None
    SettingsError.unless(
        with_gpus or not settings.device.startswith("cuda"),
        "--attest",
        f"--device {settings.device}",
        "--attest-gpus: what is sent goes to a GPU, which has to prove itself as well",
    )
    import zmq
    from zmq.utils import z85

    from protocol.curve import require_curve
    from tee_side.attest.statement import NONE, Claims, Statement, gpu_nonce, report_data
    from tsqp.key_files import replace_public_key
    from tsqp.run.attestation import ask_gpus, attester_of, read_certificates, settings_digest

    require_curve()
    public, secret = zmq.curve_keypair()
    # Versions with parts of columns claimed `columns`: the digest of what a service is told stays.
    digest = settings_digest(settings, layers=held, columns=(0, 1))
    attester = attester_of(settings)

    def attest(nonce: bytes, weights: str) -> bytes:
        leaves = {name: one[0] for name, one in read_certificates().items()} if with_gpus else {}
        claims = Claims(
            purpose="service",
            nonce=nonce,
            time=round(time.time()),
            tls_key=NONE,
            hpke_suite="x25519",
            hpke_key=b"",
            receipt_key=None,
            model=bytes.fromhex(weights),
            policy=NONE,
            settings=digest,
            curve_keys={"service": z85.decode(public)},
            plugins={},
            gpus={name: hashlib.sha256(leaf).digest() for name, leaf in leaves.items()},
            attested_services="none",
            version=version("tsqp"),
        ).encode()
        found = attester.attest(report_data(claims))
        if with_gpus:
            found = found.model_copy(update={"gpus": ask_gpus(gpu_nonce(claims))})
        fields = {
            "kind": found.kind,
            "gpus": len(found.gpus),
            "model": weights,
            "settings": digest.hex(),
        }
        log.info("evidence", extra={"fields": fields})
        return Statement(claims=claims, evidence=found.encode()).encode()

    attester.attest(report_data(b""))
    if with_gpus:
        ask_gpus(bytes(32))
    if settings.public_key is not None:
        replace_public_key(settings.public_key, public)
    return secret, attest


def _refuse(_context: click.Context, _parameter: click.Parameter, text: str | None) -> None:
    """Refuse the option of parts of the columns, which was removed."""
    if text is not None:
        from tee_side.remote.services.plan import WITHOUT_COLUMNS

        raise SettingsError("--columns", got=repr(text)[:60], expected=WITHOUT_COLUMNS)


without_columns = click.option("--columns", callback=_refuse, hidden=True, expose_value=False)


@click.command("gpu-service", context_settings=CONTEXT)
@takes(GpuServiceSettings)
@without_columns
@config_option
@version_option
@click.pass_context
def command(context: click.Context, /, *, settings: GpuServiceSettings) -> None:
    """Hold the weights of MODEL and do the heavy operators for tee-runner.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". The process needs no
    secret and is trusted with none: what it gets to see is the runner's policy.
    """
    from gpu_side.ranks.worker import OPTION, RankJob
    from gpu_side.service import ServiceSettings, serve
    from gpu_side.sessions import SessionSettings
    from gpu_side.weights import BOTH, check_columns
    from protocol.model.config import read_config

    def size(mebibytes: int | None) -> int | None:
        return None if mebibytes is None else mebibytes * MIB

    configure(settings.log_level)
    SettingsError.unless(
        settings.http is None or context.get_parameter_source("bind") is ParameterSource.DEFAULT,
        "--http",
        f"--bind {settings.bind} as well",
        "one of them",
    )
    model, ranks = model_directory(settings.model), settings.tensor_parallel
    if ranks > 1:
        check_columns(read_config(model), (0, ranks), OPTION)
    held = held_layers(settings)
    secret, attest = attested_service(settings, held) or (None, None)
    at = settings.http
    http = None if at is None else f"http://{at}" if ":" in at else f"http://127.0.0.1:{at}"
    serve(
        ServiceSettings(
            job=RankJob(
                model=model,
                place=(0, ranks),
                device=settings.device,
                dtype=settings.dtype,
                arithmetic=BOTH if settings.arithmetic == "both" else (settings.arithmetic,),
                kernels=settings.kernels,
                threads=settings.threads,
                spin_us=settings.spin_us,
                layers=held,
                max_message_bytes=settings.max_message_mib * MIB,
            ),
            bind=http or settings.bind,
            http_tokens=settings.http_tokens,
            http_cert=settings.http_cert,
            http_key=settings.http_key,
            sessions=SessionSettings(
                bytes=size(settings.sessions_mib),
                client_bytes=size(settings.session_client_mib),
                ttl_s=settings.session_ttl_s,
                spill=settings.session_spill,
                spill_bytes=size(settings.session_spill_mib),
            ),
            metrics=settings.metrics,
            queue=queue_limits(settings),
            drain_timeout_s=settings.drain_timeout_s,
            identity=settings.identity,
            secret=secret,
            allow=settings.allow,
            allow_anyone=settings.allow_anyone,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        ),
        attest,
    )


def queue_limits(settings: GpuServiceSettings) -> QueueLimits:
    """Return how much may wait: by default of one client as much as a message may have."""
    from gpu_side.handler import QueueLimits

    queued = settings.max_queued_mib or settings.max_message_mib
    return QueueLimits(
        settings.max_queued_requests,
        queued * MIB,
        settings.max_queued_total_requests,
        (settings.max_queued_total_mib or ALL_CLIENTS * queued) * MIB,
    )


def main() -> NoReturn:
    """Entry point."""
    run(command, "gpu-service")
