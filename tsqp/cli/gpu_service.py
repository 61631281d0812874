"""`gpu-service`: hold the weights and answer the TEE's requests."""

from __future__ import annotations

from typing import Literal, NoReturn

import click

from tsqp.cli.program import DEFAULT_ENDPOINT, model_directory, run, setup_logging
from tsqp.cli.settings import DTYPES, THREADS, FiniteFloatRange, config_option, version_option


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("model", envvar="GPU_SERVICE_MODEL")
@click.option(
    "--bind",
    default=DEFAULT_ENDPOINT,
    metavar="ENDPOINT",
    help="Where to listen: tcp://HOST:PORT (PORT * takes a free one) or ipc://PATH over ZeroMQ, or"
    " unix://PATH or vsock://CID:PORT, plain streams that cost less, on one machine.",
)
@click.option(
    "--device",
    default="cpu",
    help="cpu, cuda or cuda:N. For measurements, null answers zeros at once and model:PROFILE after"
    " as long as an accelerator would take: h100, h200, a100, l4, rtx-4090, or a TOML file that"
    " describes one. Both compute nothing.",
)
@click.option("--dtype", type=DTYPES, help="What to compute in; default: the model's own dtype.")
@click.option(
    "--arithmetic",
    type=click.Choice(["float", "int8", "both"]),
    default="both",
    help="Which linear weights to hold. Both take 1.5 times the memory of a bfloat16 model; float"
    " alone is enough for policies that compute in float.",
)
@click.option("--threads", type=THREADS, help="CPU threads for torch.")
@click.option(
    "--max-message-mib",
    type=click.IntRange(1, 4096),
    default=512,
    help="Larger messages are refused.",
)
@click.option(
    "--spin-us",
    type=FiniteFloatRange(0, 1_000_000),
    default=0.0,
    help="Look for the next message for so many microseconds before sleeping, as long as messages"
    " come that fast. Answers sooner and takes a core.",
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
    device: str,
    dtype: str | None,
    arithmetic: Literal["float", "int8", "both"],
    threads: int | None,
    max_message_mib: int,
    spin_us: float,
    log_level: str,
) -> None:
    """Hold the weights of MODEL and do the heavy operators for tee-runner.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". The process needs no
    secret and is trusted with none: what it gets to see is the runner's policy.
    """
    setup_logging(log_level)
    from gpu_side.service import ServiceSettings, serve

    serve(
        ServiceSettings(
            model=model_directory(model),
            bind=bind,
            device=device,
            dtype=dtype,
            arithmetic=arithmetic,
            threads=threads,
            max_message_bytes=max_message_mib * 1024 * 1024,
            spin_us=spin_us,
        )
    )


def main() -> NoReturn:
    """Entry point."""
    run(command, "gpu-service", "GPU_SERVICE")
