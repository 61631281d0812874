"""`tsqp plan`: from events to costs, from costs to a prediction; and what is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_side.kernels import request_us
from gpu_side.plans import LinearWork, Plan
from gpu_side.profiles import find_profile
from protocol.errors import SettingsError, TsqpError
from protocol.link import Link
from tee_side.policy import Policy, load_policy
from tee_side.vocabulary import OPERATORS
from tests.support import SavedModel
from tsqp.bench.shapes import find_shape
from tsqp.cli.main import command
from tsqp.cli.plan import read_link
from tsqp.plan import run
from tsqp.plan.job import as_in_layer
from tsqp.plan.model import Asked, Costs, Lane, Rpc, Section, Segment, Step
from tsqp.plan.predict import Hardware, Trip, Turn, play, predict_decode, predict_prefill
from tsqp.plan.sections import lanes_of, typical, with_round_trips
from tsqp.plan.trace import Marked, Received, StepTrace, Submitted

WORK = LinearWork(1, 2048, 2048, False)
PLAN = Plan((1, 2048), "bfloat16", WORK, 4096)
NO_LINK = Link(None, 0.0)


def trip(**times: float) -> Trip:
    given: dict[str, Any] = dict.fromkeys(
        ("send_us", "wire_us", "service_us", "gpu_us", "up_us", "down_us", "receive_us"), 0.0
    )
    return Trip(**{"service": 0, **given, **times})


def turn(work_us: float, *trips: Trip) -> Turn:
    return Turn(0.0, work_us, 0.0, 0.0, trips)


def rpc(**numbers: Any) -> Rpc:
    given: dict[str, Any] = {
        "service": 0,
        "asked": Asked(shape=PLAN.shape, dtype=PLAN.dtype, work=WORK, input_bytes=4096),
        "bytes_sent": 4200,
        "bytes_received": 4300,
        "encode_us": 1.0,
        "send_us": 2.0,
        "wire_us": 40.0,
        "service_us": 10.0,
        "receive_us": 0.0,
        "decode_us": 3.0,
    }
    return Rpc(**{**given, **numbers})


def section(work_us: float, *rpcs: Rpc, after_us: float = 0.0, **shares: float) -> Section:
    segments = (Segment(work_us=work_us, rpcs=rpcs),) if rpcs else ()
    return Section(segments=segments, after_us=after_us if rpcs else work_us, **shares)


def costs(
    layer: Section, *, layers: int = 4, rows: int = 1, tail: Section | None = None, threads: int = 2
) -> Costs:
    lane = Lane(head=section(5.0), layers=(layer,), tail=tail or section(100.0))
    step = Step(rows=rows, lanes=(lane,))
    return Costs(
        threads=threads,
        layers=3,
        itemsize=2,
        order=(0,) * layers,
        prefill=(step, step),
        decode=step,
    )


def hardware(profile: str | None = None, link: Link = NO_LINK, cores: int = 2) -> Hardware:
    return Hardware(find_profile(profile) if profile else None, link, cores, 2)


def part(found: Any, name: str) -> Any:
    (only,) = (one for one in found.parts if one.name == name)
    return only


# ------------------------------------------------------------------------------- playing a step


def test_one_lane_takes_the_sum_of_its_parts() -> None:
    lane = [
        turn(10, trip(send_us=1, wire_us=20, service_us=5, gpu_us=7)),
        turn(100),
    ]
    assert play([lane], 0.0) == pytest.approx(10 + 1 + 20 + 5 + 7 + 100)


@pytest.mark.parametrize(
    ("latency_us", "wire_us", "round_trip_us"),
    [(50, 20, 50 + 8), (10, 20, 20), (11, 20, 20), (12, 20, 20), (13, 20, 21), (0, 0, 8)],
)
def test_of_link_and_transport_the_longer_counts(
    latency_us: float, wire_us: float, round_trip_us: float
) -> None:
    lane = [turn(10, trip(wire_us=wire_us, up_us=3, down_us=5)), turn(0)]
    assert play([lane], latency_us) == pytest.approx(10 + round_trip_us)


def test_services_side_by_side_take_as_long_as_the_slower() -> None:
    lane = [turn(10, trip(gpu_us=30), trip(service=1, gpu_us=70, send_us=2)), turn(1)]
    assert play([lane], 0.0) == pytest.approx(10 + 2 + 70 + 1)


def test_two_lanes_overlap_as_far_as_turns_and_the_service_allow() -> None:
    def lane() -> list[Turn]:
        return [turn(100, trip(gpu_us=100)), turn(100, trip(gpu_us=100)), turn(100)]

    # The TEE is never idle but for the last replies: 6 pieces of work.
    assert play([lane()], 0.0) == pytest.approx(500)
    assert play([lane(), lane()], 0.0) == pytest.approx(600)


def test_lanes_wait_for_each_other_at_a_slow_service_and_on_the_link() -> None:
    slow = [turn(10, trip(gpu_us=100)), turn(10)]
    assert play([slow, slow], 0.0) == pytest.approx(10 + 200 + 10)
    narrow = [turn(10, trip(up_us=100)), turn(10)]
    assert play([narrow, narrow], 0.0) == pytest.approx(10 + 200 + 10)


def test_the_reply_of_another_lane_is_received_by_the_one_thread() -> None:
    lane = [turn(10, trip(receive_us=7)), turn(10)]
    assert play([lane, lane], 0.0) == pytest.approx(2 * (10 + 7 + 10))


# ---------------------------------------------------------------------------------- predictions


def test_layers_are_counted_and_the_device_computed() -> None:
    found = predict_decode(costs(section(50.0, rpc())), hardware("h100"))
    gpu_us = request_us(find_profile("h100"), PLAN, 2)
    layer_us = 50 + 1 + 2 + 40 + 10 + gpu_us + 3
    assert found.total_us == pytest.approx(5 + 4 * layer_us + 100)
    assert part(found, "GPU").busy_us == pytest.approx(4 * gpu_us)
    assert part(found, "TEE operators").busy_us == pytest.approx(5 + 4 * 50 + 100)
    assert part(found, "messages").busy_us == pytest.approx(4 * (1 + 3 + 10))
    assert part(found, "transport").busy_us == pytest.approx(4 * 42)
    assert sum(one.busy_us for one in found.parts) == pytest.approx(found.total_us)
    assert (found.rpcs, found.bytes_sent, found.bytes_received) == (4, 16800, 17200)


def test_a_prompt_is_all_of_its_steps() -> None:
    measured = costs(section(50.0, rpc()))
    once, twice = (one(measured, hardware()) for one in (predict_decode, predict_prefill))
    assert twice.total_us == pytest.approx(2 * once.total_us)
    assert twice.rpcs == 2 * once.rpcs


def test_link_parts_and_what_their_absence_changes() -> None:
    found = predict_decode(costs(section(50.0, rpc())), hardware(link=Link(0.01, 1000.0)))
    each_way_us = (4200 + 4300) * 8 / 0.01 / 1e3
    assert part(found, "link bandwidth").busy_us == pytest.approx(4 * each_way_us)
    assert part(found, "link latency").busy_us == pytest.approx(4000)
    # Hidden by the link but for the sending: the longer of both counts.
    assert part(found, "transport").busy_us == pytest.approx(4 * 2)
    assert found.bottleneck == "link bandwidth"
    faster = part(found, "link bandwidth").without_us
    assert faster == pytest.approx(found.total_us - 4 * each_way_us)
    # Without latency the transport's own time is still hidden by the bandwidth.
    assert part(found, "link latency").without_us == pytest.approx(found.total_us - 4000)


def test_the_bottleneck_is_what_would_help_most() -> None:
    layer = section(50.0, rpc(wire_us=500.0), mask_share=0.5)
    found = predict_decode(costs(layer), hardware())
    assert found.bottleneck == "transport"
    assert part(found, "masks and checks").busy_us == pytest.approx(4 * 25)
    found = predict_decode(costs(section(5000.0, rpc(), mask_share=0.9)), hardware())
    assert found.bottleneck == "masks and checks"
    tail = section(9000.0, product_share=0.9)
    found = predict_decode(costs(layer, tail=tail), hardware())
    assert found.bottleneck == "TEE weights"
    assert part(found, "TEE weights").busy_us == pytest.approx(8100)
    assert part(found, "TEE weights").without_us == pytest.approx(found.total_us - 8100)


@pytest.mark.parametrize(
    ("rows", "layer_us", "tail_us"),
    [
        # A small step runs on one thread, but for the weights that stay.
        (1, 50.0, 100 * (1 - 0.8 * 0.75)),
        (16, 50.0, 100 * (1 - 0.8 * 0.75)),
        (17, 50.0 / 4, 100 / 4),
    ],
)
def test_only_what_scales_is_scaled_to_more_cores(
    rows: int, layer_us: float, tail_us: float
) -> None:
    measured = costs(section(50.0, rpc()), rows=rows, tail=section(100.0, product_share=0.8))
    here, more = (predict_decode(measured, hardware(cores=cores)) for cores in (2, 8))
    saved = here.total_us - more.total_us
    head_us = 5 * (0.75 if rows > 16 else 0)
    assert saved == pytest.approx(head_us + 4 * (50 - layer_us) + 100 - tail_us)
    assert part(more, "transport").busy_us == part(here, "transport").busy_us


# -------------------------------------------------------------------------------- from events


def submitted(lane: int, request_id: int, start: int, end: int, service: int = 0) -> Submitted:
    return Submitted(lane, service, request_id, start, end, end + 1, PLAN)


def received(
    lane: int, request_id: int, start: int, sent: int, elapsed: int, *, end: int, service: int = 0
) -> Received:
    return Received(lane, service, request_id, start, end, sent, elapsed, 1000, 10, 20)


def test_time_between_events_is_work_of_the_lane() -> None:
    events = [
        Marked(0, 0, 5_000, 5_000),
        submitted(0, 1, 15_000, 18_000),
        received(0, 1, 18_500, 16_000, 9_000, end=26_000),
        Marked(0, 1, 30_000, 30_000),
        submitted(0, 2, 31_000, 32_000),
        received(0, 2, 32_001, 31_500, 8_000, end=40_000),
        Marked(0, None, 42_000, 42_000),
    ]
    (lane,) = lanes_of(StepTrace(0, 50_000, [*events]))
    assert list(lane) == ["head", 0, 1, "tail"]
    assert lane["head"].work_us == pytest.approx(5)
    first = lane[0]
    (segment,) = first.segments
    # Between the end of the submission and the wait, one nanosecond was ours.
    assert segment.work_us == pytest.approx(10)
    assert first.after_us == pytest.approx(4 + 0.499)
    (one,) = segment.rpcs
    assert one.encode_us == pytest.approx(1)
    assert one.send_us == pytest.approx(2)
    assert one.wire_us == pytest.approx(9 - 2 - 1)
    assert one.service_us == pytest.approx(1)
    assert one.receive_us == 0
    assert one.decode_us == pytest.approx(1)
    assert lane["tail"].work_us == pytest.approx(8)


def test_two_lanes_take_turns_and_each_has_its_own_work() -> None:
    events = [
        Marked(0, 0, 10_000, 10_000),
        submitted(0, 1, 30_000, 31_000),  # 20 of lane 0
        Marked(1, 0, 40_000, 40_000),  # its head: 9
        submitted(1, 2, 100_000, 101_000),  # 60 of lane 1
        received(0, 1, 101_001, 30_500, 70_900, end=102_000),
        submitted(0, 3, 109_000, 110_000),  # 7 of lane 0
        received(1, 2, 110_001, 100_500, 9_700, end=111_000),
        Marked(1, None, 116_000, 116_000),  # 5 of lane 1
        received(0, 3, 117_000, 109_500, 8_000, end=118_000),
        Marked(0, None, 121_000, 121_000),  # 3 of lane 0
    ]
    first, second = lanes_of(StepTrace(0, 130_000, [*events]))
    assert [round(one.work_us) for one in first[0].segments] == [20, 7]
    assert round(first[0].after_us) == 3
    assert round(first["tail"].work_us) == 9
    assert round(second["head"].work_us) == 9
    assert [round(one.work_us) for one in second[0].segments] == [60]
    assert round(second[0].after_us) == 5
    assert round(second["tail"].work_us) == 1
    # The reply was there when it was waited for: what that took is the receiving.
    assert first[0].segments[0].rpcs[0].receive_us == pytest.approx(0.399)


def test_requests_side_by_side_are_one_segment() -> None:
    events = [
        Marked(0, 0, 0, 0),
        submitted(0, 1, 10_000, 11_000, service=0),
        submitted(0, 1, 15_000, 16_000, service=1),
        received(0, 1, 16_001, 10_500, 9_000, end=20_000, service=0),
        received(0, 1, 20_000, 15_500, 9_000, end=25_000, service=1),
    ]
    (lane,) = lanes_of(StepTrace(0, 25_000, [*events]))
    (segment,) = lane[0].segments
    assert [one.service for one in segment.rpcs] == [0, 1]
    assert segment.work_us == pytest.approx(10 + 4, abs=0.01)


def test_typical_is_median_by_piece_and_trimmed_mean_of_the_whole() -> None:
    made = typical([section(work, rpc(wire_us=40.0)) for work in (10.0, 10.0, 40.0)])
    parts_us = 10 + 1 + 2 + 40 + 10 + 3
    stretched = (2 * parts_us + parts_us + 30) / 3 / parts_us
    assert made.segments[0].work_us == pytest.approx(10 * stretched)
    assert made.segments[0].rpcs[0].wire_us == pytest.approx(40 * stretched)
    # One in ten on either side is no cost of the section.
    made = typical([section(work, rpc()) for work in (*[10.0] * 18, 9_000.0, 1.0)])
    assert made.segments[0].work_us == pytest.approx(10)


def test_layers_that_differ_in_their_requests_are_refused() -> None:
    with pytest.raises(TsqpError, match="2 patterns"):
        typical([section(1.0, rpc()), section(1.0, rpc(), rpc(service=1))])


def test_a_lane_takes_the_round_trips_that_it_has_alone() -> None:
    beside = Lane(
        head=section(1.0),
        layers=(section(50.0, rpc(receive_us=6.0, wire_us=500.0, service_us=99.0)),),
        tail=section(2.0),
    )
    alone = Lane(head=section(9.0), layers=(section(9.0, rpc()),), tail=section(9.0))
    merged = with_round_trips(beside, alone)
    (one,) = merged.layers[0].segments[0].rpcs
    assert (one.receive_us, one.wire_us, one.service_us) == (6.0, 34.0, 10.0)
    assert merged.layers[0].segments[0].work_us == 50.0
    assert merged.head.work_us == 1.0


# ------------------------------------------------------------------------------------- policies


def layered(*qkv: dict[str, str]) -> Policy:
    operators: dict[str, Any] = dict.fromkeys(OPERATORS, "tee")
    return Policy(
        name="layered", summary="", operators={**operators, "qkv_proj": [*qkv], "o_proj": "gpu"}
    )


def test_a_policy_as_in_one_of_its_layers() -> None:
    policy = layered({"place": "tee", "layers": "0"}, {"place": "gpu", "layers": "1-"})
    first, other = as_in_layer(policy, 0), as_in_layer(policy, 5)
    for count in (1, 7):
        first.check(count)
        other.check(count)
    assert not first.on_gpu("qkv_proj")
    assert all(other.at("qkv_proj", layer, "decode").place == "gpu" for layer in range(9))
    assert first.on_gpu("o_proj")


def test_layers_of_one_kind_are_measured_once() -> None:
    config = find_shape("tinyllama-1.1b").config()
    policy = layered(
        {"place": "tee", "layers": "0"},
        {"place": "gpu", "layers": "1-19"},
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


# ------------------------------------------------------------------------------------ bad input


def settings(policies: Sequence[str] = ("tee-only",), **given: Any) -> run.PlanSettings:
    return run.PlanSettings(
        policies=tuple((name, load_policy(name)) for name in policies),
        profile=find_profile("h100"),
        link=NO_LINK,
        cores=1,
        **given,
    )


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


def test_a_policy_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    lines = [f'{name} = "tee"' for name in OPERATORS if name != "o_proj"]
    lines += ['o_proj = [{ place = "gpu", layers = "0-98" }, { place = "tee", layers = "99-" }]']
    path = tmp_path / "deep.toml"
    path.write_text('name = "deep"\nsummary = ""\n[operators]\n' + "\n".join(lines))
    with pytest.raises(TsqpError, match="layers 0-98"):
        run.Planning(settings([str(path)], shape="tinyllama-1.1b"), print)


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsqp.bench.memory_need.available_memory", lambda: 10**8)
    with pytest.raises(SettingsError, match="100 MB available"):
        run.Planning(settings(shape="tinyllama-1.1b"), print)


@pytest.mark.parametrize(
    ("text", "link"),
    [(None, NO_LINK), ("10,100", Link(10.0, 100.0)), (" any , 5 ", Link(None, 5.0))],
)
def test_a_link_is_read(text: str | None, link: Link) -> None:
    assert read_link(text) == link
