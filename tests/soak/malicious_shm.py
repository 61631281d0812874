"""Row: the lies of `malicious_service`, over shared memory, which has no keys."""

from __future__ import annotations

from tests.soak import malicious_service
from tests.soak.row import RowResult, is_full

NAME = "malicious service over shared memory"
TEST = "the same lies"
PASS = malicious_service.PASS
FULL, SHORT = 1000, malicious_service.SHORT
MINUTES = 2
ALONE = True


def run(count: int) -> RowResult:
    """Tell so many lies."""
    return malicious_service.told(NAME, TEST, count, full=is_full(FULL, count), over_shm=True)
