"""The same machine as a domain of libvirt's, 10.10 or later: it knows EPYC-v4 from there on."""

from __future__ import annotations

import base64
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from protocol.errors import SettingsError
from tsqp.deploy.image import COMMAND_LINE, INITRAMFS, KERNEL
from tsqp.deploy.launch import GUEST_POLICY
from tsqp.deploy.machine import Machine


def domain(machine: Machine, name: str) -> str:
    """Return the XML of a domain. Raises SettingsError for what is emulated, or has no word there.

    Source: libvirt, "Domain XML format" (launchSecurity, memoryBacking, vsock, shmem).
    """
    launch, others = machine.launch, (machine.vsock, machine.shared_memory, machine.publish)
    if launch is None or any(others) or machine.reach_network:
        expected = "SEV-SNP, with --kernel-vsock; a network is the domain's own"
        raise SettingsError("--show libvirt", got="another machine", expected=expected)
    root = Element("domain", type="kvm")
    _add(root, "name", name)
    _add(root, "memory", str(machine.memory_mib), unit="MiB")
    backing = _add(root, "memoryBacking")
    _add(backing, "source", type="memfd")
    _add(backing, "access", mode="shared")
    _add(root, "vcpu", str(machine.vcpus))
    system = _add(root, "os")
    _add(system, "type", "hvm", arch="x86_64", machine="q35")
    _add(system, "loader", str(launch.firmware.resolve()), type="rom")
    for word, file in (("kernel", KERNEL), ("initrd", INITRAMFS)):
        _add(system, word, str((machine.image / file).resolve()))
    _add(system, "cmdline", (machine.image / COMMAND_LINE).read_text())
    features = _add(root, "features")
    _add(features, "acpi")
    _add(features, "vmport", state="off")
    _add(_add(root, "cpu", mode="custom", match="exact"), "model", launch.vcpu_type)
    for event in ("poweroff", "reboot", "crash"):
        _add(root, f"on_{event}", "destroy")
    devices = _add(root, "devices")
    if machine.model is not None:
        disk = _add(devices, "disk", type="file", device="disk")
        _add(disk, "driver", name="qemu", type="raw", iommu="on")
        _add(disk, "source", file=str(machine.model.resolve()))
        _add(disk, "target", dev="vda", bus="virtio")
        _add(disk, "serial", "model")
        _add(disk, "readonly")
    if machine.kernel_vsock:
        vsock = _add(devices, "vsock", model="virtio")
        _add(vsock, "cid", auto="no", address=str(machine.cid))
        _add(vsock, "driver", iommu="on")
    _add(devices, "serial", type="pty")
    _add(devices, "memballoon", model="none")
    security = _add(root, "launchSecurity", type="sev-snp", kernelHashes="yes")
    _add(security, "policy", f"{GUEST_POLICY:#010x}")
    _add(security, "hostData", base64.b64encode(launch.host_data).decode())
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _add(parent: Element, tag: str, text: str | None = None, **names: str) -> Element:
    made = SubElement(parent, tag, names)
    made.text = text
    return made
