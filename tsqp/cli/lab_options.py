"""What bench, plan and leak share: types of options, and the files that reports are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from protocol.errors import SettingsError, TsqpError

if TYPE_CHECKING:
    from tsqp.lab.bench.run import Bench
    from tsqp.lab.leak.laboratory import Laboratory


Number = TypeVar("Number", int, float)
R = TypeVar("R")


def numbers_of(
    each: type[Number], *, above: Number, most: Number
) -> Callable[[Any], tuple[Number, ...]]:
    """Return what reads numbers with commas, sorted, each once: `1,128,512`.

    `each`: the type of one.
    """

    def numbers(value: Any) -> tuple[Number, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = {each(part) for part in str(value).split(",")}
        except ValueError:
            found = set()
        if not found or not all(above < number <= most for number in found):
            kind = "whole numbers" if each is int else "numbers"
            raise click.BadParameter(
                f"got {value!r}, expected {kind} above {above}, at most {most}, with commas"
            )
        return tuple(sorted(found))

    return numbers


# Sizes, in tokens or sequences.
COUNTS = numbers_of(int, above=0, most=2**31 - 1)


def complete_shape(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of models' shapes that begin so."""
    from tsqp.lab.bench.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


class OutputFile(click.Path):
    """A file to write. An empty name is refused: as a path it is the current folder."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail."""
        if not str(value):
            self.fail("got an empty name, expected a file to write", param, ctx)
        return super().convert(value, param, ctx)


class Outputs(Generic[R]):
    """The files of one run. Raises SettingsError for those that cannot be written, before it.

    `renders`: by option, the path (None: not asked for) and what makes the text of a report. `say`:
    told what could not be written. `written`: whether all could be.
    """

    def __init__(
        self,
        renders: Mapping[str, tuple[Path | None, Callable[[R], str]]],
        say: Callable[[str], None],
    ) -> None:
        self._renders = [(path, render) for path, render in renders.values() if path is not None]
        self._say = say
        self.written = True
        places: dict[Path, Path] = {}
        for path, _ in self._renders:
            new = not path.exists()
            other = places.setdefault(path.resolve(), path)
            # What is no file, such as /dev/null, takes anything.
            SettingsError.unless(
                other is path or not (new or path.is_file()),
                ", ".join(renders),
                f"{path} twice",
                "a file for each",
            )
            with SettingsError.for_os(str(path), "a file to write"):
                # For appending: a run that is refused leaves an old file as it was.
                path.open("ab").close()
                if new:  # not the link that may lead to it
                    path.resolve().unlink()

    def report_of(self, work: Bench | Laboratory, show: Callable[[Any], None]) -> Any:
        """Carry out a work, show its report and write it, of an interrupted work, too; return it.

        None where nothing was measured. See `written`.
        """
        report: Any = None
        try:
            work.run()
        finally:
            if work.measured:
                report = work.report()
                # First: it is there whatever becomes of the files, and they whatever becomes of it.
                try:
                    show(report)
                finally:
                    self.write(report)
        return report

    def write(self, report: R) -> None:
        """Write each file, whether or not another could be: `written` is whether all could."""
        for path, render in self._renders:
            try:
                path.write_text(render(report), encoding="utf-8")
            except (OSError, TsqpError) as error:
                said = f"{error}"
                if isinstance(error, OSError):
                    said = f"got {error.strerror or type(error).__name__}, expected none"
                self._say(f"error: {path}: {said}")
                self.written = False
