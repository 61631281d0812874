"""Which layers are measured; and what is refused before any work."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from tee_side.policy.placement import load_policy
from tests.kit.leaks import policy_with
from tsqp.cli.main import command
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.plan import run


def test_layers_of_one_kind_are_measured_once() -> None:
    config = find_shape("tinyllama-1.1b").config()
    sent = {"place": "gpu", "mask": "none", "verify": "none"}
    ends = [{"place": "tee", "layers": layers} for layers in ("0", "20-")]
    policy = policy_with(qkv_proj=[*ends, sent | {"layers": "1-19"}], o_proj=sent)
    kinds = run._kinds(policy, config)
    assert kinds == [0] + [1] * 19 + [0] * 2
    assert set(run._kinds(load_policy("shielded"), config)) == {0}


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--shape", "nope"], ["--shape", "nope", "llama-3.2-1b"]),
        ([], ["MODEL and --shape", "neither"]),
        (["demo", "--gpu", "nope"], ["accelerator profile", "'nope'", "h100"]),
        (["demo", "--link", "0,5"], ["link.gbps", "0"]),
        (["demo", "--tee-cores", "0"], ["tee-cores"]),
        (["demo", "--tensor-parallel", "2", "--columns", "2"], ["--tensor-parallel", "--columns"]),
        (["demo", "--spin-us", "nan"], ["spin-us"]),
        (["demo", "--context", "100000"], ["--context", "the model's context"]),
        (["demo", "--policy", "stip"], ["policy stip", "feature-permutation", "provision"]),
        (
            ["--shape", "llama-3.1-8b", "--context", "100000", "--batch", "1000"],
            ["memory", "available", "KV cache"],
        ),
    ],
)
def test_bad_input_is_refused_before_any_work(
    arguments: list[str], fragments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_starts(*_arguments: object, **_settings: object) -> None:
        raise RuntimeError("work was begun")

    monkeypatch.setattr(run.Planning, "run", nothing_starts)
    gpu = [] if "--gpu" in arguments else ["--gpu", "h100"]
    policy = [] if "--policy" in arguments else ["--policy", "attention-in-tee"]
    result = CliRunner().invoke(command, ["plan", *arguments, *gpu, *policy])
    text = result.output + str(result.exception)
    assert result.exit_code != 0
    for fragment in fragments:
        assert fragment in text
