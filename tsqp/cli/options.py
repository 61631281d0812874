"""Options of commands, made of the fields of the settings models: `@takes(ServeSettings)`.

Beside these, what bench, plan and leak share: types of options, and the files of their reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args, get_origin

import click
from annotated_types import Interval, MinLen
from click.core import ParameterSource

from protocol.errors import SettingsError, TsqpError
from tsqp.cli.config import (
    FILES,
    PATH,
    PREFIX,
    FiniteFloatRange,
    StopText,
    complete_file,
    complete_policy,
    model_argument,
)
from tsqp.run.settings import (
    DIRECTORY,
    Settings,
    Source,
    TextSettings,
    option_of,
    plain_type,
    said_of,
    settings_of,
)

if TYPE_CHECKING:
    from tsqp.lab.bench.run import Bench
    from tsqp.lab.leak.laboratory import Laboratory


C = TypeVar("C", bound=Callable[..., Any])

_COMPLETES = {None: None, "file": complete_file, "policy": complete_policy}


def takes(
    model: type[Settings], *names: str, **changed: dict[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the settings of a model as options, and one argument `settings` for them.

    `names`: of these settings alone; all others have their defaults. `changed`: what differs for
    the command, by the name of the setting.
    """
    known = settings_of(model)
    chosen = {name: known[name] for name in known if name in names or not names}

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**given: Any) -> Any:
            own = {name: given.pop(name) for name in chosen}
            context = click.get_current_context()
            of_file = {
                name
                for name in own
                if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
            }
            source = Source(tuple(context.meta.get(FILES, ())), frozenset(of_file))
            # A command that has no MODEL asks for nothing that is read from it.
            settings = model(**({"model": ""} | own), source=source)
            return function(settings=settings, **given)

        return _declared(called, chosen, changed)

    return add


def use(*names: str, **changed: dict[str, Any]) -> Callable[[C], C]:
    """Add some settings of a run as options to a command that has parameters of its own for them.

    `changed`: what differs, by the name of the setting.
    """
    known = settings_of(TextSettings)
    chosen = {name: known[name] for name in names}

    def add(command: C) -> C:
        return _declared(command, chosen, changed)

    return add


def _declared(
    command: C, chosen: dict[str, tuple[Field[Any], Any]], changed: dict[str, dict[str, Any]]
) -> C:
    """Declare settings, whose first one `--help` shows first."""
    for name, (known, annotation) in reversed(chosen.items()):
        command = _option(name, known, annotation, changed.get(name, {}))(command)
    return command


def _option(
    name: str, known: Field[Any], annotation: Any, changed: dict[str, Any]
) -> Callable[[C], C]:
    """Return the decorator that declares one setting."""
    if name == "model":
        return model_argument()
    said, (one, limits, several) = said_of(known), plain_type(annotation)
    option, flag = option_of(said.option or name), one is bool
    # A flag that is on by default, or that has a third state, can be turned off.
    off = f"/--no-{option.removeprefix('--')}" if flag and known.default is not False else ""
    facts: dict[str, Any] = {
        "help": said.help,
        "metavar": said.metavar,
        "show_default": said.show_default,
        "multiple": several,
        "shell_complete": _COMPLETES[said.complete],
        "envvar": said.option and f"{PREFIX}_{said.option.upper()}",
        "allow_from_autoenv": said.variable,
    }
    facts |= {"is_flag": True} if flag else {"type": _type_of(one, limits)}
    if flag or known.default not in (MISSING, None, ()):
        facts["default"] = known.default
    return click.option(option + off, name, **(facts | changed))


def _type_of(one: Any, limits: tuple[Any, ...]) -> Any:
    """Return the type by which click reads one value."""
    if get_origin(one) is Literal:
        return click.Choice(get_args(one))
    if one is Path:
        return click.Path(file_okay=False, path_type=Path) if DIRECTORY in limits else PATH
    if any(isinstance(limit, MinLen) for limit in limits):
        return StopText()
    bounds: Any = next((limit for limit in limits if isinstance(limit, Interval)), None)
    if bounds is None:
        return one
    kind = click.IntRange if one is int else FiniteFloatRange
    least = bounds.ge if bounds.gt is None else bounds.gt
    return kind(least, bounds.le, min_open=bounds.gt is not None)


Number = TypeVar("Number", int, float)
R = TypeVar("R")


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
    told what could not be written. `written`: whether all could be.
    """

    def __init__(
        self,
        renders: Mapping[str, tuple[Path | None, Callable[[R], str]]],
        say: Callable[[str], None],
    ) -> None:
        self._renders = [(path, render) for path, render in renders.values() if path is not None]
        self._options = ", ".join(renders)
        self._say = say
        self.written = True
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
            self._remove()
            raise

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
            else:
                self._remove()
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

    def _remove(self) -> None:
        """Delete the files that were made, when nothing will be written to them."""
        for path in self._made:
            with suppress(OSError):
                path.unlink()
