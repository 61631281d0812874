"""What commands that start or measure an image share: how the host starts it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError, describe
from tsqp.cli.settings import PATH
from tsqp.extras import needing

if TYPE_CHECKING:
    from tsqp.deploy.launch import Launch

# OVMF.amdsev.fd of Debian unstable.
TESTED_FIRMWARE = "3e4fd0b3fe3b2dbe481c3d9e99418a034174f26cbe1f55aa212b0f18c12d2d6f"
_EXTRA = "the extra deploy: pip install '.[deploy]'"
_OPTIONS = (
    click.option("--vcpus", type=click.IntRange(1, 512), required=True, help="As the host starts."),
    click.option("--vcpu-type", default="EPYC-v4", show_default=True, help="QEMU's -cpu."),
    click.option(
        "--ovmf",
        type=PATH,
        metavar="FILE",
        help="Firmware with hashes of the kernel: OVMF.amdsev.fd of Debian's package ovmf-amdsev.",
    ),
    click.option(
        "--ovmf-sha256",
        default=TESTED_FIRMWARE,
        metavar="HEX",
        help="What the firmware must be; default: of ovmf-amdsev 2026.08+ds-2, which is tested.",
    ),
    click.option(
        "--host-data",
        default="0" * 64,
        metavar="HEX",
        help="32 bytes that the report says and nothing measures.",
    ),
)


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `read_launch`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_launch(
    vcpus: int, vcpu_type: str, ovmf: Path | None, ovmf_sha256: str, host_data: str
) -> Launch:
    """Return how the host starts an image. Raises SettingsError, for other firmware, too."""
    from tsqp.deploy.launch import Launch

    if ovmf is None:
        raise SettingsError("--ovmf", got="none", expected="OVMF.amdsev.fd, or --no-tee to run")
    if re.fullmatch("[0-9a-f]{64}", host_data) is None:
        expected = "64 hexadecimal digits in lower case"
        raise SettingsError("--host-data", got=describe(host_data), expected=expected)
    try:
        firmware = hashlib.sha256(ovmf.read_bytes()).hexdigest()
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise SettingsError(str(ovmf), got=got, expected="firmware") from None
    if ovmf_sha256 != firmware:
        raise SettingsError(str(ovmf), got=f"SHA-256 {firmware}", expected=ovmf_sha256)
    return Launch(vcpus, vcpu_type, ovmf, bytes.fromhex(host_data))


def measured(image: Path, launch: Launch) -> bytes:
    """Return what SEV-SNP measures, 48 bytes. Raises SettingsError, also without the library."""
    with needing("tsqp measure", _EXTRA):
        from tsqp.deploy.measurement import measure
    return measure(image, launch)
