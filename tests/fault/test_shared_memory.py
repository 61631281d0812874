"""Shared memory between real processes: killed ones, full slots, and a client that scribbles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol.connect import open_channel
from protocol.errors import EndpointError, TsqpError
from protocol.messages import EmbeddingRequest, LinearRequest, TensorReply
from protocol.pending import PendingChannel
from protocol.shared_memory import SLOTS, Lane, create
from protocol.tensors import from_torch, to_torch
from tests.kit.lie import MaliciousService, operators_of
from tests.kit.model import SIZES, make_model
from tests.kit.service import ENVIRONMENT, Forked, Service, running_service
from tests.kit.wire import HIDDEN
from tests.soak.demo import DEMO
from tests.soak.victims import Victim
from tests.tools.scribbler import Scribbler

HOUR_S = 3600.0
ROUNDS = [400, pytest.param(2000, marks=pytest.mark.slow)]
STEPS = 30
VOCAB = SIZES["vocab_size"]

# Fills every slot of its segment, says so, and waits to be killed.
CLIENT = """
import sys, time, torch
from protocol.connect import open_channel
from protocol.messages import LinearRequest
from protocol.tensors import from_torch
channel = open_channel(sys.argv[1])
hidden = from_torch(torch.ones(64, int(sys.argv[2])))
request = LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=hidden)
channel.call(request)
for _ in range(20):
    channel.submit(request)
print("full", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture
def service(model: Path, tmp_path: Path) -> Iterator[Service]:
    with running_service(model, f"shm://{tmp_path}/s", "--threads", "1") as made:
        yield made


@pytest.fixture
def channel(service: Service) -> Iterator[PendingChannel]:
    with open_channel(service.endpoint, timeout_s=HOUR_S) as made:
        yield made


def _linear(value: float = 1.0, rows: int = 1) -> LinearRequest:
    hidden = from_torch(torch.full((rows, HIDDEN), value))
    return LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=hidden)


def _output(channel: PendingChannel, request_id: int) -> torch.Tensor:
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    return to_torch(response.output)


def _opened(service: Service) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


def _mapped(service: Service) -> int:
    return Path(f"/proc/{service.process.pid}/maps").read_text().count("memfd:tsqp")


def _kept_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keep the file of each segment that a channel makes from now on; it is the caller's."""
    files: list[int] = []

    def kept(*sizes: int) -> tuple[Lane, int]:
        lane, file = create(*sizes)
        files.append(os.dup(file))
        return lane, file

    monkeypatch.setattr("protocol.shm.create", kept)
    return files


def test_more_than_all_slots_hold_is_answered(channel: PendingChannel) -> None:
    one = _output(channel, channel.submit(_linear()))
    ids = [channel.submit(_linear(2.0**n)) for n in range(3 * SLOTS)]
    for n, request_id in reversed(list(enumerate(ids))):
        assert torch.equal(_output(channel, request_id), one * 2.0**n)


@pytest.mark.parametrize("asleep", [True, False])
def test_a_service_that_is_killed_is_noticed_in_a_slot(
    service: Service, channel: PendingChannel, asleep: bool
) -> None:
    """Awake, it has not said that it must be woken up; frozen first, it answers neither."""
    _output(channel, channel.submit(_linear()))
    if not asleep:
        # In the middle of a product: it looks at nothing.
        channel.submit(_linear(rows=20_000))
    service.freeze()
    waiting = [channel.submit(_linear()) for _ in range(SLOTS + 2)]
    service.process.kill()
    for request_id in waiting:
        with pytest.raises(EndpointError, match="a lost connection while Linear") as info:
            channel.wait(request_id)
        assert info.value.retryable


def test_a_client_that_is_killed_leaves_nothing_behind(
    service: Service, channel: PendingChannel
) -> None:
    right = _output(channel, channel.submit(_linear()))
    opened, mapped = _opened(service), _mapped(service)
    for _ in range(3):
        read, write = os.pipe()
        arguments = [service.endpoint, str(HIDDEN)]
        client = Forked("tsqp", arguments, ENVIRONMENT, stdout=write, before=CLIENT)
        os.close(write)
        with os.fdopen(read) as said:
            assert said.readline() == "full\n"
        client.kill()
        assert torch.equal(_output(channel, channel.submit(_linear())), right)
    # Asked again: by now it has seen all of them go.
    for _ in range(100):
        assert torch.equal(_output(channel, channel.submit(_linear())), right)
        if (_opened(service), _mapped(service)) == (opened, mapped):
            break
    assert (_opened(service), _mapped(service)) == (opened, mapped)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_client_that_changes_requests_while_they_are_read_hurts_itself_alone(
    service: Service, channel: PendingChannel, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Its tokens, headers, sizes and numbers change all the time; the service goes on."""
    right = _output(channel, channel.submit(_linear()))
    files = _kept_files(monkeypatch)
    ids = from_torch(torch.randint(0, VOCAB, (1000,)))
    request = EmbeddingRequest(input_ids=ids, dtype="float32")
    answered = errors = 0
    with Scribbler("requests") as scribbler:
        for turn in range(rounds):
            with open_channel(service.endpoint, timeout_s=0.2) as wild:
                for _ in range(20):
                    try:
                        request_id = wild.submit(request)
                        if files:
                            scribbler.begin(files[-1])
                            os.close(files.pop())
                        wild.wait(request_id)
                        answered += 1
                    except TsqpError:
                        errors += 1
                        break
            if turn % 50 == 0:
                assert torch.equal(_output(channel, channel.submit(_linear())), right)
            if answered + errors >= rounds:
                break
    assert answered
    assert errors
    assert torch.equal(_output(channel, channel.submit(_linear())), right)
    assert service.process.poll() is None


def test_results_that_change_while_they_are_read_are_right_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shielded session whose service writes over its replies as they are read."""
    files = _kept_files(monkeypatch)
    right = refused = 0
    with (
        MaliciousService(operators_of(DEMO), f"shm://{tmp_path}/s") as service,
        Scribbler("replies") as scribbler,
    ):
        victim = Victim("shielded", lambda: [open_channel(service.endpoint, timeout_s=0.5)])
        for _ in range(STEPS):
            outcome = victim.step()
            assert not outcome.accepted
            right += outcome.right
            if outcome.error is not None:
                refused += 1
                victim.reconnect()
            elif files:
                scribbler.begin(files[-1])
                while files:
                    os.close(files.pop())
        victim.close()
    while files:
        os.close(files.pop())
    assert right
    assert refused
