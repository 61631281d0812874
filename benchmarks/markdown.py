"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tsqp.lab.report import markdown

__all__ = ["Cells", "markdown"]

# From left to right: cells of one row.
Cells = Sequence[str]
