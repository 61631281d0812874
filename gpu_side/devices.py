"""What `--device` names: a processor that computes, or a null device that only answers.

`null` answers at once, so that what remains of a run's time is everybody else's. `model:PROFILE`
answers no earlier than the described accelerator would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_side.profiles import DeviceProfile, find_profile
from protocol.errors import SettingsError

_EXPECTED = "cpu, cuda, cuda:N, null or model:PROFILE"


@dataclass(frozen=True)
class NullDevice:
    """Computes nothing. Answers at once, or as late as an accelerator of that profile would."""

    profile: DeviceProfile | None = None

    def __str__(self) -> str:
        return "null" if self.profile is None else f"model:{self.profile.name}"


Device: TypeAlias = torch.device | NullDevice


def parse_device(name: str) -> Device:
    """Read `cpu`, `cuda`, `cuda:N`, `null` or `model:PROFILE`.

    Raises SettingsError when it is not there, or no such profile is.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if name == "null":
        return NullDevice()
    if kind == "model":
        return NullDevice(find_profile(index))
    if kind != "cuda" or (index and not index.isdecimal()) or name.endswith(":"):
        raise SettingsError("--device", got=repr(name), expected=_EXPECTED)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise SettingsError(
            "--device", got=f"{name!r} with {count} CUDA devices here", expected="a device there is"
        )
    return torch.device(name)
