"""An image: what goes into it, what is measured of it, and how QEMU starts it."""

import hashlib
import json
import stat
import struct
import subprocess
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from protocol.errors import SettingsError
from tee_side.attest.appraisal import AppraisalPolicy, MinimumTcb
from tests.kit.rows import each_row
from tsqp.cli.main import command as tsqp
from tsqp.deploy.build import strip
from tsqp.deploy.guest.start import command
from tsqp.deploy.image import COMMAND_LINE, FACTS, MEASURED, Artifact, Launch, fetch, measure
from tsqp.deploy.launch import (
    MAX_COMMAND_LINE,
    GuestMachine,
    command_line,
    configure,
    domain,
    read_minimum,
)
from tsqp.deploy.packages import _tracked, commit_of

DIGEST = "0123456789abcdef" * 4
PINNED = ["--manifest", "/model/manifest.json", "--manifest-digest", DIGEST]
SERVE = ["serve", "/model", "--host", "0.0.0.0"]
HOST_DATA = bytes(range(32))


def firmware(*, kernel_hashes: bool = True) -> bytes:
    """Return firmware in the form of OVMF's, as far as a measurement of SEV-SNP reads it."""

    def entry(guid: str, value: int) -> bytes:
        return struct.pack("<IH", value, 22) + uuid.UUID(guid).bytes_le

    sections = [struct.pack("<III", 0x80D000, 4096, 3)]
    if kernel_hashes:
        sections.append(struct.pack("<III", 0x80F000, 4096, 0x10))
    metadata = struct.pack("<4sIII", b"ASEV", 16 + 12 * len(sections), 1, len(sections))
    metadata += b"".join(sections)
    table = entry("dc886566-984a-4798-a75e-5585a7bf67cc", 4096)
    table += entry("7255371f-3a3b-4b04-927b-1da6efa8d454", 0x80FC00)
    table += entry("00f771de-1a7e-4fcb-890e-68c77e2fb44e", 0x80B004)
    footer = uuid.UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le
    table += struct.pack("<H", len(table) + 18) + footer
    data = bytearray(64 * 1024)
    data[-4096 : len(metadata) - 4096] = metadata
    data[-32 - len(table) : -32] = table
    return bytes(data)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "ovmf.fd").write_bytes(firmware())
    (tmp_path / "model.erofs").write_bytes(bytes(4096))
    made = tmp_path / "image"
    made.mkdir()
    for name in MEASURED:
        (made / name).write_bytes(f"content of {name}".encode())
    facts = {"files": {}, "runner_wheel": "ab" * 32, "unpacked_bytes": 100 * 2**20}
    (made / FACTS).write_text(json.dumps(facts))
    return made


def launch(image: Path, vcpus: int = 2, vcpu_type: str = "EPYC-v4") -> Launch:
    return Launch(vcpus, vcpu_type, image.with_name("ovmf.fd"), HOST_DATA)


def run(image: Path, name: str, *words: str) -> Result:
    """Run a command about an image, whose firmware is what it should be if no word differs."""
    ovmf = image.with_name("ovmf.fd")
    digest = hashlib.sha256(ovmf.read_bytes()).hexdigest()
    given = ["--vcpus", "2", "--ovmf", str(ovmf), "--ovmf-sha256", digest, *words]
    return CliRunner().invoke(tsqp, [*name.split(), str(image), *given])


def test_no_shell_no_package_manager_and_no_traces_stay(tmp_path: Path) -> None:
    libraries = "usr/lib/python3/dist-packages"
    gone = [
        *("etc/apt/sources.list", "etc/shadow-", "usr/bin/apt-get", "usr/bin/bash", "usr/bin/sh"),
        *("usr/bin/some-program-of-tomorrow", "usr/sbin/agetty", "usr/sbin/sulogin"),
        "usr/lib/systemd/system-generators/systemd-getty-generator",
        "usr/lib/systemd/system/getty.target.wants/getty@tty1.service",
        "usr/lib/systemd/system/debug-shell.service",
        *(f"{libraries}/bin/tsqp", f"{libraries}/torch/bin/protoc", f"{libraries}/tsqp/lab/x.py"),
        *("usr/share/doc/a/copyright", "var/lib/dpkg/status", "var/log/dpkg.log"),
    ]
    kept = [
        *("etc/passwd", "usr/bin/python3", "usr/bin/mount", "usr/lib/systemd/systemd"),
        *(f"{libraries}/torch/bin/torch_shm_manager", f"{libraries}/tsqp/demo_model/config.json"),
    ]
    for name in gone + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "usr/bin/mount").chmod(0o4755)
    (tmp_path / "usr/share/man").symlink_to(tmp_path / "etc")
    strip(tmp_path)
    assert [name for name in gone if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert not (tmp_path / "usr/share/man").is_symlink()
    assert stat.S_IMODE((tmp_path / "usr/bin/mount").stat().st_mode) == 0o755


def test_files_that_no_commit_has_are_in_no_image(tmp_path: Path) -> None:
    (tmp_path / "tsqp").mkdir()
    for name in ("tsqp/kept.py", "tsqp/left.py", "elsewhere.py"):
        (tmp_path / name).write_text("x")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "tsqp/kept.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    assert _tracked(tmp_path) == ["tsqp/kept.py"]
    commit = commit_of(tmp_path)
    (tmp_path / "tsqp/kept.py").write_text("y")
    assert commit_of(tmp_path) == f"{commit}-changed"


def artifact(content: bytes, url: str = "ftp://archive.invalid/a.deb") -> Artifact:
    return Artifact(name="a", version="1", url=url, sha256=hashlib.sha256(content).hexdigest())


def test_a_package_has_the_content_that_the_lock_says(tmp_path: Path) -> None:
    saved, into = tmp_path / "a.deb", tmp_path / "into"
    saved.write_bytes(b"there")
    for url, folders in (("ftp://archive.invalid/a.deb", [tmp_path]), (saved.as_uri(), [])):
        fetch([artifact(b"there", url)], into, folders)
        (into / "a.deb").unlink()
        with pytest.raises(SettingsError, match="expected " + artifact(b"other").sha256):
            fetch([artifact(b"other", url)], into, folders)
        assert not list(into.iterdir())
    (into / "a.deb").write_bytes(b"lies there already")
    with pytest.raises(SettingsError, match="SHA-256"):
        fetch([artifact(b"there")], into)


@each_row(
    ("arguments", "digest", "expected"),
    [
        ((), DIGEST, SERVE + PINNED),
        (("generate", "demo"), None, ["generate", "demo"]),
        (("--prompt", "Once upon\n%20 a=b é\\"), None, ["--prompt", "Once upon\n%20 a=b é\\"]),
        (("tsqp.manifest=x", ""), None, ["tsqp.manifest=x", ""]),
    ],
)
def test_the_runner_gets_the_words_of_the_image(
    arguments: tuple[str, ...], digest: str | None, expected: list[str]
) -> None:
    line = command_line(arguments, digest)
    assert line.isascii()
    assert line.isprintable()
    assert command(f"{line}\n") == expected


def test_what_the_kernel_would_cut_and_what_is_no_digest_is_refused(image: Path) -> None:
    room = MAX_COMMAND_LINE - len(command_line([""], None))
    assert len(command_line(["x" * room], None)) == MAX_COMMAND_LINE
    with pytest.raises(SettingsError, match="got 2048 characters, expected 2047 at most"):
        command_line(["x" * (room + 1)], None)
    for digest in ("", DIGEST[:-1], f"{DIGEST} init=/bin/sh", DIGEST.upper(), f"{DIGEST}\n"):
        with pytest.raises(SettingsError, match="--manifest-digest"):
            command_line((), digest)
    # Words that the guest would refuse, it refuses only when it has started.
    for words in (["srve"], ["serve", "/model", "--polcy", "x"], ["leak"]):
        result = CliRunner().invoke(tsqp, ["image", "configure", str(image), "--", *words])
        assert result.exit_code != 0
    assert (image / COMMAND_LINE).read_text().startswith("content of ")
    line = configure(image, ["serve", "/model", "--attest", "snp"], DIGEST)
    assert (image / COMMAND_LINE).read_text() == line
    facts = json.loads((image / FACTS).read_text())
    assert facts["files"] == {COMMAND_LINE: hashlib.sha256(line.encode()).hexdigest()}


def test_every_byte_that_is_measured_changes_it(image: Path) -> None:
    seen = {measure(image, launch(image))}
    for name in MEASURED:
        path = image / name
        content = path.read_bytes()
        for changed in (content[:-1] + b"!", b"!" + content[1:], content + b" "):
            path.write_bytes(changed)
            seen.add(measure(image, launch(image)))
        path.write_bytes(content)
    seen |= {measure(image, launch(image, 3)), measure(image, launch(image, 2, "EPYC-Genoa"))}
    assert len(seen) == 3 + 3 * len(MEASURED)
    (image / FACTS).write_text("changed")
    assert measure(image, launch(image)) in seen


def test_firmware_that_would_start_any_kernel_is_refused(image: Path) -> None:
    path = image.with_name("ovmf.fd")
    for content, got in (
        (b"", "got another content"),
        (b"x" * 100, "got no place for them"),
        (firmware(kernel_hashes=False), "got no place for them"),
        (firmware().replace(b"ASEV", b"ASEW"), "got another content"),
    ):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=got):
            measure(image, launch(image))


def test_clients_get_a_policy_with_it(image: Path, tmp_path: Path) -> None:
    table, whole = tmp_path / "snp.toml", tmp_path / "appraisal.toml"
    tcb = ("--minimum-tcb", "genoa=10,0,23,84", "--minimum-tcb", "turin=1,1,4,81,2")
    data = ("--host-data", HOST_DATA.hex(), "--appraisal", str(table))
    result = run(image, "measure", "--json", *data, *tcb)
    assert result.exit_code == 0, result.output
    names = ("model", "policy", "settings", "plugins", "services", "version")
    claims = "".join(f'{name} = "any"\n' for name in names)
    head = f'mode = "production"\nmax_age_s = 60\n[claims]\n{claims}'
    whole.write_text(head + table.read_text())
    snp = AppraisalPolicy.load(whole).snp
    assert snp is not None
    assert snp.measurements == (measure(image, launch(image)),)
    assert (snp.host_data, snp.products) == ((HOST_DATA,), ("genoa", "turin"))
    assert snp.minimum_tcb == {
        "genoa": MinimumTcb(bootloader=10, tee=0, snp=23, microcode=84),
        "turin": MinimumTcb(bootloader=1, tee=1, snp=4, microcode=81, fmc=2),
    }
    assert (snp.debug, snp.migration_agent, snp.signing_key) == ("off", "off", "vcek")
    for texts in (["genoa"], ["genoa=1,2,3,4,5"], ["genoa=1,2,3,²"], 2 * tcb[1:2]):
        with pytest.raises(SettingsError, match="--minimum-tcb"):
            read_minimum(texts)


def machine(image: Path, **changes: Any) -> GuestMachine:
    usual: dict[str, Any] = {"launch": launch(image), "vcpus": 2, "memory_mib": 2048}
    return GuestMachine(image=image, **(usual | changes))


def test_an_encrypted_guest_is_started_as_it_is_measured(image: Path) -> None:
    (image / COMMAND_LINE).write_text("quiet tsqp.manifest=00")
    disk = image.with_name("model.erofs")
    made = machine(image, model=disk, kernel_vsock=True, cid=7)
    words = made.qemu()
    options = dict(pairwise(words))
    assert options["-accel"] == "kvm"
    assert "confidential-guest-support=snp" in options["-M"].split(",")
    assert (options["-cpu"], options["-smp"]) == ("EPYC-v4", "2")
    guest = options["-object"].split(",", 6)
    assert guest[0] == "sev-snp-guest"
    assert {"policy=0x30000", "kernel-hashes=on"} < set(guest)
    assert guest[-1] == "host-data=AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
    assert options["-bios"] == str(image.with_name("ovmf.fd"))
    assert options["-append"] == (image / COMMAND_LINE).read_text()
    assert "readonly=on" in options["-drive"].split(",")
    devices = [value for word, value in pairwise(words) if word == "-device"]
    assert all(device.endswith("disable-legacy=on,iommu_platform=on") for device in devices)
    assert not {"-netdev", "-fw_cfg"} & set(words)
    with pytest.raises(SettingsError, match="got a digest of a manifest and no disk"):
        machine(image)
    # A domain of libvirt is the same machine.
    root = ElementTree.fromstring(domain(made, "a&b"))
    security = root.find("launchSecurity")
    assert security is not None
    assert security.attrib == {"type": "sev-snp", "kernelHashes": "yes"}
    assert f"host-data={security.findtext('hostData')}" == guest[-1]
    assert root.findtext("os/cmdline") == options["-append"]
    assert root.findtext("os/loader") == options["-bios"]


@each_row(
    ("words", "text"),
    [
        (["--memory-mib", "900"], "--memory-mib: got 900 MiB, expected 968 MiB at least"),
        (["--disk", "{beside}"], "--disk: got a disk and no such digest, expected both"),
        (["--publish", "localhost:80"], "--publish: got localhost, expected an IPv4 address"),
        (["--shared-memory", "{beside}"], "got 4096 bytes, expected a power of two"),
        (["--host-data", "00"], "--host-data: got '00', expected 64 hexadecimal digits"),
        (["--ovmf-sha256", "0" * 64], "ovmf.fd: got SHA-256 "),
    ],
)
def test_what_would_not_start_or_not_as_measured_is_refused(
    words: list[str], text: str, image: Path
) -> None:
    beside = image.with_name("model.erofs")
    result = run(image, "image run --show qemu", *(word.format(beside=beside) for word in words))
    assert text in f"{result.exception} {result.output}"
    assert result.exit_code != 0
