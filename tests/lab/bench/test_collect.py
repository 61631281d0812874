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
    assert (projection.calls, projection.rpcs, projection.bytes_sent) == (2, 1, 100)
    expected = {"mask_us": 14, "encode_us": 5, "wire_us": 60, "queue_us": 10, "gpu_us": 30}
    assert projection.stages == Stages(**expected, decode_us=2)
    (halved, _) = collector.costs(2)
    assert (halved.calls, halved.stages) == (0.5, Stages(tee_us=1.5))
    # Of requests side by side the slowest counts, and a claim beyond the round trip is made to fit.
    for asked, stages in (
        (
            [_exchange(100_000, 0, 40), _exchange(60_000, 0, 50)],
            Stages(encode_us=10, wire_us=60, gpu_us=40, decode_us=4),
        ),
        ([_exchange(100_000, 80, 900)], Stages(encode_us=5, queue_us=80, gpu_us=20, decode_us=2)),
    ):
        collector = Collector()
        collector.lane(0).exchanged("qkv_proj", 0, asked)
        (cost,) = collector.costs(1)
        assert (cost.rpcs, cost.stages) == (len(asked), stages)
