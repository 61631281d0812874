"""How a step is cut, on whose operators its parts run, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tee_side.engine import step
from tee_side.engine.step import MIN_MICRO_BATCH_ROWS, run_step
from tee_side.model.batch import Batch
from tee_side.model.forward import forward
from tests.support import SavedModel, Tee, assemble, token_ids

Models = Callable[..., SavedModel]


@pytest.fixture
def tee(saved_model: Models) -> Tee:
    return assemble(saved_model("llama").directory, micro_batches=3)


def _batch(tee: Tee, *parts: tuple[int, int]) -> Batch:
    """Return a batch of sequences with so many rows, and so many tokens left for later steps."""
    return Batch.of(
        [
            (tee.cache(rows + left), token_ids(rows, seed), left)
            for seed, (rows, left) in enumerate(parts)
        ]
    )


def _noting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Note the rows and the operators of every part."""
    seen: list[tuple[int, Any]] = []

    def noted(batch: Batch, model: Any, ops: Any) -> Any:
        seen.append((len(batch.token_ids_T), ops))
        return forward(batch, model, ops)

    monkeypatch.setattr(step, "forward", noted)
    return seen


LEAST = MIN_MICRO_BATCH_ROWS


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, [1]),
        (2 * LEAST - 1, [2 * LEAST - 1]),
        (2 * LEAST, [LEAST, LEAST]),
        (3 * LEAST - 1, [LEAST + 1, LEAST + 2]),
        (3 * LEAST, [LEAST] * 3),
        (10 * LEAST, [13, 13, 14]),
    ],
)
def test_a_step_is_cut_into_as_many_parts_as_have_enough_rows(
    tee: Tee, rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _noting(monkeypatch)
    run_step(_batch(tee, (rows, 0)), tee.lanes, "prefill")
    assert [count for count, _ in seen] == sizes
    for (_, ops), lane in zip(seen, tee.lanes, strict=False):
        assert ops is lane.tables["prefill"]


def test_a_step_that_is_not_cut_runs_the_batch_itself(
    tee: Tee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batch, "split", lambda *_: pytest.fail("cut"))
    logits = run_step(_batch(tee, (5, 0)), tee.lanes, "prefill")
    assert logits.shape == (1, 320)


def test_the_phase_chooses_the_table(saved_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    tee, seen = saved_model("llama").tee("shielded", micro_batches=2), _noting(monkeypatch)
    for phase in ("prefill", "decode"):
        seen.clear()
        run_step(_batch(tee, (9, 0)), tee.lanes, phase)
        assert [ops for _, ops in seen] == [lane.tables[phase] for lane in tee.lanes]
    tables = tee.lanes[0].tables
    assert tables["prefill"] is not tables["decode"]


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(1, 0)] * 12, 12),
        ([(13, 0)], 1),  # two parts of three have no row whose logits are wanted
        ([(1, 0), (12, 5)], 1),  # only the first has
        ([(6, 3), (1, 0), (6, 3)], 1),  # only the second has
        ([(3, 0), (9, 0), (2, 4)], 2),
    ],
)
def test_logits_stand_in_the_order_of_the_batch(
    tee: Tee, parts: list[tuple[int, int]], wanted: int
) -> None:
    batch, same = _batch(tee, *parts), _batch(tee, *parts)
    found = run_step(batch, tee.lanes, "prefill")
    expected = run_step(same, tee.lanes[:1], "prefill")
    assert found.shape == (wanted, 320)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def test_a_step_of_which_nobody_wants_logits_has_none(tee: Tee) -> None:
    logits = run_step(_batch(tee, (13, 5)), tee.lanes, "prefill")
    assert len(logits) == 0


def test_caches_hold_a_step_in_parts_and_do_not_count_it(tee: Tee) -> None:
    batch = _batch(tee, (13, 0))
    run_step(batch, tee.lanes, "prefill")
    (chunk,) = batch.chunks
    assert chunk.cache.length == 0
    batch.commit()
    assert chunk.cache.length == 13


def test_a_step_records_no_gradients(tee: Tee) -> None:
    logits = run_step(_batch(tee, (13, 0)), tee.lanes, "prefill")
    assert logits.is_inference()
    assert not logits.requires_grad
