"""`tsqp provision`: options of masks, what it says at the end, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpu_side.provision import read_provision
from protocol.errors import SettingsError, TsqpError
from tsqp.cli.provision import provision
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.feature_rotation import FeatureRotation


def _run(tmp_path: Path, *arguments: str, mask: str = "feature-rotation") -> Result:
    outputs = ("--server-dir", str(tmp_path / "server"), "--key", str(tmp_path / "key"))
    return CliRunner().invoke(provision, ["demo", "--mask", mask, *outputs, *arguments])


def _refusal(error: type[TsqpError], tmp_path: Path, *arguments: str, **settings: Any) -> TsqpError:
    result = _run(tmp_path, *arguments, **settings)
    assert isinstance(result.exception, error), result.output
    assert list(tmp_path.iterdir()) == []
    return result.exception


def test_it_says_what_goes_where_and_what_is_not_hidden(tmp_path: Path) -> None:
    result = _run(tmp_path)
    assert result.exit_code == 0, result.output
    server, key, hidden = result.stdout.splitlines()
    assert server.startswith(f"{tmp_path / 'server'}: 5 layers, 7.9 MB: copy it to the GPU host")
    assert key.startswith(f"{tmp_path / 'key'}: stays in the TEE")
    assert hidden == f"feature-rotation is known not to hide: {FeatureRotation.known_break}"
    assert "provision demo" in result.stderr
    marker = read_provision(tmp_path / "server")
    assert marker is not None
    assert marker.provision_id == FeatureKey.load(tmp_path / "key").provision_id


@pytest.mark.parametrize(
    ("options", "where", "got", "expected"),
    [
        (("block",), "--option", "'block'", "KEY=VALUE"),
        (("block=1",), "block of mask feature-rotation", "'1'", "greater than or equal to 2"),
        (("colour=1",), "--option colour", "no option", "block, sigma, delta"),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, options: tuple[str, ...], where: str, got: str, expected: str
) -> None:
    arguments = [argument for option in options for argument in ("--option", option)]
    error = _refusal(SettingsError, tmp_path, *arguments)
    assert where in error.where
    assert got in error.got
    assert expected in error.expected
