"""A runner that sends nothing to a service that has not proved what it is: real processes."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess

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


def generate(
    folder: Path, service: Service, *more: str, key: str = "attested"
) -> CompletedProcess[str]:
    keys = ("--identity", str(folder / "runner.key"), "--service-key", str(folder / f"{key}.pub"))
    given = ("--gpu", service.endpoint, "--policy", str(folder / "policy.toml"), *keys, *PROMPT)
    return run("tee-runner", "generate", "demo", "--dtype", "float32", *given, *more)


def test_an_attested_service_computes_what_the_tee_would_or_is_asked_for_nothing(
    folder: Path,
) -> None:
    """Of another measurement it is asked for nothing."""
    tee_only = ("generate", "demo", "--dtype", "float32", "--policy", "tee-only", *PROMPT)
    alone = call("tee-runner", *tee_only)
    keys = ("--allow", str(folder / "runner.pub"), "--public-key", str(folder / "attested.pub"))
    with running_service("demo", "tcp://127.0.0.1:*", "--attest", "simulated", *keys) as service:
        found, wrong = (
            generate(folder, service, "--service-appraisal", str(folder / f"{name}.toml"))
            for name in ("appraisal", "wrong")
        )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["token_ids"] == json.loads(alone.stdout)["token_ids"]
    assert "services give simulated evidence, which proves nothing" in found.stderr
    assert wrong.returncode != 0
    named = f"service {service.endpoint}: measurement: got {MEASUREMENT}, expected 00"
    assert named in wrong.stderr


def test_a_service_without_evidence_is_asked_for_nothing(folder: Path) -> None:
    keys = ("--identity", str(folder / "silent.key"), "--allow", str(folder / "runner.pub"))
    with running_service("demo", "tcp://127.0.0.1:*", *keys) as silent:
        refused = generate(folder, silent, key="silent")
    assert refused.returncode != 0
    assert "got none, expected simulated evidence (gpu-service --attest)" in refused.stderr
