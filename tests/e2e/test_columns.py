"""Real gpu-services that hold a part of every weight's columns each."""

from __future__ import annotations

import signal
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

DEMO = model_directory("demo")
PROMPT, NEW_TOKENS = "Once upon a time", 8
POLICIES = (
    "shielded",
    "attention-in-tee",
    pytest.param("quantized-clear", marks=pytest.mark.slow),
    pytest.param("tsqp", marks=pytest.mark.slow),
)

Start = Callable[[str], Service]
pytestmark = pytest.mark.usefixtures("patient_streams")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts a service with such columns."""
    folder = tmp_path_factory.mktemp("columns")
    with ExitStack() as running:
        count = iter(range(99))

        def go(columns: str) -> Service:
            options = ("--threads", "1", "--columns", columns)
            bind = f"unix://{folder}/{next(count)}"
            return running.enter_context(running_service("demo", bind, *options))

        yield go


@pytest.fixture(scope="module")
def parts(start: Start) -> list[str]:
    """The endpoints of two services with a part each, as `--gpu` names them."""
    return [f"{start(f'{part}/2').endpoint},columns={part}/2" for part in range(2)]


@pytest.fixture(scope="module")
def others(start: Start) -> list[str]:
    """Two more, of another owner."""
    return [f"{start(f'{part}/2').endpoint},columns={part}/2" for part in range(2)]


def _runner(policy: str, *gpu: str, **more: Any) -> Runner:
    chosen = load_policy(policy)
    given: dict[str, Any] = {
        "threads": 1,
        "dtype": "float32",
        "heartbeat_timeout_s": CALM_S,
        "shares_in_the_clear": chosen.services > 1,
    }
    return Runner(RunnerSettings(DEMO, chosen, gpu, **{**given, **more}))


def _tokens(runner: Runner) -> list[int]:
    prompt_ids = runner.tokenizer.encode(PROMPT)
    generation = runner.generate(prompt_ids, max_new_tokens=NEW_TOKENS, with_text=False)
    list(generation)
    found = generation.result().token_ids
    assert len(found) == NEW_TOKENS
    return found


def _generate(policy: str, *gpu: str) -> list[int]:
    with _runner(policy, *gpu) as runner:
        return _tokens(runner)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_parts_give_the_tokens_of_one_service(
    demo_service: Service, parts: list[str], policy: str
) -> None:
    with _runner(policy, *parts) as runner:
        assert all(f"columns {part}/2" in runner.assignments[part] for part in range(2))
        found, trips = _tokens(runner), runner.traffic.round_trips
    with _runner(policy, demo_service.endpoint) as alone:
        assert found == _tokens(alone)
        assert trips > alone.traffic.round_trips


@pytest.mark.parametrize(
    "policy", ["shielded", pytest.param("attention-in-tee", marks=pytest.mark.slow)]
)
def test_a_part_that_dies_is_replaced_by_one_with_the_same_columns(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start: Start,
    demo_service: Service,
    parts: list[str],
    policy: str,
) -> None:
    expected = _generate(policy, demo_service.endpoint)
    dying = start("1/2")
    gpu = (parts[0], f"{dying.endpoint},columns=1/2", parts[1])
    _at_third_reply(
        monkeypatch, dying.endpoint, lambda _: dying.process.send_signal(signal.SIGKILL)
    )
    assert _generate(policy, *gpu) == expected
    lost = [one for one in caplog.records if one.message == "service_lost"]
    assert {one.fields["endpoint"] for one in lost} == {dying.endpoint}  # type: ignore[attr-defined]


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
    others: list[str],
) -> None:
    expected = _generate("shielded", demo_service.endpoint)
    liar = parts[1].partition(",")[0]
    _at_third_reply(monkeypatch, liar, _lie)
    with pytest.raises(VerificationError) as caught:
        _generate("shielded", *parts)
    assert caught.value.where.endswith(f" at {liar} (columns 1/2)")
    assert _generate("shielded", *parts, others[1]) == expected
    quarantined = [one for one in caplog.records if one.message == "service_quarantined"]
    assert {one.fields["endpoint"] for one in quarantined} == {liar}  # type: ignore[attr-defined]
