"""What integers cost a model, which models are poor in them, and the command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError, PromptError, SettingsError, TsqpError
from protocol.model.checkpoint import EMBEDDING, SINGLE_FILE
from tee_side.protect.sites import IntegerSite
from tests.kit.kernels import check_kernels
from tests.kit.model import Models, token_ids
from tests.kit.rows import each_row
from tsqp.accuracy import measure, site_name
from tsqp.cli.model_files import accuracy as command
from tsqp.run.settings import model_directory

DEMO = model_directory("demo")
Tensors = dict[str, torch.Tensor]
Changed = Callable[[Callable[[Tensors], None]], Path]
# A token that `IDS` has not.
RARE = 319
IDS = [token_ids(80, seed, vocab_size=RARE) for seed in range(3)]


@pytest.fixture(autouse=True)
def _kernels_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsqp.accuracy.check_kernels", check_kernels)


@pytest.fixture
def changed(saved_model: Models, tmp_path: Path) -> Changed:
    """Return a function that makes a model with other weights."""

    def make(change: Callable[[Tensors], None]) -> Path:
        path = shutil.copytree(saved_model("llama").directory, tmp_path / "m", dirs_exist_ok=True)
        tensors = load_file(path / SINGLE_FILE)
        change(tensors)
        save_file(tensors, path / SINGLE_FILE)
        return path

    return make


def _rows_of_one_outlier(tensors: Tensors) -> None:
    """Give rows a weight that int8 can hold beside no other, and that its input never needs."""
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[0] = 0
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight")):
            tensor[:, 0] = 1e4 * tensor.abs().amax()


def _outlier_at_a_token(tensors: Tensors) -> None:
    """Give a token a feature that no other has, which layer 1 squares to an input of down_proj."""
    tensors[EMBEDDING][:, 5] = 0
    tensors[EMBEDDING][RARE, 5] = 20
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[5] = 0
    for module in ("gate", "up"):
        row = tensors[f"model.layers.1.mlp.{module}_proj.weight"][0]
        row[:] = 0
        row[5] = 200


def test_the_demo_model_is_good() -> None:
    told: list[tuple[int, int]] = []
    found = measure(DEMO, None, 512, lambda done, of: told.append((done, of)))
    assert found.is_good
    assert 500 < found.score.tokens < 512
    assert found.score.agreement > 0.97
    assert found.score.kl_nats > 0
    assert 0 < found.error < 0.05
    assert told == [(done, 40) for done in range(1, 41)]


def test_weights_that_int8_cannot_hold_are_poor(changed: Changed) -> None:
    assert measure(changed(lambda _: None), None, 240, chunks=IDS).is_good
    path = changed(_rows_of_one_outlier)
    found = measure(path, None, 240, chunks=IDS)
    assert not found.is_good
    assert found.error == pytest.approx(1, abs=0.01)
    assert found.worst[1] in ("qkv_proj", "gate_up_proj")
    (path / "ids").write_text(json.dumps(IDS))
    printed = invoke(path, "--token-ids", path / "ids")
    assert (printed.exit_code, "poor (" in printed.stdout) == (1, True)


@pytest.mark.usefixtures("torch_kernels")
@each_row("position", [0, 40])
def test_an_outlier_in_the_activations_costs_nothing(
    changed: Changed, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """Wherever it is: the rows beside it have scales of their own."""
    encode, ratios = IntegerSite.encode, list[float]()

    def noted(self: IntegerSite, x_TI: torch.Tensor) -> Any:
        found = encode(self, x_TI)
        ratios.append(float(found[1].max() / found[1].median()))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(IntegerSite, "encode", noted)
        chunks = [[*ids[:position], RARE, *ids[position + 1 :]] for ids in IDS]
        assert measure(changed(_outlier_at_a_token), None, 240, chunks=chunks).is_good
    assert max(ratios) > 20_000


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(one) for one in arguments])


def test_the_command_prints_what_was_measured_or_what_is_wrong(tmp_path: Path) -> None:
    text, ids = tmp_path / "text", tmp_path / "ids"
    text.write_text("Once there was a girl who had a kite. " * 9, encoding="utf-8")
    ids.write_text("[[5, 6], [7, 2000]]")
    refused: list[tuple[tuple[str | Path, ...], type[TsqpError], str]] = [
        (("demo", "--text", text, "--token-ids", ids), SettingsError, "--token-ids: got --text"),
        (("demo", "--text", tmp_path / "missing"), PromptError, "missing"),
        (("demo", "--token-ids", ids), PromptError, "sequence 1, position 1: got a number that is"),
        ((tmp_path, "--text", text), ModelError, "config.json"),
    ]
    for arguments, error, said in refused:
        found = invoke(*arguments).exception
        assert isinstance(found, error), arguments
        assert said in str(found)
    printed = invoke("demo", "--text", text, "--tokens", "64")
    right = measure(DEMO, text.read_text(encoding="utf-8"), 64)
    assert printed.exit_code == 1 - right.is_good
    for said in (
        f"over {right.score.tokens} next tokens",
        f"{right.score.perplexity_ratio:.4f} times",
        f"{right.score.agreement:.1%}",
        f"{right.score.kl_nats:.2g} nats",
        f"{right.error:.2%}, at {site_name(right.worst)}",
        "good (" if right.is_good else "poor (",
    ):
        assert said in printed.stdout
