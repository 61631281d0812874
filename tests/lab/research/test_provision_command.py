"""`tsqp provision`: options of masks that it refuses."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from protocol.errors import SettingsError
from tests.kit.rows import each_row
from tsqp.cli.provision import provision


@each_row(
    ("option", "where", "got", "expected"),
    [
        ("block", "--option", "'block'", "KEY=VALUE"),
        ("block=1", "block of mask feature-rotation", "'1'", "greater than or equal to 2"),
        ("colour=1", "--option colour", "no option", "block, sigma, delta"),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, option: str, where: str, got: str, expected: str
) -> None:
    outputs = ("--server-dir", str(tmp_path / "server"), "--key", str(tmp_path / "key"))
    given = ["demo", "--mask", "feature-rotation", *outputs, "--option", option]
    error = CliRunner().invoke(provision, given).exception
    assert isinstance(error, SettingsError)
    assert where in error.where
    assert got in error.got
    assert expected in error.expected
    assert list(tmp_path.iterdir()) == []
