"""`tsqp measure`: what a processor will say of an image."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import click

from protocol.errors import SettingsError
from tsqp.cli.settings import CONTEXT, PATH, config_option
from tsqp.extras import needing

# OVMF.amdsev.fd of Debian unstable.
TESTED_FIRMWARE = "3e4fd0b3fe3b2dbe481c3d9e99418a034174f26cbe1f55aa212b0f18c12d2d6f"
_EXTRA = "the extra deploy: pip install '.[deploy]'"


@click.command(context_settings=CONTEXT)
@click.argument("image", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--vcpus", type=click.IntRange(1, 512), required=True, help="As the host starts it.")
@click.option("--vcpu-type", default="EPYC-v4", show_default=True, help="QEMU's -cpu.")
@click.option(
    "--ovmf",
    type=PATH,
    required=True,
    metavar="FILE",
    help="Firmware with hashes of the kernel: OVMF.amdsev.fd of Debian's package ovmf-amdsev.",
)
@click.option(
    "--ovmf-sha256",
    default=TESTED_FIRMWARE,
    metavar="HEX",
    help="What the firmware must be; default: of ovmf-amdsev 2026.08+ds-2, which is tested.",
)
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
    ovmf: Path,
    ovmf_sha256: str,
    appraisal: Path | None,
    minimum_tcb: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say what SEV-SNP measures when QEMU starts IMAGE, a directory of tsqp image build.

    Another byte of kernel, initramfs or command line, another firmware, vCPU type or number of
    vCPUs gives another measurement. Registers of TDX are not computed.
    """
    with needing("tsqp measure", _EXTRA):
        from tsqp.deploy.measure import GUEST_POLICY, Launch
        from tsqp.deploy.measure import measure as run
    from tsqp.deploy.appraisal import read_minimum, snp_table

    minimum = read_minimum(minimum_tcb)
    if (appraisal is not None) != bool(minimum):
        got = "--minimum-tcb alone" if minimum else "--appraisal alone"
        raise SettingsError("tsqp measure", got=got, expected="--appraisal and --minimum-tcb")
    firmware = hashlib.sha256(ovmf.read_bytes()).hexdigest()
    if ovmf_sha256 != firmware:
        raise SettingsError(str(ovmf), got=f"SHA-256 {firmware}", expected=ovmf_sha256)
    measurement = run(image, Launch(vcpus, vcpu_type, ovmf))
    if appraisal is not None:
        appraisal.write_text(snp_table(measurement, minimum))
    facts = {
        "measurement": measurement.hex(),
        "policy": f"{GUEST_POLICY:#x}",
        "vcpus": vcpus,
        "vcpu_type": vcpu_type,
        "ovmf_sha256": firmware,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        click.echo(f"{name:12} {value}")
