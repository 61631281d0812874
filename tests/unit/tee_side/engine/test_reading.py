"""What is read of a prompt is what the model says of it, however it is cut into steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tee_side.engine import reading
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import PromptRead, Request
from tests.kit.model import Models, Tee, finish, token_ids

PROMPT = token_ids(25)


@pytest.fixture(autouse=True)
def _three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM head is asked for so many rows of a prompt at a time."""
    monkeypatch.setattr(reading, "_HEAD_ROWS", 8)


def _read(tee: Tee, step_tokens: int = 512, prompt: Any = PROMPT, **wanted: Any) -> PromptRead:
    engine = Engine(tee.model, tee.lanes, EngineSettings(step_tokens=step_tokens))
    (sequence,) = engine.admit(Request(prompt_ids=tuple(prompt), max_new_tokens=0, **wanted))
    finish(engine)
    assert sequence.reader is not None
    return sequence.reader.result()


def test_what_is_read_is_the_references(saved_model: Models) -> None:
    model = saved_model("llama")
    tee, expected = model.tee("tee-only"), model.logits(PROMPT).log_softmax(-1)
    found = _read(tee, 7, prompt_logprobs=3).logprobs
    assert [one.token_id for one in found] == PROMPT[1:]
    for row, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[row, one.token_id]), abs=1e-4)
        top = expected[row].topk(3)
        assert [token_id for token_id, _ in one.top] == top.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert _read(tee, prompt=[5], prompt_logprobs=2).logprobs == ()
    with torch.inference_mode():
        hidden_TD = model.reference.model(torch.tensor([PROMPT])).last_hidden_state[0]
    for pooling, expected_D in (("mean", hidden_TD.mean(0)), ("last", hidden_TD[-1])):
        found_D = _read(tee, 16, pooling=pooling).pooled_D
        assert found_D is not None
        torch.testing.assert_close(found_D.float(), expected_D, rtol=0, atol=1e-4)


def test_how_many_rows_are_read_does_not_leave_the_tee(saved_model: Models) -> None:
    """The LM head under pads is computed here: its rows, and their number, are the prompt's."""
    tee = saved_model("llama").tee("shielded-prefill")
    asked = []
    for wanted in ({"pooling": "last"}, {"prompt_logprobs": 1}):
        before = len(tee.channels[0].requests)
        _read(tee, 16, **wanted)
        asked.append(len(tee.channels[0].requests) - before)
    assert asked[0] == asked[1] > 0
