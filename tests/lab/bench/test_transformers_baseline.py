"""The transformers baseline measures what it says: prompts, and steps with a KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kit.model import SavedModel
from tsqp.lab.bench import transformers_baseline
from tsqp.lab.bench.transformers_baseline import main


def test_measures_and_prints_json(
    saved_model: Callable[..., SavedModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps: list[tuple[int, int, int]] = []
    step = transformers_baseline._step

    def recorded(model: Any, ids: torch.Tensor, cache: Any) -> Any:
        before = 0 if cache is None else cache.get_seq_length()
        output = step(model, ids, cache)
        steps.append((before, ids.shape[1], output.logits.shape[1]))
        return output

    monkeypatch.setattr(transformers_baseline, "_step", recorded)
    arguments = ["--tokens", "5,9", "--new-tokens", "3", "--repeats", "2", "--threads", "1"]
    main([str(saved_model().directory), *arguments, "--dtype", "float32", "--case-s", "1000"])
    five, nine, decode = json.loads(capsys.readouterr().out)
    assert (five["phase"], five["tokens"], five["step_ms"]["runs"]) == ("prefill", 5, 2)
    assert (nine["phase"], nine["tokens"], nine["new_tokens"]) == ("prefill", 9, 0)
    assert (decode["phase"], decode["tokens"], decode["new_tokens"]) == ("decode", 5, 3)
    assert decode["step_ms"]["runs"] == 3
    assert decode["against"] == "none"
    assert (decode["dtype"], decode["round_trips"]) == ("float32", 0)
    assert "1 threads, sdpa attention" in decode["description"]
    # One more than is counted warms up each time; only the last token has logits.
    assert steps == [
        *[(0, 5, 1)] * 3,
        *[(0, 9, 1)] * 3,
        (0, 5, 1),
        *[(n, 1, 1) for n in range(5, 9)],
    ]
