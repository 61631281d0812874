"""The operator table adds up calls, round trips, bytes and times per operator."""

from __future__ import annotations

from protocol.channel import Exchange
from protocol.messages import TensorReply, Timing
from protocol.tensors import WireTensor
from tsqp.operator_table import OperatorTable, OperatorTotals

REPLY = TensorReply(output=WireTensor("float32", (1,), bytes(4)))


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
