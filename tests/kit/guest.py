"""Images of a guest and packages of Debian unstable, for tests that build and start guests."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tsqp.deploy.image import COMMAND_LINE, INITRAMFS, KERNEL
from tsqp.deploy.packages import _APT, ARCHIVE, KEYRING

BOOT_S = 180
MACHINE = ("qemu-system-x86_64", "-M", "q35", "-cpu", "max", "-m", "1G", "-display", "none")
PROGRAMS = ("mmdebstrap", "apt-get", "qemu-system-x86_64")


def missing(*programs: str) -> str | None:
    """Return why no image can be built here, or started with these programs too."""
    for program in (*PROGRAMS, *programs):
        if shutil.which(program) is None:
            return f"no {program}"
    if os.geteuid() != 0:
        return "not root"
    try:
        socket.create_connection(("deb.debian.org", 80), timeout=10).close()
    except OSError as error:
        return f"no archive of Debian: {error}"
    return None


def build(output: Path, *arguments: str | Path, timeout_s: float, **environment: str) -> Path:
    """Build an image; an environment of its own comes with another umask, too."""
    process = subprocess.Popen(
        [Path(sys.executable).with_name("tsqp"), "image", "build", "-o", output, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        umask=0o077 if environment else 0o022,
    )
    assert process.wait(timeout_s) == 0
    return output


class SmallGuest:
    """A machine of a small image that runs, or waits for a snapshot; `seen`: what it has said."""

    def __init__(self, control: socket.socket, console: socket.socket) -> None:
        self._console, self.seen = console, ""
        self._control, self._said = control.makefile("rw"), console.makefile(errors="replace")
        self._control.readline()  # it names itself
        self.order("qmp_capabilities")

    def order(self, command: str, **arguments: str) -> Any:
        json.dump({"execute": command, "arguments": arguments}, self._control)
        self._control.flush()
        for line in self._control:
            if "event" not in (answer := json.loads(line)):
                return answer["return"]
        raise EOFError(command)

    def await_status(self, command: str, wanted: str) -> None:
        """Ask again until something has happened to it."""
        while (status := self.order(command).get("status")) != wanted:
            assert status != "failed"

    def report(self, *, asked: bool = True) -> dict[str, Any]:
        if asked:
            self.say("report")
        for line in self._said:
            self.seen += line
            _, found, facts = line.partition("tsqp-guest ")
            if found:
                report: dict[str, Any] = json.loads(facts)
                return report
        raise EOFError("console")

    def say(self, line: str) -> None:
        self._console.sendall(f"{line}\n".encode())

    def read_to_the_end(self) -> None:
        self.seen += self._said.read()

    def close(self) -> None:
        self._control.close()
        self._said.close()


@contextmanager
def small_guest(
    image: Path, generation: str, snapshot: Path | None = None, firmware: Path | None = None
) -> Iterator[SmallGuest]:
    """Start an image, or go on from a snapshot of it, under a generation id.

    `firmware`: UEFI, as confidential machines have; default: QEMU's BIOS.
    """
    line = (image / COMMAND_LINE).read_text()
    start = ["-kernel", image / KERNEL, "-initrd", image / INITRAMFS, "-append", line]
    device = ["-device", f"vmgenid,guid={generation}", "-net", "none", "-no-reboot"]
    device += [] if firmware is None else ["-bios", firmware]
    incoming = [] if snapshot is None else ["-incoming", f"exec:cat {snapshot}"]
    with ExitStack() as opened:
        pairs = [socket.socketpair() for _ in range(2)]
        for one in (one for pair in pairs for one in pair):
            opened.enter_context(one)
        (control, its_control), (console, its_console) = pairs
        lines = [
            *("-chardev", f"socket,id=control,fd={its_control.fileno()}"),
            *("-mon", "chardev=control,mode=control"),
            *("-chardev", f"socket,id=console,fd={its_console.fileno()}"),
            *("-serial", "chardev:console"),
        ]
        fds = [its_control.fileno(), its_console.fileno()]
        process = subprocess.Popen([*MACHINE, *start, *device, *incoming, *lines], pass_fds=fds)
        opened.callback(process.wait)
        opened.callback(process.kill)
        end = threading.Timer(BOOT_S, process.kill)
        opened.callback(end.cancel)
        end.start()
        for its in (its_control, its_console):
            its.close()
        made = SmallGuest(control, console)
        opened.callback(made.close)
        yield made


# A mirror may stand still for longer than unstable's index is good for; its signature is checked.
_AT_ANY_TIME = 'Acquire::Check-Valid-Until "false";\n'


def unpack(names: tuple[str, ...], directory: Path) -> Path:
    """Unpack packages, none of which is installed, and return the directory tree of them all."""
    for name in ("state/lists/partial", "cache/archives/partial", "etc", "packages"):
        (directory / name).mkdir(parents=True)
    (directory / "status").touch()
    source = f"deb [signed-by={KEYRING}] {ARCHIVE}/debian sid main\n"
    (directory / "etc" / "sources.list").write_text(source)
    configuration = directory / "apt.conf"
    configuration.write_text(_APT.format(directory) + _AT_ANY_TIME)
    environment = {**os.environ, "APT_CONFIG": str(configuration)}
    packages = directory / "packages"
    for command in (["update"], ["download", *names]):
        subprocess.run(["apt-get", "-qq", *command], cwd=packages, env=environment, check=True)
    for package in packages.iterdir():
        subprocess.run(["dpkg-deb", "--extract", package, directory / "tree"], check=True)
    return directory / "tree"
