"""QEMU's words: an encrypted guest is started as it is measured, and an emulated one says so."""

from __future__ import annotations

import hashlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from protocol.errors import SettingsError
from tests.kit.rows import each_row
from tests.unit.tsqp.deploy.firmware import firmware
from tests.unit.tsqp.deploy.images import make_image
from tsqp.cli.main import command
from tsqp.deploy.image import COMMAND_LINE
from tsqp.deploy.launch import Launch
from tsqp.deploy.libvirt import domain
from tsqp.deploy.machine import Machine, least_memory_mib

MEMORY_MIB = 2048
HOST_DATA = bytes(range(32))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image, with firmware, a disk and memory to share beside it."""
    (tmp_path / "ovmf.fd").write_bytes(firmware())
    (tmp_path / "model.erofs").write_bytes(bytes(4096))
    (tmp_path / "memory").write_bytes(bytes(1024 * 1024))
    return make_image(tmp_path / "image")


def _machine(image: Path, **changes: Any) -> Machine:
    launch = Launch(2, "EPYC-v4", image.with_name("ovmf.fd"), HOST_DATA)
    usual = {"image": image, "launch": launch, "vcpus": 2, "memory_mib": MEMORY_MIB}
    return Machine(**(usual | changes))


def _pinned(image: Path) -> Path:
    (image / COMMAND_LINE).write_text("quiet tsqp.manifest=00")
    return image


def _value(words: list[str], name: str, at: int = 0) -> str:
    return [value for word, value in pairwise(words) if word == name][at]


def test_an_encrypted_guest_is_started_as_it_is_measured(image: Path) -> None:
    words = _machine(image).qemu()
    assert _value(words, "-accel") == "kvm"
    assert "confidential-guest-support=snp" in _value(words, "-M").split(",")
    assert _value(words, "-cpu") == "EPYC-v4"
    assert _value(words, "-smp") == "2"
    guest = dict(part.partition("=")[::2] for part in _value(words, "-object", 1).split(",", 6)[1:])
    assert (guest["policy"], guest["kernel-hashes"]) == ("0x30000", "on")
    assert guest["host-data"] == "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    assert _value(words, "-bios") == str(image.with_name("ovmf.fd"))
    assert _value(words, "-append") == (image / COMMAND_LINE).read_text()
    # Nothing tells it of a copy, and it has no network and no simulated measurement.
    assert not {"-netdev", "-fw_cfg"} & set(words)
    assert "vmgenid" not in " ".join(words)


def test_devices_of_an_encrypted_guest_use_pages_that_it_shares(image: Path) -> None:
    files = {"model": image.with_name("model.erofs"), "publish": ("127.0.0.1", 8443)}
    words = _machine(_pinned(image), kernel_vsock=True, cid=7, **files).qemu()
    assert any("guest-cid=7" in word for word in words)
    devices = [value for word, value in pairwise(words) if word == "-device"]
    assert len(devices) == 3
    assert all(device.endswith("disable-legacy=on,iommu_platform=on") for device in devices)
    assert "readonly=on" in _value(words, "-drive").split(",")
    assert _value(words, "-netdev").endswith("restrict=on,hostfwd=tcp:127.0.0.1:8443-:8000")


def test_an_emulated_guest_repeats_a_measurement_and_is_told_of_copies(image: Path) -> None:
    measurement = bytes(range(48))
    words = _machine(image, launch=None, measurement=measurement).qemu()
    assert _value(words, "-fw_cfg") == f"name=opt/tsqp/measurement,string={measurement.hex()}"
    assert _value(words, "-device") == "vmgenid,guid=auto"
    assert not {"-accel", "-bios"} & set(words)
    assert "sev" not in " ".join(words)


def test_links_are_devices(image: Path) -> None:
    memory = image.with_name("memory")
    machine = _machine(
        image, launch=None, vsock=Path("/run/vm.sock"), shared_memory=memory, reach_network=True
    )
    words = machine.qemu(Path("/run/device"))
    assert _value(words, "-chardev") == "socket,id=vsock,path=/run/device"
    assert _value(words, "-netdev") == "user,id=net,restrict=off"
    assert f"size={1024 * 1024},mem-path={memory}" in _value(words, "-object", 1)
    assert "ivshmem-plain,memdev=shared,addr=0x10" in words
    device, qemu = str(machine).splitlines()
    assert device.startswith("vhost-device-vsock --guest-cid 3 ")
    assert device.endswith("--uds-path /run/vm.sock &")
    assert qemu.startswith("qemu-system-x86_64 ")


@each_row(
    ("changes", "text"),
    [
        ({"memory_mib": 900}, r"--memory-mib: got 900 MiB, expected 968 MiB at least"),
        ({"shared_memory": Path("none")}, "none: got no such file"),
        ({"model": Path("model.erofs")}, "--disk: got a disk and no such digest, expected both"),
        ({"publish": ("localhost", 80)}, "--publish: got localhost, expected an IPv4 address"),
        ({"publish": ("::1", 80)}, "--publish: got ::1, expected an IPv4 address"),
        ({"vsock": Path("vm")}, "--vsock: got SEV-SNP, expected --kernel-vsock, or --no-tee"),
        ({"shared_memory": Path("image/vmlinuz")}, "got 18 bytes, expected a power of two"),
    ],
)
def test_what_would_not_start_is_refused(
    changes: dict[str, Any], text: str, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(image.parent)
    assert least_memory_mib(image) == 968
    with pytest.raises(SettingsError, match=text):
        _machine(image, **changes)


def test_a_name_that_qemu_would_read_as_two_is_refused(image: Path) -> None:
    disk = image.with_name("a,b")
    disk.write_bytes(b"x")
    with pytest.raises(SettingsError, match="no comma"):
        _machine(_pinned(image), model=disk)


def test_a_digest_without_a_disk_is_refused(image: Path) -> None:
    with pytest.raises(SettingsError, match="got a digest of a manifest and no disk"):
        _machine(_pinned(image))


def test_a_domain_of_libvirt_is_the_same_machine(image: Path) -> None:
    disk = image.with_name("model.erofs")
    machine = _machine(_pinned(image), model=disk, kernel_vsock=True, cid=7)
    root = ElementTree.fromstring(domain(machine, "a&b"))
    security = root.find("launchSecurity")
    assert security is not None
    assert security.attrib == {"type": "sev-snp", "kernelHashes": "yes"}
    assert security.findtext("policy") == "0x00030000"
    assert security.findtext("hostData") in " ".join(machine.qemu())
    assert root.findtext("name") == "a&b"
    assert root.findtext("os/cmdline") == (image / COMMAND_LINE).read_text()
    assert root.findtext("os/loader") == str(image.with_name("ovmf.fd"))
    assert (root.findtext("vcpu"), root.findtext("cpu/model")) == ("2", "EPYC-v4")
    assert root.findtext("devices/disk/serial") == "model"
    (cid,) = root.findall("devices/vsock/cid")
    assert cid.attrib == {"auto": "no", "address": "7"}
    for changes in ({"launch": None}, {"publish": ("127.0.0.1", 1)}, {"reach_network": True}):
        with pytest.raises(SettingsError, match="--show libvirt"):
            domain(_machine(image, model=disk, **changes), "x")


def _run(image: Path, *words: str) -> Result:
    ovmf = image.with_name("ovmf.fd")
    digest = hashlib.sha256(ovmf.read_bytes()).hexdigest()
    command_words = ["image", "run", str(image), "--vcpus", "2", "--memory-mib", "2048", *words]
    firmware_words = ["--ovmf", str(ovmf), "--ovmf-sha256", digest]
    return CliRunner().invoke(command, [*command_words, *firmware_words])


def test_an_operator_sees_what_would_be_started(image: Path) -> None:
    encrypted = _run(image, "--show", "qemu")
    assert encrypted.exit_code == 0, encrypted.output
    assert "sev-snp-guest" in encrypted.stdout
    emulated = _run(image, "--show", "qemu", "--no-tee")
    assert "opt/tsqp/measurement" in emulated.stdout
    assert "sev-snp-guest" not in emulated.stdout
    assert _run(image, "--show", "libvirt").stdout.startswith("<domain ")


@each_row(
    ("words", "text"),
    [
        (["--host-data", "00"], "--host-data: got '00', expected 64 hexadecimal digits"),
        (["--ovmf-sha256", "0" * 64], "ovmf.fd: got SHA-256 "),
        (["--publish", "8443"], "--publish: got '8443', expected HOST:PORT"),
        (["--cid", "2"], "2 is not in the range"),
        (["--vsock", "x", "--kernel-vsock"], "expected one of them"),
    ],
)
def test_other_words_are_refused(words: list[str], text: str, image: Path) -> None:
    # What comes first counts: the firmware's own digest stands behind it.
    ovmf = str(image.with_name("ovmf.fd"))
    digest = hashlib.sha256(Path(ovmf).read_bytes()).hexdigest()
    usual = ["image", "run", str(image), "--vcpus", "2", "--ovmf", ovmf, "--ovmf-sha256", digest]
    result = CliRunner().invoke(command, [*usual, *words])
    assert text in f"{result.exception} {result.output}"


@each_row("words", [["--vcpu-type", "EPYC-v4"], ["--host-data", "zz"], ["--ovmf-sha256", "0"]])
def test_what_only_a_measurement_reads_needs_firmware(words: list[str], image: Path) -> None:
    usual = ["image", "run", str(image), "--vcpus", "2", "--no-tee"]
    result = CliRunner().invoke(command, [*usual, *words])
    assert f"{words[0]}: got --no-tee without --ovmf" in str(result.exception)


def test_a_host_without_qemu_is_told(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="qemu-system-x86_64: got no such program"):
        _machine(image, launch=None).run()
    monkeypatch.setattr("tsqp.deploy.machine.QEMU", sys.executable)
    with pytest.raises(SettingsError, match="vhost-device-vsock"):
        _machine(image, launch=None, vsock=image.with_name("vm")).run()


def test_a_word_of_the_runner_is_no_digest(image: Path) -> None:
    (image / COMMAND_LINE).write_text("tsqp.arg=tsqp.manifest=00")
    _machine(image)


def test_without_firmware_nothing_is_encrypted(image: Path) -> None:
    result = CliRunner().invoke(command, ["image", "run", str(image), "--vcpus", "2"])
    assert "--ovmf: got none, expected OVMF.amdsev.fd, or --no-tee" in str(result.exception)
