"""`tsqp provision`: options of masks, what it says at the end, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpu_side.provision import read_provision
from protocol.errors import FeatureKeyError, MaskError, SettingsError, TsqpError
from tee_side.protect.masks.mask import SegmentMask
from tsqp.cli.provision import provision
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.lab.research.feature_rotation import FeatureRotation
from tsqp.lab.research.segment_permutation import SegmentPermutation
from tsqp.lab.research.segment_rotation import SegmentRotation


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


def test_options_of_the_mask_are_in_the_key(tmp_path: Path) -> None:
    result = _run(tmp_path, "--option", "block=32", "--option", "sigma=0.5")
    assert result.exit_code == 0, result.output
    mask = FeatureRotation(block=32, sigma=0.5)
    assert FeatureKey.load(tmp_path / "key").options == mask.model_dump()
    assert f"noise: {mask.statement(192)}" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        (SegmentPermutation, "embedding"),
        (SegmentRotation, "embedding, norms and LM head"),
    ],
)
def test_of_whole_layers_it_says_what_the_client_keeps(
    tmp_path: Path, mask: type[SegmentMask], kept: str
) -> None:
    result = _run(tmp_path, mask=mask.name)
    assert result.exit_code == 0, result.output
    _, _, client, hidden = result.stdout.splitlines()
    assert client == (
        f"the client keeps of demo: config.json, the tokenizer, {kept}; the server must get neither"
        " these nor the key"
    )
    assert hidden == f"{mask.name} is known not to hide: {mask.known_break}"


def test_noise_of_whole_layers_is_stated(tmp_path: Path) -> None:
    result = _run(tmp_path, "--option", "sigma=0.5", mask="cloak-segment")
    (noise,) = (line for line in result.stdout.splitlines() if line.startswith("noise: "))
    assert noise.startswith("noise: a segment from layer 0: epsilon ")


def test_a_mask_of_the_users_own_is_found_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "mine.py"
    file.parent.mkdir()
    file.write_text(
        "from typing import ClassVar\n"
        "from tsqp.lab.research.feature_permutation import FeaturePermutation\n"
        "class Mine(FeaturePermutation):\n"
        '    name: ClassVar[str] = "mine"\n'
    )
    result = _run(tmp_path, "--option", "block=8", mask=str(file))
    assert result.exit_code == 0, result.output
    key = FeatureKey.load(tmp_path / "key")
    assert (key.mask, key.options) == ("mine", {"block": 8})


@pytest.mark.parametrize(
    ("options", "where", "got", "expected"),
    [
        (("block",), "--option", "'block'", "KEY=VALUE"),
        (("block=8", "block=9"), "--option block", "it twice", "it once"),
        (("sigma=much",), "sigma of mask feature-rotation", "'much'", "number"),
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


def test_masks_that_need_no_provisioning_are_refused(tmp_path: Path) -> None:
    error = _refusal(MaskError, tmp_path, mask="pad")
    assert (error.got, error.expected) == (
        "a mask of kind additive",
        "one of kind feature or segment",
    )
    _refusal(MaskError, tmp_path, mask="nope")


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    assert _run(tmp_path).exit_code == 0
    before = (tmp_path / "key").read_bytes()
    outputs = ["--server-dir", str(tmp_path / "other"), "--key", str(tmp_path / "key")]
    result = CliRunner().invoke(provision, ["demo", "--mask", "feature-rotation", *outputs])
    assert isinstance(result.exception, FeatureKeyError)
    assert (tmp_path / "key").read_bytes() == before
    assert not (tmp_path / "other").exists()
