"""How scales are chosen, what is refused, and the command."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from protocol.errors import CalibrationError, ModelError, PromptError, SettingsError, TsqpError
from protocol.integer import exact_product, ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.quantized import load_quantized, quantize_rows
from tee_side.engine.tokenizer import Tokenizer
from tee_side.protect.calibration import HEADROOM, MAX_SUM, Calibration, SiteScales
from tee_side.words import Site
from tests.kit.model import SavedModel, make_model, token_ids
from tsqp.calibrate import (
    MIN_STEPS,
    STEPS,
    SiteResult,
    calibrate,
    calibrate_on,
    check_error,
    check_ids,
    choose_scales,
    coarse,
    default_text,
    parse_ids,
    relative_error,
    sequences,
    typical_input,
)
from tsqp.cli.calibrate import calibrate as command
from tsqp.cli.program import model_directory

SITE: Site = (3, "down_proj")
INPUTS, OUTPUTS, ROWS = 1024, 192, 96


def random_site(
    factor: float, channels: int = 4, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [T, I] with outlier channels `factor` times as large, and weights [O, I]."""
    generator = torch.Generator().manual_seed(seed)
    x_TI = torch.randn(ROWS, INPUTS, generator=generator)
    x_TI[:, :channels] = x_TI[:, :channels].sign() * factor * 0.6745
    return x_TI, torch.randn(OUTPUTS, INPUTS, generator=generator)


def chosen(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> tuple[SiteScales, torch.Tensor]:
    """Choose scales, and return them with the int8 weights."""
    integers, scale = quantize_rows(weight_OI)
    return choose_scales(x_TI, scale, float(integers.double().norm(dim=1).max()), SITE), integers


# ---------------------------------------------------------------------------------------- the rule


def test_without_outliers_a_typical_input_has_its_steps_and_much_headroom() -> None:
    x_TI, weight_OI = random_site(factor=1)
    scales, _ = chosen(x_TI, weight_OI)
    steps = typical_input(x_TI) / scales.input_scale
    assert STEPS * (1 - 1e-6) <= steps < STEPS * 2**0.25
    largest = x_TI.norm(dim=1).max().item() / scales.input_scale
    assert scales.norm_limit / largest > 100


def test_where_the_ring_binds_steps_are_coarser_and_the_headroom_is_kept() -> None:
    x_TI, weight_OI = random_site(factor=10_000)
    scales, _ = chosen(x_TI, weight_OI)
    assert MIN_STEPS <= typical_input(x_TI) / scales.input_scale < STEPS / 2
    largest = x_TI.double().norm(dim=1).max().item() / scales.input_scale
    assert HEADROOM * (1 - 1e-6) <= scales.norm_limit / largest < HEADROOM * 2**0.25
    rounded = coarse(largest * scales.input_scale)
    assert scales.norm_limit * scales.input_scale / rounded == pytest.approx(HEADROOM, rel=1e-6)
    # As the file will have it.
    assert scales.max_norm == pytest.approx(rounded)
    Calibration({SITE: scales}, "", "", 1).check_ring()


@given(st.floats(1e-30, 1e30))
def test_a_size_is_rounded_to_few_values_and_never_the_wrong_way(size: float) -> None:
    up, down = coarse(size), coarse(size, up=False)
    assert down <= size <= up <= size * 2**0.25 * (1 + 1e-12)
    assert up <= down * 2**0.25 * (1 + 1e-12)
    for rounded in (up, down):
        assert 4 * math.log2(rounded) == pytest.approx(round(4 * math.log2(rounded)), abs=1e-9)
        assert coarse(rounded) == coarse(rounded, up=False) == rounded
    assert coarse(0.0) == 0.0


def test_scales_say_the_exact_size_of_no_row() -> None:
    """Texts whose largest and typical rows differ by less than a step give the same scales."""
    x_TI, weight_OI = random_site(factor=10_000)
    scales = {chosen(x_TI * factor, weight_OI)[0].input_scale for factor in (1.0, 1.001, 1.002)}
    assert len(scales) == 1
    x_TI, weight_OI = random_site(factor=1)
    scales = {chosen(x_TI * factor, weight_OI)[0].input_scale for factor in (1.0, 1.001, 1.002)}
    assert len(scales) == 1


@pytest.mark.parametrize("factor", [1, 30, 1_000, 10_000, 100_000, 1_000_000])
def test_outlier_channels_are_computed_accurately_or_refused(factor: float) -> None:
    x_TI, weight_OI = random_site(factor)
    if factor >= 100_000:
        with pytest.raises(CalibrationError, match="ring too small"):
            chosen(x_TI, weight_OI)
        return
    scales, integers = chosen(x_TI, weight_OI)
    x_int = scales.encode(x_TI)
    exact = x_int.long() @ integers.long().t()
    assert exact.abs().max() <= MAX_SUM
    assert torch.equal(ring_product(x_int, integers).long(), exact)
    # The other channels are not rounded away beside the outliers: with weights that are the
    # integers themselves, all the error is the inputs', and the small channels' part stays right.
    small = x_int.clone()
    small[:, :4] = 0
    weights = integers.float() * scales.weight_scale[:, None]
    found = exact_product(small, integers) * scales.factor_N
    expected = x_TI[:, 4:] @ weights[:, 4:].t()
    assert relative_error(found, expected) < 0.06


def test_a_refusal_names_the_site_and_both_magnitudes() -> None:
    x_TI, weight_OI = random_site(factor=1_000_000)
    with pytest.raises(CalibrationError) as raised:
        chosen(x_TI, weight_OI)
    message = str(raised.value)
    assert "down_proj in layer 3: ring too small" in message
    typical, largest = coarse(typical_input(x_TI), up=False), coarse(x_TI.norm(dim=1).max().item())
    assert f"{typical:.4g} beside {largest:.4g}" in message
    assert f"expected at least {MIN_STEPS} steps" in message


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_inputs_without_a_size_are_refused(value: float) -> None:
    with pytest.raises(CalibrationError, match="down_proj in layer 3: largest norm"):
        chosen(torch.full((4, 16), value), torch.ones(3, 16))


def test_typical_is_neither_moved_by_outliers_nor_by_zeros() -> None:
    x_TI = torch.full((9, 100), 0.001)
    x_TI[:, :15] = 2.0  # what matters
    x_TI[:, 0] = 5_000.0
    x_TI[4] = 1e6  # one odd row
    assert typical_input(x_TI) == 2.0


def test_an_error_beyond_the_bound_is_refused() -> None:
    check_error(0.05, SITE)
    for error in (0.2, float("nan")):
        with pytest.raises(CalibrationError, match="down_proj in layer 3: error of the integer"):
            check_error(error, SITE)
    one, two = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    assert relative_error(two, one) == pytest.approx(0.1)


# ------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_every_site_sees_what_transformers_multiplies(
    saved_model: Callable[..., SavedModel], kind: str
) -> None:
    model = saved_model(kind)
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    chunks = [token_ids(60, seed=1), token_ids(9, seed=2)]
    results: list[SiteResult] = []
    calibration = calibrate_on(config, checkpoint, chunks, results.append)

    expected: dict[Site, float] = {}

    def watch(site: Site) -> Callable[..., None]:
        def hook(_module: object, arguments: tuple[torch.Tensor, ...]) -> None:
            largest = arguments[0].norm(dim=-1).max().item()
            expected[site] = max(expected.get(site, 0.0), largest)

        return hook

    hooks = []
    for layer, block in enumerate(model.reference.model.layers):
        modules = {"qkv_proj": block.self_attn.k_proj, "o_proj": block.self_attn.o_proj}
        modules |= {"gate_up_proj": block.mlp.up_proj, "down_proj": block.mlp.down_proj}
        hooks += [
            modules[operator].register_forward_pre_hook(watch((layer, operator)))
            for operator in FUSED_MODULES
        ]
    for ids in chunks:
        model.logits(ids)
    for hook in hooks:
        hook.remove()

    assert calibration.sites.keys() == expected.keys()
    for site, largest in expected.items():
        max_norm = calibration.sites[site].max_norm
        assert largest * (1 - 1e-4) <= max_norm <= largest * 2**0.25 * (1 + 1e-4)
        assert max_norm == coarse(max_norm)
        weights = load_quantized(checkpoint, config, *site)
        calibration.check_weights(site, weights.scale, weights.max_row_norm())
    assert calibration.tokens == 69
    assert calibration.model_digest == model_digest(config, checkpoint)
    assert calibration.linear_digest == linear_digest(config, checkpoint)
    assert [result.done for result in results] == list(range(1, 13))
    assert {result.total for result in results} == {12}
    for result in results:
        assert result.headroom == pytest.approx(calibration.sites[result.site].headroom)
        # Weights of a normal distribution in 48 and 96 inputs: half a percent, and not nothing.
        assert 0.001 < result.error < 0.02


def with_outliers(directory: Path, factor: float, *, in_weights: bool) -> Path:
    """Save a model whose input_layernorm has some channels `factor` times as large.

    `in_weights`: the next weights are as much smaller, so that float results do not change.
    """
    make_model(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("input_layernorm.weight"):
            tensor[5:13] *= factor
        if in_weights and any(f"{module}.weight" in name for module in FUSED_MODULES["qkv_proj"]):
            tensor[:, 5:13] /= factor
    save_file(tensors, path, {"format": "pt"})
    return directory


def test_a_model_with_outliers_in_its_activations_computes_the_same_integers(
    tmp_path: Path,
) -> None:
    directory = with_outliers(tmp_path, 1_000, in_weights=False)
    config, checkpoint = read_config(directory), Checkpoint(directory)
    calibration = calibrate_on(config, checkpoint, [token_ids(200, seed=3)])
    site: Site = (1, "qkv_proj")
    weights, scales = load_quantized(checkpoint, config, *site), calibration.sites[site]
    largest = scales.max_norm
    # Rows as large as headroom and margin allow, all their size in an outlier channel.
    x_TI = torch.zeros(2, config.hidden_size)
    x_TI[:, 5] = torch.tensor([1.0, -1.0]) * largest * HEADROOM * 0.99
    x_int = scales.encode(x_TI)
    exact = x_int.long() @ weights.weight.long().t()
    product = exact_product(x_int, weights.weight)
    assert torch.equal(product.long(), exact)
    found = product * scales.factor_N
    expected = x_TI @ (weights.weight.float() * weights.scale[:, None]).t()
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * largest)


def test_a_model_whose_weights_hide_outliers_is_refused(tmp_path: Path) -> None:
    directory = with_outliers(tmp_path, 1_000, in_weights=True)
    with pytest.raises(CalibrationError, match="qkv_proj in layer 0: error of the integer product"):
        calibrate_on(read_config(directory), Checkpoint(directory), [token_ids(100)])


# -------------------------------------------------------------------------------- text and command


@pytest.mark.parametrize(("tokens", "context"), [(2048, 512), (700, 512), (700, 4096), (90, 128)])
def test_sequences_start_as_the_models_own_do(tokens: int, context: int) -> None:
    tokenizer = Tokenizer(model_directory("demo"))
    (bos,) = tokenizer.encode("")
    chat, *rest = sequences(tokenizer, default_text(), tokens, context)
    assert sum(map(len, [chat, *rest])) == tokens
    assert all(len(ids) <= min(512, context) for ids in [chat, *rest])
    opening = " ".join(default_text().split()[:60])
    full = tokenizer.apply_chat_template([{"role": "user", "content": opening}])
    assert chat == full[: min(context, tokens)]
    assert all(ids[0] == bos for ids in rest)
    text = [token_id for ids in rest for token_id in ids[1:]]
    assert text == tokenizer.encode(default_text(), add_special_tokens=False)[: len(text)]


def test_a_short_text_is_run_once_and_an_empty_one_not_at_all() -> None:
    tokenizer = Tokenizer(model_directory("demo"))
    [_, text] = sequences(tokenizer, "Tom saw a kite.", 2048, 512)
    assert tokenizer.decode(text) == "Tom saw a kite."
    with pytest.raises(PromptError, match="calibration text: got no tokens"):
        sequences(tokenizer, "", 2048, 512)


def test_a_tokenizer_without_a_chat_template_does_without(tmp_path: Path) -> None:
    shutil.copy(model_directory("demo") / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    [only] = sequences(tokenizer, "Tom saw a kite.", 2048, 512)
    assert only == tokenizer.encode("Tom saw a kite.")


def test_the_shipped_file_is_what_the_command_makes() -> None:
    demo = model_directory("demo")
    config, checkpoint = read_config(demo), Checkpoint(demo)
    path = demo / "calibration.safetensors"
    assert path.stat().st_size < 100_000
    shipped = Calibration.load(
        path, config, model_digest(config, checkpoint), linear_digest(config, checkpoint)
    )
    fresh = calibrate(demo)
    assert shipped.tokens == fresh.tokens == 2048
    for site, scales in fresh.sites.items():
        # Made from the same text before sizes were rounded, which was a step of 2^(1/4) at most.
        # Another processor adds up in another order, and may round to the next step.
        assert 0.84 < shipped.sites[site].input_scale / scales.input_scale < 2**0.5
        assert shipped.sites[site].max_norm == coarse(shipped.sites[site].max_norm)
        assert shipped.sites[site].norm_limit == scales.norm_limit
        assert torch.equal(shipped.sites[site].weight_scale, scales.weight_scale)


def invoke(*arguments: str | Path) -> str:
    """Run the command; return what it printed, or raise what it raised."""
    result = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
    if isinstance(result.exception, TsqpError | click.ClickException):
        raise result.exception
    assert result.exception is None, result.exception
    return result.stdout


def test_the_command_writes_a_file_and_says_where_room_is_least(tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "scales"
    text.write_text("Once there was a girl who had a kite. " * 9, encoding="utf-8")
    printed = invoke("demo", "--text", text, "--tokens", "64", "--output", output)
    demo = model_directory("demo")
    config, checkpoint = read_config(demo), Checkpoint(demo)
    made = Calibration.load(output, config, model_digest(config, checkpoint))
    assert made.tokens == 64
    site = min(made.sites, key=lambda site: made.sites[site].headroom)
    first, second, third = printed.splitlines()
    assert first == f"{output}: 20 sites, 64 tokens"
    assert f"headroom: {made.sites[site].headroom:.1f} times" in second
    assert f"at {site[1]} in layer {site[0]}" in second
    assert math.isfinite(float(third.split("product: ")[1].split("%")[0]))


def test_exact_norms_of_an_old_file_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped, demo = model_directory("demo") / "calibration.safetensors", model_directory("demo")
    config = read_config(demo)
    digest = model_digest(config, Checkpoint(demo))
    tensors = load_file(shipped)
    Calibration.load(shipped, config, digest)
    assert not caplog.records
    with safe_open(shipped, "pt") as file:
        metadata = file.metadata()
    save_file(tensors | {"max_norm": tensors["max_norm"] * 0.99}, tmp_path / "old", metadata)
    Calibration.load(tmp_path / "old", config, digest)
    assert [record.message for record in caplog.records] == ["calibration_has_exact_norms"]


def test_the_file_goes_beside_the_model_by_default(tmp_path: Path) -> None:
    demo = model_directory("demo")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(demo / name, tmp_path / name)
    invoke(tmp_path, "--tokens", "64")
    assert (tmp_path / "calibration.safetensors").is_file()


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    output = tmp_path / "scales"
    output.write_bytes(b"precious")
    with pytest.raises(SettingsError, match="got a file that exists, expected none, or --force"):
        invoke("demo", "--tokens", "64", "--output", output)
    assert output.read_bytes() == b"precious"
    invoke("demo", "--tokens", "64", "--output", output, "--force")
    assert output.read_bytes() != b"precious"


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes(b"caf\xe9")
    output = ("--output", tmp_path / "scales")
    with pytest.raises(PromptError, match="got a byte that is not UTF-8 at offset 3"):
        invoke("demo", "--text", latin, *output)
    with pytest.raises(PromptError, match="got No such file"):
        invoke("demo", "--text", tmp_path / "missing", *output)
    with pytest.raises(SettingsError, match="got no such directory"):
        invoke("demo", "--output", tmp_path / "missing" / "scales")
    with pytest.raises(click.BadParameter, match="1 is not in the range"):
        invoke("demo", "--tokens", "1", *output)
    with pytest.raises(ModelError, match=r"config\.json"):
        invoke(tmp_path, *output)
    assert not (tmp_path / "scales").exists()


# --------------------------------------------------------------------------------- token ids


@pytest.mark.parametrize(
    ("content", "chunks"),
    [
        ("1 2\n3\t4\n", [[1, 2, 3, 4]]),
        ("[[1, 2], [3]]", [[1, 2], [3]]),
        (" [[0], []]\n", [[0], []]),
    ],
)
def test_token_ids_are_numbers_or_lists_of_lists(content: str, chunks: list[list[int]]) -> None:
    assert parse_ids(content, "ids") == chunks


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "ids: got no token ids"),
        ("[]", "ids: got no token ids"),
        ("[[]]", "ids: got no token ids"),
        ("[1, 2]", "ids: got no token ids, expected numbers, or a JSON list of lists"),
        ("[[1, 2", "ids: got no token ids"),
        ("[" * 100_000, "ids: got no token ids"),
        ("1 two 3", "ids: sequence 0, position 1: got no whole number"),
        ("1 -2", "ids: sequence 0, position 1: got no whole number"),
        ("9" * 5000, "ids: sequence 0, position 0: got no whole number"),
        ("[[1], [2, true]]", "ids: sequence 1, position 1: got no whole number"),
        ("[[1.5]]", "ids: sequence 0, position 0: got no whole number"),
    ],
)
def test_what_is_no_token_id_is_refused_by_its_position(content: str, said: str) -> None:
    with pytest.raises(PromptError) as caught:
        parse_ids(content, "ids")
    assert said in str(caught.value)
    assert "two" not in str(caught.value)


@pytest.mark.parametrize("token", [320, -1, 2**40])
def test_ids_beyond_the_vocabulary_are_refused_by_position_and_size(
    saved_model: Callable[..., SavedModel], tmp_path: Path, token: int
) -> None:
    model = saved_model().directory
    with pytest.raises(PromptError, match=r"sequence 1, position 2: .*a vocabulary of 320"):
        check_ids([[1], [2, 3, token]], read_config(model))
    ids = tmp_path / "ids"
    ids.write_text(f"[[1], [2, 3, {token}]]")
    with pytest.raises(PromptError, match="a vocabulary of 320"):
        command.main(
            [str(model), "--token-ids", str(ids), "--output", str(tmp_path / "scales")],
            standalone_mode=False,
        )


def test_a_model_without_a_tokenizer_is_calibrated_from_token_ids(
    saved_model: Callable[..., SavedModel], tmp_path: Path
) -> None:
    model, ids = saved_model().directory, tmp_path / "ids"
    assert not (model / "tokenizer.json").exists()
    ids.write_text(" ".join(map(str, token_ids(60, seed=1))))
    output = tmp_path / "scales"
    run = [str(model), "--token-ids", str(ids), "--tokens", "50", "--output", str(output)]
    result = CliRunner().invoke(command, run)
    assert result.exit_code == 0, result.output
    assert "12 sites, 50 tokens" in result.output
    config, checkpoint = read_config(model), Checkpoint(model)
    expected = calibrate_on(config, checkpoint, [token_ids(60, seed=1)[:50]])
    digests = (model_digest(config, checkpoint), linear_digest(config, checkpoint))
    loaded = Calibration.load(output, config, *digests)
    norms = [{s: c.sites[s].max_norm for s in c.sites} for c in (loaded, expected)]
    assert norms[0] == norms[1]
    both = CliRunner().invoke(command, [*run[:-1], str(tmp_path / "b"), "--text", str(ids)])
    assert isinstance(both.exception, SettingsError)
