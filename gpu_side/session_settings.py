"""How much the service keeps of its clients' sessions, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_side.defaults import SESSION_TTL_S
from protocol.errors import SettingsError

# What a null device keeps as many sessions as fit into; it takes no memory for them.
_NULL_BYTES = 2**36
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Limits of sessions. `bytes`: of all clients, None: half of the memory that is free now.

    `client_bytes`: of one client, None: half of `bytes`. `ttl_s`: how long after its last use a
    session is kept. `spill`: a directory where sessions that must make room wait, encrypted
    (`gpu_side.spill`); None: they are dropped. `spill_bytes`: how much of them, None: as `bytes`.
    """

    bytes: int | None = None
    client_bytes: int | None = None
    ttl_s: float = SESSION_TTL_S
    spill: Path | None = None
    spill_bytes: int | None = None

    def check(self) -> None:
        """Raise SettingsError for such as can never be reached, or cannot be used."""
        if self.bytes is not None and (self.client_bytes or 0) > self.bytes:
            got, most = (f"{size / 2**20:.9g}" for size in (self.client_bytes or 0, self.bytes))
            expected = f"at most {most}, which is --sessions-mib"
            raise SettingsError("--session-client-mib", got=got, expected=expected)
        if self.spill is None and self.spill_bytes is not None:
            raise SettingsError("--session-spill-mib", got="no directory", expected="one to fill")
        if self.spill is not None and not self.spill.is_dir():
            where = f"--session-spill {self.spill}"
            raise SettingsError(where, got="no directory", expected="one that can be written to")


def free_bytes(device: torch.device | None) -> int:
    """Return how much memory is free on a device, in bytes; None: a null one."""
    if device is None:
        return _NULL_BYTES
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
