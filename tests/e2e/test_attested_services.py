"""A runner that sends nothing to a service that has not proved what it is: real processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tee_side.words import OPERATORS
from tests.kit.evidence import DIGESTS, policy_text
from tests.kit.service import Service, call, run, running_service

PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "4", "--json")
HEAVY, TEE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), '= "tee"'
MEASUREMENT = hashlib.sha384(version("tsqp").encode()).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of both sides, and a policy."""
    made = tmp_path_factory.mktemp("services")
    for name in ("runner", "silent"):
        assert call("tsqp", "keys", "new", str(made / name)).returncode == 0
    attested = '= { place = "attested", mask = "none", verify = "none" }'
    operators = [f"{name} {attested if name in HEAVY else TEE}" for name in OPERATORS]
    head = ['name = "to-attested"', 'summary = "to a service that proves what it is"', "[service]"]
    head += ['attested = "simulated"', "[operators]"]
    (made / "policy.toml").write_text("\n".join([*head, *operators]))
    claims = dict.fromkeys((*DIGESTS, "version", "services"), "any")
    for name, measurement in (("appraisal", MEASUREMENT), ("wrong", "00" * 48)):
        (made / f"{name}.toml").write_text(policy_text([measurement], **claims, plugins=[]))
    return made


@pytest.fixture(scope="module")
def attested(folder: Path) -> Iterator[Service]:
    """A service that makes its key inside, and proves it."""
    keys = ("--allow", str(folder / "runner.pub"), "--public-key", str(folder / "attested.pub"))
    with running_service("demo", "tcp://127.0.0.1:*", "--attest", "simulated", *keys) as service:
        yield service


def generate(
    folder: Path, service: Service, *more: str, key: str = "attested"
) -> tuple[int, str, str]:
    keys = ("--identity", str(folder / "runner.key"), "--service-key", str(folder / f"{key}.pub"))
    given = ("--gpu", service.endpoint, "--policy", str(folder / "policy.toml"), *keys, *PROMPT)
    found = run("tee-runner", "generate", "demo", "--dtype", "float32", *given, *more)
    return found.returncode, found.stdout, found.stderr


def test_what_an_attested_service_computes_is_what_the_tee_would(
    folder: Path, attested: Service
) -> None:
    tee_only = ("generate", "demo", "--dtype", "float32", "--policy", "tee-only", *PROMPT)
    alone = call("tee-runner", *tee_only)
    status, said, errors = generate(
        folder, attested, "--service-appraisal", str(folder / "appraisal.toml")
    )
    assert status == 0, errors
    assert json.loads(said)["token_ids"] == json.loads(alone.stdout)["token_ids"]
    assert "services give simulated evidence, which proves nothing" in errors


def test_a_service_with_another_measurement_is_asked_for_nothing(
    folder: Path, attested: Service
) -> None:
    status, _, errors = generate(
        folder, attested, "--service-appraisal", str(folder / "wrong.toml")
    )
    assert status != 0
    assert f"service {attested.endpoint}: measurement: got {MEASUREMENT}, expected 00" in errors


def test_a_service_without_evidence_is_asked_for_nothing(folder: Path) -> None:
    keys = ("--identity", str(folder / "silent.key"), "--allow", str(folder / "runner.pub"))
    with running_service("demo", "tcp://127.0.0.1:*", *keys) as silent:
        status, _, errors = generate(folder, silent, key="silent")
    assert status != 0
    assert "got none, expected simulated evidence (gpu-service --attest)" in errors
