"""From the events of a step to what its sections cost."""

from __future__ import annotations

import pytest

from protocol.errors import TsqpError
from tsqp.lab.plan.model import Lane
from tsqp.lab.plan.sections import lanes_of, typical, typical_lanes, with_round_trips
from tsqp.lab.plan.trace import Marked, Received, StepTrace, Submitted

from .sample_costs import PLAN, rpc, section


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


def two_lanes() -> StepTrace:
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
    return StepTrace(0, 130_000, [*events])


def test_two_lanes_take_turns_and_each_has_its_own_work() -> None:
    first, second = lanes_of(two_lanes())
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


def test_each_lane_has_what_is_typical_of_it() -> None:
    trace = two_lanes()
    cut_short = StepTrace(0, 121_000, trace.events[:7])
    first, second = typical_lanes([trace] * 3)
    assert [round(one.head.work_us) for one in (first, second)] == [10, 9]
    assert [round(one.layers[0].work_us) for one in (first, second)] == [30, 65]
    assert [round(one.tail.work_us) for one in (first, second)] == [9, 1]
    # A lane that comes to no rows of logits has nothing behind its layers.
    _, second = typical_lanes([cut_short])
    assert second.tail.work_us == 0


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
