"""Images and the compose file: hardened alike, and what they name is there."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any, NamedTuple

import pytest
import yaml

from tests.kit.rows import each_row
from tests.unit.tsqp.deploy.test_units import ROOT, unknown_words
from tsqp.cli.settings import PREFIX, PROGRAMS, _names_of

FOLDER = ROOT / "tsqp/deploy/container"
SIDES = ("gpu-service", "tee-runner")
TOOLS = ("g++", "gcc", "clang", "make", "pip", "python3-pip", "python3-dev", "git", "curl")


class Stage(NamedTuple):
    """What a stage is made from, and its instructions in order."""

    base: str
    steps: list[tuple[str, str]]

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {"": Stage("", [])}
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        name, _, value = line.partition(" ")
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            found[stage] = Stage(base, [])
        else:
            list(found.values())[-1].steps.append((name, value.strip()))
    return found


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return _read("compose.yaml")


def _read(name: str) -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(content, dict)
    return content


def _health(stage: Stage) -> list[str]:
    (value,) = stage.values("HEALTHCHECK")
    return list(json.loads(value.partition("CMD")[2]))


@each_row("side", SIDES)
def test_an_image_runs_one_program_as_nobody_without_tools(
    stages: dict[str, Stage], side: str
) -> None:
    stage, run = stages[side], stages["run"]
    assert stage.base == "run"
    assert run.base == "${BASE}"
    # No later instruction takes it back.
    assert run.values("USER") == ["65532:65532"]
    assert stage.values("USER") == stage.values("RUN") == []
    assert json.loads(stage.values("ENTRYPOINT")[0]) == [side]
    installed = shlex.split(run.values("RUN")[0].partition("install")[2].partition("&&")[0])
    assert {"python3", "libstdc++6"} <= set(installed)
    assert not set(TOOLS) & set(installed)
    assert "-perm /6000 -exec chmod a-s" in run.values("RUN")[0]


def test_the_image_without_a_target_is_the_services(stages: dict[str, Stage]) -> None:
    assert list(stages)[-1] == "gpu-service"


@each_row("side", SIDES)
def test_a_health_check_is_a_command_that_exists(stages: dict[str, Stage], side: str) -> None:
    words = _health(stages[side])
    if words[0] == "tsqp":
        assert unknown_words(words) == []
    else:
        compile(words[-1], "health", "exec")
        assert words[:2] == ["python3", "-c"]
        assert f":{stages[side].values('EXPOSE')[0]}/health" in words[-1]


def test_variables_are_settings(stages: dict[str, Stage]) -> None:
    words = [
        word
        for stage in stages.values()
        for value in stage.values("ENV")
        for word in shlex.split(value)
        if word.startswith(f"{PREFIX}_")
    ]
    names = [word.partition("=")[0].removeprefix(f"{PREFIX}_").lower() for word in words]
    assert names == ["bind"]
    assert set(names) <= _names_of(PROGRAMS)
    (bind,) = (word.partition("=")[2] for word in words)
    assert _health(stages["gpu-service"])[-1] == bind


def test_what_is_copied_and_installed_is_there(stages: dict[str, Stage]) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [word for value in stages["build"].values("COPY") for word in value.split()[:-1]]
    assert len(sources) > 4
    assert [
        name for name in sources if not (ROOT / name).exists() or f"!{name}" not in ignored
    ] == []
    # What setuptools packs is there for the wheel to be made of.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert packed <= set(sources)
    extras = [
        extra
        for side in SIDES
        for value in stages[f"build-{side}"].values("RUN")
        for group in re.findall(r"\*\.whl\)\[([a-z,]+)\]", value)
        for extra in group.split(",")
    ]
    assert extras == ["attest", "metrics", "attest", "serve"]
    assert set(extras) <= project["project"]["optional-dependencies"].keys()


def test_packages_are_of_the_versions_that_are_tested(stages: dict[str, Stage]) -> None:
    build = stages["build"]
    assert build.values("ENV")[0].startswith("PIP_CONSTRAINT=/source/constraints.txt")
    (torch,) = (value for value in build.values("RUN") if "TORCH_INDEX" in value)
    assert "\"$(grep '^torch==' /source/constraints.txt)+${TORCH}\"" in torch
    assert re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@each_row("side", SIDES)
def test_containers_have_no_rights_and_write_nowhere(compose: dict[str, Any], side: str) -> None:
    service = compose["services"][side]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"]["core"] == 0
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert not service.keys() & {"privileged", "cap_add", "user", "devices", "pid", "ipc"}
    assert service["volumes"] == ["link:/run/tsqp" + (":ro" if side == "tee-runner" else "")]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")


@each_row("side", SIDES)
def test_a_container_starts_what_its_image_has(
    compose: dict[str, Any], stages: dict[str, Stage], side: str
) -> None:
    service = compose["services"][side]
    assert (FOLDER / service["build"]["context"]).resolve() == ROOT
    assert ROOT / service["build"]["dockerfile"] == FOLDER / "Containerfile"
    assert service["build"]["target"] == side
    assert unknown_words([side, *service["command"]]) == []
    assert service["healthcheck"]["test"] == ["CMD", *_health(stages[side])]
    for name in ("interval", "timeout", "start_period"):
        option = f"--{name.replace('_', '-')}={service['healthcheck'][name]}"
        assert option in stages[side].values("HEALTHCHECK")[0].split()


def test_the_link_is_a_socket_in_memory_and_the_service_has_no_network(
    compose: dict[str, Any],
) -> None:
    service, runner = compose["services"]["gpu-service"], compose["services"]["tee-runner"]
    commands = (service["command"], runner["command"], service["healthcheck"]["test"])
    endpoints = {word for words in commands for word in words if "://" in word}
    assert endpoints == {"unix:///run/tsqp/gpu.sock"}
    assert service["network_mode"] == "none"
    assert "ports" not in service
    assert runner["depends_on"] == {"gpu-service": {"condition": "service_healthy"}}
    link = compose["volumes"]["link"]["driver_opts"]
    assert (link["type"], link["o"].split(",")[:3]) == (
        "tmpfs",
        ["uid=65532", "gid=65532", "mode=0700"],
    )


def test_a_gpu_changes_the_service_alone(compose: dict[str, Any], stages: dict[str, Stage]) -> None:
    override = _read("compose.gpu.yaml")
    assert list(override["services"]) == ["gpu-service"]
    service = override["services"]["gpu-service"]
    assert service["command"][:3] == compose["services"]["gpu-service"]["command"]
    assert service["command"][3:] == ["--device", "cuda"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    # What is compiled goes where the image allows it.
    (volume,) = service["volumes"]
    assert volume.partition(":")[2] == stages["gpu-service"].values("VOLUME")[0]
    assert f"HOME={volume.partition(':')[2]}" in stages["gpu-service"].values("ENV")[0].split()
    arguments = service["build"]["args"]
    assert arguments.keys() == {"BASE", "TORCH"}
    known = [value.partition("=")[0] for stage in stages.values() for value in stage.values("ARG")]
    assert arguments.keys() <= set(known)
    # The CUDA of the base is that of torch's build.
    major, minor = re.findall(r"cuda:(\d+)\.(\d+)\.\d+-base-ubuntu24\.04$", arguments["BASE"])[0]
    assert arguments["TORCH"] == f"cu{major}{minor}"


def test_the_file_says_that_nothing_is_confidential() -> None:
    assert "NOTHING IS CONFIDENTIAL" in (FOLDER / "compose.yaml").read_text().partition("name:")[0]
