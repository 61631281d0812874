"""Spoilt model directories, read as either side reads them: refused soon, in little, by name."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

from tests.soak.directory_cases import CASES, GOOD
from tests.soak.directory_draft import Draft, Named, make_base
from tests.soak.directory_reader import Readers, Reading
from tests.soak.row import RowResult, is_full, note, progress
from tsqp.cli.program import model_directory

NAME = "model directories"
TEST = (
    f"directories spoilt in {len(CASES)} ways at random (weights cut, lying headers and offsets,"
    " shapes, dtypes, NaN, sizes, JSON, links, pipes, pickles), each read by the TEE and by the"
    " service in a fresh process"
)
PASS = "refused in <= 2 s and <= 256 MiB by a typed error that names file and field"
FULL = 500
SHORT = len(CASES)
# Memory is judged in the short form, too; time is not.
MAX_S, MAX_MIB = 2.0, 256.0
ALONE = True
MINUTES = 2


def run(count: int) -> RowResult:
    """Spoil and read so many directories."""
    began = time.monotonic()
    readings = accepted = unnamed = untyped = good = 0
    slowest = largest = 0.0
    with tempfile.TemporaryDirectory() as folder, Readers() as readers:
        base = Path(folder) / "base"
        make_base(base, model_directory("demo") / "tokenizer.json")
        for leave in GOOD:
            draft = _copy(base, Path(folder) / "good", 0)
            leave(draft)
            for reader in ("tee", "service"):
                reading = readers.read(reader, draft.directory)
                good += reading.error == ""
                if reading.error:
                    note(f"{leave.__name__}: {reader} refused a good directory: {reading.text}")
            shutil.rmtree(Path(folder) / "good")
        for number in range(count):
            case = CASES[number % len(CASES)]
            draft = _copy(base, Path(folder) / "case", number)
            named = case(draft)
            for reader in named.by:
                reading = readers.read(reader, draft.directory)
                readings += 1
                fault = _fault(reading, named)
                accepted += fault == "accepted"
                unnamed += fault == "unnamed"
                untyped += fault == "untyped"
                slowest, largest = max(slowest, reading.seconds), max(largest, reading.peak_mib)
                if fault or reading.seconds > MAX_S or reading.peak_mib > MAX_MIB:
                    note(f"{case.__name__} {number}: {reader}: {fault} {reading} for {named.parts}")
            shutil.rmtree(draft.directory)
            progress(number + 1)
    in_time = slowest <= MAX_S or not is_full(FULL, count)
    right = not (accepted or unnamed or untyped) and good == 2 * len(GOOD)
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "readings": readings,
            "accepted": accepted,
            "refused without naming the place": unnamed,
            "untyped errors, crashes and hangs": untyped,
            "slowest refusal, s": round(slowest, 2),
            "largest peak above the process, MiB": round(largest, 1),
            "good directories refused": 2 * len(GOOD) - good,
        },
        time.monotonic() - began,
        passed=right and in_time and largest <= MAX_MIB,
    )


def _copy(base: Path, directory: Path, seed: int) -> Draft:
    shutil.copytree(base, directory)
    return Draft(directory, random.Random(seed))


def _fault(reading: Reading, named: Named) -> str:
    """Say what is wrong with how a spoilt directory was refused; "" if nothing is."""
    if not reading.error:
        return "accepted"
    if reading.error not in ("ModelError", "ManifestError"):
        return "untyped"
    # A message is one line that anybody's terminal can show.
    shown = reading.text.isprintable() and len(reading.text) < 2000
    return "" if shown and all(part in reading.where for part in named.parts) else "unnamed"
