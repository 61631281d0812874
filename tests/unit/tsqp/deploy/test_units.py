"""Units of systemd and containers: hardened, and what they start is ours."""

import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import click
import yaml

from tests.kit.rows import each_row
from tsqp.cli.config import PROGRAMS

ROOT = Path(__file__).resolve().parents[4]
DEPLOY = Path(str(files("tsqp.deploy")))
UNITS = {
    "gpu-service": DEPLOY / "host/gpu-service.service",
    "tee-runner": DEPLOY / "host/tee-runner.service",
    "tsqp-guest": DEPLOY / "host/tsqp-guest.service",
    "guest": DEPLOY / "guest/tsqp.service",
}
PROGRAM = {"gpu-service": "gpu-service", "tee-runner": "tee-runner", "tsqp-guest": "tsqp"}
# It has no /tmp of others, no other user's objects, and what ends its program ends the VM.
NOT_IN_THE_IMAGE = ("DevicePolicy", "PrivateTmp", "ProtectProc", "RemoveIPC", "Restart")
ON = """LockPersonality NoNewPrivileges PrivateMounts PrivateTmp ProtectClock ProtectControlGroups
ProtectHome ProtectHostname ProtectKernelModules ProtectKernelTunables RemoveIPC RestrictNamespaces
RestrictRealtime RestrictSUIDSGID"""
EVERYWHERE = dict.fromkeys(ON.split(), "yes") | {
    "DevicePolicy": "closed",
    "KeyringMode": "private",
    "LimitCORE": "0",
    "ProtectProc": "invisible",
    "ProtectSystem": "strict",
    "Restart": "on-failure",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK AF_VSOCK",
    "SystemCallArchitectures": "native",
    "SystemCallErrorNumber": "EPERM",
}


def read_unit(path: Path) -> dict[str, dict[str, list[str]]]:
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


@each_row("side", list(UNITS))
def test_hardening_that_all_units_have(side: str) -> None:
    service, expected = read_unit(UNITS[side])["Service"], dict(EVERYWHERE)
    if side == "guest":
        expected = {name: expected[name] for name in expected if name not in NOT_IN_THE_IMAGE}
    if side == "tsqp-guest":  # a guest that ends itself is off, and QEMU has done what it should
        expected["Restart"] = "always"
    assert {name: service[name] for name in expected} == {
        name: [value] for name, value in expected.items()
    }
    assert service["SystemCallFilter"] == ["@system-service", "~@privileged"]


@each_row(
    ("side", "name", "expected"),
    [
        # The service's own network is this machine until a drop-in says more.
        ("gpu-service", "IPAddressDeny", ["any"]),
        ("gpu-service", "IPAddressAllow", ["localhost"]),
        ("gpu-service", "CapabilityBoundingSet", [""]),
        # Whoever may connect is in the group.
        ("gpu-service", "UMask", ["0007"]),
        ("tee-runner", "StateDirectoryMode", ["0700"]),
        ("tee-runner", "UMask", ["0077"]),
        ("tee-runner", "LimitMEMLOCK", ["infinity"]),
        ("tee-runner", "MemorySwapMax", ["0"]),
        # Reading the kernel's log, which says that the VM was resumed, needs this capability.
        ("tee-runner", "CapabilityBoundingSet", ["CAP_SYSLOG"]),
        ("tee-runner", "DeviceAllow", ["/dev/sev-guest rw", "/dev/kmsg r"]),
        ("tee-runner", "ProtectKernelLogs", None),
        # ProtectKernelTunables makes all of /sys read-only, and reports are asked for there.
        ("tee-runner", "ReadWritePaths", ["-/sys/kernel/config -/sys/devices"]),
        ("tsqp-guest", "CapabilityBoundingSet", [""]),
        ("tsqp-guest", "UMask", ["0077"]),
        ("guest", "CapabilityBoundingSet", ["CAP_SYSLOG"]),
        ("guest", "UMask", ["0077"]),
    ],
)
def test_what_one_side_needs(side: str, name: str, expected: list[str] | None) -> None:
    assert read_unit(UNITS[side])["Service"].get(name) == expected


@each_row("side", list(PROGRAM))
def test_what_a_unit_starts_is_ours_by_a_user_of_its_own(side: str) -> None:
    service = read_unit(UNITS[side])["Service"]
    path, *words = shlex.split(service["ExecStart"][0])
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert (Path(path).name, Path(path).name in scripts) == (PROGRAM[side], True)
    assert unknown_words([PROGRAM[side], *words]) == []
    users = (DEPLOY / "host/tsqp.sysusers").read_text()
    assert re.search(rf"^u!? {service['User'][0]} ", users, re.MULTILINE)
    others = [read_unit(UNITS[other])["Service"]["User"] for other in PROGRAM if other != side]
    assert service["User"] not in [*others, ["root"]]


@each_row("side", ["gpu-service", "tee-runner"])
def test_a_container_has_no_rights_and_starts_what_is_ours(side: str) -> None:
    content = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())
    service = content["services"][side]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"]["core"] == 0
    assert not service.keys() & {"privileged", "cap_add", "user", "devices", "pid", "ipc"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert service.get("network_mode") == ("none" if side == "gpu-service" else None)
    assert unknown_words([side, *service["command"]]) == []
    users = re.findall(
        r"^USER (.*)", (DEPLOY / "container/Containerfile").read_text(), re.MULTILINE
    )
    assert users == ["65532:65532"]
