"""What ranks with GPUs use between them, as far as a machine without any can say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_side.ranks import head
from gpu_side.ranks.group import Group
from gpu_side.ranks.head import Ranks, RankWeights
from gpu_side.ranks.job import RankJob
from gpu_side.ranks.place import Place
from gpu_side.replies import Working
from gpu_side.stop_signal import StopSignal
from gpu_side.tasks import RequestChecker
from gpu_side.weights import load_weights
from protocol.errors import EndpointError, SettingsError
from protocol.messages import RingLinearRequest, TensorReply
from protocol.tensors import from_torch, to_torch
from tests.kit.model import SavedModel

CUDA, CPU = torch.device("cuda:1"), torch.device("cpu")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How groups were made, in place of making any."""
    made: list[dict[str, Any]] = []

    def note(backend: str, **settings: Any) -> None:
        made.append({"backend": backend, **settings})

    monkeypatch.setattr("torch.distributed.init_process_group", note)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "unset")
    return made


def test_results_go_over_nccl_where_ranks_have_gpus(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    for device in (CUDA, CPU):
        Group(Place(1, 2), None, device)
    assert [(one["backend"], one["device_id"]) for one in joined] == [
        ("cpu:gloo,cuda:nccl", CUDA),
        ("gloo", None),
    ]
    # What they exchange does not leave this host.
    assert {os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")} == {"lo"}


@pytest.mark.parametrize(
    ("missing", "device", "name"), [("nccl", CUDA, "NCCL"), ("gloo", CPU, "gloo")]
)
def test_a_torch_without_what_is_needed_is_refused(
    missing: str, device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"torch.distributed.is_{missing}_available", lambda: False)
    with pytest.raises(SettingsError, match=f"--tensor-parallel: got a torch without {name}"):
        Group(Place(1, 2), None, device)


def test_a_rank_that_holds_other_weights_ends_the_service(
    saved_model: Callable[..., SavedModel], ranks: Ranks
) -> None:
    directory = saved_model("llama").directory
    weights = load_weights(directory, device=CPU, dtype=torch.float32, columns=(0, 2))
    said = ranks.job.holds(weights)
    others: Any = SimpleNamespace(others=[1], receive=lambda *_: (said, b""))
    ranks._group = others
    assert ranks.served(weights).model.ranks == 2
    said += b"?"
    with pytest.raises(EndpointError, match="rank 1: got other weights than ours"):
        ranks.served(weights)
    assert ranks.failure is not None


# ------------------------------------------------------------------------- work that has no end


class Asked:
    """A GPU's work that ends when it is told to."""

    ends = False

    def ends_ns(self) -> int:
        """See `gpu_side.replies.Working`."""
        return 0 if self.ends else 2**63


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    job = RankJob(
        place=Place(0, 2),
        store=None,
        model=tmp_path,
        device="cpu",
        dtype="float32",
        arithmetic=("int8",),
        kernels=None,
        threads=1,
        spin_us=0.0,
        layers=None,
        max_message_bytes=2**20,
    )
    stop = StopSignal()
    with stop.reader, stop.writer:
        yield Ranks(job, stop, starts_them=False)


def _begun(saved: SavedModel, ranks: Ranks, work: Asked, patch: pytest.MonkeyPatch) -> Working:
    """Begin a product whose own part a GPU computes, and return what its reply waits for."""
    weights = load_weights(
        saved.directory, device=CPU, dtype=torch.float32, arithmetic=("int8",), columns=(0, 2)
    )
    together = RankWeights(ranks, weights)
    kernels = together.kernels

    def compute(_header: bytes, _request: object, buffers: list[torch.Tensor], own: Any) -> Any:
        (buffer,) = buffers
        assert (buffer.device, buffer.dtype) == (weights.device, torch.int32)
        buffer.zero_()
        return own()

    reply = kernels._own.reply
    patch.setattr(ranks, "compute", compute)
    patch.setattr(kernels._own, "reply", lambda *given: (reply(*given)[0], work))
    out_features, in_features = weights.config.module_shape("o_proj")
    elements = from_torch(torch.ones(1, in_features, dtype=torch.int32))
    request = RingLinearRequest(layer_idx=0, module_names=("o_proj",), elements=elements)
    task = RequestChecker(together.model, 2**20).check(request)
    found, working = kernels.prepare(request, task)(request, None)
    assert isinstance(found, TensorReply)
    output_1D = to_torch(found.output)
    assert output_1D.shape == (1, out_features)
    assert output_1D[0, : out_features // 2].any()
    assert not output_1D[0, out_features // 2 :].any()
    assert working is not None
    return working


def test_work_waits_for_no_rank_that_has_failed(
    saved_model: Callable[..., SavedModel], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Asked()
    working = _begun(saved_model("llama"), ranks, work, monkeypatch)
    assert working.ends_ns() == 2**63
    assert ranks.failure is None
    ranks.fail(1, "a process killed by SIGKILL")
    with pytest.raises(RuntimeError, match="rank 1: got a process killed by SIGKILL"):
        working.ends_ns()
    work.ends = True
    assert working.ends_ns() == 0


def test_work_that_waits_for_too_long_is_a_failure(
    saved_model: Callable[..., SavedModel], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "COMPUTE_S", 0.0)
    working = _begun(saved_model("llama"), ranks, Asked(), monkeypatch)
    with pytest.raises(RuntimeError, match="a rank: got no reply, expected one that goes on"):
        working.ends_ns()
    assert ranks.failure is not None
