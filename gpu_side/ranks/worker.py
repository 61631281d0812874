"""What a rank is told (`RankJob`), how ranks reach each other (`Group`), and all but the head.

A rank that is not the head computes its part of every request, until the head ends. Any failure
ends it, and so the service: the head would wait for its part otherwise.

Requests go over gloo, results over NCCL where ranks have GPUs. A request is a header and a payload,
and goes from host memory, where it arrived, to host memory, from where each rank copies it over its
own bus. Both go in one tensor of fixed size where they fit, so that a row of most models takes one
message; a longer payload follows in a tensor of its own. Results have sizes that both ends know,
and go without a header, from the device of the product.
"""

import ctypes
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from gpu_side.cuda.products import check_integers, device_kernels
from gpu_side.devices import NullDevice, parse_device
from gpu_side.encoding import RequestReader
from gpu_side.kernels import there
from gpu_side.tasks import Computed, RequestChecker
from gpu_side.weights import BOTH, Progress, ServedModel, ServiceWeights, load_weights
from protocol import native
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import EndpointError, SettingsError, TsqpError
from protocol.messages import WHOLE, Arithmetic, Columns, Request
from protocol.model.config import read_config
from protocol.tensors import Buffer, torch_dtype

# Not there in a torch without ranks.
Works: TypeAlias = "list[dist.Work]"

OPTION = "--tensor-parallel"
# Of the first tensor of a message.
MESSAGE_BYTES = 16 * 1024
# Ranks find each other before they read weights, which takes no time.
JOIN_S = 120.0
_LOOK_S = 0.02
# How long a rank waits for the next request. It ends with the head's connection, not by this.
IDLE = timedelta(days=3650)
# Lengths of header and payload.
_LENGTHS = struct.Struct("<QQ")


def by_torchrun() -> bool:
    """Say whether torchrun, or what sets the same variables, has started this process."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def device_at(place: Columns, name: str) -> str:
    """Return which device `--device` means for a rank. Raises SettingsError."""
    SettingsError.unless(
        place == WHOLE or name in ("cpu", "cuda"),
        OPTION,
        f"--device {name}",
        "cpu or cuda: each rank takes the GPU of its number, and all of them compute",
    )
    return name if place == WHOLE or name == "cpu" else f"{name}:{place[0]}"


class RankJob(BaseModel):
    """The head's settings that count for all ranks.

    `place`: which rank it is, 0 the head's, and of how many; `WHOLE`: a service without others.
    Each has its part of the output columns. `store`: the file in which the ranks find each other,
    where the head starts the others; None: torchrun has, and its environment says how. `device`: as
    `parse_device` reads it. `dtype`: a short name, or None for the model's own, as the head is
    told. `arithmetic`: which linear weights to hold; of both the head does without int8 ones where
    the device's int8 products are not exact, or the weights are transformed for a feature mask.
    `kernels`: those of the CPU, see `protocol.native.use`; None: those in use. `threads`: of each
    process; None: it has all cores that it may use to itself. `spin_us`: how long to look for the
    next message before blocking, as long as messages come that fast, and to ask a GPU whether it is
    done. `layers`: first and last whose weights to hold, None: all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    place: Columns = WHOLE
    store: Path | None = None
    device: str = "cpu"
    dtype: str | None = None
    arithmetic: tuple[Arithmetic, ...] = BOTH
    kernels: str | None = None
    threads: int | None = None
    spin_us: float = 0.0
    layers: tuple[int, int] | None = None
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES

    def load(self, device: torch.device, progress: Progress | None = None) -> ServiceWeights:
        """Read this rank's part of the weights, see `load_weights`."""
        return load_weights(
            self.model,
            device=device,
            dtype=torch_dtype(there(self.dtype)),
            arithmetic=self.arithmetic,
            layers=self.layers,
            columns=self.place,
            progress=progress,
        )

    def holds(self, held: ServedModel) -> bytes:
        """Say what a rank holds; all ranks must say the same."""
        named = (held.model_digest, held.linear_digest, self.dtype, *held.arithmetic, held.layers)
        return " ".join(map(str, named)).encode()


def placed(job: RankJob) -> RankJob:
    """Return the job of this process among its ranks: the head's, or what torchrun says.

    All ranks are on one host. Rank 0 is the head; each has the GPU of its number, this part of the
    columns and, unless it is said how many threads, its share of the cores.

    Raises SettingsError where torchrun has started another number of processes, or says no numbers;
    and where some are on another host: rows and results would cross a network in the clear.
    """
    rank, ranks = "0", job.place[1]
    if ranks == 1:
        return job
    if by_torchrun():
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, world, here = (os.environ.get(name, "") for name in names)
        SettingsError.unless(
            rank.isdecimal() and (world, here) == (str(ranks), str(ranks)),
            OPTION,
            f"torchrun with {world[:20] or 'no'} processes, {here[:20] or 'none'} of them here",
            f"{ranks}, all on this host (--layers spreads a model over several)",
        )
    threads = job.threads or max(1, native.usable_cores() // ranks)
    return job.model_copy(update={"place": (int(rank), ranks), "threads": threads})


class Group:
    """The ranks, as one of them has it. Methods raise RuntimeError where another rank is gone."""

    def __init__(
        self,
        place: Columns,
        file: Path | None,
        device: torch.device,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the others, `JOIN_S` at most and not where `gone` says that it is of no use.

        `file`: see `RankJob.store`. Raises RuntimeError then, and SettingsError for a torch without
        what is needed.
        """
        (rank, ranks), on_cpu = place, device.type == "cpu"
        SettingsError.unless(
            dist.is_available() and dist.is_gloo_available(),
            OPTION,
            "a torch without gloo",
            "one with it",
        )
        SettingsError.unless(
            on_cpu or dist.is_nccl_available(), OPTION, "a torch without NCCL", "one with it"
        )
        # One for each device; NCCL has its connections at once, and fails here if it cannot.
        backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
        # They would listen at the address that the host's name has.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        found: dict[str, Any] = {}
        if file is not None:
            store = dist.FileStore(str(file), ranks)  # type: ignore[attr-defined]
            store.set(f"here/{rank}", "")
            everybody = [f"here/{each}" for each in range(ranks)]
            # Of torch's own wait nothing is told that a rank has ended.
            until = time.monotonic() + JOIN_S
            while not store.check(everybody):
                if gone() or time.monotonic() > until:
                    raise RuntimeError("a rank that does not come")
                time.sleep(_LOOK_S)
            found = {"store": store, "rank": rank, "world_size": ranks}
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=JOIN_S),
            device_id=None if on_cpu else device,
            **found,
        )
        # All ranks but this one.
        self.others = [other for other in range(ranks) if other != rank]
        memory = bytearray(MESSAGE_BYTES)
        self._memory, self._view = bytes_tensor(memory), memoryview(memory)

    def send(self, header: bytes, payload: Buffer, to: list[int]) -> Works:
        """Begin to send a message; all works are to have ended before the next one.

        `header`: some hundred bytes. The payload stays as it is until then.
        """
        begin, size = _LENGTHS.size + len(header), len(payload)
        self._view[: _LENGTHS.size] = _LENGTHS.pack(len(header), size)
        self._view[_LENGTHS.size : begin] = header
        tensors = [self._memory]
        if begin + size <= MESSAGE_BYTES:
            self._view[begin : begin + size] = payload
        else:
            tensors.append(bytes_tensor(payload))
        return [there(dist.isend(tensor, rank)) for rank in to for tensor in tensors]

    def receive(self, source: int, within: timedelta) -> tuple[bytes, memoryview]:
        """Return the next message's header and payload, which is valid until the next one."""
        there(dist.irecv(self._memory, source)).wait(within)
        header_bytes, size = _LENGTHS.unpack_from(self._view)
        begin = _LENGTHS.size + header_bytes
        header = bytes(self._view[_LENGTHS.size : begin])
        if begin + size <= MESSAGE_BYTES:
            return header, self._view[begin : begin + size]
        payload = bytearray(size)
        dist.recv(bytes_tensor(payload), source)
        return header, memoryview(payload)

    def send_result(self, result: torch.Tensor, to: int) -> None:
        """Send a tensor whose shape and dtype the other end knows."""
        dist.send(result.contiguous().view(-1).view(torch.uint8), to)

    def begin_results(self, buffers: list[torch.Tensor]) -> Works:
        """Begin to receive a result from each other rank, in order, into contiguous tensors."""
        return [
            there(dist.irecv(buffer.view(-1).view(torch.uint8), rank))
            for rank, buffer in zip(self.others, buffers, strict=True)
        ]

    @staticmethod
    def leave() -> None:
        """Close the connections."""
        dist.destroy_process_group()


def bytes_tensor(data: Buffer) -> torch.Tensor:
    """View bytes as a tensor; of read-only ones, which torch must not alias, return a copy."""
    writable = isinstance(data, bytearray) or (isinstance(data, memoryview) and not data.readonly)
    return torch.frombuffer(data if writable else bytearray(data), dtype=torch.uint8)


_HEAD = 0
_PR_SET_PDEATHSIG = 1


def work(job: RankJob) -> None:
    """Serve the head until it ends.

    Raises EndpointError where it is lost, ModelError, KernelError and SettingsError while loading.
    """
    # Sent to all processes of a terminal, of torchrun or of a unit: the head says when it has done
    # what it has taken.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        device = parse_device(device_at(job.place, job.device))
        if isinstance(device, NullDevice):
            raise TypeError("a null device that computes")
        group = Group(job.place, job.store, device)
        native.set_up(job.kernels, job.threads)
        if "int8" in job.arithmetic:
            check_integers(read_config(job.model), device)
        weights = job.load(device)
        for sent in group.send(job.holds(weights), b"", [_HEAD]):
            sent.wait()
        kernels = device_kernels(weights, job.spin_us)
        checker = RequestChecker(weights, job.max_message_bytes)

        def prepare(request: Request) -> Callable[[Any], torch.Tensor]:
            if not isinstance(request, Computed):
                raise TypeError("a request that the head answers")
            return kernels.product(request, checker.check(request))

        reader = RequestReader(job.max_message_bytes, prepare)
        with torch.inference_mode():
            while True:
                header, payload = group.receive(_HEAD, IDLE)
                if not header:
                    break
                request, product = reader.read(reader.open([memoryview(header), payload]))
                group.send_result(product(request), _HEAD)
        group.leave()
    except RuntimeError as error:
        raise EndpointError(
            f"rank {job.place[0]}", got=str(error), expected="a head that goes on, and a product"
        ) from error


def main(parent: str, job: str) -> None:
    """Entry point of a process that the head has started.

    On Linux it is killed when the head ends, however it does. Elsewhere, and from then on where
    weights have been read, it ends with the connection.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):  # too late to be told
            sys.exit("the head has ended")
    given = RankJob.model_validate_json(job)
    try:
        work(given)
    except TsqpError as error:
        sys.exit(f"gpu-service rank {given.place[0]}: error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
