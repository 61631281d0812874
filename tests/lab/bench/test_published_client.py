"""The published way of running a model, checked against transformers over a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import transformers

from tests.kit.model import make_model, token_ids
from tests.kit.service import running_service
from tsqp.lab.bench.published_client import main
from tsqp.lab.bench.published_model import PublishedClient, PublishedModel

TOLERANCE = 1e-4
LAYERS = 3
RPCS = 9 * LAYERS + 2


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[transformers.PreTrainedModel, str]]:
    directory = tmp_path_factory.mktemp("model")
    model = make_model(directory, request.param)
    with running_service(directory, "tcp://127.0.0.1:*", "--threads", "1") as service:
        yield model, service.endpoint


def _close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 1.0
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def test_one_token_equals_transformers(served: tuple[transformers.PreTrainedModel, str]) -> None:
    model, endpoint = served
    ids = torch.tensor([[17], [5]])
    with PublishedClient(endpoint) as client:
        logits = PublishedModel(client).forward(ids)
    _close(logits, model(ids).logits)


@torch.no_grad()
def test_longer_prompts_equal_attention_without_a_causal_mask(
    served: tuple[transformers.PreTrainedModel, str],
) -> None:
    model, endpoint = served
    ids = torch.tensor([token_ids(9), token_ids(9, seed=1)])
    with PublishedClient(endpoint) as client:
        logits = PublishedModel(client).forward(ids)
    everywhere = torch.zeros(2, 1, 9, 9)  # added to the scores: nothing is masked
    _close(logits, model(ids, attention_mask=everywhere).logits[:, -1:])
    causal = model(ids).logits[:, -1:]
    assert float((logits - causal).abs().max()) > 0.1


def test_measures_and_prints_json(
    served: tuple[transformers.PreTrainedModel, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, endpoint = served
    arguments = ["--tokens", "1,6", "--new-tokens", "4", "--sampled", "2", "--repeats", "2"]
    main([endpoint, *arguments, "--threads", "1", "--against", "null", "--case-s", "1000"])
    one, six, new = json.loads(capsys.readouterr().out)
    assert [(b["phase"], b["tokens"], b["new_tokens"]) for b in (one, six, new)] == [
        ("prefill", 1, 0),
        ("prefill", 6, 0),
        ("decode", 6, 4),
    ]
    assert {b["against"] for b in (one, six, new)} == {"null"}
    assert {b["round_trips"] for b in (one, six, new)} == {RPCS}
    assert one["bytes_sent"] < six["bytes_sent"] < new["bytes_sent"]
    assert one["step_ms"]["runs"] == new["step_ms"]["runs"] == 2
    main([endpoint, "--tokens", "2", "--repeats", "9", "--case-s", "0"])
    (once,) = json.loads(capsys.readouterr().out)
    assert (once["step_ms"]["runs"], once["round_trips"], once["against"]) == (1, RPCS, "cpu")
    for baseline in (one, six, new):
        spread = baseline["step_ms"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
