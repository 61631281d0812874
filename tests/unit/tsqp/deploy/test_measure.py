"""A measurement changes with every byte of an image, and clients refuse another one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.errors import SettingsError
from tee_side.attest.appraisal_policy import AppraisalPolicy, MinimumTcb
from tests.kit.rows import each_row
from tests.unit.tsqp.deploy.firmware import firmware
from tests.unit.tsqp.deploy.images import make_image
from tsqp.cli.main import command
from tsqp.deploy.appraisal import read_minimum
from tsqp.deploy.image import MEASURED, first_difference
from tsqp.deploy.launch import Launch
from tsqp.deploy.measure import measure

GENOA = MinimumTcb(bootloader=10, tee=0, snp=23, microcode=84)
TURIN = MinimumTcb(bootloader=1, tee=1, snp=4, microcode=81, fmc=2)
REST = """
mode = "production"
max_age_s = 60
[claims]
model = "any"
policy = "any"
settings = "any"
plugins = "any"
services = "any"
version = "any"
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image of a few bytes, with firmware beside it."""
    made = make_image(tmp_path / "image")
    (tmp_path / "ovmf.fd").write_bytes(firmware())
    return made


def _launch(image: Path, vcpus: int = 2, vcpu_type: str = "EPYC-v4") -> Launch:
    return Launch(vcpus, vcpu_type, image.with_name("ovmf.fd"))


def test_every_byte_that_is_measured_changes_it(image: Path) -> None:
    launch = _launch(image)
    seen = {measure(image, launch)}
    for name in MEASURED:
        path = image / name
        content = path.read_bytes()
        for changed in (content[:-1] + b"!", b"!" + content[1:], content + b" "):
            path.write_bytes(changed)
            seen.add(measure(image, launch))
        path.write_bytes(content)
    assert len(seen) == 1 + 3 * len(MEASURED)
    assert measure(image, launch) in seen
    (image / "image.json").write_text("changed")
    assert measure(image, launch) in seen


def test_how_it_is_started_changes_it(image: Path) -> None:
    launches = [_launch(image), _launch(image, 3), _launch(image, 2, "EPYC-Genoa")]
    seen = [measure(image, launch) for launch in launches]
    image.with_name("ovmf.fd").write_bytes(firmware(fill=b"\1"))
    seen.append(measure(image, launches[0]))
    assert len(set(seen)) == 4
    assert {len(digest) for digest in seen} == {48}


@each_row(
    ("content", "got"),
    [
        (None, "got No such file or directory"),
        (b"", "got another content"),
        (b"x" * 100, "got no place for them"),
        (firmware(kernel_hashes=False), "got no place for them"),
        (firmware().replace(b"ASEV", b"ASEW"), "got another content"),
    ],
    ids=["missing", "empty", "other", "no hashes", "damaged"],
)
def test_firmware_that_would_start_any_kernel_is_refused(
    content: bytes | None, got: str, image: Path
) -> None:
    path = image.with_name("ovmf.fd")
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        measure(image, _launch(image))
    assert got in str(refused.value)


def test_what_is_no_image_or_no_processor_is_refused(image: Path) -> None:
    with pytest.raises(SettingsError, match="EPYC-Genoa"):
        measure(image, _launch(image, 2, "host"))
    (image / "cmdline").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="expected ASCII"):
        measure(image, _launch(image))
    (image / "cmdline").unlink()
    with pytest.raises(SettingsError, match="cmdline: got no such file"):
        measure(image, _launch(image))


def test_the_first_file_that_differs_is_named(image: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in image.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert first_difference(image, other) is None
    for name in ("image.json", "cmdline", "initrd", "vmlinuz"):
        (other / name).write_bytes(b"changed")
        assert first_difference(image, other) == name
    (other / "initrd").unlink()
    with pytest.raises(SettingsError, match="initrd"):
        first_difference(image, other)


def _measured(image: Path, *arguments: str) -> Result:
    ovmf = image.with_name("ovmf.fd")
    digest = hashlib.sha256(ovmf.read_bytes()).hexdigest()
    common = ("--vcpus", "2", "--ovmf", str(ovmf), "--ovmf-sha256", digest)
    return CliRunner().invoke(command, ["measure", str(image), *common, *arguments])


def test_clients_get_a_policy_with_it(image: Path, tmp_path: Path) -> None:
    table = tmp_path / "snp.toml"
    tcb = ("--minimum-tcb", "genoa=10,0,23,84", "--minimum-tcb", "turin=1,1,4,81,2")
    result = _measured(image, "--json", "--appraisal", str(table), *tcb)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert bytes.fromhex(said["measurement"]) == measure(image, _launch(image))
    assert int(said["policy"], 16) == 0x30000
    whole = tmp_path / "appraisal.toml"
    whole.write_text(REST + table.read_text())
    snp = AppraisalPolicy.load(whole).snp
    assert snp is not None
    assert snp.measurements == (measure(image, _launch(image)),)
    assert (snp.host_data, snp.products) == ((bytes(32),), ("genoa", "turin"))
    assert snp.minimum_tcb == {"genoa": GENOA, "turin": TURIN}
    assert (snp.debug, snp.migration_agent, snp.signing_key) == ("off", "off", "vcek")


def test_another_firmware_than_the_named_one_is_refused(image: Path) -> None:
    result = _measured(image, "--ovmf-sha256", "0" * 64)
    assert isinstance(result.exception, SettingsError)
    assert "SHA-256" in str(result.exception)
    # By default, it is the one that is tested.
    plain = ["measure", str(image), "--vcpus", "2", "--ovmf", str(image.with_name("ovmf.fd"))]
    assert isinstance(CliRunner().invoke(command, plain).exception, SettingsError)


@each_row("arguments", [("--appraisal", "none"), ("--minimum-tcb", "genoa=1,2,3,4")])
def test_an_appraisal_says_the_oldest_firmware(arguments: tuple[str, str], image: Path) -> None:
    result = _measured(image, *arguments)
    assert "expected --appraisal and --minimum-tcb" in str(result.exception)


@each_row(
    "texts",
    [
        ["genoa"],
        ["genoa=1,2,3"],
        ["genoa=1,2,3,4,5"],
        ["turin=1,2,3,4"],
        ["genoa=1,2,3,-4"],
        ["genoa=1,2,3,²"],
        ["rome=1,2,3,4"],
        ["genoa=1,2,3,4", "genoa=1,2,3,4"],
    ],
)
def test_malformed_firmware_versions_are_refused(texts: list[str]) -> None:
    with pytest.raises(SettingsError, match="--minimum-tcb"):
        read_minimum(texts)
