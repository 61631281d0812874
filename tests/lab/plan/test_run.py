"""Which layers are measured; and what is refused before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_side.profiles import find_profile
from tee_side.policy.placement import load_policy
from tests.kit.leaks import policy_with
from tsqp.cli.main import command
from tsqp.lab.bench.model import PadMaking
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.plan import run
from tsqp.lab.plan.model import Costs, Lane, Step

from .sample_costs import NO_LINK, section


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


def test_what_a_plan_says_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of a prompt and of a decode step, tokens of one request and of all."""
    policies = (("tee-only", load_policy("tee-only")),)
    sizes: dict[str, Any] = {"batch": 4, "context": 1000, "prompt_tokens": 500, "cores": 1}
    given = run.PlanSettings(
        policies, find_profile("h100"), NO_LINK, shape="tinyllama-1.1b", **sizes
    )
    planning = run.Planning(given, print)
    prompt, decode = (
        Step(rows=rows, lanes=(Lane(head=section(us), layers=(section(0.0),), tail=section(0.0)),))
        for rows, us in ((500, 3_000_000.0), (4, 20_000.0))
    )
    measured = Costs(
        threads=1, layers=3, itemsize=2, order=(0,) * 22, prefill=(prompt,), decode=decode
    )
    monkeypatch.setattr(planning, "_costs", lambda name, policy: measured)
    (found,) = planning.run().policies
    assert found.ttft_ms == pytest.approx(3000)
    assert found.tpot_ms == pytest.approx(20)
    assert found.tokens_per_s_per_request == pytest.approx(50)
    assert found.tokens_per_s == pytest.approx(200)
    assert (found.pads, found.sustained_tokens_per_s) == (None, found.tokens_per_s)
    # On twice the cores pads take half as long: 4 sequences of 5 ms, after a step of 20.
    pads = PadMaking(phases=("decode",), token_ms=10.0, cpu_ms=10.0, batch_tokens=512)
    more = run.Planning(replace(given, cores=2), print)
    monkeypatch.setattr(more, "_costs", lambda *_: measured.model_copy(update={"pads": pads}))
    (found,) = more.run().policies
    assert found.pads is not None
    assert found.pads.token_ms == pytest.approx(5)
    made_us = 4 * 5e3
    assert found.sustained_tokens_per_s == pytest.approx(4e6 / (found.decode.total_us + made_us))
