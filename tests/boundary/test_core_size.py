"""The trusted core only becomes smaller: what a shielded run imports is counted."""

from __future__ import annotations

import pytest

from tests.tools.core_size import (
    RECORDED,
    ROOT,
    all_of,
    code_lines,
    imported_by_a_shielded_run,
    total,
)


def test_a_shielded_run_imports_no_more_code_than_is_recorded() -> None:
    files = imported_by_a_shielded_run()
    assert all(ROOT in file.parents for file in files.values())
    assert {"tee_side.runner", "protocol.messages", "tsqp.cli.tee_runner"} <= files.keys()
    found = total(files.values())
    assert found <= RECORDED["core"]["imported"], "python -m tests.tools.core_size says what of it"
    # Deferring an import is no reduction.
    assert total(all_of("protocol", "tee_side")) <= RECORDED["core"]["whole"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("# nothing\n\n", 0),
        ('"""A module."""\n\nx = 1  # one\n', 1),
        ('def f():\n    """What."""\n    return (\n        1,\n    )\n', 4),
        ('class A:\n    """Two\n    lines."""\n\n    x = """no\n    docstring"""\n', 3),
    ],
)
def test_a_line_counts_that_has_code_on_it(source: str, lines: int) -> None:
    assert code_lines(source) == lines
