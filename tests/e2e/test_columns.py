"""Real gpu-services that hold a part of every weight's columns each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from protocol.channel import Exchange
from protocol.errors import VerificationError
from protocol.messages import InitReply, TensorReply
from protocol.pending import PendingChannel
from protocol.tensors import to_torch
from tee_side import runner as runner_module
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.service import CALM_S, Service, running_service
from tsqp.cli.program import model_directory

PROMPT, NEW_TOKENS = "Once upon a time", 8
pytestmark = pytest.mark.usefixtures("patient_streams")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Services with a part each, as `--gpu` names them: two, and another owner's second part."""
    folder = tmp_path_factory.mktemp("columns")
    with ExitStack() as running:
        found = []
        for number, columns in enumerate(("0/2", "1/2", "1/2")):
            options = (f"unix://{folder}/{number}", "--threads", "1", "--columns", columns)
            service = running.enter_context(running_service("demo", *options))
            found.append(f"{service.endpoint},columns={columns}")
        yield found


def _runner(*gpu: str) -> Runner:
    settings = RunnerSettings(
        model_directory("demo"),
        load_policy("shielded"),
        gpu,
        threads=1,
        dtype="float32",
        heartbeat_timeout_s=CALM_S,
    )
    return Runner(settings)


def _tokens(runner: Runner) -> list[int]:
    prompt_ids = runner.tokenizer.encode(PROMPT)
    generation = runner.generate(prompt_ids, max_new_tokens=NEW_TOKENS, with_text=False)
    list(generation)
    found = generation.result().token_ids
    assert len(found) == NEW_TOKENS
    return found


def test_two_parts_give_the_tokens_of_one_service(demo_service: Service, parts: list[str]) -> None:
    with _runner(*parts[:2]) as runner:
        assert all(f"columns {part}/2" in runner.assignments[part] for part in range(2))
        found, trips = _tokens(runner), runner.traffic.round_trips
    with _runner(demo_service.endpoint) as alone:
        assert found == _tokens(alone)
        assert trips > alone.traffic.round_trips


def _at_third_reply(
    monkeypatch: pytest.MonkeyPatch, chosen: str, act: Callable[[Exchange], object]
) -> None:
    """Do something with the third tensor that comes from an endpoint."""
    connect = runner_module.open_channel

    def connecting(endpoint: str, **settings: Any) -> PendingChannel:
        channel = connect(endpoint, **settings)
        wait, replies = channel.wait, iter(range(10**6))

        def waiting(request_id: int) -> Exchange:
            exchange = wait(request_id)
            if not isinstance(exchange.response, InitReply) and next(replies) == 2:
                act(exchange)
            return exchange

        if endpoint == chosen:
            channel.wait = waiting  # type: ignore[method-assign]
        return channel

    monkeypatch.setattr(runner_module, "open_channel", connecting)


def _lie(exchange: Exchange) -> None:
    if isinstance(exchange.response, TensorReply):
        exchange.output = to_torch(exchange.response.output)
    assert exchange.output is not None
    exchange.output = exchange.output + 1


def test_a_lying_part_is_named_and_its_replica_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    demo_service: Service,
    parts: list[str],
) -> None:
    with _runner(demo_service.endpoint) as runner:
        expected = _tokens(runner)
    liar = parts[1].partition(",")[0]
    _at_third_reply(monkeypatch, liar, _lie)
    with _runner(*parts[:2]) as runner, pytest.raises(VerificationError) as caught:
        _tokens(runner)
    assert caught.value.where.endswith(f" at {liar} (columns 1/2)")
    with _runner(*parts) as runner:
        assert _tokens(runner) == expected
    quarantined = [one for one in caplog.records if one.message == "service_quarantined"]
    assert {one.fields["endpoint"] for one in quarantined} == {liar}  # type: ignore[attr-defined]
