"""The process that measures: each case as often as the plan says, and where its time went."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.messages import TensorReply, Timing
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from protocol.prepared import Exchange
from protocol.tensors import from_torch
from tee_side.engine.engine import Engine
from tee_side.policy.placement import load_policy
from tests.kit.model import Models
from tsqp.lab.bench import prepare, worker
from tsqp.lab.bench.job import PROCESS_BYTES, BenchSettings, Plan, tee_parts
from tsqp.lab.bench.results import Case, Finished, Stages
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.bench.worker import Collector
from tsqp.lab.measure import cpu_ns

PLAN = Plan(prefill=(1, 9), decode=((5, 3),), generation=(4, 6), repeats=4, decode_steps=5)


def test_every_case_is_measured(saved_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    add = Engine.add

    def recorded(self: Engine, prompt_ids: Any, **settings: Any) -> Any:
        given.append((len(prompt_ids), settings["max_new_tokens"]))
        return add(self, prompt_ids, **settings)

    monkeypatch.setattr(Engine, "add", recorded)
    # However slow this machine is: what takes long is run less often, which is another test's.
    for budget in ("_WARM_UP_S", "_TIMED_S", "_OBSERVED_S"):
        monkeypatch.setattr(worker, budget, math.inf)
    asked = BenchSettings("c", (), step_tokens=64, plan=PLAN)
    told = [*worker.measure(asked, saved_model().directory, "tee-only")]
    cases = [answer for answer in told if isinstance(answer, Case)]
    assert [(one.phase, one.tokens, one.batch, one.step_ms.runs) for one in cases] == [
        ("prefill", 1, 1, 4),
        ("prefill", 9, 1, 4),
        ("decode", 5, 3, 5),
    ]
    # As often as the plan counts, which is what contexts and pads are sized by.
    runs, steps = PLAN.runs("prefill"), PLAN.new_tokens(5, 3, 64)
    assert given == [*[(1, 1)] * runs, *[(9, 1)] * runs, *[(5, steps)] * 3, (4, 6)]
    for case in cases:
        # Without a service all of it is known, and nothing is sent.
        assert (case.rpcs, case.bytes_sent, case.cpu_gpu_ms) == (0, 0, 0)
        layers = {cost.layer for cost in case.operators if cost.operator == "qkv_proj"}
        assert layers == {0, 1, 2}
        assert case.step_ms.low <= case.step_ms.median <= case.step_ms.high
        assert 0 < case.heavy_ms < case.step_ms.high
    for case, tokens in zip(cases, (1, 9, 3), strict=True):
        assert case.tokens_per_s == pytest.approx(tokens * 1e3 / case.step_ms.median)
    finished = told[-1]
    assert isinstance(finished, Finished)
    # Keys and values of 3 sequences of 5 + 13 - 1 tokens: 3 layers of 2 heads of 16 floats each.
    assert PLAN.cached_tokens(64) == 3 * (5 + 13 - 1)
    assert finished.kv_bytes == 51 * 2 * 3 * 2 * 16 * 4


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
    lane = collector(0)
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
        collector(0).exchanged("qkv_proj", 0, asked)
        (cost,) = collector.costs(1)
        assert (cost.rpcs, cost.stages) == (len(asked), stages)


def test_a_hollow_model_is_one_for_which_zeros_are_right(
    saved_model: Models, tmp_path: Path
) -> None:
    """The model's own embedding and norms; the other weights are zeros."""
    given = saved_model("qwen2", num_hidden_layers=2).directory
    made = prepare.write_hollow(given, tmp_path / "hollow")
    config = read_config(made)
    source, hollow = Checkpoint(given), Checkpoint(made)
    hollow.require(light_tensors(config) | linear_tensors(config))
    hollow.refuse_extra(config)
    light, head = light_tensors(config), "lm_head.weight"
    zeros = {head: light.pop(head)} | linear_tensors(config)
    for name, shape in light.items():
        assert torch.equal(hollow.rows(name, 0, shape[0]), source.rows(name, 0, shape[0]))
    for name, shape in zeros.items():
        assert not hollow.rows(name, 0, shape[0]).any()


ONE_B = find_shape("llama-3.2-1b").config()
VOCABULARY = 128256 * 2048
LINEAR = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
OUTPUTS = 16 * (2048 + 2 * 512 + 2048 + 2 * 8192 + 2048)
HEAD = VOCABULARY + 4 * 128256


@pytest.mark.parametrize(
    ("policy", "vocabulary", "linear"),
    [
        ("tee-only", 2 * VOCABULARY, 2 * LINEAR),
        ("published", 0, 0),
        ("quantized-clear", 2 * VOCABULARY, HEAD),
        ("shielded", 2 * VOCABULARY, LINEAR + 4 * OUTPUTS + HEAD),
        ("shielded-prefill", 2 * VOCABULARY, 0),
    ],
)
def test_weights_that_stay(policy: str, vocabulary: int, linear: int) -> None:
    parts = tee_parts(ONE_B, load_policy(policy), tokens=1024)
    assert parts["embedding and LM head"] == vocabulary
    assert parts["linear weights"] == linear
    assert parts["process"] == PROCESS_BYTES


def test_cpu_time_is_of_threads_that_have_ended_as_well() -> None:
    spent: list[int] = []

    def work() -> None:
        while time.thread_time_ns() < 20_000_000:
            sum(range(1000))
        spent.append(time.thread_time_ns())

    before = cpu_ns()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cpu_ns() - before >= spent[0]
