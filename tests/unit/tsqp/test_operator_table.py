"""The operator table adds up calls, round trips, bytes and times per operator."""

from __future__ import annotations

from collections.abc import Callable

from protocol.channel import Exchange
from protocol.messages import TensorReply, Timing
from protocol.tensors import WireTensor
from tests.kit.model import SavedModel, token_ids
from tsqp.operator_table import OperatorTable, OperatorTotals

REPLY = TensorReply(output=WireTensor("float32", (1,), bytes(4)))


def test_the_table_and_the_channel_agree_on_the_traffic(
    saved_model: Callable[..., SavedModel],
) -> None:
    table = OperatorTable()
    tee = saved_model("llama").tee("tsqp", observer=table)
    tee.greedy(token_ids(8), 1)
    assert tee.channel is not None
    totals, traffic = table.totals.values(), tee.channel.traffic
    assert sum(one.round_trips for one in totals) == traffic.round_trips == 29
    assert sum(one.bytes_sent for one in totals) == traffic.bytes_sent
    assert sum(one.bytes_received for one in totals) == traffic.bytes_received
    qkv = table.totals["qkv_proj"]
    assert (qkv.place, qkv.calls, qkv.round_trips) == ("gpu", 3, 9)
    # The loopback channel claims 1 us of queue and 2 us of computing in 4 us of round trip.
    assert (qkv.queue_ns, qkv.gpu_ns, qkv.round_trip_ns) == (9000, 18_000, 36_000)
    assert table.totals["sample"].calls == 1


def test_what_is_told_is_added_up() -> None:
    table = OperatorTable()
    for place, said in (("tee", "tee"), ("gpu", "both"), ("gpu", "both")):
        table.lane(table.totals["o_proj"].calls).called("o_proj", 0, place)
        assert table.totals["o_proj"].place == said
    table.spent("o_proj", 0, "mask", 1000, 1070)
    table.exchanged("o_proj", 0, [Exchange(REPLY, 10, 20, 1, 5000, 2, None, 0, "h")])
    # Side by side they take as long as the slowest.
    fast = Exchange(REPLY, 10, 20, 1, 3000, 2, Timing(queue_us=0, compute_us=2), 0, "h")
    slow = Exchange(REPLY, 1, 2, 1, 5000, 2, Timing(queue_us=1, compute_us=1), 0, "h")
    table.exchanged("o_proj", 1, [fast, slow])
    totals = table.totals["o_proj"]
    assert (totals.round_trips, totals.bytes_sent, totals.bytes_received) == (3, 21, 42)
    assert (totals.round_trip_ns, totals.queue_ns, totals.gpu_ns) == (10_000, 1000, 1000)
    # An exchange without a claim is all of it on the wire.
    assert (totals.wire_ns, totals.tee_ns) == (8000, 70 + 3 * (1 + 2))
    # A claim of more time than the round trip took gives no negative time.
    assert OperatorTotals(round_trip_ns=1000, queue_ns=500, gpu_ns=9000).wire_ns == 0
