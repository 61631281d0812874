"""The measured command line says what runs, whole, and to the program in the guest alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from protocol.errors import SettingsError
from tests.kit.rows import each_row
from tests.unit.tsqp.deploy.images import make_image
from tsqp.cli.main import command as tsqp
from tsqp.deploy.command_line import MAX_COMMAND_LINE, SELF_TEST, command_line, configure
from tsqp.deploy.guest.start import command
from tsqp.deploy.image import COMMAND_LINE, FACTS, INITRAMFS, KERNEL

DIGEST = "0123456789abcdef" * 4
PINNED = ["--manifest", "/model/manifest.json", "--manifest-digest", DIGEST]
SERVE = ["serve", "/model", "--host", "0.0.0.0"]


@each_row(
    ("arguments", "digest", "expected"),
    [
        ((), None, SERVE),
        ((), DIGEST, SERVE + PINNED),
        (("generate", "demo"), None, ["generate", "demo"]),
        (("--prompt", "Once upon\n%20 a=b é\\"), None, ["--prompt", "Once upon\n%20 a=b é\\"]),
        (("serve", "/model", "--attest=snp"), DIGEST, ["serve", "/model", "--attest=snp", *PINNED]),
        (("tsqp.manifest=x",), None, ["tsqp.manifest=x"]),
        (("",), None, [""]),
    ],
)
def test_the_runner_gets_the_words_of_the_image(
    arguments: tuple[str, ...], digest: str | None, expected: list[str]
) -> None:
    line = command_line(arguments, digest)
    assert line.isascii()
    assert line.isprintable()
    assert "tsqp.self-test" not in line.split()
    assert command(f"{line}\n") == expected


def test_a_command_line_that_the_kernel_would_cut_is_refused() -> None:
    room = MAX_COMMAND_LINE - len(command_line([""], None))
    assert len(command_line(["x" * room], None)) == MAX_COMMAND_LINE
    with pytest.raises(SettingsError, match="got 2048 characters, expected 2047 at most"):
        command_line(["x" * (room + 1)], None)


@each_row("digest", ["", "x", DIGEST[:-1], f"{DIGEST} init=/bin/sh", DIGEST.upper(), f"{DIGEST}\n"])
def test_a_digest_is_one(digest: str) -> None:
    with pytest.raises(SettingsError, match="--manifest-digest"):
        command_line((), digest)


def test_to_configure_an_image_changes_its_command_line_alone(tmp_path: Path) -> None:
    image = make_image(tmp_path / "image")
    before = [(image / name).read_bytes() for name in (KERNEL, INITRAMFS)]
    line = configure(image, ["serve", "/model", "--attest", "snp"], DIGEST)
    assert (
        (image / COMMAND_LINE).read_text()
        == line
        == command_line(["serve", "/model", "--attest", "snp"], DIGEST)
    )
    facts = json.loads((image / FACTS).read_text())
    assert facts["files"] == {COMMAND_LINE: hashlib.sha256(line.encode()).hexdigest()}
    assert [(image / name).read_bytes() for name in (KERNEL, INITRAMFS)] == before


@each_row(
    ("words", "text"),
    [
        (["srve"], "arguments: got 'srve', expected a command of tee-runner"),
        (["serve", "/model", "--polcy", "x"], "No such option '--polcy'"),
        (["pads"], "arguments: got '', expected a command of tee-runner"),
        (["pads", "make", "/model", "--nope"], "No such option '--nope'"),
        (["leak"], "arguments: got 'leak'"),
        (["doctor", "--nope"], "No such option '--nope'"),
    ],
)
def test_words_that_the_guest_would_refuse_are_refused_here(words: list[str], text: str) -> None:
    with TemporaryDirectory() as folder:
        image = make_image(Path(folder, "image"))
        result = CliRunner().invoke(tsqp, ["image", "configure", str(image), "--", *words])
        assert result.exit_code != 0
        assert text.replace("'", "") in f"{result.exception} {result.output}".replace("'", "")
        assert "content" in (image / COMMAND_LINE).read_text()


def test_an_operator_configures_an_image(tmp_path: Path) -> None:
    image = make_image(tmp_path / "image")
    run = ["image", "configure", str(image)]
    assert CliRunner().invoke(tsqp, [*run, "--", "doctor"]).exit_code == 0
    assert command((image / COMMAND_LINE).read_text()) == ["doctor"]
    pinned = CliRunner().invoke(tsqp, [*run, "--manifest-digest", DIGEST, "--", "doctor"])
    assert "expected a command with a model" in str(pinned.exception)
    said = CliRunner().invoke(tsqp, [*run, "--manifest-digest", DIGEST])
    assert said.output.strip() == (image / COMMAND_LINE).read_text()
    assert command(said.output) == SERVE + PINNED


def test_an_image_without_a_runner_runs_its_self_test(tmp_path: Path) -> None:
    assert "tsqp.self-test" in SELF_TEST
    with pytest.raises(SettingsError, match="got a small image, expected one with a runner"):
        configure(make_image(tmp_path / "image", small=True), (), None)
