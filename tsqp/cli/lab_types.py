"""Types of options that only commands of the laboratory have: bench, plan and leak."""

from __future__ import annotations

from typing import Any, TypeVar

import click

Number = TypeVar("Number", int, float)


class Numbers(click.ParamType[tuple[Number, ...]]):
    """Numbers with commas, sorted, each once: `1,128,512`. `each`: the type of one."""

    name = "numbers"

    def __init__(self, each: type[Number], *, above: Number, most: Number) -> None:
        self._each: type[Number] = each
        self._above: Number = above
        self._most: Number = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Number, ...]:
        """Read them."""
        if isinstance(value, tuple):
            return value
        try:
            found = {self._each(part) for part in str(value).split(",")}
        except ValueError:
            found = set()
        if not found or not all(self._above < number <= self._most for number in found):
            kind = "whole numbers" if self._each is int else "numbers"
            self.fail(
                f"got {value!r}, expected {kind} above {self._above}, at most {self._most}, with"
                " commas",
                param,
                ctx,
            )
        return tuple(sorted(found))


# Sizes, in tokens or sequences.
COUNTS: Numbers[int] = Numbers(int, above=0, most=2**31 - 1)


def complete_shape(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of models' shapes that begin so."""
    from tsqp.lab.bench.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]
