"""A service of several ranks: which is which, one reply of all, and what becomes of processes.

In `make test` the ranks are threads of one process; as processes, with gloo, they take minutes.
"""

import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call, create_autospec, patch

import pytest
import torch
import torch.distributed as dist

from gpu_side.handler import RequestHandler
from gpu_side.kernels import Transfer
from gpu_side.ranks import head, worker
from gpu_side.ranks.head import Ranks
from gpu_side.ranks.worker import IDLE, JOIN_S, Group, RankJob, placed
from gpu_side.request_loop import StoppedWhileLoadingError, StopSignal
from gpu_side.weights import load_weights
from protocol.channel import Channel
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ServiceError,
    SettingsError,
)
from protocol.messages import InitReply, InitRequest, Request, TensorReply
from protocol.tensors import Buffer, to_torch
from protocol.transport import open_channel
from tests.kit import ask
from tests.kit.model import SIZES, Models
from tests.kit.rows import each_row
from tests.kit.service import running_service, until

CUDA, CPU = torch.device("cuda:1"), torch.device("cpu")
HIDDEN, VOCAB, BETWEEN = SIZES["hidden_size"], 331, SIZES["intermediate_size"]
LIMIT = 2**20


def _requests(rows: int) -> list[Request]:
    ids, down = torch.randint(0, VOCAB, (rows,)), ask.uniform(rows, BETWEEN)
    hidden = torch.randn(rows, HIDDEN)
    return [
        *ask.one_of_each(rows, HIDDEN),
        ask.ring(down, "down_proj"),
        ask.embedding(ids),
        ask.matmul(hidden, hidden.T),
    ]


@pytest.fixture(scope="module")
def model(saved_model: Models) -> Path:
    return saved_model(vocab_size=VOCAB, attention_bias=True).directory


@pytest.fixture
def ranks(model: Path) -> Iterator[Ranks]:
    job = RankJob(model=model, place=(0, 2), dtype="float32", threads=1, max_message_bytes=LIMIT)
    stop = StopSignal()
    with stop.reader, stop.writer:
        yield Ranks(job, stop, starts_them=False)


class Pair:
    """Stands in for the connection between the head and one other rank, for both of them."""

    others = (1,)

    def __init__(self) -> None:
        self.sent = tuple(SimpleQueue[tuple[bytes, memoryview]]() for _ in range(2))
        self.results: SimpleQueue[torch.Tensor] = SimpleQueue()
        self.leave = Mock()

    def send(self, header: bytes, payload: Buffer, to: Sequence[int]) -> list[Any]:
        self.sent[to[0]].put((header, memoryview(bytes(payload))))
        return [Mock()]

    def receive(self, source: int, within: timedelta) -> tuple[bytes, memoryview]:
        return self.sent[1 - source].get(timeout=30)

    def send_result(self, result: torch.Tensor, to: int) -> None:
        self.results.put(result)

    def begin_results(self, buffers: list[torch.Tensor]) -> list[Any]:
        (buffer,) = buffers
        return [SimpleNamespace(wait=lambda _limit: buffer.copy_(self.results.get(timeout=30)))]


@contextmanager
def _joined(ranks: Ranks) -> Iterator[RequestHandler]:
    """Have another rank compute on a thread, and return what answers with both."""
    pair: Any = Pair()
    ranks._group = pair
    job = ranks.job.model_copy(update={"place": (1, 2)})
    with torch.inference_mode(), ExitStack() as stack:
        told = stack.enter_context(patch("signal.signal"))
        stack.enter_context(patch.object(worker, "Group", return_value=pair))
        thread = threading.Thread(target=worker.work, args=(job,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(pair.send, b"", b"", [1])
        yield RequestHandler(ranks.served(ranks.job.load(CPU)), LIMIT)
    # Each leaves the group where it ends; the head only where no other has failed.
    assert pair.leave.call_count == 1 + (ranks._ending and ranks.failure is None)
    # The head says when it ends, not a terminal.
    assert told.mock_calls == [call(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]


def test_the_parts_of_all_ranks_are_one_reply(ranks: Ranks, model: Path) -> None:
    alone = RequestHandler(load_weights(model, device=CPU, dtype=torch.float32), LIMIT)
    with _joined(ranks) as together:
        for rows in (1, 3):
            for request in _requests(rows):
                expected = ask.answer(alone, request)
                torch.testing.assert_close(ask.answer(together, request), expected)
        init, _ = together.apply(InitRequest())
        assert isinstance(init, InitReply)
        assert init.ranks == 2
        # From then on that one of them has failed, requests are refused.
        ranks._has_ended(1, -signal.SIGKILL)
        with pytest.raises(
            ProtocolError, match="rank 1: got a process killed by SIGKIL"
        ) as refused:
            together.apply(_requests(1)[0])
        ranks.close()
        assert refused.value.code is ErrorCode.SHUTTING_DOWN
    assert ranks._stop.requested


def test_a_rank_that_holds_other_weights_ends_the_service(ranks: Ranks) -> None:
    weights = ranks.job.load(CPU)
    said = ranks.job.holds(weights)
    others: Any = SimpleNamespace(others=[1], receive=lambda *_: (said, b""))
    ranks._group = others
    assert ranks.served(weights).model.ranks == 2
    said += b"?"
    with pytest.raises(EndpointError, match="rank 1: got other weights than ours"):
        ranks.served(weights)
    assert ranks.failure is not None


def test_work_of_a_gpu_ends_where_a_rank_has_failed_or_takes_too_long(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Mock(return_value=2**63)
    with _joined(ranks) as together:
        reply = Transfer.reply
        monkeypatch.setattr(Transfer, "reply", lambda *given: (reply(*given)[0], work))
        _, working = together.apply(ask.ring(ask.uniform(1, HIDDEN), *ask.QKV))
        monkeypatch.setattr(head, "COMPUTE_S", 0.0)
        _, late = together.apply(ask.ring(ask.uniform(1, HIDDEN), *ask.QKV))
        # The other one ends when it is told to, which is no failure.
        ranks.close()
        ranks._has_ended(1, 0)
    assert working is not None
    assert late is not None
    assert working() == 2**63
    assert ranks.failure is None
    with pytest.raises(RuntimeError, match="a rank: got no reply, expected one that goes on"):
        late()
    assert ranks.failure is not None
    with pytest.raises(RuntimeError, match="a rank: got no reply"):
        working()
    work.return_value = 0
    assert working() == 0


@patch.dict(os.environ)
def test_a_rank_that_does_not_start_or_come_ends_the_service(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    started = Ranks(ranks.job, ranks._stop, starts_them=True)
    store: Any = started.job.store
    # One that is told to stop waits for no other, and that is no failure.
    ranks._stop.requested = True
    with pytest.raises(StoppedWhileLoadingError):
        started.join(CPU)
    assert started.failure is None
    ranks._stop.requested = False
    no_answer = pytest.raises(EndpointError, match="a rank: got no answer")
    with patch("gpu_side.ranks.worker.JOIN_S", 0.0), no_answer:
        started.join(CPU)
    started.failure, ranks._stop.requested = None, False
    started.start()
    with pytest.raises(EndpointError, match="rank 1: got a process that ended with 1"):
        started.join(CPU)
    started.close()
    assert not store.parent.exists()


@patch.dict(os.environ)
def test_messages_between_ranks_have_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in this process, on a stand-in for torch's connections."""
    wire: deque[torch.Tensor] = deque()
    joins = create_autospec(dist.init_process_group)
    monkeypatch.setattr(dist, "init_process_group", joins)
    monkeypatch.setattr(dist, "isend", lambda tensor, _: wire.append(tensor.clone()) or Mock())
    for name in ("irecv", "recv"):
        monkeypatch.setattr(dist, name, lambda to, _: Mock(filled=to.copy_(wire.popleft())))
    with pytest.raises(RuntimeError, match="a rank that does not come"):
        Group((1, 2), tmp_path / "store", CPU, lambda: True)
    head = Group((0, 2), tmp_path / "store", CPU)
    given: dict[str, Any] = {"timeout": timedelta(seconds=JOIN_S), "device_id": None}
    joins.assert_called_once_with("gloo", store=ANY, rank=0, world_size=2, **given)
    assert joins.call_args.kwargs["store"].path == str(tmp_path / "store")
    other = Group((1, 2), None, CPU)
    joins.assert_called_with("gloo", **given)
    for payload in (b"", b"row", bytes(range(256)) * 100, b"row"):
        for work in head.send(b"header", payload, head.others):
            work.wait()
        assert other.receive(0, IDLE) == (b"header", payload)
    assert not wire
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    Group((0, 2), None, CUDA)
    joins.assert_called_with("cpu:gloo,cuda:nccl", **given | {"device_id": CUDA})
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError, match="got a torch without NCCL"):
        Group((0, 2), None, CUDA)


THEIRS = {"MASTER_ADDR": "127.0.0.1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}


@each_row(
    ("changes", "place"),
    [
        (dict.fromkeys(THEIRS), (0, 8)),
        ({}, (5, 8)),
        ({"WORLD_SIZE": "4"}, None),
        ({"RANK": "-1"}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, None),
        ({"LOCAL_WORLD_SIZE": ""}, None),
    ],
)
def test_which_rank_a_process_is(
    changes: dict[str, str | None], place: tuple[int, int] | None
) -> None:
    """The head, or what torchrun says; all of them on this host."""
    given = {name: value for name, value in (THEIRS | changes).items() if value is not None}
    job = RankJob(model=Path(), place=(0, 8))
    with patch.dict(os.environ, given, clear=True):
        if place is not None:
            assert placed(job).place == place
            return
        with pytest.raises(SettingsError, match=r"got torchrun with \w+ processes.*, all on this"):
            placed(job)


def _asked(channel: Channel, request: Request) -> torch.Tensor:
    reply = channel.call(request).response
    assert isinstance(reply, TensorReply)
    return to_torch(reply.output).clone()


@pytest.mark.slow
@pytest.mark.usefixtures("patient_streams")
@pytest.mark.parametrize("how", ["rank killed", "rank hangs", "head killed", "all are told"])
def test_processes_answer_as_one_and_end_together(model: Path, tmp_path: Path, how: str) -> None:
    compute_s = 1.0 if how == "rank hangs" else 60.0
    patience = f"import gpu_side.ranks.head as head; head.COMPUTE_S = {compute_s}"
    with (
        running_service(
            model, f"unix://{tmp_path}/s", "--tensor-parallel", "2", before=patience
        ) as service,
        open_channel(service.endpoint, timeout_s=30.0) as client,
    ):
        children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children")
        rank = int(children.read_text(encoding="ascii"))
        if how == "rank killed":
            os.kill(rank, signal.SIGKILL)  # noticed though nothing is asked
        elif how == "rank hangs":
            os.kill(rank, signal.SIGSTOP)
            with pytest.raises((ServiceError, EndpointError, DeadlineExceededError)):
                _asked(client, _requests(1)[0])
        elif how == "head killed":
            service.process.send_signal(signal.SIGKILL)
        else:
            # As systemd and a terminal do; the head says when a rank is to end.
            os.kill(rank, signal.SIGTERM)
            alone = RequestHandler(load_weights(model, device=CPU, dtype=torch.float32), LIMIT)
            # 97 rows are more than one message between ranks holds.
            for rows in (1, 97, 1):
                for request in _requests(rows):
                    found = _asked(client, request)
                    torch.testing.assert_close(found, ask.answer(alone, request))
            service.process.send_signal(signal.SIGTERM)
        assert (service.process.wait(60) == 0) == (how == "all are told")
        service.stop()
        until(lambda: not Path(f"/proc/{rank}").exists())
    log = "\n".join(service.log)
    assert ("rank_failed" in log) == how.startswith("rank")
    if how == "rank killed":
        assert "rank 1: got a process killed by SIGKILL, expected one that goes on" in log
