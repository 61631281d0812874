"""An image of a few bytes, as a build leaves it."""

from __future__ import annotations

import json
from pathlib import Path

from tsqp.deploy.image import FACTS, MEASURED

UNPACKED_BYTES = 100 * 1024 * 1024


def make_image(directory: Path, *, small: bool = False) -> Path:
    """Return a new image; a small one has no runner."""
    directory.mkdir()
    for name in MEASURED:
        (directory / name).write_bytes(f"content of {name}".encode())
    wheel = None if small else "ab" * 32
    facts = {"files": {}, "runner_wheel": wheel, "unpacked_bytes": UNPACKED_BYTES}
    (directory / FACTS).write_text(json.dumps(facts))
    return directory
