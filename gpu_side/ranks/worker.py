"""A rank that is not the head: computes its part of every request, until the head ends.

Any failure ends it, and so the service: the head would wait for its part otherwise.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpu_side.cuda.kernels import device_kernels
from gpu_side.encoding import RequestReader
from gpu_side.ranks.group import IDLE, Group
from gpu_side.ranks.processes import RankJob
from gpu_side.tasks import Computed, RequestChecker
from gpu_side.weights import ServiceWeights, check_integers
from protocol import native
from protocol.errors import EndpointError, TsqpError
from protocol.messages import Request
from protocol.model.config import read_config

_HEAD = 0
_PR_SET_PDEATHSIG = 1


def work(job: RankJob) -> None:
    """Serve the head until it ends.

    Raises EndpointError where it is lost, ModelError, KernelError and SettingsError while loading.
    """
    place = job.place
    # Sent to all processes of a terminal, of torchrun or of a unit: the head says when it has done
    # what it has taken.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve(Group(place, job.store, job.torch_device), job)
    except RuntimeError as error:
        raise EndpointError(
            f"rank {place.rank}", got=str(error), expected="a head that goes on, and a product"
        ) from error


def _serve(group: Group, job: RankJob) -> None:
    place = job.place
    native.set_up(job.kernels, job.threads or place.threads)
    device = job.torch_device
    if "int8" in job.arithmetic:
        check_integers(read_config(job.model), device)
    weights = job.load(device)
    for sent in group.send(job.holds(weights), b"", [_HEAD]):
        sent.wait()
    with torch.inference_mode():
        _answer(group, weights, job)
    group.leave()


def _answer(group: Group, weights: ServiceWeights, job: RankJob) -> None:
    kernels = device_kernels(weights, job.spin_us)
    checker = RequestChecker(weights, job.max_message_bytes)

    def prepare(request: Request) -> Callable[[Any], torch.Tensor]:
        if not isinstance(request, Computed):
            raise TypeError("a request that the head answers")
        return kernels.product(request, checker.check(request))

    reader = RequestReader(job.max_message_bytes, prepare)
    while True:
        header, payload = group.receive(_HEAD, IDLE)
        if not header:
            return
        request, product = reader.read(reader.open([memoryview(header), payload]))
        group.send_result(product(request), _HEAD)


def _end_with(parent: int) -> None:
    """Have this process killed when the head ends, however it does; Linux only.

    Elsewhere, and from then on where weights have been read, it ends with the connection.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # too late to be told
            sys.exit("the head has ended")


def main(parent: str, job: str) -> None:
    """Entry point of a process that the head has started."""
    _end_with(int(parent))
    given = RankJob.model_validate_json(job)
    try:
        work(given)
    except TsqpError as error:
        sys.exit(f"gpu-service rank {given.place.rank}: error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
