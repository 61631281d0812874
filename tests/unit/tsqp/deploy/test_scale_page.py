"""docs/operate/scale.md: its manifest and commands are ones that the programs take."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import pairwise
from typing import Any

import pytest
import yaml

from tee_side.policy.placement import load_policy
from tee_side.remote.services.plan import ServiceSpec, plan_services
from tests.unit.tsqp.deploy.test_units import ROOT, unknown_words
from tsqp.cli.settings import _names_of

PAGE = (ROOT / "docs/operate/scale.md").read_text()


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """What the page's yaml says, by kind."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["Deployment"]["spec"]["template"]
    return found


def test_the_runner_starts_with_options_that_it_has(pod: dict[str, Any]) -> None:
    (runner,) = pod["spec"]["containers"]
    assert runner["args"][0] == "serve"
    assert unknown_words(["tee-runner", *runner["args"]]) == []
    assert pod["spec"]["runtimeClassName"]


def test_the_settings_are_settings_and_its_services_have_all_columns(
    manifest: dict[str, Any], pod: dict[str, Any]
) -> None:
    data = manifest["ConfigMap"]["data"]
    settings = tomllib.loads(data["tsqp.toml"])
    assert settings.keys() <= _names_of(["tee-runner"])
    specs = [ServiceSpec.parse(text) for text in settings["gpu"]]
    assert len(plan_services(specs, load_policy(settings["policy"]), 16)) == 2
    (runner,) = pod["spec"]["containers"]
    at = {mount["name"]: mount["mountPath"] for mount in runner["volumeMounts"]}
    assert runner["args"][runner["args"].index("--config") + 1] == f"{at['settings']}/tsqp.toml"
    assert settings["service-key"] == [f"{at['settings']}/{n}" for n in ("first.pub", "second.pub")]
    assert {"first.pub", "second.pub"} <= data.keys()
    for name in ("identity", "api-keys"):  # what only their owner may read
        assert settings[name].startswith(f"{at['keys']}/")


def test_what_is_mounted_is_there_and_nothing_secret_is_on_a_disk(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in spec["containers"] + spec["initContainers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
    assert volumes["keys"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["secret"]["secret"]["defaultMode"] == 0o440
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 65532


def test_the_service_finds_the_pods_and_keeps_clients_at_one(
    manifest: dict[str, Any], pod: dict[str, Any]
) -> None:
    service, labels = manifest["Service"]["spec"], pod["metadata"]["labels"]
    assert service["selector"] == labels
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    (runner,) = pod["spec"]["containers"]
    probe = runner["readinessProbe"]["httpGet"]
    assert service["ports"][0]["targetPort"] == probe["port"] == 8000
    # Its certificate is attested, so it speaks TLS itself.
    assert ("--attest" in runner["args"]) == (probe["scheme"] == "HTTPS")
    assert service["sessionAffinity"] == "ClientIP"


def test_every_command_of_the_page_is_one() -> None:
    lines = re.findall(r"^    (?:gpu-service|tee-runner) .*", PAGE, flags=re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        words = [one for one in shlex.split(line, comments=True) if one != "..."]
        assert unknown_words(words) == []
        for option, value in pairwise(words):
            if option == "--gpu":
                ServiceSpec.parse(value)
