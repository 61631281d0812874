"""The process that measures: every case is run as often as the plan says, and reported."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.channel import Traffic
from tee_side.runner import Runner
from tee_side.words import Phase
from tests.kit.model import SavedModel
from tsqp.lab.bench import worker
from tsqp.lab.bench.job import Answer, Failed, Finished, Job, Measured, Plan, Progress
from tsqp.lab.bench.model import Case, Spread

Models = Callable[..., SavedModel]
PLAN = Plan(prefill=(1, 9), decode=((5, 3),), generation=(4, 6), repeats=4, decode_steps=5)


def job(model: Path, **changes: Any) -> Job:
    made = Job(
        model=model,
        policy="tee-only",
        endpoints=(),
        service_pids=(),
        key=None,
        bank=None,
        kernels="auto",
        threads=1,
        step_tokens=64,
        micro_batches=1,
        spin_us=0.0,
        link_gbps=None,
        link_rtt_us=0.0,
        dtype=None,
        shares_in_the_clear=False,
        plan=PLAN,
    )
    return made.model_copy(update=changes)


def test_every_case_is_measured(saved_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    generate = Runner.generate

    def recorded(self: Runner, prompt_ids: Any, **settings: Any) -> Any:
        given.append((len(prompt_ids), settings["max_new_tokens"]))
        return generate(self, prompt_ids, **settings)

    monkeypatch.setattr(Runner, "generate", recorded)
    # However slow this machine is: what takes long is run less often, which is another test's.
    for budget in ("_WARM_UP_S", "_TIMED_S", "_OBSERVED_S"):
        monkeypatch.setattr(worker, budget, math.inf)
    told: list[Answer] = []
    worker.measure(job(saved_model().directory), told.append)
    doing = [answer.doing for answer in told if isinstance(answer, Progress)]
    assert doing == ["loading", "prefill 1", "prefill 9", "decode 3 x 5", "generating 6 tokens"]
    measured = [answer for answer in told if isinstance(answer, Measured)]
    one, nine, decode = (answer.case for answer in measured[:3])
    assert one is not None
    assert nine is not None
    assert decode is not None
    assert [(c.phase, c.tokens, c.batch) for c in (one, nine, decode)] == [
        ("prefill", 1, 1),
        ("prefill", 9, 1),
        ("decode", 5, 3),
    ]
    assert (one.step_ms.runs, decode.step_ms.runs) == (4, 5)
    # As often as the plan counts, which is what contexts and pads are sized by.
    runs = PLAN.runs("prefill")
    assert given == [
        *[(1, 1)] * runs,
        *[(9, 1)] * runs,
        *[(5, PLAN.new_tokens(5, 3, 64))] * 3,
        (4, 6),
    ]
    for case in (one, nine, decode):
        # Without a service all of it is known, and nothing is sent.
        assert (case.rpcs, case.bytes_sent, case.cpu_gpu_ms) == (0, 0, 0)
        layers = {cost.layer for cost in case.operators if cost.operator == "qkv_proj"}
        assert layers == {0, 1, 2}
        assert all(cost.calls >= 1 for cost in case.operators)
        assert case.step_ms.low <= case.step_ms.median <= case.step_ms.high
        assert 0 < case.heavy_ms < case.step_ms.high
    assert decode.tokens_per_s == pytest.approx(3e3 / decode.step_ms.median)
    assert nine.tokens_per_s == pytest.approx(9e3 / nine.step_ms.median)
    assert [answer.timeline is not None for answer in measured] == [False, True, True, False]
    generation = measured[3].generation
    assert generation is not None
    assert (generation.prompt_tokens, generation.new_tokens) == (4, 6)
    finished = told[-1]
    assert isinstance(finished, Finished)
    # Keys and values of 3 sequences of 5 + 13 - 1 tokens: 3 layers of 2 heads of 16 floats each.
    assert PLAN.cached_tokens(64) == 3 * (5 + 13 - 1)
    assert finished.kv_bytes == 51 * 2 * 3 * 2 * 16 * 4
    assert (
        finished.vocabulary_bytes == 2 * 320 * 48 * 4 or finished.vocabulary_bytes == 320 * 48 * 4
    )


def test_an_error_is_told_in_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = job(tmp_path / "nowhere").model_dump_json()
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    with pytest.raises(SystemExit) as ended:
        worker.main()
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    failed = Failed.model_validate(json.loads(lines[-1]))
    assert str(tmp_path / "nowhere") in failed.where
    assert failed.expected


class _Clock:
    """Stands in for `time`, so that each figure is known."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def spend(self, milliseconds: float) -> tuple[int, int]:
        started_ns, self.now_ns = self.now_ns, self.now_ns + round(milliseconds * 1e6)
        return started_ns, self.now_ns


class _ScriptedRunner:
    """Takes a known time for each step, and sends twice in it.

    Of a step, `heavy_ms` are for the LM head in the TEE, and a quarter is between operators.
    """

    def __init__(self, clock: _Clock, steps_ms: list[tuple[float, float]]) -> None:
        self.config = SimpleNamespace(vocab_size=9)
        self.traffic = Traffic(7, 70, 700)  # of what was run before
        self.steps = 0
        self._clock = clock
        self._left = steps_ms
        self._observer: Any = None
        self._told: tuple[str, ...] = ()

    def observe(self, observer: Any, operators: tuple[str, ...] = ("lm_head", "rope")) -> None:
        self._observer, self._told = observer, operators

    def step(self) -> None:
        step_ms, heavy_ms = self._left.pop(0)
        for operator, spent_ms in (("lm_head", heavy_ms), ("rope", 0.75 * step_ms - heavy_ms)):
            span = self._clock.spend(spent_ms)
            if self._observer is not None and operator in self._told:
                lane = self._observer.lane(0)
                lane.called(operator, None, "tee")
                lane.spent(operator, None, "tee", *span)
        self._clock.spend(0.25 * step_ms)
        self.steps += 1
        before = self.traffic
        self.traffic = Traffic(
            before.round_trips + 2, before.bytes_sent + 100, before.bytes_received + 300
        )


def _measured(
    monkeypatch: pytest.MonkeyPatch, phase: Phase, tokens: int, batch: int, **changes: Any
) -> Case:
    """Measure steps of 10, 40 and 20 ms, then observe others."""
    clock = _Clock()
    warm, timed = [(50.0, 5.0)] * 2, [(10.0, 1.0), (40.0, 2.0), (20.0, 9.0)]
    observed = [(24.0, 4.0), (16.0, 4.0), (32.0, 4.0)]
    runner: Any = _ScriptedRunner(clock, warm + timed + observed)
    monkeypatch.setattr(worker, "time", clock)
    rates = {"self": 3e6, 11: 5e6, 12: 7e6}
    monkeypatch.setattr(worker, "cpu_ns", lambda pid: round(1e9 + rates[pid] * runner.steps))
    told: list[Answer] = []
    given = job(Path("nowhere"), **changes)
    bench = worker._Bench(runner, given, told.append)
    bench._measure(phase, tokens, batch, runner.step, 3, False)
    (answer,) = told
    assert isinstance(answer, Measured)
    assert answer.case is not None
    return answer.case


def test_what_a_case_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _measured(
        monkeypatch, "decode", 128, 4, service_pids=(11, 12), endpoints=("a", "b"), micro_batches=2
    )
    assert case.step_ms == Spread(median=20, low=10, high=40, runs=3)
    assert case.heavy_ms == 2
    # The median of 9, 38 and 11: not that of the step less that of the LM head.
    assert case.overhead_ms == pytest.approx(11)
    assert case.tokens_per_s == pytest.approx(4 / 20e-3)
    assert (case.cpu_tee_ms, case.cpu_gpu_ms) == (pytest.approx(3), pytest.approx(12))
    assert (case.rpcs, case.bytes_sent, case.bytes_received) == (2, 100, 300)
    assert (case.tokens, case.batch, case.micro_batches) == (128, 4, 2)
    # Of the observed steps of 24, 16 and 32 ms the one in the middle, 18 of which have a name.
    assert {cost.operator: cost.stages.tee_us for cost in case.operators} == {
        "lm_head": pytest.approx(4000),
        "rope": pytest.approx(14000),
    }
    assert case.rest_us == pytest.approx(6000)


@pytest.mark.parametrize(
    ("step_ms", "times"),
    [
        (100.0, (2, 5, 3)),
        (599.0, (2, 5, 3)),
        (601.0, (1, 5, 3)),
        (1200.0, (1, 5, 2)),
        (1300.0, (1, 4, 2)),
        (9000.0, (1, 2, 1)),
    ],
)
def test_slow_work_is_run_less_often(
    monkeypatch: pytest.MonkeyPatch, step_ms: float, times: tuple[int, int, int]
) -> None:
    """To warm up, timed, and observed."""
    clock = _Clock()
    runner: Any = _ScriptedRunner(clock, [(step_ms, 0.0)] * 20)
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(worker, "cpu_ns", lambda _pid: 0)
    under: list[str] = []
    observe, step = runner.observe, runner.step

    def observing(observer: Any, *operators: Any) -> None:
        under.append(type(observer).__name__)
        observe(observer, *operators)

    done: list[str] = []

    def noted() -> None:
        done.append(under[-1] if under else "")
        step()

    monkeypatch.setattr(runner, "observe", observing)
    told: list[Answer] = []
    worker._Bench(runner, job(Path("nowhere")), told.append)._measure(
        "prefill", 128, 1, noted, 5, True
    )
    assert (done.count(""), done.count("_Heavy"), done.count("Collector")) == times
    (answer,) = told
    assert isinstance(answer, Measured)
    assert answer.case is not None
    assert answer.case.step_ms.runs == times[1]
