"""Where results of a measurement go."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel


def write_results(results: Iterable[BaseModel], path: Path | None) -> None:
    """Write results as a JSON array to a file, or to stdout where none is named (None)."""
    text = json.dumps([result.model_dump() for result in results], indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")
