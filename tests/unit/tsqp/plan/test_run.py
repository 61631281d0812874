"""Which layers are measured; and what is refused before any work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_side.profiles import find_profile
from protocol.errors import SettingsError, TsqpError
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import OPERATORS
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.cli.main import command
from tsqp.cli.plan import read_link
from tsqp.cli.program import model_directory
from tsqp.lab.bench.memory_need import tee_need
from tsqp.lab.bench.model import PadMaking
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.link import Link
from tsqp.lab.plan import run
from tsqp.lab.plan.job import as_in_layer
from tsqp.lab.plan.model import Costs, Lane, Step

from .sample_costs import NO_LINK, section


def layered(*qkv: dict[str, str]) -> Policy:
    operators: dict[str, Any] = dict.fromkeys(OPERATORS, "tee")
    return Policy(
        name="layered",
        summary="",
        operators={
            **operators,
            "qkv_proj": [*qkv],
            "o_proj": {"place": "gpu", "mask": "none", "verify": "none"},
        },
    )


def test_a_policy_as_in_one_of_its_layers() -> None:
    policy = layered(
        {"place": "tee", "layers": "0"},
        {"place": "gpu", "layers": "1-", "mask": "none", "verify": "none"},
    )
    first, other = as_in_layer(policy, 0), as_in_layer(policy, 5)
    for count in (1, 7):
        first.check(count)
        other.check(count)
    leaving = {operator for operator, _ in first.leaving()}
    assert "qkv_proj" not in leaving
    assert all(other.at("qkv_proj", layer, "decode").place == "gpu" for layer in range(9))
    assert "o_proj" in leaving


def test_layers_of_one_kind_are_measured_once() -> None:
    config = find_shape("tinyllama-1.1b").config()
    policy = layered(
        {"place": "tee", "layers": "0"},
        {"place": "gpu", "layers": "1-19", "mask": "none", "verify": "none"},
        {"place": "tee", "layers": "20-"},
    )
    kinds = run._kinds(policy, config)
    assert kinds == [0] + [1] * 19 + [0] * 2
    assert set(run._kinds(load_policy("shielded"), config)) == {0}


def test_kinds_of_attention_windows_are_kept(saved_model: Callable[..., SavedModel]) -> None:
    saved = saved_model(
        "qwen2",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    shape = run._shape_of(settings(model=saved.directory))
    config = shape.config()
    assert run._kinds(load_policy("tee-only"), config) == [0, 1, 0]
    for layer, window in enumerate(config.sliding_windows):
        made = run._alike(shape.settings, config, layer, 5)
        few = run.Shape("few", "", {**made, "num_hidden_layers": 5}).config()
        assert few.sliding_windows == (window,) * 5


def settings(policies: Sequence[str] = ("tee-only",), **given: Any) -> run.PlanSettings:
    return run.PlanSettings(
        policies=tuple((name, load_policy(name)) for name in policies),
        profile=find_profile("h100"),
        link=NO_LINK,
        cores=1,
        **given,
    )


@each_row("option", ["tensor_parallel", "columns"])
def test_a_model_cannot_be_parted_into_more_than_it_has_columns(
    saved_model: Callable[..., SavedModel], option: str
) -> None:
    parts: dict[str, int] = {option: 64}
    message = f"--{option.replace('_', '-')}: got 64 parts, expected 1 to 32"
    with pytest.raises(SettingsError, match=message):
        run.Planning(settings(model=saved_model().directory, **parts), lambda _: None)
    run.Planning(settings(model=model_directory("demo"), **parts), lambda _: None)


@each_row(
    ("parts", "said"),
    [({}, False), ({"columns": 2}, False), ({"tensor_parallel": 2}, True)],
)
def test_it_says_what_an_exchange_between_ranks_is_taken_for(
    parts: dict[str, int], said: bool
) -> None:
    planning = run.Planning(settings(["shielded"], shape="tinyllama-1.1b", **parts), lambda _: None)
    costs: Any = SimpleNamespace(layers=3, threads=1)
    found = "; ".join(planning._assumptions(load_policy("shielded"), costs))
    assert ("in 120 us and at 1.3 GB/s (gloo, measured on 2 EPYC cores)" in found) == said


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--shape", "nope"], ["--shape", "nope", "llama-3.2-1b"]),
        (["--shape", "tinyllama-1.1b", "demo"], ["MODEL and --shape", "both"]),
        ([], ["MODEL and --shape", "neither"]),
        (["/nonexistent"], ["/nonexistent"]),
        (["demo", "--gpu", "nope"], ["accelerator profile", "'nope'", "h100"]),
        (["demo", "--link", "10"], ["--link", "'10'", "GBPS,RTT_US"]),
        (["demo", "--link", "10,x"], ["--link", "GBPS,RTT_US"]),
        (["demo", "--link", "0,5"], ["link.gbps", "0"]),
        (["demo", "--link", "nan,5"], ["link.gbps", "nan"]),
        (["demo", "--link", "10,-5"], ["link.rtt_us", "-5"]),
        (["demo", "--link", "10,inf"], ["link.rtt_us", "inf"]),
        (["demo", "--tee-cores", "0"], ["tee-cores"]),
        (["demo", "--batch", "0"], ["batch"]),
        (["demo", "--columns", "65"], ["columns"]),
        (["demo", "--tensor-parallel", "2", "--columns", "2"], ["--tensor-parallel", "--columns"]),
        (["demo", "--spin-us", "nan"], ["spin-us"]),
        (["demo", "--prompt-tokens", "100000"], ["--prompt-tokens", "100001"]),
        (["demo", "--context", "100000"], ["--context", "the model's context"]),
        (["demo", "--policy", "nope"], ["policy", "'nope'"]),
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
    given = (
        [*arguments, *gpu]
        if "--policy" in arguments
        else [*arguments, *gpu, "--policy", "attention-in-tee"]
    )
    result = CliRunner().invoke(command, ["plan", *given])
    text = result.output + str(result.exception)
    assert result.exit_code != 0
    for fragment in fragments:
        assert fragment in text


def test_segments_are_for_bench() -> None:
    with pytest.raises(SettingsError) as caught:
        run.Planning(settings(["clear-segment"], shape="tinyllama-1.1b"), print)
    assert (caught.value.where, caught.value.got) == ("policy clear-segment", "segments")


def test_a_policy_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    lines = [f'{name} = "tee"' for name in OPERATORS if name != "o_proj"]
    lines += [
        'o_proj = [{ place = "gpu", layers = "0-98", mask = "none", verify = "none" },'
        ' { place = "tee", layers = "99-" }]'
    ]
    path = tmp_path / "deep.toml"
    path.write_text('name = "deep"\nsummary = ""\n[operators]\n' + "\n".join(lines))
    with pytest.raises(TsqpError, match="layers 0-98"):
        run.Planning(settings([str(path)], shape="tinyllama-1.1b"), print)


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsqp.lab.bench.memory_need.available_memory", lambda: 10**8)
    with pytest.raises(SettingsError, match="100 MB available"):
        run.Planning(settings(shape="tinyllama-1.1b"), print)


@pytest.mark.parametrize(
    ("text", "link"),
    [(None, NO_LINK), ("10,100", Link(10.0, 100.0)), (" any , 5 ", Link(None, 5.0))],
)
def test_a_link_is_read(text: str | None, link: Link) -> None:
    assert read_link(text) == link


def test_what_a_plan_says_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of a prompt and of a decode step, tokens of one request and of all."""
    given = settings(shape="tinyllama-1.1b", batch=4, context=1000, prompt_tokens=500)
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
    # Of the longer of prompt and context, for each sequence, in the model's 16 bits.
    config = find_shape("tinyllama-1.1b").config()
    need = tee_need(config, load_policy("tee-only"), tokens=1000, sequences=4, itemsize=2)
    assert found.tee_memory_bytes == need.total
