"""A small image: built twice it is the same, it starts under emulation, and it is measured."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tsqp.deploy.image import COMMAND_LINE, INITRAMFS, KERNEL, LOCK, first_difference

BUILD_S, BOOT_S = 600, 180
PROGRAMS = ("mmdebstrap", "apt-get", "qemu-system-x86_64")
pytestmark = [pytest.mark.more, pytest.mark.timeout(2 * BUILD_S + BOOT_S)]


def _missing() -> str | None:
    """Return why no image can be built here."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"no {program}"
    if os.geteuid() != 0:
        return "not root"
    try:
        socket.create_connection(("deb.debian.org", 80), timeout=10).close()
    except OSError as error:
        return f"no archive of Debian: {error}"
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where images are, for as long as the tests run."""
    if (reason := _missing()) is not None:
        pytest.skip(reason)
    made = tmp_path_factory.mktemp("images")
    yield made
    shutil.rmtree(made)


def _build(output: Path, *arguments: str | Path, **environment: str) -> Path:
    command = ["image", "build", "--small", "-o", output, *arguments]
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tsqp"), *command],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        umask=0o077 if environment else 0o022,
    )
    assert process.wait(BUILD_S) == 0
    return output


@pytest.fixture(scope="module")
def image(folder: Path) -> Path:
    """A small image of today's packages."""
    return _build(folder / "first", "--save", folder / "packages", "--jobs", "1")


def test_another_build_of_its_lock_is_the_same(image: Path, folder: Path) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    again = _build(
        folder / "a" / "second",
        *("--lock", image / LOCK, "--packages", folder / "packages", "--jobs", "2"),
        *("--scratch", scratch),
        TZ="Asia/Tokyo",
        LANG="de_DE.UTF-8",
        LC_ALL="tr_TR.UTF-8",
        PYTHONHASHSEED="7",
    )
    assert first_difference(image, again) is None
    assert not list(scratch.iterdir())


def test_it_starts_under_emulation_and_says_how_it_stands(image: Path) -> None:
    machine = ["qemu-system-x86_64", "-M", "q35", "-cpu", "max", "-m", "1G", "-smp", "2"]
    start = ["-kernel", image / KERNEL, "-initrd", image / INITRAMFS]
    line = ["-append", (image / COMMAND_LINE).read_text()]
    guest = subprocess.Popen(
        [*machine, *start, *line, "-nographic", "-no-reboot", "-net", "none"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    end = threading.Timer(BOOT_S, guest.kill)
    end.start()
    seen, reports = [], []
    try:
        assert guest.stdin is not None
        assert guest.stdout is not None
        for said in guest.stdout:
            seen.append(said)
            _, found, facts = said.partition("tsqp-guest ")
            if found:
                reports.append(json.loads(facts))
                guest.stdin.write("report\n" if len(reports) == 1 else "off\n")
                guest.stdin.flush()
        assert guest.wait() == 0, "".join(seen)
    finally:
        end.cancel()
        guest.kill()
        guest.communicate()  # closes the pipes, too
    assert len(reports) == 2, "".join(seen)
    assert reports[0] == reports[1]
    assert reports[0]["system"] == "Debian GNU/Linux 13 (trixie)"
    assert reports[0]["python"].startswith("3.13.")
    assert (reports[0]["root"], reports[0]["seeded"]) == ("ro", True)
    # No login is offered on the console.
    assert "login:" not in "".join(seen)
