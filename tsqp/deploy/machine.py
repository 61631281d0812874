"""The virtual machine that starts an image: QEMU's words for it, with SEV-SNP or emulated.

Sources: QEMU's documentation of `sev-snp-guest`, of confidential guests and of ivshmem.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from protocol.errors import SettingsError
from tsqp.deploy.command_line import MANIFEST
from tsqp.deploy.image import COMMAND_LINE, FACTS, INITRAMFS, KERNEL, require_image
from tsqp.deploy.launch import GUEST_POLICY, Launch
from tsqp.processes import END_TIMEOUT_S, child, ending_with_us

QEMU = "qemu-system-x86_64"
VSOCK_DEVICE = "vhost-device-vsock"
# Where guests have the memory that they share with their host: /sys/bus/pci/devices/0000:00:10.0.
SHARED_MEMORY_SLOT = "0x10"
# Of tee-runner serve in the guest.
_GUEST_PORT = 8000
# The bit of an address that says "encrypted", on every EPYC with SEV-SNP (CPUID 0x8000001f).
_C_BIT = 51
_MIB = 1024 * 1024
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")
# Beside the image: kernel and systemd, and a runner that does nothing yet.
_LEAST_MIB = 768
# What an encrypted guest shares with the host's devices it says page by page.
_SHARED_PAGES = ",disable-legacy=on,iommu_platform=on"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How a host starts an image.

    `launch`: with SEV-SNP, as measured; None: emulated, by any processor. `measurement`: what an
    emulated guest repeats, 48 bytes. `model`: the weights' disk. `publish`: HOST:PORT at which the
    guest's port is reached, by IPv4; `reach_network`: whether the guest reaches its host and what
    that reaches. `vsock`: the path for connections, by a program of its own, which encrypted memory
    is not shown to work with; `kernel_vsock`: by the host's kernel. `cid`: the guest's address
    there. `shared_memory`: a file.
    """

    image: Path
    launch: Launch | None
    vcpus: int
    memory_mib: int
    measurement: bytes | None = None
    model: Path | None = None
    publish: tuple[str, int] | None = None
    reach_network: bool = False
    vsock: Path | None = None
    kernel_vsock: bool = False
    cid: int = 3
    shared_memory: Path | None = None

    def __post_init__(self) -> None:
        require_image(self.image)
        least = least_memory_mib(self.image)
        if self.memory_mib < least:
            got, expected = f"{self.memory_mib} MiB", f"{least} MiB at least, for this image"
            raise SettingsError("--memory-mib", got=got, expected=expected)
        line = (self.image / COMMAND_LINE).read_text()
        pinned = any(word.startswith(MANIFEST) for word in line.split())
        if pinned != (self.model is not None):
            got = "a digest of a manifest and no disk" if pinned else "a disk and no such digest"
            expected = "both: tsqp image configure --manifest-digest"
            raise SettingsError("--disk", got=got, expected=expected)
        if self.launch is not None and self.vsock is not None:
            raise SettingsError("--vsock", got="SEV-SNP", expected="--kernel-vsock, or --no-tee")
        if self.publish is not None and _IPV4.fullmatch(self.publish[0]) is None:
            raise SettingsError("--publish", got=self.publish[0], expected="an IPv4 address")
        for path in (self.model, self.shared_memory):
            # QEMU reads a comma as the end of a word.
            if path is not None and (not path.is_file() or "," in str(path)):
                raise SettingsError(str(path), got="no such file", expected="a file, no comma")
        if self.shared_memory is not None:
            size = self.shared_memory.stat().st_size
            if size < _MIB or size & (size - 1):
                got, expected = f"{size} bytes", "a power of two, 1 MiB at least"
                raise SettingsError(str(self.shared_memory), got=got, expected=expected)

    def qemu(self, vsock_device: Path | None = None) -> list[str]:
        """Return the command that starts it. `vsock_device`: the socket of that program."""
        words = [QEMU, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
        words += ["-serial", "stdio", "-smp", str(self.vcpus), "-m", f"{self.memory_mib}M"]
        memory = f"memory-backend-memfd,id=ram,size={self.memory_mib}M,share=on"
        words += ["-object", memory, *self._processor()]
        for name, file in (("kernel", KERNEL), ("initrd", INITRAMFS)):
            words += [f"-{name}", str(self.image / file)]
        words += ["-append", (self.image / COMMAND_LINE).read_text()]
        for device in self._devices(vsock_device):
            words += device
        return words

    def _processor(self) -> list[str]:
        machine = "q35,memory-backend=ram"
        if self.launch is None:
            # It says where a copy of this machine goes on; of encrypted memory there is none.
            words = ["-M", machine, "-cpu", "max", "-device", "vmgenid,guid=auto"]
            if self.measurement is not None:
                value = f"name=opt/tsqp/measurement,string={self.measurement.hex()}"
                words += ["-fw_cfg", value]
            return words
        launch = self.launch
        guest = f"sev-snp-guest,id=snp,policy={GUEST_POLICY:#x},kernel-hashes=on"
        guest += f",cbitpos={_C_BIT},reduced-phys-bits=1"
        guest += f",host-data={base64.b64encode(launch.host_data).decode()}"
        machine += ",confidential-guest-support=snp,vmport=off"
        words = ["-accel", "kvm", "-M", machine, "-cpu", launch.vcpu_type, "-object", guest]
        return [*words, "-bios", str(launch.firmware)]

    def _devices(self, vsock_device: Path | None) -> Iterator[list[str]]:
        pages = "" if self.launch is None else _SHARED_PAGES
        if self.model is not None:
            disk = f"if=none,id=model,format=raw,readonly=on,file={self.model}"
            device = f"virtio-blk-pci,drive=model,serial=model{pages}"
            yield ["-drive", disk, "-device", device]
        if self.publish is not None or self.reach_network:
            net = f"user,id=net,restrict={'off' if self.reach_network else 'on'}"
            if self.publish is not None:
                host, port = self.publish
                net += f",hostfwd=tcp:{host}:{port}-:{_GUEST_PORT}"
            yield ["-netdev", net, "-device", f"virtio-net-pci,netdev=net,romfile={pages}"]
        if self.kernel_vsock:
            yield ["-device", f"vhost-vsock-pci,guest-cid={self.cid}{pages}"]
        if vsock_device is not None:
            chardev = f"socket,id=vsock,path={vsock_device}"
            yield ["-chardev", chardev, "-device", f"vhost-user-vsock-pci,chardev=vsock{pages}"]
        if self.shared_memory is not None:
            size = self.shared_memory.stat().st_size
            memory = f"memory-backend-file,id=shared,share=on,size={size}"
            device = f"ivshmem-plain,memdev=shared,addr={SHARED_MEMORY_SLOT}"
            yield ["-object", f"{memory},mem-path={self.shared_memory}", "-device", device]

    def vsock_command(self, vsock_device: Path) -> list[str]:
        """Return the command of the program that is the host's end of vsock."""
        words = [VSOCK_DEVICE, "--guest-cid", str(self.cid), "--socket", str(vsock_device)]
        return [*words, "--uds-path", str(self.vsock)]

    def __str__(self) -> str:
        """Return the commands as a shell takes them."""
        if self.vsock is None:
            return shlex.join(self.qemu())
        device = self.vsock.with_name(f"{self.vsock.name}.device")
        return f"{shlex.join(self.vsock_command(device))} &\n{shlex.join(self.qemu(device))}"

    def run(self, output: int | None = None) -> int:
        """Start it, and return QEMU's exit status when it ends. Raises SettingsError.

        `output`: the file of its console, where that is not this process's.
        """
        with ExitStack() as stack:
            if shutil.which(QEMU) is None:
                raise SettingsError(QEMU, got="no such program", expected="it installed")
            device = stack.enter_context(self._vsock_device()) if self.vsock is not None else None
            return subprocess.call([*ending_with_us(), *self.qemu(device)], stdout=output)

    @contextmanager
    def _vsock_device(self) -> Iterator[Path]:
        with TemporaryDirectory(prefix="tsqp-vsock-") as name:
            device = Path(name, "device")
            with child(self.vsock_command(device), stdout=subprocess.DEVNULL) as (process, errors):
                began = time.monotonic()
                while not (device.exists() and stat.S_ISSOCK(device.stat().st_mode)):
                    if process.poll() is not None or time.monotonic() - began > END_TIMEOUT_S:
                        got = errors.last or "no socket"
                        expected = f"a socket (Debian's package {VSOCK_DEVICE})"
                        raise SettingsError(VSOCK_DEVICE, got=got, expected=expected)
                    time.sleep(0.01)
                yield device


def least_memory_mib(image: Path) -> int:
    """Return how much memory a guest needs for an image alone: its files are in memory."""
    unpacked = json.loads((image / FACTS).read_bytes())["unpacked_bytes"]
    # Linux gives the files half of the memory at most, and has both copies while it unpacks.
    packed = (image / INITRAMFS).stat().st_size
    return int((2 * unpacked + packed) // _MIB + _LEAST_MIB)
