"""Real services with segments that are killed in the middle of an answer: it is the same answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import SavedModel
from tests.kit.service import CALM, CALM_S, Worker, Workers

PROMPT, TOKENS = [1, 5, 9, 13, 2, 7, 11, 3, 8], 10
POLICY = "clear-segment"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[SavedModel, str], Worker]]:
    """Return a function that starts a service of a model, at a socket of this name."""
    with Workers() as workers:
        yield lambda model, name: workers.start(
            *(str(model.directory), "--bind", f"unix://{tmp_path}/{name}"),
            *("--dtype", "float32", *CALM),
        )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stands_in", [True, False], ids=["another", "the-same-again"])
def test_a_killed_service_changes_no_token(
    saved_model: Callable[..., SavedModel],
    start: Callable[[SavedModel, str], Worker],
    micro_batches: int,
    *,
    stands_in: bool,
) -> None:
    """Another that stands by has never heard of the session, nor has one that starts again."""
    model = saved_model("llama")
    first = start(model, "first")
    endpoints = [first.endpoint]
    if stands_in:
        endpoints.append(start(model, "second").endpoint)
    settings = RunnerSettings(
        model.directory,
        load_policy(POLICY),
        tuple(endpoints),
        dtype="float32",
        micro_batches=micro_batches,
        request_timeout_s=30.0,
        heartbeat_timeout_s=CALM_S,
    )
    with Runner(settings) as runner:
        generation = runner.generate(PROMPT, max_new_tokens=TOKENS, with_text=False)
        for number, _ in enumerate(generation):
            if number == TOKENS // 2:
                first.kill()
                if not stands_in:
                    assert start(model, "first").endpoint == first.endpoint
        assert generation.result().token_ids == model.greedy(PROMPT, TOKENS)
        again = runner.generate(PROMPT, max_new_tokens=TOKENS, with_text=False)
        list(again)
        assert again.result().token_ids == model.greedy(PROMPT, TOKENS)
