"""Growth: which cases are measured, how a prompt is split, and what counts as linear."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.growth import (
    Sizes,
    attention_ms,
    comma_separated,
    grown,
    growths,
    main,
    plan_for,
)
from tests.kit.model import SIZES
from tests.unit.tsqp.bench.sample_report import case, policy_run
from tsqp.lab.bench.shapes import Shape

SETTLED = Sizes(layers=(4, 16), contexts=(128, 512), prompts=(128, 512), batches=(1, 8))


@pytest.mark.parametrize(
    ("exponent", "linear"), [(0.0, True), (1.0, True), (1.04, True), (1.2, False), (2.0, False)]
)
def test_an_exponent_is_found_and_judged(exponent: float, linear: bool) -> None:
    found = grown("c", "s", "", [(size, 3.0 * size**exponent) for size in (8, 2, 4)])
    assert found.exponent == pytest.approx(exponent, abs=1e-9)
    assert [size for size, _ in found.points] == [2, 4, 8]
    assert (found.linear, found.may_exceed) == (linear, False)


def test_what_cannot_be_fitted_is_not_called_linear() -> None:
    found = grown("c", "s", "", [(1, 0.0), (2, 1.0)])
    assert (found.exponent, found.linear) == (None, False)


def test_attention_gets_its_share_of_the_overhead() -> None:
    one = case("attention-in-tee", "prefill", 512)
    parts = [c for c in one.operators if c.operator not in ("embedding", "lm_head")]
    attention_us = sum(c.stages.total_us for c in parts if c.operator == "attention")
    whole_us = sum(c.stages.total_us for c in parts) + one.rest_us
    share = attention_us / whole_us
    assert 0 < share < 1
    assert attention_ms(one) == pytest.approx(one.overhead_ms * share)
    # A step that was faster than those observed is divided as they were.
    half = one.model_copy(update={"overhead_ms": one.overhead_ms / 2})
    assert attention_ms(half) == pytest.approx(attention_ms(one) / 2)


def test_only_the_most_layers_get_every_case() -> None:
    few, many = (plan_for(count, SETTLED, 5, 24) for count in SETTLED.layers)
    assert (few.prefill, few.decode) == ((128,), ((128, 1),))
    assert (many.prefill, many.decode) == ((128, 512), ((128, 1), (512, 1), (128, 8)))
    assert few.generation is None


def test_everything_is_fitted() -> None:
    runs = {count: policy_run("attention-in-tee", layers=count) for count in SETTLED.layers}
    # Its cases in two micro-batches are others.
    runs = {
        count: run.model_copy(update={"cases": tuple(c for c in run.cases if c.micro_batches == 1)})
        for count, run in runs.items()
    }
    found = {(one.cost, one.against): one for one in growths(runs, SETTLED)}
    assert list(found) == [
        ("decode step", "layers"),
        ("prefill", "layers"),
        ("decode step", "context"),
        ("decode step, attention", "context"),
        ("prefill, attention", "prompt"),
        ("prefill, all else", "prompt"),
        ("decode step", "batch"),
    ]
    assert [one.may_exceed for one in found.values()] == [False] * 4 + [True] + [False] * 2
    attention = found["prefill, attention", "prompt"]
    assert attention.exponent is not None
    assert attention.exponent > 1.5
    rest = found["prefill, all else", "prompt"]
    for (tokens, one), (_, other) in zip(attention.points, rest.points, strict=True):
        whole = case("attention-in-tee", "prefill", tokens)
        assert one + other == pytest.approx(whole.overhead_ms)
    batches = found["decode step", "batch"]
    assert batches.points[1] == (8, case("attention-in-tee", "decode", 128, 8).overhead_ms)
    layers = found["decode step", "layers"]
    assert layers.points[0] == (4, case("attention-in-tee", "decode", 128, layers=4).overhead_ms)


def test_measures_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {**SIZES, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    shape = Shape("tiny", "none", tiny)
    monkeypatch.setattr("benchmarks.growth.find_shape", lambda name: shape)
    file = tmp_path / "out.json"
    arguments = ["--layers", "2,1", "--contexts", "4,8", "--prompts", "4,8", "--batches", "1,2"]
    main(
        [*arguments, "--repeats", "1", "--decode-steps", "1", "--threads", "1", "--json", str(file)]
    )
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found["growth"]) == 7
    sizes = {one["against"]: [size for size, _ in one["points"]] for one in found["growth"]}
    assert sizes == {"layers": [1, 2], "context": [4, 8], "prompt": [4, 8], "batch": [1, 2]}
    assert found["transport"] == "unix"


@pytest.mark.parametrize("text", ["", "0", "1,", "a", "1.5", "-1"])
def test_bad_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected whole numbers from 1"):
        comma_separated(text)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(SystemExit, match="growth: error: --shape: got 'camel'"):
        main(["--shape", "camel"])
