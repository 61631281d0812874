"""How a step is cut, on whose operators its parts run, and what comes out and is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError
from tee_side.engine import step
from tee_side.engine.step import Part, run_step
from tee_side.model.batch import Batch
from tee_side.model.forward import forward
from tee_side.words import Phase
from tests.kit.model import LoopbackChannel, Models, Tee, token_ids


def _batch(tee: Tee, *parts: tuple[int, int]) -> Batch:
    """Return a batch of sequences with so many rows, and so many tokens left for later steps."""
    return Batch.of(
        [
            (tee.cache(rows + left), token_ids(rows, seed), left)
            for seed, (rows, left) in enumerate(parts)
        ]
    )


def _run(tee: Tee, batch: Batch, phase: Phase = "prefill") -> torch.Tensor:
    (result,) = run_step([Part(batch, phase)], tee.lanes)
    return result.logits_NV


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []

    def noted(batch: Batch, model: Any, ops: Any) -> Any:
        found.append((len(batch.token_ids_T), ops))
        return forward(batch, model, ops)

    monkeypatch.setattr(step, "forward", noted)
    return found


def _mixed(tee: Tee) -> list[Part]:
    """Rows of every table: two that decode, ten of a prompt, one that gets no pads."""
    decode, prompt, withheld = (_batch(tee, *p) for p in ([(1, 0)] * 2, [(10, 0)], [(1, 0)]))
    return [Part(decode, "decode"), Part(prompt, "prefill"), Part(withheld, "decode", True)]


def test_each_part_runs_on_its_own_table_and_lane_and_the_largest_is_cut(
    saved_model: Models, seen: list[tuple[int, Any]]
) -> None:
    tee = saved_model("llama").tee("shielded", micro_batches=2)
    together = run_step(_mixed(tee), tee.lanes)
    one, two, three, four, *_ = tee.lanes
    assert [lane.spare for lane in tee.lanes[:4]] == [False, False, True, True]
    assert sorted(seen, key=lambda one: one[0]) == [
        (1, four.withheld["decode"]),
        (2, one.tables["decode"]),
        (5, two.tables["prefill"]),
        (5, three.tables["prefill"]),
    ]
    # Side by side they give what each gives alone.
    for part, found in zip(_mixed(tee), together, strict=True):
        (alone,) = run_step([part], tee.lanes)
        assert torch.equal(found.logits_NV, alone.logits_NV)
    assert [len(found.logits_NV) for found in together] == [2, 1, 1]


def test_a_step_that_fails_leaves_no_pads_behind(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller steps afterwards have fewer lanes: the others would keep them for ever."""
    tee = saved_model("llama").tee("shielded-prefill", micro_batches=2)
    (pads,) = tee.assembly.pads.values()

    def lose(*_: object) -> Exchange:
        raise DeadlineExceededError("loopback", got="no reply", expected="one")

    monkeypatch.setattr(LoopbackChannel, "wait", lose)
    with pytest.raises(DeadlineExceededError):
        _run(tee, _batch(tee, (40, 0)))
    assert pads._store.available + pads._store.room == pads._store.capacity
