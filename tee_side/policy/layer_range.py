"""A range of layers as people write it: in a policy's `layers`, and behind `=` in `--gpu`."""

from __future__ import annotations

import re
from dataclasses import dataclass

# "3", "0-3" or "4-"; for expressions that look for one in a longer text.
LAYER_RANGE = r"\d{1,4}(?:-\d{0,4})?"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` to `last`, both included; to the end of the model if `last` is None."""

    first: int
    last: int | None

    @staticmethod
    def parse(text: str) -> LayerRange:
        """Read "3", "0-3" or "4-". Raises ValueError that says what is expected."""
        if re.fullmatch(LAYER_RANGE, text) is None:
            raise ValueError('layers such as "3", "0-3" or "4-"')
        first_text, dash, last_text = text.partition("-")
        first = int(first_text)
        last = first if not dash else int(last_text) if last_text else None
        if last is not None and last < first:
            raise ValueError("a range that does not run backwards")
        return LayerRange(first, last)

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer and (self.last is None or layer <= self.last)

    def __str__(self) -> str:
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"
