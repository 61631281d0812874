"""What a worker said before it ended is what is reported."""

from __future__ import annotations

from tee_side.policy.placement import load_policy
from tests.unit.tsqp.bench.sample_report import case, timeline
from tsqp.lab.bench.job import Finished, Measured, Progress
from tsqp.lab.bench.model import Generation, PadMaking
from tsqp.lab.bench.partial import Partial

GENERATION = Generation(prompt_tokens=4, new_tokens=6, ttft_ms=1, tpot_ms=2, total_ms=11)
PADS = PadMaking(phases=("decode",), token_ms=3, cpu_ms=5, batch_tokens=512)


def test_answers_add_up() -> None:
    policy = load_policy("tsqp")
    partial = Partial(policy)
    first, second = case("tsqp", "prefill"), case("tsqp", "decode")
    assert not partial.any
    partial.take(Progress(doing="prefill"))
    assert not partial.any
    for answer in (
        Measured(case=first),
        Measured(case=second, timeline=timeline("tsqp")),
        Measured(generation=GENERATION),
        Finished(peak_bytes=7, kv_bytes=8, vocabulary_bytes=9, pads=PADS),
    ):
        partial.take(answer)
        assert partial.any
    partial.gpu_peak_bytes = 10
    found = partial.run()
    assert (found.policy, found.summary) == ("tsqp", policy.summary)
    assert found.leakage_summary == policy.leakage_summary()
    assert found.cases == (first, second)
    assert found.timelines == (timeline("tsqp"),)
    assert found.generation == GENERATION
    assert (found.tee_peak_bytes, found.kv_bytes, found.vocabulary_bytes) == (7, 8, 9)
    assert found.gpu_peak_bytes == 10
    assert found.pads == PADS


def test_without_the_last_answer_its_figures_are_zero() -> None:
    partial = Partial(load_policy("tsqp"))
    partial.take(Measured(generation=GENERATION))
    assert partial.any
    found = partial.run()
    assert found.generation == GENERATION
    assert (found.tee_peak_bytes, found.kv_bytes, found.vocabulary_bytes) == (0, 0, 0)
    assert found.gpu_peak_bytes is None
