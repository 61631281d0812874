"""What the measurements share: a command line, a record, a place, turns, a repeated step.

A measurement is a module with a function that takes the options and a `Place`, and returns what it
found, and whether it reached its target. `main` prints that, or writes it where `--json` says.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.runner import Runner, RunnerSettings
from tsqp.lab.bench.job import Plan
from tsqp.lab.bench.prepare import write_random_model
from tsqp.lab.bench.shapes import Shape
from tsqp.lab.bench.worker import decode_step, prompt_step
from tsqp.lab.measure import (
    describe_machine,
    elapsed_us,
    in_fresh_process,
    random_ids,
    script,
    write_results,
)
from tsqp.processes import start_service

Options = argparse.Namespace
# What was found of one thing, by name.
Fields = dict[str, Any]
Found = tuple[Fields, bool]

CORES = len(os.sched_getaffinity(0))
TRANSPORTS = ("unix", "tcp")


class Place(ExitStack):
    """A folder that is gone afterwards, with services and what else ends then.

    A part of a measurement may have a place of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(
            self.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-benchmarks-"))
        )
        self._services = 0

    def service(
        self, model: Path | str, *options: str, transport: str = "unix", bind: str = ""
    ) -> str:
        """Start a `gpu-service` with one thread, unless `options` say more; return its endpoint."""
        self._services += 1
        own = f"unix://{self.folder}/{self._services}.sock"
        bind = bind or (own if transport == "unix" else "tcp://127.0.0.1:*")
        command = [str(model), "--bind", bind, "--threads", "1", *options]
        # Models of some gigabytes are read and quantised first.
        return start_service(self, command, timeout_s=600.0)[1]

    def model(self, shape: Shape, *, linear: bool) -> Path:
        """Return a directory of a shape, with random weights. `linear`: also of its layers."""
        parts = (
            shape.name,
            str(shape.settings["num_hidden_layers"]),
            "whole" if linear else "light",
        )
        path = self.folder / "-".join(parts)
        if path.exists():
            return path
        say(f"making random weights of {shape.name}")
        return in_fresh_process(write_random_model, path, shape, linear)


def main(about: str | None, measure: Callable[[Options, Place], Found], **options: Any) -> None:
    """Measure and report; exit status 1 if a target is missed.

    `options`: see `script`. What names machine and versions is put in front of what was found.
    """

    def measured(given: Options) -> Found:
        with Place() as place:
            return measure(given, place)

    (found, reached), path = script(about, measured, **options)
    write_results({"machine": describe_machine(), **found}, path)
    sys.exit(0 if reached else 1)


def say(line: str) -> None:
    """Tell what is being measured."""
    print(line, file=sys.stderr, flush=True)


def noted(line: str, found: Fields) -> Fields:
    """Tell some of what was found, and return it. `line`: with names of its fields in braces."""
    say(line.format(**found))
    return found


def transports(text: str) -> list[str]:
    """Read names of transports, with commas. Raises SettingsError."""
    return chosen("--transports", text.split(","), TRANSPORTS)


def chosen(option: str, given: list[str], known: Iterable[str]) -> list[str]:
    """Return the names given, or all if there is none. Raises SettingsError for an unknown one."""
    names = list(dict.fromkeys(known))
    for name in given:
        SettingsError.unless(name in names, option, repr(name), f"of {', '.join(names)}")
    return given or names


def new_tokens(tokens: int, batch: int, steps: int) -> int:
    """Return how many tokens sequences need so that all of them decode in `steps` steps.

    Those whose prompts are computed first decode while the others still have theirs.
    """
    return Plan(decode_steps=steps).new_tokens(tokens, batch, DEFAULT_STEP_TOKENS)


class Repeated:
    """A runner that repeats one step: a prompt, or a token of each of `batch` sequences.

    Raises SettingsError if the sequences would end early: an empty step takes no time.
    """

    def __init__(
        self,
        closing: ExitStack,
        settings: RunnerSettings,
        *,
        tokens: int,
        batch: int = 1,
        steps: int = 0,
    ) -> None:
        """Prepare `steps` steps of decoding, or, if 0, prompts of `tokens`."""
        self.runner = runner = closing.enter_context(Runner(settings))
        more = new_tokens(tokens, batch, steps) if steps else 1
        positions, needed = runner.config.context_length, tokens + more
        SettingsError.unless(
            needed <= positions,
            "a sequence",
            f"{positions} positions",
            f"at least {needed} for {steps} steps",
        )
        prompts = random_ids(runner.config.vocab_size, tokens, seed=0, sequences=batch).tolist()
        self.step = (
            decode_step(closing, runner, prompts, more)
            if steps
            else prompt_step(runner, prompts[0])
        )

    def timed_ms(self) -> float:
        """Run a step; return its time."""
        return elapsed_us(self.step) / 1e3
