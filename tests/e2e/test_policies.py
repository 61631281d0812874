"""Every built-in policy: tee-runner's command line against real gpu-service processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tee_side.policy.placement import builtin_policies, load_policy
from tee_side.protect.pads import bank_files
from tests.kit.model import greedy
from tests.kit.service import CALM, Service, call, running_service

DEVELOPMENT = """
mode = "development"
max_age_s = 60
[simulated]
measurements = "any"
[claims]
model = "any"
policy = "any"
settings = "any"
version = "any"
plugins = []
services = "any"
"""
PROMPT, TOKENS = "Once upon a time", 24
INT8, FLOAT = (
    [name for name in builtin_policies() if load_policy(name).arithmetic == arithmetic]
    for arithmetic in ("int8", "float")
)


def _bank(path: Path) -> tuple[str, ...]:
    return ("--bank", str(path), "--bank-key-beside-bank")


@pytest.fixture(scope="module")
def second_service() -> Iterator[Service]:
    """A service that must not know of the first."""
    with running_service("demo", "tcp://127.0.0.1:*", "--threads", "1") as service:
        yield service


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, ...]]]:
    """Services that hold transformed weights: their endpoints and keys, as options, by policy."""
    folder = tmp_path_factory.mktemp("provisioned")
    options = {}
    with ExitStack() as running:
        for policy in ("stip", "cloak", "stip-segment", "cloak-segment"):
            mask = load_policy(policy).masks[0].name
            server, key = folder / policy, folder / f"{policy}.key"
            made = call(
                "tsqp",
                *("provision", "demo", "--mask", mask),
                *("--server-dir", str(server), "--key", str(key)),
            )
            assert made.returncode == 0, made.stderr
            service = running_service(server, "tcp://127.0.0.1:*", "--threads", "1")
            endpoint = running.enter_context(service).endpoint
            options[policy] = ("--gpu", endpoint, "--key", str(key))
        yield options


@pytest.fixture(scope="module")
def attested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The options for a service that gives simulated evidence, accepted in development."""
    folder = tmp_path_factory.mktemp("attested")
    assert call("tsqp", "keys", "new", str(folder / "runner")).returncode == 0
    made_inside, appraisal = folder / "service.pub", folder / "development.toml"
    appraisal.write_text(DEVELOPMENT)
    given = ("--allow", str(folder / "runner.pub"), "--public-key", str(made_inside))
    with running_service(
        "demo", "tcp://127.0.0.1:*", "--threads", "1", "--attest", "simulated", *given
    ) as service:
        yield (
            *("--gpu", service.endpoint, "--identity", str(folder / "runner.key")),
            *("--service-key", str(made_inside), "--service-appraisal", str(appraisal)),
        )


@pytest.fixture(scope="module")
def generate(
    demo_service: Service,
    second_service: Service,
    provisioned: dict[str, tuple[str, ...]],
    attested: tuple[str, ...],
) -> Any:
    """Return a function that runs `tee-runner generate`, once a policy and its options."""
    services = {
        1: ("--gpu", demo_service.endpoint),
        2: (
            *("--gpu", demo_service.endpoint, "--gpu", second_service.endpoint),
            "--shares-in-the-clear",
        ),
    }
    special = {**provisioned, "attested-segment": attested}
    found: dict[tuple[str, ...], tuple[dict[str, Any], torch.Tensor, str]] = {}

    def run(policy: str, folder: Path, *options: str) -> tuple[dict[str, Any], torch.Tensor, str]:
        if (policy, *options) not in found:
            logits = folder / "logits"
            result = call(
                "tee-runner",
                *("generate", "demo", "--policy", policy),
                *special.get(policy, services[max(1, load_policy(policy).services)]),
                *("--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--dtype", "float32"),
                *("--json", "--save-logits", str(logits), *CALM, *options),
            )
            assert result.returncode == 0, result.stderr
            answer = json.loads(result.stdout)
            found[policy, *options] = answer, load_file(logits)["logits"], result.stderr
        return found[policy, *options]

    return run


@pytest.mark.parametrize("policy", FLOAT)
def test_float_policies_give_the_tokens_of_transformers(
    policy: str, generate: Any, reference: Any, tmp_path: Path
) -> None:
    answer, logits, _ = generate(policy, tmp_path)
    token_ids, expected = greedy(reference, answer["prompt_token_ids"], TOKENS)
    assert answer["token_ids"] == token_ids
    assert (logits - expected).abs().max().item() < 2e-4
    assert answer["policy"] == policy


@pytest.mark.parametrize("policy", INT8)
def test_integer_policies_give_the_same_bits(policy: str, generate: Any, tmp_path: Path) -> None:
    answer, logits, _ = generate(policy, tmp_path)
    clear, clear_logits, _ = generate("quantized-clear", tmp_path)
    assert answer["token_ids"] == clear["token_ids"]
    assert torch.equal(logits, clear_logits)


def test_without_pads_the_tee_computes_the_same_bits(generate: Any, tmp_path: Path) -> None:
    bank = tmp_path / "bank"
    made = call("tee-runner", "pads", "make", "demo", "--tokens", "7", *_bank(bank))
    assert made.returncode == 0, made.stderr
    with_tee = (*_bank(bank), "--when-out", "tee")
    answer, logits, _ = generate("shielded", tmp_path, *with_tee)
    _, clear_logits, _ = generate("quantized-clear", tmp_path)
    assert torch.equal(logits, clear_logits)
    # The first token comes from prefill; seven of the rest had pads.
    assert answer["pads"] == {"available": 0, "waited": 0, "in_tee": TOKENS - 1 - 7}
    assert answer["rpc"]["count"] == 7 * (4 * 5 + 1)


def test_with_a_bank_pads_run_out_are_waited_for_and_never_come_back(
    demo_service: Service, tmp_path: Path
) -> None:
    bank = tmp_path / "bank"
    make = ("tee-runner", "pads", "make", "demo", *_bank(bank), "--tokens")
    status = ("tee-runner", "pads", "status", *_bank(bank), "--json")
    generate = (
        "tee-runner",
        *("generate", "demo", "--gpu", demo_service.endpoint, "--prompt", PROMPT),
        *(*_bank(bank), "--max-new-tokens"),
    )
    made = call(*make, "40", "--capacity", "48")
    assert made.returncode == 0
    assert "40 tokens in" in made.stderr
    assert "a second" in made.stderr
    before = json.loads(call(*status).stdout)
    assert (before["capacity"], before["available"], before["next_index"]) == (48, 40, 0)

    ended = call(*generate, "21")
    assert ended.returncode == 0
    after = json.loads(call(*status).stdout)
    # Both count alike, what is left of a block that was begun included.
    assert f", {after['available']} pads left" in ended.stderr
    # 20 were used; at most a block of 15 beyond them is lost, and nothing comes back.
    assert 20 <= after["next_index"] <= 35
    assert after["available"] == 40 - after["next_index"]

    refused = call(*generate, "60", "--when-out", "fail")
    assert refused.returncode == 2
    assert "pads: got 0 left, expected 1" in refused.stderr
    # Text was shown before; what is said next begins a line.
    assert refused.stdout.strip()
    assert refused.stdout.endswith("\n")

    waited = call(*generate, "60", "--when-out", "wait")
    assert waited.returncode == 0, waited.stderr
    assert "times for more)" in waited.stderr.splitlines()[-1]


def test_a_key_beside_the_bank_is_refused_unless_it_is_allowed(
    demo_service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what makes pads and by what uses them. The temporary folder may be in memory."""
    bank, disk = tmp_path / "bank", tmp_path.stat().st_dev
    found = bank_files._in_memory
    monkeypatch.setattr(bank_files, "_in_memory", lambda device: device != disk and found(device))
    make = ("tee-runner", "pads", "make", "demo", "--tokens", "2", "--bank", str(bank))
    generate = (
        "tee-runner",
        *("generate", "demo", "--gpu", demo_service.endpoint, "--prompt", PROMPT),
        *("--max-new-tokens", "2", "--bank", str(bank)),
    )
    refused = [call(*make)]
    assert not bank.exists()
    assert call(*make, "--bank-key-beside-bank").returncode == 0
    refused.append(call(*generate))
    for result in refused:
        assert result.returncode == 2
        assert f"{bank}.key: got the file system of the bank {bank}" in result.stderr
        assert "--bank-key FILE" in result.stderr
        assert "--bank-key-beside-bank" in result.stderr
    assert call(*generate, "--bank-key-beside-bank").returncode == 0


def test_one_service_under_two_names_does_not_get_both_shares(demo_service: Service) -> None:
    endpoint = demo_service.endpoint
    result = call(
        "tee-runner",
        *("generate", "demo", "--policy", "two-server", "--prompt", PROMPT),
        *(
            "--shares-in-the-clear",
            "--gpu",
            endpoint,
            "--gpu",
            endpoint.replace("127.0.0.1", "localhost"),
        ),
    )
    assert result.returncode == 2
    assert "one and the same, expected two that do not collude" in result.stderr
