"""Real gpu-services that are killed, stopped, restarted and exchanged in the middle of a decode.

The output must be that of the undisturbed run, or one typed error must come; and no service may
ever get the other share, whatever fails.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError, ModelMismatchError, SettingsError
from protocol.messages import InitRequest, Request
from protocol.pending import PendingChannel
from tee_side import runner as runner_module
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import SavedModel, expanded
from tests.kit.service import CALM, CALM_S, Worker, Workers, run

PROMPT = [1, 5, 9, 13, 2, 7]
NEW_TOKENS = 6
SHARES = "two-server"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as made:
        yield made


@pytest.fixture
def start(workers: Workers, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a service of a model; `transport`: tcp, ipc, unix or shm."""
    started: list[Worker] = []

    def go(model: Path, *arguments: str, transport: str = "tcp") -> Worker:
        bind = "tcp://127.0.0.1:*"
        if transport != "tcp":
            bind = f"{transport}://{tmp_path}/{len(started)}"
        made = workers.start(str(model), "--bind", bind, "--dtype", "float32", *CALM, *arguments)
        started.append(made)
        return made

    yield go
    for worker in started:
        worker.kill()


@dataclass
class Record:
    """What was sent where. `at`: called before and after the n-th request that is no Init."""

    sent: list[tuple[str, Request]] = field(default_factory=list)
    at: Callable[[int, bool], None] = lambda _count, _sent: None

    def to(self, endpoint: str) -> list[Request]:
        """Return what a service was sent, but for Init."""
        return [r for where, r in self.sent if where == endpoint and not _is_init(r)]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Record what runners hand to the transports, over the real ones."""
    kept = Record()
    connect = runner_module.open_channel

    def recording(endpoint: str, **settings: Any) -> PendingChannel:
        channel = connect(endpoint, **settings)
        submit, start = channel.submit, channel.start

        def recorded(request: Request, *arguments: Any, **more: Any) -> int:
            return noted(request, lambda: submit(request, *arguments, **more))

        def started(prepared: Any, payload: Any, timeout_s: float | None = None) -> int:
            request = prepared.request(payload)
            return noted(request, lambda: start(prepared, payload, timeout_s))

        def noted(request: Request, send: Callable[[], int]) -> int:
            count = sum(not _is_init(one) for _, one in kept.sent)
            if not _is_init(request):
                kept.at(count, False)
            request_id = send()
            kept.sent.append((endpoint, request))
            if not _is_init(request):
                kept.at(count, True)
            return request_id

        channel.submit, channel.start = recorded, started  # type: ignore[method-assign]
        return channel

    monkeypatch.setattr(runner_module, "open_channel", recording)
    return kept


def _is_init(request: Request) -> bool:
    return isinstance(request, InitRequest)


def _settings(model: SavedModel, policy: str, *gpu: str, **more: Any) -> RunnerSettings:
    chosen = load_policy(policy)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "request_timeout_s": 30.0,
        "heartbeat_timeout_s": CALM_S,
        "shares_in_the_clear": True,
        **more,
    }
    return RunnerSettings(model.directory, chosen, gpu, masks=model.masks(chosen), **settings)


def _generate(settings: RunnerSettings) -> list[int]:
    with Runner(settings) as runner:
        return _tokens(runner)


def _tokens(runner: Runner) -> list[int]:
    generation = runner.generate(PROMPT, max_new_tokens=NEW_TOKENS, with_text=False)
    list(generation)
    return generation.result().token_ids


@contextmanager
def _in_background(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


# --------------------------------------------------------------------------------------- kill -9


@pytest.mark.each_value
@pytest.mark.parametrize("transport", ["tcp", "ipc", "unix", "shm"])
@pytest.mark.parametrize(
    ("policy", "point", "sent", "micro_batches"),
    [
        ("attention-in-tee", 0, False, 1),  # before anything was asked
        ("attention-in-tee", 5, True, 2),  # several in flight, in the prompt
        ("attention-in-tee", 30, False, 1),
        ("quantized-clear", 37, True, 1),  # in flight, in the middle of a token
    ],
)
def test_a_killed_worker_changes_nothing_where_another_is(
    saved_model: Callable[..., SavedModel],
    start: Callable[..., Worker],
    record: Record,
    transport: str,
    policy: str,
    point: int,
    sent: bool,
    micro_batches: int,
) -> None:
    model = saved_model("llama")
    first, second = (start(model.directory, transport=transport) for _ in range(2))
    settings = _settings(
        model, policy, first.endpoint, second.endpoint, micro_batches=micro_batches
    )
    undisturbed = _generate(settings)
    assert not record.to(second.endpoint)
    record.sent.clear()

    def kill(count: int, is_sent: bool) -> None:
        if (count, is_sent) == (point, sent):
            first.kill()

    record.at = kill
    assert _generate(settings) == undisturbed
    assert not first.is_running
    assert record.to(second.endpoint)


def test_a_service_that_is_told_to_stop_is_left_for_another(
    saved_model: Callable[..., SavedModel], start: Callable[..., Worker], record: Record
) -> None:
    model = saved_model("llama")
    first, second = (start(model.directory) for _ in range(2))
    settings = _settings(model, "attention-in-tee", first.endpoint, second.endpoint)
    undisturbed = _generate(settings)
    for point in (3, 20):
        asked = first if first.is_running and point == 3 else second
        record.sent.clear()

        def stop(count: int, is_sent: bool, point: int = point, asked: Worker = asked) -> None:
            if (count, is_sent) == (point, True):
                asked.signal(signal.SIGTERM)

        record.at = stop
        if point == 20:
            first = start(model.directory)
            settings = _settings(model, "attention-in-tee", second.endpoint, first.endpoint)
        assert _generate(settings) == undisturbed
        other = second if asked is not second else first
        assert record.to(other.endpoint)


# ------------------------------------------------------------------------------ the only worker


@pytest.mark.parametrize("policy", ["attention-in-tee", "quantized-clear"])
def test_the_only_worker_is_killed_and_comes_back(
    saved_model: Callable[..., SavedModel],
    start: Callable[..., Worker],
    workers: Workers,
    record: Record,
    policy: str,
) -> None:
    model = saved_model("llama")
    only = start(model.directory)
    settings = _settings(model, policy, only.endpoint)
    undisturbed = _generate(settings)
    back: list[Worker] = []
    killed = threading.Event()

    def kill(count: int, is_sent: bool) -> None:
        if (count, is_sent) == (17, True) and not killed.is_set():
            only.kill()
            killed.set()

    def restart() -> None:
        assert killed.wait(60)
        back.append(workers.restart(only))

    record.sent.clear()
    record.at = kill
    with _in_background(restart):
        assert _generate(settings) == undisturbed
    # The new process was asked what it holds before it was sent anything: one more request may
    # have been on its way to the dead one, and is sent again.
    asked = [_is_init(request) for _, request in record.sent]
    assert asked.index(True) == 0
    assert asked.index(True, 1) in (19, 20)
    back[0].kill()


def test_a_worker_that_comes_back_with_another_model_gets_nothing(
    saved_model: Callable[..., SavedModel],
    start: Callable[..., Worker],
    workers: Workers,
    record: Record,
) -> None:
    model, other = saved_model("llama"), saved_model("llama", max_position_embeddings=128)
    only = start(model.directory)
    killed = threading.Event()
    back: list[Worker] = []

    def kill(count: int, is_sent: bool) -> None:
        if (count, is_sent) == (17, True):
            only.kill()
            killed.set()

    def restart() -> None:
        assert killed.wait(60)
        arguments = list(only.arguments)
        arguments[0] = str(other.directory)
        arguments[arguments.index("--bind") + 1] = only.endpoint
        back.append(workers.start(*arguments))

    record.at = kill
    with (
        _in_background(restart),
        pytest.raises(ModelMismatchError, match="model_digest"),
    ):
        _generate(_settings(model, "attention-in-tee", only.endpoint))
    # One more may have been on its way to the dead one; after that only what it holds was asked.
    assert len(record.to(only.endpoint)) <= 19
    assert _is_init(record.sent[-1][1])
    back[0].kill()


def test_with_nobody_left_one_error_says_what_became_of_each(
    saved_model: Callable[..., SavedModel], start: Callable[..., Worker], record: Record
) -> None:
    model = saved_model("llama")
    both = [start(model.directory) for _ in range(2)]

    def kill(count: int, is_sent: bool) -> None:
        if (count, is_sent) == (17, True):
            for worker in both:
                worker.kill()

    record.at = kill
    settings = _settings(
        model, "attention-in-tee", *(one.endpoint for one in both), request_timeout_s=1.0
    )
    with Runner(settings) as runner:
        with pytest.raises(DeadlineExceededError) as caught:
            _tokens(runner)
        for worker in both:
            assert f"{worker.endpoint}: " in caught.value.got
        # The next one is asked of nobody in vain, and ends as well.
        with pytest.raises(DeadlineExceededError):
            _tokens(runner)


# --------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("at", [11, pytest.param(40, marks=pytest.mark.slow)])
def test_no_service_ever_gets_the_other_share(
    saved_model: Callable[..., SavedModel], start: Callable[..., Worker], record: Record, at: int
) -> None:
    model = saved_model("llama")
    workers = [start(model.directory) for _ in range(4)]
    shared = [f"{worker.endpoint},share={1 + n % 2}" for n, worker in enumerate(workers)]
    settings = _settings(model, SHARES, *shared)
    undisturbed = _generate(settings)
    record.sent.clear()

    def kill(count: int, is_sent: bool) -> None:
        # One of each share, at different moments.
        for number, point in ((0, at), (1, at + 13)):
            if (count, is_sent) == (point, True):
                workers[number].kill()

    record.at = kill
    assert _generate(settings) == undisturbed
    got = [_elements(record.to(worker.endpoint)) for worker in workers]
    first, second = got[0] | got[2], got[1] | got[3]
    assert all(got)
    # A share is uniform and drawn afresh: what is the same twice is the same share.
    assert not first & second
    # As many different ones as there were products: what was sent again was not split anew.
    products = (NEW_TOKENS) * 3 * 4
    assert len(first) == len(second) == products


def _elements(requests: list[Request]) -> set[bytes]:
    return {bytes(expanded(request).elements.data) for request in requests}


def test_a_restart_does_not_give_a_process_another_share(
    saved_model: Callable[..., SavedModel],
    start: Callable[..., Worker],
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two names of one service, one of which leads elsewhere when the run starts."""
    model = saved_model("llama")
    first, second = (start(model.directory) for _ in range(2))
    connect = runner_module.open_channel
    moved = threading.Event()

    def moving(endpoint: str, **settings: Any) -> PendingChannel:
        # As a name server or a load balancer would: the second's name leads to the first by now.
        led = first.endpoint if endpoint == second.endpoint and moved.is_set() else endpoint
        return connect(led, **settings)

    def kill(count: int, is_sent: bool) -> None:
        if (count, is_sent) == (20, True):
            moved.set()
            second.kill()

    monkeypatch.setattr(runner_module, "open_channel", moving)
    record.at = kill
    settings = _settings(model, SHARES, first.endpoint, second.endpoint)
    with pytest.raises(SettingsError, match="one and the same, expected two that do not collude"):
        _generate(settings)
    to_first = _elements(record.to(first.endpoint))
    # 21 were sent: the first got its share of each, and nothing of the other's.
    assert len(to_first) in (10, 11)


# --------------------------------------------------------------------------------------- layers


def test_layers_may_be_spread_over_services(
    saved_model: Callable[..., SavedModel], start: Callable[..., Worker], record: Record
) -> None:
    model = saved_model("llama")
    low, high = start(model.directory, "--layers", "0-1"), start(model.directory, "--layers", "2-2")
    whole = start(model.directory)
    for policy in ("attention-in-tee", "tsqp"):
        expected = _generate(_settings(model, policy, whole.endpoint))
        record.sent.clear()
        spread = _settings(model, policy, f"{low.endpoint}=0-1", f"{high.endpoint}=2-")
        assert _generate(spread) == expected
        asked = {
            endpoint: {r.layer_idx for r in record.to(endpoint) if hasattr(r, "layer_idx")}
            for endpoint in (low.endpoint, high.endpoint)
        }
        assert asked == {low.endpoint: {0, 1}, high.endpoint: {2}}
    with pytest.raises(ModelMismatchError, match="layers: got 0-1, expected 0-2"):
        _generate(_settings(model, "attention-in-tee", low.endpoint))


# ----------------------------------------------------------------------------- the program itself


def test_a_missing_replica_is_a_warning(
    saved_model: Callable[..., SavedModel], start: Callable[..., Worker]
) -> None:
    model = saved_model("llama")
    worker = start(model.directory)
    result = run(
        "tee-runner",
        *("generate", str(model.directory), "--policy", "attention-in-tee"),
        *("--prompt-token-ids", "1,5,9", "--max-new-tokens", "3", "--dtype", "float32"),
        *("--gpu", "tcp://127.0.0.1:9", "--gpu", worker.endpoint),
    )
    assert result.returncode == 0, result.stderr
    assert "warning service_missing endpoint=tcp://127.0.0.1:9" in result.stderr
    assert result.stdout.strip() == ",".join(map(str, model.greedy([1, 5, 9], 3)))


def test_exchanges_say_who_answered(
    saved_model: Callable[..., SavedModel], start: Callable[..., Worker]
) -> None:
    model = saved_model("llama")
    first, second = (start(model.directory) for _ in range(2))
    with Runner(_settings(model, "tsqp", first.endpoint, second.endpoint)) as runner:
        (channel,) = runner._services.at(0)
        exchanges: list[Exchange] = []
        for worker in (first, second):
            exchanges.append(channel.call(_embedding()))
            worker.kill()
    assert [exchange.endpoint for exchange in exchanges] == [first.endpoint, second.endpoint]


def _embedding() -> Request:
    import torch

    from protocol.messages import EmbeddingRequest
    from protocol.tensors import from_torch

    return EmbeddingRequest(input_ids=from_torch(torch.tensor([1, 2])), dtype="float32")
