"""The published way of running a model, checked against transformers over a real service."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.kit.model import make_model, token_ids
from tests.kit.service import running_service
from tsqp.lab.bench.published_model import PublishedClient, PublishedModel

TOLERANCE = 1e-4


@torch.no_grad()
def test_it_equals_transformers_but_for_the_causal_mask(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2", num_hidden_layers=2)
    one, longer = torch.tensor([[17], [5]]), torch.tensor([token_ids(9), token_ids(9, seed=1)])
    with (
        running_service(tmp_path, "tcp://127.0.0.1:*", "--threads", "1") as service,
        PublishedClient(service.endpoint) as client,
    ):
        published = PublishedModel(client)
        found, found_longer = published.forward(one), published.forward(longer)
    everywhere = torch.zeros(2, 1, 9, 9)  # added to the scores: nothing is masked
    expected_longer = model(longer, attention_mask=everywhere).logits[:, -1:]
    for ours, expected in ((found, model(one).logits), (found_longer, expected_longer)):
        assert float(expected.abs().max()) > 1.0
        torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert float((found_longer - model(longer).logits[:, -1:]).abs().max()) > 0.1
