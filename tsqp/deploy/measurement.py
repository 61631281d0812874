"""What an AMD processor measures when QEMU starts an image, before the image runs."""

from __future__ import annotations

from pathlib import Path

from sevsnpmeasure.guest import calc_launch_digest
from sevsnpmeasure.ovmf import OVMF, SectionType
from sevsnpmeasure.sev_mode import SevMode
from sevsnpmeasure.vcpu_types import CPU_SIGS

from protocol.errors import SettingsError
from tsqp.deploy.launch import Launch
from tsqp.deploy.lock import COMMAND_LINE, INITRAMFS, KERNEL, require_image

# Of QEMU and KVM: SNP active, nothing else; Linux 6.12 on a host sets no more by itself.
_GUEST_FEATURES = 0x1


def measure(image: Path, launch: Launch) -> bytes:
    """Return the 48 bytes that a report of SEV-SNP has as its measurement.

    Firmware, hashes of kernel, initramfs and command line, and the start of each vCPU, as QEMU lays
    them out with kernel-hashes=on. Raises SettingsError for files that are not such ones.
    """
    require_image(image)
    expected = f"one of {', '.join(sorted(CPU_SIGS))}"
    SettingsError.unless(launch.vcpu_type in CPU_SIGS, "vcpu type", launch.vcpu_type, expected)
    _require_kernel_hashes(launch.firmware)
    try:
        line = (image / COMMAND_LINE).read_text(encoding="ascii")
    except UnicodeDecodeError:
        raise SettingsError(
            str(image / COMMAND_LINE), got="another content", expected="ASCII"
        ) from None
    return bytes(
        calc_launch_digest(
            SevMode.SEV_SNP,
            launch.vcpus,
            CPU_SIGS[launch.vcpu_type],
            str(launch.firmware),
            str(image / KERNEL),
            str(image / INITRAMFS),
            line,
            _GUEST_FEATURES,
        )
    )


def _require_kernel_hashes(firmware: Path) -> None:
    """Raise SettingsError for firmware that would start a kernel that nothing measured."""
    expected = "firmware that checks hashes of the kernel, such as Debian's OVMF.amdsev.fd"
    try:
        found = OVMF(str(firmware)).has_metadata_section(SectionType.SNP_KERNEL_HASHES)
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise SettingsError(str(firmware), got=got, expected=expected) from None
    except (RuntimeError, ValueError, KeyError, IndexError, AssertionError):
        raise SettingsError(str(firmware), got="another content", expected=expected) from None
    SettingsError.unless(found, str(firmware), "no place for them", expected)
