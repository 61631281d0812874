"""How scales are chosen, what is refused, and the command."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from protocol.errors import CalibrationError, ModelError, PromptError, SettingsError
from protocol.integer import ring_product
from protocol.model.checkpoint import Checkpoint, model_digest
from protocol.model.config import read_config
from protocol.model.weights import quantize_rows
from tee_side.protect.calibration import HEADROOM, MAX_SUM, Calibration, SiteScales
from tee_side.protect.sites import IntegerSite
from tee_side.words import Site
from tests.kit.rows import each_row
from tsqp.calibrate import (
    MIN_STEPS,
    STEPS,
    check_error,
    choose_scales,
    coarse,
    relative_error,
    typical_input,
)
from tsqp.cli.model_files import calibrate as command
from tsqp.run.settings import model_directory

SITE: Site = (3, "down_proj")
DEMO = model_directory("demo")


def random_site(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [T, I] with outlier channels `factor` times as large, and weights [O, I]."""
    x_TI = torch.randn(96, 1024)
    x_TI[:, :4] = x_TI[:, :4].sign() * factor * 0.6745
    return x_TI, torch.randn(192, 1024)


def chosen(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> tuple[SiteScales, torch.Tensor]:
    """Choose scales, and return them with the int8 weights."""
    integers, scale = quantize_rows(weight_OI)
    return choose_scales(x_TI, scale, float(integers.double().norm(dim=1).max()), SITE), integers


def test_steps_are_fine_until_the_ring_binds_and_the_headroom_is_kept() -> None:
    x_TI, weight_OI = random_site(factor=1)
    scales, _ = chosen(x_TI, weight_OI)
    assert STEPS * (1 - 1e-6) <= typical_input(x_TI) / scales.input_scale < STEPS * 2**0.25
    assert scales.norm_limit / (x_TI.norm(dim=1).max().item() / scales.input_scale) > 100
    x_TI, weight_OI = random_site(factor=10_000)
    scales, _ = chosen(x_TI, weight_OI)
    assert MIN_STEPS <= typical_input(x_TI) / scales.input_scale < STEPS / 2
    largest = x_TI.double().norm(dim=1).max().item() / scales.input_scale
    assert HEADROOM * (1 - 1e-6) <= scales.norm_limit / largest < HEADROOM * 2**0.25
    assert scales.max_norm == pytest.approx(coarse(largest * scales.input_scale))
    Calibration({SITE: scales}, "", "", 1).check_ring()
    # Scales say the exact size of no row.
    assert chosen(x_TI * 1.002, weight_OI)[0].input_scale == scales.input_scale


@each_row("factor", [1, 1_000, 10_000, 100_000])
def test_outlier_channels_are_computed_accurately_or_refused(factor: float) -> None:
    x_TI, weight_OI = random_site(factor)
    if factor >= 100_000:
        with pytest.raises(CalibrationError, match="down_proj in layer 3: ring too small"):
            chosen(x_TI, weight_OI)
        return
    scales, integers = chosen(x_TI, weight_OI)
    x_int = IntegerSite(scales).encode(x_TI)
    exact = x_int.long() @ integers.long().t()
    assert exact.abs().max() <= MAX_SUM
    assert torch.equal(ring_product(x_int, integers).long(), exact)
    # The other channels are not rounded away beside the outliers: with weights that are the
    # integers themselves, all the error is the inputs', and the small channels' part stays right.
    small = x_int.clone()
    small[:, :4] = 0
    weights = integers.float() * scales.weight_scale[:, None]
    found = ring_product(small, integers) * scales.factor_N
    assert relative_error(found, x_TI[:, 4:] @ weights[:, 4:].t()) < 0.06


def test_inputs_without_a_size_and_errors_beyond_the_bound_are_refused() -> None:
    for value in (0.0, float("nan"), float("inf")):
        with pytest.raises(CalibrationError, match="down_proj in layer 3: largest norm"):
            chosen(torch.full((4, 16), value), torch.ones(3, 16))
    check_error(0.05, SITE)
    for error in (0.2, float("nan")):
        with pytest.raises(CalibrationError, match="down_proj in layer 3: error of the integer"):
            check_error(error, SITE)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(one) for one in arguments])


def test_the_command_writes_a_file_and_over_none(tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "scales"
    text.with_name("ids").write_text("[[5, 6], [7, 2000]]")
    text.write_text("Once there was a girl who had a kite. " * 9, encoding="utf-8")
    output.write_bytes(b"precious")
    given = ("--text", text, "--tokens", "64", "--output")
    for arguments, error in (
        (("demo", *given, output), SettingsError),
        (("demo", *given, tmp_path / "missing" / "scales"), SettingsError),
        (("demo", "--text", tmp_path / "missing", "--output", tmp_path / "new"), PromptError),
        ((tmp_path, *given, tmp_path / "new"), ModelError),
    ):
        assert isinstance(invoke(*arguments).exception, error), arguments
    assert output.read_bytes() == b"precious"
    refused = invoke("demo", "--token-ids", text.with_name("ids"), "--output", tmp_path / "new")
    assert "sequence 1, position 1: got a number that is no token" in str(refused.exception)
    printed = invoke("demo", *given, output, "--force").stdout
    config, checkpoint = read_config(DEMO), Checkpoint(DEMO)
    assert Calibration.load(output, config, model_digest(config, checkpoint)).tokens == 64
    assert printed.startswith(f"{output}: 20 sites, 64 tokens\n")
