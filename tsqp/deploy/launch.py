"""How a host starts an image: the measured command line, SEV-SNP, QEMU's and libvirt's words.

The command line says what an image runs, and for which model.

Sources: QEMU's documentation of `sev-snp-guest`, of confidential guests and of ivshmem; libvirt,
"Domain XML format" (launchSecurity, memoryBacking, vsock, shmem), of 10.10 or later, which knows
EPYC-v4 from there on.
"""

import base64
import hashlib
import json
import re
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from protocol.errors import SettingsError
from tee_side.attest.appraisal import MinimumTcb
from tee_side.attest.guests import Product
from tsqp.deploy.image import COMMAND_LINE, FACTS, INITRAMFS, KERNEL, Launch, require_image
from tsqp.processes import END_TIMEOUT_S, child, ending_with_us

# Of x86's kernel, with the zero that ends it.
MAX_COMMAND_LINE = 2047

# Only the measured command line sets up the guest: it takes no credentials and no variables of the
# host's firmware.
_ALWAYS = (
    "console=ttyS0",
    "efi=noruntime",
    "panic=-1",
    "loglevel=4",
    "random.trust_bootloader=off",
    "systemd.import_credentials=no",
    "systemd.firstboot=off",
    "systemd.show_status=error",
)

# Before the digest of the manifest of what is at /model.
MANIFEST = "tsqp.manifest="

SELF_TEST = (*_ALWAYS, "tsqp.self-test")


def command_line(arguments: Sequence[str], manifest_digest: str | None) -> str:
    """Return the line of an image that starts tee-runner, or tsqp doctor, with these words.

    `manifest_digest`: of the model on the disk that the guest sees at /model. Raises SettingsError.
    """
    words = [*_ALWAYS, *(f"tsqp.arg={quote(word, safe='/:,=@+')}" for word in arguments)]
    if manifest_digest is not None:
        SettingsError.unless(
            re.fullmatch("[0-9a-f]{64}", manifest_digest) is not None,
            "--manifest-digest",
            "another text",
            "64 hexadecimal digits in lower case",
        )
        words.append(f"{MANIFEST}{manifest_digest}")
    line = " ".join(words)
    SettingsError.unless(
        len(line) <= MAX_COMMAND_LINE,
        "command line",
        f"{len(line)} characters",
        f"{MAX_COMMAND_LINE} at most",
    )
    return line


def configure(image: Path, arguments: Sequence[str], manifest_digest: str | None) -> str:
    """Write what an image runs, and return its command line; nothing else of it changes.

    Raises SettingsError for what is no image with a runner.
    """
    require_image(image)
    facts = json.loads((image / FACTS).read_bytes())
    SettingsError.unless(
        facts["runner_wheel"] is not None, str(image), "a small image", "one with a runner"
    )
    line = command_line(arguments, manifest_digest)
    (image / COMMAND_LINE).write_text(line)
    facts["files"][COMMAND_LINE] = hashlib.sha256(line.encode()).hexdigest()
    (image / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    return line


# A guest's policy: bit 17 is always one, 16 lets it run with SMT. No debugging, no migration.
GUEST_POLICY = 1 << 17 | 1 << 16

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
class GuestMachine:
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
        SettingsError.unless(
            self.memory_mib >= least,
            "--memory-mib",
            f"{self.memory_mib} MiB",
            f"{least} MiB at least, for this image",
        )
        line = (self.image / COMMAND_LINE).read_text()
        pinned = any(word.startswith(MANIFEST) for word in line.split())
        SettingsError.unless(
            pinned == (self.model is not None),
            "--disk",
            "a digest of a manifest and no disk" if pinned else "a disk and no such digest",
            "both: tsqp image configure --manifest-digest",
        )
        SettingsError.unless(
            self.launch is None or self.vsock is None,
            "--vsock",
            "SEV-SNP",
            "--kernel-vsock, or --no-tee",
        )
        if self.publish is not None and _IPV4.fullmatch(self.publish[0]) is None:
            raise SettingsError("--publish", got=self.publish[0], expected="an IPv4 address")
        for path in (self.model, self.shared_memory):
            # QEMU reads a comma as the end of a word.
            SettingsError.unless(
                path is None or (path.is_file() and "," not in str(path)),
                str(path),
                "no such file",
                "a file, no comma",
            )
        if self.shared_memory is not None:
            size = self.shared_memory.stat().st_size
            SettingsError.unless(
                size >= _MIB and not size & (size - 1),
                str(self.shared_memory),
                f"{size} bytes",
                "a power of two, 1 MiB at least",
            )

    def qemu(self, vsock_device: Path | None = None) -> list[str]:
        """Return the command that starts it. `vsock_device`: the socket of that program."""
        memory = f"memory-backend-memfd,id=ram,size={self.memory_mib}M,share=on"
        return [
            *(QEMU, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-serial", "stdio", "-smp", str(self.vcpus), "-m", f"{self.memory_mib}M"),
            *("-object", memory, *self._processor()),
            *("-kernel", str(self.image / KERNEL), "-initrd", str(self.image / INITRAMFS)),
            *("-append", (self.image / COMMAND_LINE).read_text()),
            *chain.from_iterable(self._devices(vsock_device)),
        ]

    def _processor(self) -> list[str]:
        machine, launch = "q35,memory-backend=ram", self.launch
        if launch is None:
            said = "" if self.measurement is None else self.measurement.hex()
            value = f"name=opt/tsqp/measurement,string={said}"
            # One thread emulates all processors: of several, one runs old code that another's
            # kernel has just patched, and that kernel ends (Oops: int3). vmgenid says where a copy
            # of this machine goes on; of encrypted memory there is none.
            words = ["-accel", "tcg,thread=single", "-M", machine, "-cpu", "max"]
            words += ["-device", "vmgenid,guid=auto"]
            return [*words, *(("-fw_cfg", value) if said else ())]
        guest = (
            f"sev-snp-guest,id=snp,policy={GUEST_POLICY:#x},kernel-hashes=on"
            f",cbitpos={_C_BIT},reduced-phys-bits=1"
            f",host-data={base64.b64encode(launch.host_data).decode()}"
        )
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
        return [
            *(VSOCK_DEVICE, "--guest-cid", str(self.cid), "--socket", str(vsock_device)),
            *("--uds-path", str(self.vsock)),
        ]

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
        SettingsError.unless(
            shutil.which(QEMU) is not None, QEMU, "no such program", "it installed"
        )
        with nullcontext() if self.vsock is None else self._vsock_device() as device:
            return subprocess.call([*ending_with_us(), *self.qemu(device)], stdout=output)

    @contextmanager
    def _vsock_device(self) -> Iterator[Path]:
        with TemporaryDirectory(prefix="tsqp-vsock-") as name:
            device = Path(name, "device")
            with child(self.vsock_command(device), stdout=subprocess.DEVNULL) as (process, errors):
                began = time.monotonic()
                while not (device.exists() and stat.S_ISSOCK(device.stat().st_mode)):
                    if process.poll() is not None or time.monotonic() - began > END_TIMEOUT_S:
                        raise SettingsError(
                            VSOCK_DEVICE,
                            got=errors.last or "no socket",
                            expected=f"a socket (Debian's package {VSOCK_DEVICE})",
                        )
                    time.sleep(0.01)
                yield device


def least_memory_mib(image: Path) -> int:
    """Return how much memory a guest needs for an image alone: its files are in memory."""
    unpacked = json.loads((image / FACTS).read_bytes())["unpacked_bytes"]
    # Linux gives the files half of the memory at most, and has both copies while it unpacks.
    packed = (image / INITRAMFS).stat().st_size
    return int((2 * unpacked + packed) // _MIB + _LEAST_MIB)


def domain(machine: GuestMachine, name: str) -> str:
    """Return the XML of a domain. Raises SettingsError for what is emulated, or has no word there.

    Source: libvirt, "Domain XML format" (launchSecurity, memoryBacking, vsock, shmem).
    """
    launch, others = machine.launch, (machine.vsock, machine.shared_memory, machine.publish)
    if launch is None or any(others) or machine.reach_network:
        raise SettingsError(
            "--show libvirt",
            got="another machine",
            expected="SEV-SNP, with --kernel-vsock; a network is the domain's own",
        )
    disk = "" if machine.model is None else _DISK.format(quoteattr(str(machine.model.resolve())))
    vsock = _VSOCK.format(machine.cid) if machine.kernel_vsock else ""
    kernel, initrd = (escape(str((machine.image / f).resolve())) for f in (KERNEL, INITRAMFS))
    return _DOMAIN.format(
        name=escape(name),
        memory_mib=machine.memory_mib,
        vcpus=machine.vcpus,
        firmware=escape(str(launch.firmware.resolve())),
        kernel=kernel,
        initrd=initrd,
        line=escape((machine.image / COMMAND_LINE).read_text()),
        model=escape(launch.vcpu_type),
        devices=f"{disk}{vsock}",
        policy=f"{GUEST_POLICY:#010x}",
        host_data=base64.b64encode(launch.host_data).decode(),
    )


_DISK = """\
    <disk type="file" device="disk">
      <driver name="qemu" type="raw" iommu="on" />
      <source file={} />
      <target dev="vda" bus="virtio" />
      <serial>model</serial>
      <readonly />
    </disk>
"""
_VSOCK = """\
    <vsock model="virtio">
      <cid auto="no" address="{}" />
      <driver iommu="on" />
    </vsock>
"""
_DOMAIN = """\
<domain type="kvm">
  <name>{name}</name>
  <memory unit="MiB">{memory_mib}</memory>
  <memoryBacking>
    <source type="memfd" />
    <access mode="shared" />
  </memoryBacking>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch="x86_64" machine="q35">hvm</type>
    <loader type="rom">{firmware}</loader>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{line}</cmdline>
  </os>
  <features>
    <acpi />
    <vmport state="off" />
  </features>
  <cpu mode="custom" match="exact">
    <model>{model}</model>
  </cpu>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
{devices}    <serial type="pty" />
    <memballoon model="none" />
  </devices>
  <launchSecurity type="sev-snp" kernelHashes="yes">
    <policy>{policy}</policy>
    <hostData>{host_data}</hostData>
  </launchSecurity>
</domain>
"""


_PARTS = ("bootloader", "tee", "snp", "microcode", "fmc")


def read_minimum(texts: Sequence[str]) -> dict[str, MinimumTcb]:
    """Read PRODUCT=BOOTLOADER,TEE,SNP,MICROCODE[,FMC], each product once. Raises SettingsError."""
    found: dict[str, MinimumTcb] = {}
    for text in texts:
        product, _, numbers = text.partition("=")
        parts = numbers.split(",")
        wanted = len(_PARTS) if product == "turin" else len(_PARTS) - 1
        well_formed = len(parts) == wanted and all(p.isascii() and p.isdigit() for p in parts)
        SettingsError.unless(
            product not in found and product in get_args(Product) and well_formed,
            "--minimum-tcb",
            text,
            "each product once, such as genoa=10,0,23,84 or turin=1,1,4,81,1",
        )
        found[product] = MinimumTcb.model_validate(dict(zip(_PARTS, map(int, parts), strict=False)))
    return found


def snp_table(measurement: bytes, host_data: bytes, minimum: Mapping[str, MinimumTcb]) -> str:
    """Return the table, as TOML: this measurement and host data, firmware from `minimum` on."""
    products = ", ".join(f'"{product}"' for product in minimum)
    lines = [
        "[snp]",
        f'measurements = ["{measurement.hex()}"]',
        f'host_data = ["{host_data.hex()}"]',
        f"products = [{products}]",
        "[snp.minimum_tcb]",
    ]
    for product, least in minimum.items():
        said = least.model_dump(exclude_none=True)
        values = ", ".join(f"{name} = {value}" for name, value in said.items())
        lines.append(f"{product} = {{ {values} }}")
    return "\n".join(lines) + "\n"
