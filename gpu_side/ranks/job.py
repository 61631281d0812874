"""What a rank that is not the head is told, and what all of them must agree on."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from gpu_side.devices import NullDevice, parse_device
from gpu_side.ranks.place import Place
from gpu_side.served_model import ServedModel
from gpu_side.weights import ServiceWeights, load_weights
from protocol.messages import Arithmetic, Columns
from protocol.tensors import torch_dtype


class RankJob(BaseModel):
    """The head's settings that count for all ranks.

    `store`: the file in which the ranks find each other, where the head starts the others; None:
    torchrun has, and its environment says how. `device`: as the option says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: Place
    store: Path | None
    model: Path
    device: str
    dtype: str
    arithmetic: tuple[Arithmetic, ...]
    kernels: str | None
    threads: int | None
    spin_us: float
    layers: tuple[int, int] | None
    max_message_bytes: int

    @property
    def torch_device(self) -> torch.device:
        """The device of this rank. Raises SettingsError where there is none."""
        device = parse_device(self.place.device(self.device))
        if isinstance(device, NullDevice):
            raise TypeError("a null device that computes")
        return device

    @property
    def columns(self) -> Columns:
        """The part of the weights that the rank holds."""
        return self.place.rank, self.place.ranks

    def load(self, device: torch.device) -> ServiceWeights:
        """Read this rank's part of the weights. Raises ModelError, SettingsError."""
        return load_weights(
            self.model,
            device=device,
            dtype=torch_dtype(self.dtype),
            arithmetic=self.arithmetic,
            layers=self.layers,
            columns=self.columns,
        )

    def holds(self, held: ServedModel) -> bytes:
        """Say what a rank holds; all ranks must say the same."""
        named = (held.model_digest, held.linear_digest, self.dtype, *held.arithmetic, held.layers)
        return " ".join(map(str, named)).encode()
