"""The operator table adds up calls, round trips, bytes and times per operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.channel import Exchange
from protocol.messages import TensorReply, Timing
from protocol.tensors import WireTensor
from tee_side.policy.placement import load_policy
from tee_side.words import LAYERLESS, LIGHT_OPERATORS, OPERATORS, PRODUCTS, is_projection
from tests.kit.model import POLICIES, SavedModel, assemble, token_ids
from tests.unit.tee_side.policy_texts import leaves
from tsqp.operator_table import OperatorTable, OperatorTotals

Models = Callable[..., SavedModel]

REPLY = TensorReply(output=WireTensor("float32", (1,), bytes(4)))


@pytest.mark.parametrize("name", POLICIES)
def test_a_forward_pass_is_counted_per_operator_and_place(saved_model: Models, name: str) -> None:
    policy, table = load_policy(name), OperatorTable()
    tee = assemble(saved_model("llama").directory, policy, observer=table)
    tee.logits(token_ids(8), chunk=4)
    rpcs_a_call = {"qkv_proj": 3, "gate_up_proj": 2} if policy.one_rpc_per_module else {}
    fused = not leaves(policy, "attn_scores")
    for operator in OPERATORS:
        totals = table.totals[operator]
        assert totals.place == policy.at(operator, 0, "decode").place
        if operator in PRODUCTS and fused:
            assert totals.calls == 0
            continue
        assert totals.calls == (2 if operator in LAYERLESS else 6)
        trips = totals.calls * rpcs_a_call.get(operator, 1) if leaves(policy, operator) else 0
        assert totals.round_trips == trips
        assert (totals.bytes_sent > 0) == (totals.bytes_received > 0) == (trips > 0)
        # The loopback channel claims 1 us of queue and 2 us of computing in 4 us of round trip.
        assert (totals.queue_ns, totals.gpu_ns, totals.round_trip_ns) == (
            1000 * trips,
            2000 * trips,
            4000 * trips,
        )
        assert totals.tee_ns > 0
    # Two norms a layer and the last one; attention whole or its softmax.
    counts = {"rms_norm": 14, "rope": 6, "residual": 12, "kv_cache": 6, "silu_mul": 6}
    counts |= {"attention": 6 * fused, "softmax": 6 * (not fused), "sample": 0}
    light = {operator: table.totals[operator] for operator in LIGHT_OPERATORS}
    assert {operator: totals.calls for operator, totals in light.items()} == counts
    for totals in light.values():
        assert (totals.place, totals.round_trips) == ("tee", 0)
        assert (totals.tee_ns > 0) == (totals.calls > 0)


def test_the_table_and_the_channel_agree_on_the_traffic(saved_model: Models) -> None:
    table = OperatorTable()
    tee = assemble(saved_model("llama").directory, "tsqp", observer=table)
    tee.logits(token_ids(8))
    assert tee.channel is not None
    totals = table.totals.values()
    traffic = tee.channel.traffic
    assert sum(t.round_trips for t in totals) == traffic.round_trips == 29
    assert sum(t.bytes_sent for t in totals) == traffic.bytes_sent
    assert sum(t.bytes_received for t in totals) == traffic.bytes_received


def test_an_observer_does_not_change_the_result(saved_model: Models) -> None:
    directory, ids = saved_model("llama").directory, token_ids(8)
    observed = assemble(directory, "tsqp", observer=OperatorTable()).logits(ids)
    assert observed.tolist() == assemble(directory, "tsqp").logits(ids).tolist()


def test_a_sampled_token_is_counted_where_it_is_chosen(saved_model: Models) -> None:
    table = OperatorTable()
    saved_model("llama").tee("tsqp", observer=table).greedy(token_ids(3), 5)
    assert table.totals["sample"].calls == 5
    assert table.totals["sample"].tee_ns > 0


def test_an_exchange_without_timing_counts_as_wire(saved_model: Models) -> None:
    table = OperatorTable()
    table.exchanged("o_proj", 0, [Exchange(REPLY, 10, 20, 1, 5000, 2, None, 0, "h")])
    timing = Timing(queue_us=1, compute_us=1)
    table.exchanged("o_proj", 1, [Exchange(REPLY, 1, 2, 1, 3000, 2, timing, 0, "h")])
    totals = table.totals["o_proj"]
    assert (totals.bytes_sent, totals.bytes_received) == (11, 22)
    assert (totals.queue_ns, totals.gpu_ns, totals.wire_ns) == (1000, 1000, 6000)


def test_a_claim_of_more_time_than_the_round_trip_took_gives_no_negative_time() -> None:
    totals = OperatorTotals(round_trip_ns=1000, queue_ns=500, gpu_ns=9000)
    assert totals.wire_ns == 0


def test_time_in_the_tee_is_that_of_its_stages_and_of_encoding_and_decoding() -> None:
    table = OperatorTable()
    table.spent("o_proj", 0, "mask", 1000, 1070)
    table.spent("o_proj", 2, "unmask", 5000, 5005)
    table.exchanged("o_proj", 0, [Exchange(REPLY, 1, 2, 100, 3000, 2000, None, 0, "h")] * 2)
    assert table.totals["o_proj"].tee_ns == 70 + 5 + 2 * (100 + 2000)
    assert table.totals["down_proj"].tee_ns == 0


def test_micro_batches_are_counted_together() -> None:
    table = OperatorTable()
    for index in range(2):
        table.lane(index).called("rope", 0, "tee")
    assert table.totals["rope"].calls == 2


def test_round_trips_are_those_of_the_phase_that_leaves(saved_model: Models) -> None:
    table = OperatorTable()
    tee = saved_model("llama").tee("shielded", observer=table)
    tee.greedy(token_ids(7), 4)
    for operator in OPERATORS:
        totals, layers = table.totals[operator], 1 if operator in LAYERLESS else 3
        assert totals.calls == (0 if operator in PRODUCTS else 4 * layers)
        # One prefill step in the TEE, three decode steps out of it.
        assert totals.round_trips == (3 * layers if is_projection(operator) else 0)


def test_round_trips_side_by_side_take_as_long_as_the_slowest() -> None:
    table = OperatorTable()
    fast = Exchange(REPLY, 10, 20, 1, 3000, 2, Timing(queue_us=0, compute_us=2), 0, "h")
    slow = Exchange(REPLY, 1, 2, 1, 5000, 2, Timing(queue_us=1, compute_us=1), 0, "h")
    table.exchanged("o_proj", 0, [fast, slow])
    totals = table.totals["o_proj"]
    assert (totals.round_trips, totals.bytes_sent, totals.bytes_received) == (2, 11, 22)
    assert (totals.round_trip_ns, totals.queue_ns, totals.gpu_ns) == (5000, 1000, 1000)


def test_an_operator_in_both_places_says_so() -> None:
    table = OperatorTable()
    for place, said in (("tee", "tee"), ("gpu", "both"), ("gpu", "both")):
        table.called("o_proj", 0, place)
        assert table.totals["o_proj"].place == said
    table.called("down_proj", 0, "gpu")
    assert table.totals["down_proj"].place == "gpu"
