"""From what a few layers cost to what the whole model would."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_side.kernels import request_us
from gpu_side.profiles import find_profile
from tsqp.lab.link import Link
from tsqp.lab.plan.model import Costs, Lane, Section, Step
from tsqp.lab.plan.predict import Hardware, Trip, Turn, play, predict_decode, predict_prefill

from .sample_costs import NO_LINK, PLAN, rpc, section


def trip(**times: float) -> Trip:
    given: dict[str, Any] = dict.fromkeys(
        ("send_us", "wire_us", "service_us", "gpu_us", "up_us", "down_us", "receive_us"), 0.0
    )
    return Trip(**{"service": 0, **given, **times})


def turn(work_us: float, *trips: Trip) -> Turn:
    return Turn(0.0, work_us, 0.0, 0.0, trips)


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


def test_two_lanes_overlap_once_both_have_begun() -> None:
    lane = [turn(100, trip(gpu_us=100)) for _ in range(6)] + [turn(100)]
    assert play([lane], 0.0) == pytest.approx(1300)
    # The TEE is never idle but for the first reply and the last: 14 pieces of work, and 2.
    assert play([lane, lane], 0.0) == pytest.approx(1600)


def test_lanes_wait_for_each_other_at_a_slow_accelerator_and_on_the_link() -> None:
    slow = [turn(10, trip(gpu_us=100)), turn(10, trip(gpu_us=100)), turn(10)]
    narrow = [turn(10, trip(up_us=100)), turn(10, trip(up_us=100)), turn(10)]
    # The second begins at 120, and its first request has to wait for the first's until 220.
    for lane in (slow, narrow):
        assert play([lane, lane], 0.0) == pytest.approx(220 + 100 + 10 + 100 + 10)


def test_a_service_reads_while_its_accelerator_works() -> None:
    lane = [turn(10, trip(service_us=30, gpu_us=100)) for _ in range(2)] + [turn(10)]
    assert play([lane], 0.0) == pytest.approx(2 * 140 + 10)
    # The second begins at 150. Its request is read from 180 on, while the first's is computed
    # until 280, and is computed from then on.
    assert play([lane, lane], 0.0) == pytest.approx(280 + 100 + 140 + 10)


def test_a_service_is_kept_busy_by_messages_of_several_lanes() -> None:
    both = trip(gpu_us=10, wire_us=40)
    lane = [turn(10, both), turn(10, both), turn(0)]
    # The second lane's first request is there at 70 + 10 + 20. The first's, there at 90, keeps the
    # service busy for half of what the transport takes, until 110.
    assert play([lane, lane], 0.0) == pytest.approx(110 + 10 + 20 + 10 + 20 + 10 + 20)
    # Alone, two requests at once only wait for each other's computing.
    assert play([[turn(10, both, both), turn(0)]], 0.0) == pytest.approx(10 + 20 + 10 + 10 + 20)


def test_the_reply_of_another_lane_is_received_by_the_one_thread() -> None:
    lane = [turn(10, trip(receive_us=7)), turn(10, trip(receive_us=7)), turn(10)]
    assert play([lane, lane], 0.0) == pytest.approx(2 * (10 + 7 + 10 + 7 + 10))


def test_lanes_that_ask_nobody_follow_one_another() -> None:
    assert play([], 0.0) == 0.0
    assert play([[turn(10)], [turn(20)], [turn(30)]], 0.0) == pytest.approx(60)


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


def test_without_a_part_a_lane_alone_takes_that_much_less() -> None:
    layer = section(50.0, rpc(), mask_share=0.3, product_share=0.2)
    found = predict_decode(costs(layer), hardware("h100"))
    assert {one.name for one in found.parts if one.busy_us == 0} == {
        "link bandwidth",
        "link latency",
    }
    for one in found.parts:
        assert one.without_us == pytest.approx(found.total_us - one.busy_us), one.name


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
        (63, 50.0, 100 * (1 - 0.8 * 0.75)),
        (64, 50.0 / 4, 100 / 4),
    ],
)
def test_only_what_scales_is_scaled_to_more_cores(
    rows: int, layer_us: float, tail_us: float
) -> None:
    measured = costs(section(50.0, rpc()), rows=rows, tail=section(100.0, product_share=0.8))
    here, more = (predict_decode(measured, hardware(cores=cores)) for cores in (2, 8))
    saved = here.total_us - more.total_us
    head_us = 5 * (0.75 if rows >= 64 else 0)
    assert saved == pytest.approx(head_us + 4 * (50 - layer_us) + 100 - tail_us)
    assert part(more, "transport").busy_us == part(here, "transport").busy_us
    # More threads were measured than there will be cores: nothing is known of that.
    assert predict_decode(measured, hardware(cores=1)).total_us == here.total_us
