"""systemd's units of both sides: their hardening, what they start, and that a wheel has them."""

from __future__ import annotations

import shlex
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import click

from tests.kit.rows import each_row
from tsqp.cli.settings import PROGRAMS

ROOT = Path(__file__).resolve().parents[4]
DEPLOY = Path(str(files("tsqp.deploy")))
HOST = DEPLOY / "host"
UNITS = {
    "gpu-service": HOST / "gpu-service.service",
    "tee-runner": HOST / "tee-runner.service",
    "tsqp-guest": HOST / "tsqp-guest.service",
    "guest": DEPLOY / "guest/tsqp.service",
}
PROGRAM = {"gpu-service": "gpu-service", "tee-runner": "tee-runner", "tsqp-guest": "tsqp"}
# Where the guest's unit differs: it is of an image that has one program and no other user, its
# runner says on the console what it does, and what ends it ends the VM.
OF_THE_IMAGE = {"ExecStart", "StandardError", "StandardInput", "StandardOutput", "TTYPath"}
OF_THE_IMAGE |= {"Environment", "ReadWritePaths"}
# It has no /tmp of others, no other user's objects, and a device more for its console.
NOT_IN_THE_IMAGE = {"DevicePolicy", "PrivateTmp", "ProtectProc", "RemoveIPC", "Restart"}

EVERYWHERE = {
    "KeyringMode": "private",
    "LimitCORE": "0",
    "LockPersonality": "yes",
    "NoNewPrivileges": "yes",
    "PrivateMounts": "yes",
    "PrivateTmp": "yes",
    "ProtectClock": "yes",
    "ProtectControlGroups": "yes",
    "ProtectHome": "yes",
    "ProtectHostname": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectProc": "invisible",
    "ProtectSystem": "strict",
    "RemoveIPC": "yes",
    "Restart": "on-failure",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "RuntimeDirectory": "tsqp",
    "SystemCallArchitectures": "native",
    "SystemCallErrorNumber": "EPERM",
    "DevicePolicy": "closed",
}
FILTER = ["@system-service", "~@privileged"]
FAMILIES = ["AF_UNIX AF_INET AF_INET6 AF_NETLINK AF_VSOCK"]


def read_unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """Return all values of every setting of every section, in order."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            settings = sections[line.strip("[]")] = defaultdict(list)
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            settings[name].append(value)
    return sections


def unknown_words(words: Sequence[str]) -> list[str]:
    """Return the options, or the name of a command, that our program does not have."""
    program, *rest = words
    command: click.Command = import_module(f"tsqp.cli.{PROGRAMS[program]}").command
    while isinstance(command, click.Group):
        name, *rest = rest
        found = command.get_command(click.Context(command), name)
        if found is None:
            return [name]
        command = found
    known = {option for parameter in command.params for option in parameter.opts}
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]


@each_row(
    ("side", "others"),
    [
        ("gpu-service", {}),
        ("tee-runner", {}),
        # A guest that ends itself is off, and QEMU has done what it should.
        ("tsqp-guest", {"Restart": "always", "RuntimeDirectory": "tsqp-guest"}),
        ("guest", dict.fromkeys(NOT_IN_THE_IMAGE)),
    ],
)
def test_hardening_that_all_have(side: str, others: dict[str, str | None]) -> None:
    service, expected = read_unit(UNITS[side])["Service"], EVERYWHERE | others
    assert {name: service.get(name) for name in expected} == {
        name: None if value is None else [value] for name, value in expected.items()
    }
    assert service["SystemCallFilter"] == FILTER
    assert service["RestrictAddressFamilies"] == FAMILIES


@each_row(
    ("side", "name", "expected"),
    [
        # The service's own network is this machine until a drop-in says more.
        ("gpu-service", "IPAddressDeny", ["any"]),
        ("gpu-service", "IPAddressAllow", ["localhost"]),
        ("gpu-service", "DeviceAllow", ["char-nvidia* rw"]),
        ("gpu-service", "CapabilityBoundingSet", [""]),
        ("gpu-service", "AmbientCapabilities", [""]),
        ("gpu-service", "ProtectKernelLogs", ["yes"]),
        # Whoever may connect is in the group.
        ("gpu-service", "RuntimeDirectoryMode", ["0750"]),
        ("gpu-service", "UMask", ["0007"]),
        ("tee-runner", "RuntimeDirectoryMode", ["0700"]),
        ("tee-runner", "StateDirectoryMode", ["0700"]),
        ("tee-runner", "UMask", ["0077"]),
        ("tee-runner", "LimitMEMLOCK", ["infinity"]),
        ("tee-runner", "MemorySwapMax", ["0"]),
        ("tee-runner", "SuccessExitStatus", ["143"]),
        ("tsqp-guest", "CapabilityBoundingSet", [""]),
        ("guest", "CapabilityBoundingSet", ["CAP_SYSLOG"]),
        ("guest", "UMask", ["0077"]),
        ("guest", "RuntimeDirectoryMode", ["0700"]),
        (
            "guest",
            "ReadWritePaths",
            ["-/sys/kernel/config -/sys/devices/pci0000:00/0000:00:10.0"],
        ),
        ("tsqp-guest", "DeviceAllow", ["/dev/kvm rw", "/dev/sev rw", "/dev/vhost-vsock rw"]),
        ("tsqp-guest", "UMask", ["0077"]),
        # Reading the kernel's log, which says that the VM was resumed, needs this capability.
        ("tee-runner", "CapabilityBoundingSet", ["CAP_SYSLOG"]),
        ("tee-runner", "AmbientCapabilities", ["CAP_SYSLOG"]),
        ("tee-runner", "DeviceAllow", ["/dev/sev-guest rw", "/dev/kmsg r"]),
        ("tee-runner", "ProtectKernelLogs", None),
        # ProtectKernelTunables makes all of /sys read-only, and reports are asked for there.
        ("tee-runner", "ReadWritePaths", ["-/sys/kernel/config -/sys/devices"]),
    ],
)
def test_what_one_side_needs(side: str, name: str, expected: list[str] | None) -> None:
    assert read_unit(UNITS[side])["Service"].get(name) == expected


def test_the_guest_of_an_image_is_hardened_no_more_than_a_runner_elsewhere() -> None:
    guest, runner = (read_unit(UNITS[side])["Service"] for side in ("guest", "tee-runner"))
    shared = guest.keys() - OF_THE_IMAGE
    assert {name: runner.get(name) for name in shared} == {name: guest[name] for name in shared}


@each_row("side", list(PROGRAM))
def test_what_is_started_is_ours_and_has_these_options(side: str) -> None:
    unit = read_unit(UNITS[side])
    (line,) = unit["Service"]["ExecStart"]
    path, *words = shlex.split(line)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(path).parent == Path("/opt/tsqp/bin")
    assert Path(path).name == PROGRAM[side]
    assert PROGRAM[side] in scripts
    assert unknown_words([PROGRAM[side], *words]) == []
    assert words[-2:] == ["--config", f"/etc/tsqp/{side}.toml"]
    assert unit["Install"]["WantedBy"] == ["multi-user.target"]


def test_an_option_that_is_none_of_ours_is_found() -> None:
    assert unknown_words(["gpu-service", "demo", "--bnd", "x", "--bind=y"]) == ["--bnd"]
    assert unknown_words(["tee-runner", "serve", "demo", "--bind", "x"]) == ["--bind"]
    assert unknown_words(["tsqp", "helth", "x"]) == ["helth"]


def test_each_side_has_a_user_of_its_own_that_is_made() -> None:
    lines = [
        shlex.split(line)
        for line in (HOST / "tsqp.sysusers").read_text().splitlines()
        if not line.startswith("#")
    ]
    made = {line[1] for line in lines if line[0] == "u"}
    services = [read_unit(path)["Service"] for path in HOST.glob("*.service")]
    users = [user for service in services for user in service["User"]]
    assert len(services) > 1
    assert [service["Group"] for service in services] == [service["User"] for service in services]
    # No two share one, and none is root.
    assert sorted(users) == sorted(made)


def test_a_wheel_has_every_file_for_deployment() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    patterns = tools["setuptools"]["package-data"]["tsqp"]
    there = [
        path for folder in ("host", "container", "guest") for path in (DEPLOY / folder).iterdir()
    ]
    names = [f"deploy/{path.parent.name}/{path.name}" for path in there if path.is_file()]
    assert len(names) > 5
    assert [name for name in names if not any(fnmatchcase(name, each) for each in patterns)] == []
