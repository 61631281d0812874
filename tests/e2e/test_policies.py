"""Policies of each kind of service: the command line against real gpu-service processes.

Every policy, in one process: tests/contract/test_policies.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.model import greedy
from tests.kit.service import CALM, Service, call, running_service

PROMPT, TOKENS = "Once upon a time", 8
Generate = Callable[..., tuple[dict[str, Any], torch.Tensor]]


@pytest.fixture
def generate(tmp_path: Path) -> Generate:
    """Return a function that runs `tee-runner generate`: what it says, and its logits."""

    def run(policy: str, *options: str) -> tuple[dict[str, Any], torch.Tensor]:
        result = call(
            "tee-runner",
            *("generate", "demo", "--policy", policy, "--prompt", PROMPT, "--json", *CALM),
            *("--max-new-tokens", str(TOKENS), "--dtype", "float32"),
            *("--save-logits", str(tmp_path / "logits"), *options),
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), load_file(tmp_path / "logits")["logits"]

    return run


def _of_transformers(said: dict[str, Any], logits: torch.Tensor, reference: Any) -> None:
    token_ids, expected = greedy(reference, said["prompt_token_ids"], TOKENS)
    assert said["token_ids"] == token_ids
    assert (logits - expected).abs().max().item() < 2e-4


@pytest.mark.parametrize("policy", ["attention-in-tee", "published"])
def test_float_policies_give_the_tokens_of_transformers(
    policy: str, demo_service: Service, generate: Generate, reference: Any
) -> None:
    said, logits = generate(policy, "--gpu", demo_service.endpoint)
    _of_transformers(said, logits, reference)
    assert said["policy"] == policy


@pytest.mark.parametrize("policy", ["stip", "cloak-segment"])
def test_services_with_transformed_weights_do_so_too(
    policy: str, generate: Generate, reference: Any, tmp_path: Path
) -> None:
    mask = {"stip": "feature-permutation"}.get(policy, policy)
    key = ("--key", str(tmp_path / "key"))
    weights = ("--mask", mask, "--server-dir", str(tmp_path / "weights"))
    made = call("tsqp", "provision", "demo", *weights, *key)
    assert made.returncode == 0, made.stderr
    bind = f"unix://{tmp_path}/gpu"
    with running_service(tmp_path / "weights", bind, "--threads", "1") as service:
        said, logits = generate(policy, "--gpu", service.endpoint, *key)
    _of_transformers(said, logits, reference)


def test_integer_policies_give_the_same_bits(
    demo_service: Service, generate: Generate, tmp_path: Path
) -> None:
    one = ("--gpu", demo_service.endpoint)
    bank = _bank(tmp_path / "bank")
    made = call("tee-runner", "pads", "make", "demo", "--tokens", "4", *bank)
    assert made.returncode == 0, made.stderr
    clear, clear_logits = generate("quantized-clear", *one)
    with running_service("demo", "tcp://127.0.0.1:*", "--threads", "1") as second:
        two = ("--dealer", second.endpoint, "--dealer-in-the-clear")
        shared, shared_logits = generate("dealt", *one, *two)
    said, logits = generate("shielded", *one, *bank, "--when-out", "tee")
    assert said["token_ids"] == shared["token_ids"] == clear["token_ids"]
    assert torch.equal(logits, clear_logits)
    assert torch.equal(shared_logits, clear_logits)
    # The first token comes from prefill; four of the rest had pads.
    assert said["pads"] == {"available": 0, "waited": 0, "in_tee": TOKENS - 1 - 4}
    assert said["rpc"]["count"] == 4 * (4 * 5 + 1)


def _bank(path: Path) -> tuple[str, ...]:
    return ("--bank", str(path), "--bank-key-beside-bank")


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
    assert call(*make, "40", "--capacity", "48").returncode == 0
    before = json.loads(call(*status).stdout)
    assert (before["capacity"], before["available"], before["next_index"]) == (48, 40, 0)

    ended = call(*generate, "21")
    assert ended.returncode == 0
    after = json.loads(call(*status).stdout)
    # 20 were used; at most a block of 15 beyond them is lost, and nothing comes back.
    assert 20 <= after["next_index"] <= 35
    assert after["available"] == 40 - after["next_index"]

    refused = call(*generate, "30", "--when-out", "fail")
    assert refused.returncode == 2
    assert "pads: got 0 left, expected 1" in refused.stderr
    assert refused.stdout.strip()

    waited = call(*generate, "30", "--when-out", "wait")
    assert waited.returncode == 0, waited.stderr


def test_one_service_under_two_names_is_not_its_own_dealer(demo_service: Service) -> None:
    first = demo_service.endpoint
    result = call(
        *("tee-runner", "generate", "demo", "--policy", "dealt", "--prompt", PROMPT),
        *("--gpu", first, "--dealer", first.replace("127.0.0.1", "localhost")),
        "--dealer-in-the-clear",
    )
    assert result.returncode == 2
    assert "one and the same, expected services of two owners" in result.stderr
