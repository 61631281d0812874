"""What the operators tell is added up per operator and layer, and kept as pieces of a timeline."""

from __future__ import annotations

import torch

from protocol.channel import Exchange
from protocol.messages import TensorReply, Timing
from protocol.tensors import from_torch
from tsqp.lab.bench.collect import Collector
from tsqp.lab.bench.model import Stages


def _exchange(
    elapsed_ns: int, queue_us: int = 0, compute_us: int = 0, sent_ns: int = 1_010_000
) -> Exchange:
    return Exchange(
        TensorReply(output=from_torch(torch.zeros(1))),
        bytes_sent=100,
        bytes_received=30,
        encode_ns=5000,
        elapsed_ns=elapsed_ns,
        decode_ns=2000,
        timing=Timing(queue_us=queue_us, compute_us=compute_us),
        sent_ns=sent_ns,
        endpoint="tcp://h:1",
    )


def test_stages_add_up_by_operator_and_layer() -> None:
    collector = Collector()
    lane = collector.lane(0)
    lane.called("rms_norm", 0, "tee")
    lane.spent("rms_norm", 0, "tee", 1000, 4000)
    for _ in range(2):
        lane.called("o_proj", 1, "gpu")
        lane.spent("o_proj", 1, "mask", 0, 7000)
    lane.exchanged("o_proj", 1, [_exchange(100_000, 10, 30)])
    norm, projection = collector.costs(1)
    assert (norm.operator, norm.layer, norm.place, norm.rpcs) == ("rms_norm", 0, "tee", 0)
    assert norm.stages == Stages(tee_us=3)
    assert (projection.operator, projection.layer, projection.place) == ("o_proj", 1, "gpu")
    assert (projection.calls, projection.rpcs) == (2, 1)
    assert (projection.bytes_sent, projection.bytes_received) == (100, 30)
    assert projection.stages == Stages(
        mask_us=14, encode_us=5, wire_us=60, queue_us=10, gpu_us=30, decode_us=2
    )
    (halved, _) = collector.costs(2)
    assert (halved.calls, halved.stages) == (0.5, Stages(tee_us=1.5))
    collector.reset(0)
    assert collector.costs(1) == ()


def test_of_requests_side_by_side_the_slowest_counts_and_what_it_claims_fits() -> None:
    collector = Collector()
    slow, fast = _exchange(100_000, 0, 40), _exchange(60_000, 0, 50)
    collector.lane(0).exchanged("qkv_proj", 0, [slow, fast])
    (cost,) = collector.costs(1)
    assert (cost.rpcs, cost.bytes_sent) == (2, 200)
    assert cost.stages == Stages(encode_us=10, wire_us=60, gpu_us=40, decode_us=4)

    collector = Collector()
    collector.lane(0).exchanged("qkv_proj", 0, [_exchange(100_000, 80, 900)])
    (cost,) = collector.costs(1)
    assert cost.stages == Stages(encode_us=5, queue_us=80, gpu_us=20, decode_us=2)
