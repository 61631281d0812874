"""From what a few layers and a machine were measured to cost to what the whole model would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_side.devices import find_profile
from gpu_side.kernels import request_us
from gpu_side.tasks import LinearWork, Task
from protocol.errors import SettingsError
from tee_side.policy.placement import load_policy
from tee_side.words import OPERATORS
from tests.kit.leaks import policy_with
from tests.kit.model import Models
from tsqp.cli.main import command
from tsqp.lab.bench.results import PadMaking, PingPong
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.explain.explanation import explain
from tsqp.lab.plan import planning
from tsqp.lab.plan.costs import (
    PARTS,
    Costs,
    Machine,
    PlanReport,
    PlanSettings,
    Rpc,
    Section,
    Step,
    Stretch,
    Transport,
    fit_transports,
    read_machine,
)
from tsqp.lab.plan.predict import Hardware, Turn, play, predict
from tsqp.link import Link

WORK = LinearWork(1, 2048, 2048, False)
PLAN = Task((1, 2048), "bfloat16", WORK, 4096)
NO_LINK = Link(None, 0.0)


def rpc(**numbers: Any) -> Rpc:
    given: dict[str, Any] = {
        "bytes_sent": 4200,
        "bytes_received": 4300,
        "encode_us": 1.0,
        "send_us": 2.0,
        "wire_us": 40.0,
        "service_us": 10.0,
        "decode_us": 3.0,
    }
    return Rpc(0, PLAN, **{**given, **numbers})


def section(work_us: float, *rpcs: Rpc, after_us: float = 0.0, **shares: float) -> Section:
    segments = [Stretch(work_us, [*rpcs])] if rpcs else []
    return Section(segments=segments, after_us=after_us if rpcs else work_us, **shares)


def trip(**times: Any) -> Rpc:
    return Rpc(0, PLAN, **times)


def turn(work_us: float, *trips: Rpc) -> Turn:
    return Turn(0.0, work_us, 0.0, 0.0, trips)


def costs(layer: Section, *, rows: int = 1, tail: Section | None = None) -> Costs:
    step = Step(rows=rows, lanes=((section(5.0), layer, tail or section(100.0)),))
    return Costs((step, step), step, threads=2, layers=3, order=(0,) * 4)


def hardware(profile: str | None = None, cores: int = 2) -> Hardware:
    return Hardware(find_profile(profile) if profile else None, NO_LINK, cores, 2)


def part(found: Any, name: str) -> Any:
    (only,) = (one for one in found.parts if one.name == name)
    return only


def test_lanes_overlap_and_wait_for_each_other() -> None:
    one = [turn(10, trip(send_us=1, wire_us=20, service_us=5, gpu_us=7)), turn(100)]
    assert play([one], 0.0) == pytest.approx(10 + 1 + 20 + 5 + 7 + 100)
    lane = [turn(100, trip(gpu_us=100)) for _ in range(6)] + [turn(100)]
    assert play([lane], 0.0) == pytest.approx(1300)
    # The TEE is never idle but for the first reply and the last: 14 pieces of work, and 2.
    assert play([lane, lane], 0.0) == pytest.approx(1600)
    # The second begins at 120, and its first request has to wait for the first's until 220.
    for slow in (trip(gpu_us=100), trip(up_us=100)):
        lane = [turn(10, slow), turn(10, slow), turn(10)]
        assert play([lane, lane], 0.0) == pytest.approx(220 + 100 + 10 + 100 + 10)


def test_layers_are_counted_and_the_device_computed() -> None:
    measured = costs(section(50.0, rpc()))
    found = predict([measured.decode], measured, hardware("h100"))
    gpu_us = request_us(find_profile("h100"), PLAN, 2)
    layer_us = 50 + 1 + 2 + 40 + 10 + gpu_us + 3
    assert found.total_us == pytest.approx(5 + 4 * layer_us + 100)
    assert part(found, "GPU").busy_us == pytest.approx(4 * gpu_us)
    assert part(found, "TEE operators").busy_us == pytest.approx(5 + 4 * 50 + 100)
    assert part(found, "messages").busy_us == pytest.approx(4 * (1 + 3 + 10))
    assert part(found, "transport").busy_us == pytest.approx(4 * 42)
    assert sum(one.busy_us for one in found.parts) == pytest.approx(found.total_us)
    assert (found.rpcs, found.bytes_sent, found.bytes_received) == (4, 16800, 17200)


@pytest.mark.parametrize(
    ("rows", "layer_us", "tail_us"),
    [
        # A small step runs on one thread, but for the weights that stay.
        (1, 50.0, 100 * (1 - 0.8 * 0.75)),
        (63, 50.0, 100 * (1 - 0.8 * 0.75)),
        (64, 50.0 / 4, 100 / 4),
    ],
)
def test_only_what_scales_is_scaled_to_more_cores(
    rows: int, layer_us: float, tail_us: float
) -> None:
    measured = costs(section(50.0, rpc()), rows=rows, tail=section(100.0, product_share=0.8))
    here, more = (predict([measured.decode], measured, hardware(cores=cores)) for cores in (2, 8))
    saved = here.total_us - more.total_us
    head_us = 5 * (0.75 if rows >= 64 else 0)
    assert saved == pytest.approx(head_us + 4 * (50 - layer_us) + 100 - tail_us)
    assert part(more, "transport").busy_us == part(here, "transport").busy_us
    # More threads were measured than there will be cores: nothing is known of that.
    assert predict([measured.decode], measured, hardware(cores=1)).total_us == here.total_us


def test_what_a_plan_says_of_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of a prompt and of a decode step, tokens of one request and of all."""
    policies = (("tee-only", load_policy("tee-only")),)
    sizes: dict[str, Any] = {"batch": 4, "context": 1000, "prompt_tokens": 500, "cores": 1}
    given = PlanSettings(policies, find_profile("h100"), NO_LINK, shape="tinyllama-1.1b", **sizes)
    made = planning.Planning(given, print)
    prompt, decode = (
        Step(rows=rows, lanes=((section(us), section(0.0), section(0.0)),))
        for rows, us in ((500, 3_000_000.0), (4, 20_000.0))
    )
    measured = Costs([prompt], decode, threads=1, layers=3, order=(0,) * 22)
    monkeypatch.setattr(made, "_costs", lambda name, policy: measured)
    (found,) = made.run().policies
    assert found.ttft_ms == pytest.approx(3000)
    assert found.tpot_ms == pytest.approx(20)
    assert found.tokens_per_s_per_request == pytest.approx(50)
    assert found.tokens_per_s == pytest.approx(200)
    assert (found.pads, found.sustained_tokens_per_s) == (None, found.tokens_per_s)
    # On twice the cores pads take half as long: 4 sequences of 5 ms, after a step of 20.
    pads = PadMaking(phases=("decode",), token_ms=10.0, cpu_ms=10.0, batch_tokens=512)
    more = planning.Planning(replace(given, cores=2), print)
    monkeypatch.setattr(more, "_costs", lambda *_: replace(measured, pads=pads))
    (found,) = more.run().policies
    assert found.pads is not None
    assert found.pads.token_ms == pytest.approx(5)
    made_us = 4 * 5e3
    assert found.sustained_tokens_per_s == pytest.approx(4e6 / (found.decode.total_us + made_us))


FITTED = Machine(
    kernels="avx2",
    spin_us=50.0,
    int8_gops=(100.0, 180.0, 250.0),
    gb_per_s=(10.0, 15.0, 16.0),
    transports={"unix": Transport(rtt_us=40.0, gb_per_s=2.0)},
)


def pong(transport: str, payload: int, us: float, kind: str = "ours") -> PingPong:
    given = {"transport": transport, "payload_bytes": payload, "kind": kind, "round_trips": 9}
    return PingPong.model_validate({**given, "p50_us": us, "p90_us": us})


def test_a_file_says_what_was_measured_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    for gpu in (None, find_profile("l4")):
        fitted = FITTED.model_copy(update={"gpu": gpu})
        path.write_text(fitted.toml(), encoding="utf-8")
        assert read_machine(path) == fitted
    for text, fragment in (
        ("{", "got no TOML"),
        (FITTED.toml().replace("100.0", "-1.0"), "int8_gops"),
        (FITTED.toml().replace("40.0", "nan"), "rtt_us"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=fragment) as refused:
            read_machine(path)
        assert str(path) in str(refused.value)


def test_a_transport_is_a_line_through_its_round_trips() -> None:
    measured = [
        *(pong("unix", 1000, 50.0), pong("unix", 501_000, 150.0), pong("unix", 1000, 1.0, "raw")),
        *(pong("zeromq-tcp", 1000, 9.0), pong("tcp", 1000, 1.0, "raw")),
    ]
    found = fit_transports(measured)
    # One size tells no rate.
    assert list(found) == ["unix"]
    # 1,000,000 bytes more, both ways together, in 100 us.
    assert found["unix"].gb_per_s == pytest.approx(10)
    assert found["unix"].rtt_us == pytest.approx(50 - 0.2)
    assert found["unix"].us(2000) == pytest.approx(50)
    assert found["unix"].us(1_002_000) == pytest.approx(150)


def test_layers_of_one_kind_are_measured_once() -> None:
    config = find_shape("tinyllama-1.1b").config()
    sent = {"place": "gpu", "mask": "none", "verify": "none"}
    ends = [{"place": "tee", "layers": layers} for layers in ("0", "20-")]
    policy = policy_with(qkv_proj=[*ends, sent | {"layers": "1-19"}], o_proj=sent)
    kinds = planning._kinds(policy, config)
    assert kinds == [0] + [1] * 19 + [0] * 2
    assert set(planning._kinds(load_policy("shielded"), config)) == {0}


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--shape", "nope"], ["--shape", "nope", "llama-3.2-1b"]),
        ([], ["MODEL and --shape", "neither"]),
        (["demo", "--gpu", "nope"], ["accelerator profile", "'nope'", "h100"]),
        (["demo", "--link", "0,5"], ["link.gbps", "0"]),
        (["demo", "--tee-cores", "0"], ["tee-cores"]),
        (["demo", "--tensor-parallel", "65"], ["--tensor-parallel", "65"]),
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

    monkeypatch.setattr(planning.Planning, "run", nothing_starts)
    gpu = [] if "--gpu" in arguments else ["--gpu", "h100"]
    policy = [] if "--policy" in arguments else ["--policy", "attention-in-tee"]
    result = CliRunner().invoke(command, ["plan", *arguments, *gpu, *policy])
    text = result.output + str(result.exception)
    assert result.exit_code != 0
    for fragment in fragments:
        assert fragment in text


PROMPT, CONTEXT = 40, 30


@pytest.mark.slow
def test_layers_that_differ_under_pads(saved_model: Models, tmp_path: Path) -> None:
    # More layers than are measured.
    model = saved_model(num_hidden_layers=5).directory
    lines = [f'{name} = "tee"' for name in OPERATORS if name != "o_proj"]
    lines += [
        'o_proj = [{ place = "gpu", mask = "pad", verify = "none", layers = "0-1" },'
        ' { place = "tee", layers = "2-" }]'
    ]
    path = tmp_path / "layered.toml"
    head = 'name = "layered"\nsummary = ""\narithmetic = "int8"\n[operators]\n'
    path.write_text(head + "\n".join(lines))
    words = f"plan {model} --gpu h100 --tee-cores 1 --transport unix --link 10,100 --json"
    words += f" --prompt-tokens {PROMPT} --context {CONTEXT} --policy {path} --policy dealt"
    result = CliRunner().invoke(command, words.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = PlanReport.model_validate_json(result.stdout)
    found, dealt, alone = report.policies
    assert alone.policy == "tee-only-int8"
    # RPCs and bytes are those that `tsqp explain` counts of the whole model.
    sizes: dict[str, Any] = {"context": CONTEXT, "prompt_tokens": PROMPT, "step_tokens": 512}
    told = explain(model, load_policy(str(path)), **sizes)
    assert (found.policy, found.decode.rpcs) == (told.policy, 2)
    assert (found.prefill.rpcs, found.decode.rpcs) == (told.prefill.rpcs, told.decode.rpcs)
    assert found.decode.bytes_sent == pytest.approx(told.decode.bytes_sent, rel=0.01)
    assert found.decode.bytes_received == pytest.approx(told.decode.bytes_received, rel=0.01)
    for prediction in (found.prefill, found.decode):
        assert [part.name for part in prediction.parts] == list(PARTS)
    assert found.ttft_ms == pytest.approx(found.prefill.total_us / 1e3)
    busy = {part.name: part.busy_us for part in found.decode.parts}
    assert busy["link latency"] == pytest.approx(200)
    assert min(busy["masks and checks"], busy["TEE weights"]) > 0
    assert found.pads is not None
    assert (found.pads.phases, alone.pads) == (("prefill", "decode"), None)
    told = explain(model, load_policy("dealt"), **sizes)
    assert (dealt.prefill.rpcs, dealt.decode.rpcs) == (told.prefill.rpcs, told.decode.rpcs)
    assert dealt.pads is not None
    assert dealt.pads.phases == ("decode",)
