"""The published way of running a model, checked against transformers over a real service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from tests.kit.model import make_model, token_ids
from tests.kit.service import running_service
from tsqp.lab.bench.published_model import PublishedClient, PublishedModel

TOLERANCE = 1e-4


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
