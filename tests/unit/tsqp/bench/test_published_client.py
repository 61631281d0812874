"""The published way of running a model, checked against transformers over a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
import zmq

from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ServiceError
from tests.kit.model import make_model, token_ids
from tests.kit.service import running_service
from tsqp.lab.bench.published_client import main, mean_over, sample_lengths
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


def test_each_new_token_runs_the_whole_sequence(
    served: tuple[transformers.PreTrainedModel, str],
) -> None:
    _, endpoint = served
    prompt = token_ids(4)
    with PublishedClient(endpoint) as client:
        model = PublishedModel(client)
        assert model.vocab_size == 320
        before = client.counters.round_trips
        new = model.generate(prompt, 3)
        assert client.counters.round_trips - before == 3 * RPCS
        again = model.generate([*prompt, new[0]], 2)
    assert again == new[1:]


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


def test_an_error_reply_is_a_service_error(
    served: tuple[transformers.PreTrainedModel, str],
) -> None:
    _, endpoint = served
    with PublishedClient(endpoint) as client, pytest.raises(ServiceError) as raised:
        client.linear(LAYERS, "q_proj", torch.zeros(1, 1, 48))
    assert raised.value.code is ErrorCode.INVALID_FIELD


def test_no_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = zmq.Context()
    socket = silent.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/silent")
    with (
        PublishedClient(f"ipc://{tmp_path}/silent", timeout_s=0.05) as client,
        pytest.raises(DeadlineExceededError, match="no reply to Init within"),
    ):
        PublishedModel(client)
    socket.close(linger=0)
    silent.term()
    with pytest.raises(EndpointError, match="unix:///nowhere"):
        PublishedClient("unix:///nowhere")
    with pytest.raises(SystemExit) as ended:
        main(["unix:///nowhere"])
    assert "published_client: error: endpoint: got" in str(ended.value.code)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "sampled", "expected"),
    [
        (512, 64, 3, [512, 544, 575]),
        (512, 64, 2, [512, 575]),
        (8, 2, 5, [8, 9]),
        (8, 1, 3, [8]),
        (8, 5, 1, [10]),
    ],
)
def test_sampled_lengths(tokens: int, new_tokens: int, sampled: int, expected: list[int]) -> None:
    assert sample_lengths(tokens, new_tokens, sampled) == expected


def test_mean_over_interpolates() -> None:
    def cost(length: int) -> float:
        return 3.0 * length + 1.0

    lengths = [10, 14, 25]
    exact = sum(cost(n) for n in range(10, 26)) / 16
    assert mean_over(lengths, [cost(n) for n in lengths]) == pytest.approx(exact)
    assert mean_over([7], [5.0]) == 5.0
    assert mean_over([1, 2, 4], [1.0, 10.0, 10.0]) == pytest.approx(31 / 4)
