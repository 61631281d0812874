"""Runs in the guest: starts what the measured command line of the kernel says.

tsqp.arg=WORD        a word of tee-runner's command line, in order, or doctor; %20 is a blank
tsqp.manifest=HEX    /model has to be what this digest of its manifest says
tsqp.self-test       no runner: say how this guest stands, and answer "report" and "off"
"""

import json
import os
import platform
import sys
from urllib.parse import unquote

# The guest has one network, which its host made for its clients.
_SERVE = ["serve", "/model", "--host", "0.0.0.0"]  # noqa: S104
_PROGRAM = "from tsqp.cli.{} import main; main()"


def command(line: str) -> list[str]:
    """Return the words of tee-runner that a kernel's command line asks for."""
    given = [word.partition("=") for word in line.split()]
    words = [unquote(value) for name, _, value in given if name == "tsqp.arg"] or list(_SERVE)
    for name, _, value in given:
        if name == "tsqp.manifest":
            words += ["--manifest", "/model/manifest.json", "--manifest-digest", value]
    return words


def seeded() -> bool:
    """Say whether the kernel's generator has a seed; the runner refuses to start without one."""
    try:
        os.getrandom(1, os.GRND_NONBLOCK)
    except BlockingIOError:
        return False
    return True


class Resumed:
    """Whether this VM was resumed from a snapshot since this was made.

    As `tee_side.protect.resumption` notices it, which a small image has not.
    """

    def __init__(self) -> None:
        self._said = False
        self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(self._log, 0, os.SEEK_END)

    def __bool__(self) -> bool:
        while True:
            try:
                self._said |= b"virtual machine fork" in os.read(self._log, 8192)
            except BlockingIOError:
                return self._said


def report(resumed: Resumed) -> str:
    """Return how this guest stands, as one line of JSON."""
    # Of the file system, not of this process's view of it, which systemd made read-only.
    with open("/proc/self/mountinfo") as mounts:
        options = [line.split()[-1] for line in mounts if line.split()[4] == "/"]
    devices = [
        name for name in ("sev-guest", "tdx_guest", "vsock") if os.path.exists(f"/dev/{name}")
    ]
    return "tsqp-guest " + json.dumps(
        {
            "system": platform.freedesktop_os_release()["PRETTY_NAME"],
            "kernel": platform.release(),
            "python": platform.python_version(),
            "seeded": seeded(),
            "resumed": bool(resumed),
            "root": options[-1].split(",")[0],
            "devices": devices,
        }
    )


def say(line: str) -> None:
    """Write a line to the console."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point."""
    with open("/proc/cmdline") as file:
        line = file.read()
    if "tsqp.self-test" not in line.split():
        words = command(line)
        module = "main" if words[0] == "doctor" else "tee_runner"
        os.execv("/usr/bin/python3", ["python3", "-I", "-c", _PROGRAM.format(module), *words])
    resumed = Resumed()
    say(report(resumed))
    for asked in sys.stdin:
        if asked.strip() == "off":
            break
        if asked.strip() == "report":
            say(report(resumed))


if __name__ == "__main__":
    main()
