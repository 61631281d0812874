"""Files that a command writes a report to: checked before the work, written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import click

from protocol.errors import SettingsError, TsqpError

R = TypeVar("R")


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
    """The files of one run.

    `renders`: by option, the path (None: not asked for) and what makes the text of a report. `say`:
    told what could not be written.
    """

    def __init__(
        self,
        renders: Mapping[str, tuple[Path | None, Callable[[R], str]]],
        say: Callable[[str], None],
    ) -> None:
        self._renders = [(path, render) for path, render in renders.values() if path is not None]
        self._options = ", ".join(renders)
        self._say = say
        # Those that were not there before.
        self._made: list[Path] = []

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Refuse files that cannot be written, and leave none behind if the block is left early.

        Raises SettingsError.
        """
        places: dict[Path, Path] = {}
        for path, _ in self._renders:
            other = places.setdefault(path.resolve(), path)
            # What is no file, such as /dev/null, takes anything.
            SettingsError.unless(
                other is path or (path.exists() and not path.is_file()),
                self._options,
                f"{path} twice",
                "a file for each",
            )
        try:
            for path, _ in self._renders:
                new = not path.exists()
                try:
                    # For appending: a run that is refused leaves an old file as it was.
                    path.open("ab").close()
                except OSError as error:
                    raise SettingsError(
                        str(path), got=error.strerror or "an error", expected="a file to write"
                    ) from None
                self._made += [path] if new else []
            yield
        except BaseException:
            self.remove()
            raise

    def write(self, report: R) -> bool:
        """Write each file, whether or not another could be; return whether all could."""
        written = True
        for path, render in self._renders:
            try:
                path.write_text(render(report), encoding="utf-8")
            except OSError as error:
                reason = error.strerror or type(error).__name__
                self._say(f"error: {path}: got {reason}, expected none")
                written = False
            except TsqpError as error:
                self._say(f"error: {path}: {error}")
                written = False
        return written

    def remove(self) -> None:
        """Delete the files that were made, when nothing will be written to them."""
        for path in self._made:
            with suppress(OSError):
                path.unlink()
