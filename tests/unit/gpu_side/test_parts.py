"""A service that holds a part of a model, layers or columns: what it loads, says and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_side.devices import NullDevice
from gpu_side.handler import RequestHandler
from gpu_side.kernels import NullWeights
from gpu_side.provision import PROVISION_FILE, Provision, read_provision, write_provision
from gpu_side.served_model import read_served_model
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, ModelError, ProtocolError, SettingsError
from protocol.messages import InitReply, InitRequest, Request
from protocol.model.columns import Columns
from tests.kit import ask
from tests.kit.model import SIZES, SavedModel
from tests.kit.rows import each_row
from tests.kit.wire import part, segment

CPU = torch.device("cpu")
MIB, UNAVAILABLE = 2**20, ErrorCode.UNAVAILABLE
HIDDEN, VOCAB, LAST = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_hidden_layers"] - 1

# One embedding for both, biases, or sizes that three parts do not divide.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "biased": {"kind": "llama", "mlp_bias": True, "attention_bias": True},
    "uneven": {"kind": "llama", "vocab_size": 331, "intermediate_size": 97},
}


@pytest.fixture(scope="module")
def models(saved_model: Callable[..., SavedModel]) -> dict[str, Path]:
    found = {name: saved_model(**{"kind": name, **given}) for name, given in MODELS.items()}
    return {name: saved.directory for name, saved in found.items()}


def _load(directory: Path, columns: Columns = (0, 1), **settings: Any) -> ServiceWeights:
    return load_weights(directory, device=CPU, dtype=torch.float32, columns=columns, **settings)


def _null(directory: Path, **settings: Any) -> NullWeights:
    held, _ = read_served_model(directory, weights=False, **settings)
    return NullWeights(held, NullDevice(), torch.float32)


ROW, ELEMENTS = torch.ones(1, HIDDEN), torch.ones(1, HIDDEN, dtype=torch.int32)


def _whole(first: int, last: int, *, lm_head: bool = False) -> Request:
    return segment(ROW, [part(1, 0, 1)], (first, last), lm_head=lm_head)


ASKED: dict[str, Request] = {
    **{f"linear {n}": ask.linear(ROW, "q_proj", layer=n) for n in range(LAST + 1)},
    **{f"ring {n}": ask.ring(ELEMENTS, "q_proj", layer=n) for n in range(LAST + 1)},
    "embedding": ask.embedding(torch.tensor([1])),
    "head": ask.head(ROW),
    "ring head": ask.ring_head(ELEMENTS),
    "matmul": ask.matmul(ROW, ROW.T),
    "whole 1": _whole(1, 1),
    "whole model": _whole(0, LAST),
    "whole head": _whole(0, LAST, lm_head=True),
}
LINEARS = [f"linear {layer}" for layer in range(LAST + 1)]
RINGS = [f"ring {layer}" for layer in range(LAST + 1)]
WHOLE = ["whole 1", "whole model", "whole head"]


def _provisioned(directory: Path, target: Path, holds: Any) -> Path:
    """Write a server's directory with the weights as they are, of so much of the model."""
    kept = {"linears": ("_proj.",), "layers": ("model.layers.",)}.get(
        holds, ("model.layers.", "model.norm.", "lm_head.")
    )
    target.mkdir()
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    found = {name: tensor for name, tensor in tensors.items() if any(k in name for k in kept)}
    save_file(found, target / "model.safetensors")
    write_provision(target, Provision(mask="test-mask", provision_id="5a" * 32, holds=holds))
    return target


@each_row(
    ("name", "settings", "answered"),
    [
        ("llama", {}, ["embedding", "head", "ring head", *LINEARS, *RINGS, *WHOLE]),
        ("llama", {"arithmetic": ("float",)}, [*LINEARS, "embedding", "head", *WHOLE]),
        # These two are float whatever the linears are.
        ("llama", {"arithmetic": ("int8",)}, [*RINGS, "embedding", "head", "ring head"]),
        ("llama", {"layers": (0, 1)}, [*LINEARS[:2], *RINGS[:2], "embedding", "whole 1"]),
        ("qwen3", {"layers": (1, 2)}, [*LINEARS[1:], *RINGS[1:], "head", "ring head", "whole 1"]),
        ("llama", {"columns": (1, 2)}, [*LINEARS, *RINGS, "embedding", "head", "ring head"]),
        ("llama", {"holds": "linears"}, LINEARS),
        ("llama", {"holds": "layers"}, [*LINEARS, "whole 1", "whole model"]),
        ("qwen3", {"holds": "model"}, [*LINEARS, *WHOLE]),
    ],
)
def test_what_is_not_held_is_unavailable(
    models: dict[str, Path],
    tmp_path: Path,
    name: str,
    settings: dict[str, Any],
    answered: list[str],
) -> None:
    directory, given = models[name], dict(settings)
    whole = RequestHandler(_load(directory), MIB)
    if (holds := given.pop("holds", None)) is not None:
        directory = _provisioned(directory, tmp_path / holds, holds)
    for held in (_load(directory, **given), _null(directory, **given)):
        handler = RequestHandler(held, MIB)
        found = {}
        for asked, request in ASKED.items():
            try:
                found[asked] = ask.answer(handler, request)
            except ProtocolError as error:
                found[asked] = error.code
        refused = {asked for asked, output in found.items() if output is UNAVAILABLE}
        assert refused == ASKED.keys() - {"matmul", *answered}
        if isinstance(held, ServiceWeights) and "columns" not in given:
            for asked in answered:
                assert torch.equal(found[asked], ask.answer(whole, ASKED[asked])), asked
        init, _ = handler.apply(InitRequest())
        assert isinstance(init, InitReply)
        assert init.layers == given.get("layers", (0, LAST))
        assert init.columns == given.get("columns", (0, 1))
        assert init.provision_id == (holds and "5a" * 32)
        # It is the same model, whatever part of it is held here.
        model, _ = read_served_model(directory)
        assert init.model_digest == model.model_digest
        assert init.linear_digest == model.linear_digest
        assert init.norm_weights.keys() == model.norms.keys()


@each_row("name", [*MODELS, "provisioned"])
def test_parts_answer_their_columns_of_each_module(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    provisioned = name == "provisioned"
    directory = models["llama" if provisioned else name]
    if provisioned:
        directory = _provisioned(directory, tmp_path / name, "linears")
    whole = _load(directory)
    handler, down = RequestHandler(whole, MIB), whole.config.module_shape("down_proj")[1]
    hidden, elements = torch.randn(3, HIDDEN), ask.uniform(3, HIDDEN)
    floats: list[tuple[Request, tuple[Any, ...]]] = [
        (ask.linear(hidden, *ask.QKV), ask.QKV),
        (ask.linear(hidden, *ask.GATE_UP, layer=0), ask.GATE_UP),
        (ask.linear(torch.randn(1, down), "down_proj", layer=2), ("down_proj",)),
    ]
    others: list[tuple[Request, tuple[Any, ...]]] = [
        (ask.ring(elements, *ask.QKV), ask.QKV),
        (ask.seeded(2, HIDDEN, *ask.GATE_UP), ask.GATE_UP),
        (ask.head(hidden), ("head",)),
        (ask.ring_head(elements), ("head",)),
    ]
    for parts in (2, 3):
        held = [_load(directory, (number, parts)) for number in range(parts)]
        handlers = [RequestHandler(one, MIB) for one in held]
        null = RequestHandler(_null(directory, columns=(0, parts)), MIB)
        for request, names in floats + others * (not provisioned):
            pieces = []
            for one, answers in zip(held, handlers, strict=True):
                config = one.part
                widths = [
                    config.vocab_size if name == "head" else config.module_shape(name)[0]
                    for name in names
                ]
                pieces.append(ask.answer(answers, request).split(widths, dim=-1))
            assert ask.answer(null, request).shape[-1] == sum(p.shape[-1] for p in pieces[0])
            # Of each module the parts stand side by side.
            joined = torch.cat(
                [piece for module in zip(*pieces, strict=True) for piece in module], -1
            )
            exact = joined.dtype == torch.int32
            expected = ask.answer(handler, request)
            torch.testing.assert_close(joined, expected, rtol=1e-5, atol=0 if exact else 1e-5)
        for one in held:
            digests = whole.model_digest, whole.linear_digest
            assert (one.model_digest, one.linear_digest) == digests
            assert (one.lm_head is one.embedding) == (whole.lm_head is whole.embedding)
        sizes = [one.weight_bytes for one in held]
        assert sum(sizes) == whole.weight_bytes
        assert max(sizes) <= whole.weight_bytes * (1 / parts + 0.05)


@each_row(
    ("settings", "text"),
    [
        ({"columns": (2, 2)}, "columns to hold: got part 2 of 2, expected 0 to 1"),
        ({"columns": (-1, 2)}, "columns to hold: got part -1 of 2, expected 0 to 1"),
        ({"columns": (0, 0)}, "columns to hold: got 0 parts, expected 1 to 32"),
        # As many as k_proj has outputs.
        ({"columns": (0, 33)}, "columns to hold: got 33 parts, expected 1 to 32"),
        *(
            ({"layers": layers}, f"expected a range within 0-{LAST}")
            for layers in ((0, LAST + 1), (LAST + 1, LAST + 1), (2, 1), (-1, 0))
        ),
    ],
)
def test_parts_that_there_are_not(
    models: dict[str, Path], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        read_served_model(models["llama"], **settings)
    assert text in str(refused.value)


GOOD = {"version": 1, "mask": "feature-rotation", "provision_id": "5a" * 32}


def test_a_damaged_provisioned_directory_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    directory = _provisioned(models["llama"], tmp_path / "server", "linears")
    with pytest.raises(ModelError, match="mask test-mask: got arithmetic int8, expected float"):
        _load(directory, arithmetic=("int8",))
    tensors, path = load_file(directory / "model.safetensors"), directory / "model.safetensors"
    up = "model.layers.1.mlp.up_proj"
    for changed in (
        {name: t for name, t in tensors.items() if name != f"{up}.weight"},
        tensors | {f"{up}.bias": torch.ones(96)},
    ):
        save_file(changed, path)
        with pytest.raises(ModelError, match="up_proj"):
            _load(directory)
    save_file(tensors, path)
    (directory / PROVISION_FILE).unlink()
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: got no such tensor"):
        _load(directory)


ORDER = "model.layers.1.self_attn.rope_order"


@each_row(
    ("change", "message"),
    [
        ({ORDER: torch.zeros(2, 8)}, "rope_order: got other numbers"),
        ({ORDER: torch.arange(8.0).repeat(3, 1)}, "rope_order: got shape .3, 8."),
        ({"model.layers.0.input_layernorm.weight": None}, "input_layernorm.weight: got no such"),
        ({"model.norm.weight": torch.ones(3)}, "model.norm.weight: got shape"),
        ({"lm_head.weight": None}, "lm_head.weight: got no such"),
        ({"model.layers.0.self_attn.other": torch.ones(3)}, "does not explain"),
    ],
)
def test_a_damaged_directory_of_whole_layers_is_refused(
    models: dict[str, Path], tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    target = tmp_path / str(len(list(tmp_path.iterdir())))
    path = _provisioned(models["llama"], target, "model") / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: one for name, one in tensors.items() if one is not None}, path)
    with pytest.raises(ModelError, match=message):
        _load(target)


@each_row(
    ("change", "field"),
    [
        *((text, "") for text in ("", "{", "[]", "null")),
        *(({"version": value}, "version") for value in (..., 2, True, "1", 1.0)),
        *(({"mask": value}, "mask") for value in (..., "", "a b", None)),
        *(({"provision_id": value}, "provision_id") for value in (..., "0F" * 32, "0f" * 31, 5)),
        *(({"holds": value}, "holds") for value in ("everything", None)),
        ({"key": "canary"}, "key"),
    ],
)
def test_a_damaged_marker_is_refused(tmp_path: Path, change: Any, field: str) -> None:
    path = tmp_path / PROVISION_FILE
    if isinstance(change, str):
        path.write_text(change)
    else:
        fields = {name: value for name, value in (GOOD | change).items() if value is not ...}
        path.write_text(json.dumps(fields))
    with pytest.raises(ModelError) as info:
        read_provision(tmp_path)
    assert info.value.where == (f"{path}: {field}" if field else str(path))
