"""`tsqp measure`: what a processor will say of an image."""

from __future__ import annotations

import json
from pathlib import Path

import click

from protocol.errors import SettingsError
from tsqp.cli.launching import launch_options, measured, read_launch
from tsqp.cli.settings import CONTEXT, PATH, config_option


@click.command(context_settings=CONTEXT)
@click.argument("image", type=click.Path(exists=True, file_okay=False, path_type=Path))
@launch_options
@click.option("--appraisal", type=PATH, metavar="FILE", help="Write the table [snp] for clients.")
@click.option(
    "--minimum-tcb",
    multiple=True,
    metavar="PRODUCT=N,N,N,N[,FMC]",
    help="For --appraisal: the oldest firmware (boot loader, TEE, SNP, microcode) of a product that"
    " may run it. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, allow_from_autoenv=False)
@config_option
def measure(
    *,
    image: Path,
    vcpus: int,
    vcpu_type: str,
    ovmf: Path | None,
    ovmf_sha256: str,
    host_data: str,
    appraisal: Path | None,
    minimum_tcb: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what SEV-SNP measures when QEMU starts IMAGE, a directory of tsqp image build.

    Another byte of kernel, initramfs or command line, another firmware, vCPU type or number of
    vCPUs gives another measurement. Registers of TDX are not computed.
    """
    from tsqp.deploy.launch import GUEST_POLICY, read_minimum, snp_table

    minimum = read_minimum(minimum_tcb)
    if (appraisal is not None) != bool(minimum):
        got = "--minimum-tcb alone" if minimum else "--appraisal alone"
        raise SettingsError("tsqp measure", got=got, expected="--appraisal and --minimum-tcb")
    launch = read_launch(vcpus, vcpu_type, ovmf, ovmf_sha256, host_data)
    measurement = measured(image, launch)
    if appraisal is not None:
        appraisal.write_text(snp_table(measurement, launch.host_data, minimum))
    facts = {
        "measurement": measurement.hex(),
        "policy": f"{GUEST_POLICY:#x}",
        "vcpus": vcpus,
        "vcpu_type": vcpu_type,
        "ovmf_sha256": ovmf_sha256,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        click.echo(f"{name:12} {value}")
