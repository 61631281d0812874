"""A service that holds a part of a model, layers or columns: what it loads, says and answers."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_side.devices import PROFILES, DeviceProfile, NullDevice
from gpu_side.encoding import payload_place
from gpu_side.handler import RequestHandler, Served, served_zeros
from gpu_side.kernels import NullKernels, request_us
from gpu_side.tasks import Computed, RequestChecker
from gpu_side.transport.listener import Incoming
from gpu_side.weights import (
    PROVISION_FILE,
    Provision,
    ServiceWeights,
    load_weights,
    read_provision,
    read_served_model,
)
from protocol.errors import ErrorCode, ModelError, ProtocolError, SettingsError
from protocol.messages import (
    Columns,
    InitReply,
    InitRequest,
    LMHeadRequest,
    Request,
    SegmentRequest,
    TensorReply,
)
from protocol.shared_memory import SlotMemory
from protocol.tensors import from_torch, to_torch
from tests.kit import ask
from tests.kit.model import SIZES, Models, SavedModel
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
def models(saved_model: Models) -> dict[str, Path]:
    found = {name: saved_model(**{"kind": name, **given}) for name, given in MODELS.items()}
    return {name: saved.directory for name, saved in found.items()}


def _load(directory: Path, columns: Columns = (0, 1), **settings: Any) -> ServiceWeights:
    return load_weights(directory, device=CPU, dtype=torch.float32, columns=columns, **settings)


def _null(directory: Path, **settings: Any) -> Served:
    held = read_served_model(directory, weights=False, **settings)
    return served_zeros(held, NullKernels(NullDevice(), torch.float32))


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
    marker = Provision(mask="test-mask", provision_id="5a" * 32, holds=holds)
    (target / PROVISION_FILE).write_text(marker.model_dump_json())
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
        assert init.provision_id == (holds and "5a" * 32)
        # It is the same model, whatever part of it is held here.
        model = read_served_model(directory)
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


# 10^12 operations, 2 * 10^12 int8 ones, 10^11 and 10^10 bytes a second, in microseconds.
ROUND = DeviceProfile(
    name="round", tflops=1.0, int8_tops=2.0, gb_per_s=100.0, launch_us=3.0, pcie_gb_per_s=10.0
)
MOVED = 1000 * 4000 + 1000 + 4000


@each_row(
    ("found_us", "expected_us"),
    [
        # Few rows take as long as reading the weight, many as the arithmetic.
        (ROUND.linear_us(1, 1000, 4000, 2), 3 + 2 * MOVED / 1e5),
        (ROUND.linear_us(512, 1000, 4000, 2), 3 + 2 * 512 * 1000 * 4000 / 1e6),
        # float32 has half the rate, and twice the bytes.
        (ROUND.linear_us(512, 1000, 4000, 4), 3 + 4 * 512 * 1000 * 4000 / 1e6),
        (ROUND.linear_us(1, 1000, 4000, 4), 3 + 4 * MOVED / 1e5),
        # A product in the ring takes four of int8; of one row, a byte for each weight.
        (ROUND.linear_us(4096, 1000, 4000, 2, integer=True), 39 + 4 * 4096 * 1000 * 4000 / 1e6),
        (ROUND.linear_us(1, 1000, 4000, 2, integer=True), 39 + (1000 * 4012 + 4000 * 36) / 1e5),
        # Every operand of a batch is moved.
        (ROUND.matmul_us(8, 1, 64, 100, 2), 3 + 2 * 8 * (1 * 64 + 64 * 100 + 1 * 100) / 1e5),
        (ROUND.matmul_us(8, 512, 64, 512, 2), 3 + 2 * 8 * 512 * 64 * 512 / 1e6),
        (ROUND.embedding_us(512, 1000, 2), 3 + 2 * 512 * 1000 * 2 / 1e5),
        (ROUND.transfer_us(10**6), 3 + 100),
        # 67 MB at 3.35 TB/s: a unit that slipped would show.
        (PROFILES["h100"].linear_us(1, 4096, 8192, 2), 25.04),
    ],
)
def test_how_long_it_takes(found_us: float, expected_us: float) -> None:
    assert found_us == pytest.approx(expected_us, rel=1e-3)


RING, IDS = torch.ones(3, HIDDEN, dtype=torch.int32), torch.tensor([[1, 2, VOCAB - 1]])
# What each has in and out, in bytes, and its kernels take with weights of 16 bits.
REQUESTS: list[tuple[Any, tuple[int, int], float]] = [
    (
        ask.linear(torch.randn(2, 5, HIDDEN), *ask.QKV),
        *((1920, 6400), ROUND.linear_us(10, 48, 160, 2)),
    ),
    (ask.ring(RING, *ask.GATE_UP), (576, 2304), ROUND.linear_us(3, 48, 192, 2, integer=True)),
    (ask.head(torch.randn(4, 48)), (768, 5120), ROUND.linear_us(4, 48, 320, 2)),
    (
        ask.matmul(torch.randn(6, 2, 16), torch.randn(1, 16, 7)),
        *((1216, 336), ROUND.matmul_us(6, 2, 16, 7, 2)),
    ),
    (ask.embedding(IDS, torch.bfloat16), (24, 288), ROUND.embedding_us(3, 48, 2)),
]


def _segment(rows: int, start: int = 0, **fields: Any) -> SegmentRequest:
    hidden = torch.randn(rows, HIDDEN)
    return segment(hidden, [part(1, start, rows)], (0, LAST), **fields)


LAST_ROW = {"lm_head": True, "outputs": torch.tensor([1])}


@pytest.fixture
def light(saved_model: Any, tmp_path: Path) -> Path:
    full = saved_model().directory
    shutil.copy(full / "config.json", tmp_path)
    tensors = load_file(full / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    return tmp_path


def _null_device(directory: Path, profile: DeviceProfile | None = None) -> Served:
    held = read_served_model(directory, weights=False)
    kernels = NullKernels(NullDevice(profile), torch.bfloat16, clock=lambda: 0)
    return served_zeros(held, kernels)


def test_zeros_of_the_shape_and_dtype_that_a_real_service_answers(
    saved_model: Any, light: Path
) -> None:
    model: SavedModel = saved_model()
    weights = load_weights(model.directory, device=torch.device("cpu"), dtype=torch.float32)
    real, null = RequestHandler(weights, MIB), RequestHandler(_null_device(light), MIB)
    segments, zeros = (_segment(5), _segment(2, 5, **LAST_ROW)), []
    for request in (*(request for request, *_ in REQUESTS), *segments):
        (expected, _), (reply, work) = real.apply(request), null.apply(request)
        assert isinstance(reply, TensorReply)
        assert isinstance(expected, TensorReply)
        found, wanted = reply.output, expected.output
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), request.method
        assert work is None
        assert memoryview(found.data).readonly
        zeros.append(to_torch(found))
    # It keeps sessions, and the zeros of earlier replies stay valid when larger ones are needed.
    assert null.sessions.totals.sessions == 1
    assert not any(one.any() for one in zeros)


def test_large_zeros_are_left_where_the_reply_goes(light: Path) -> None:
    rows = 100  # of 320 numbers each
    request = LMHeadRequest(hidden_states=from_torch(torch.ones(rows, 48)))
    task = RequestChecker(read_served_model(light, weights=False), MIB).check(request)
    kernel = NullKernels(NullDevice(), torch.float32).prepare(request, task)
    place = payload_place("LMHead", task.dtype, task.shape)
    for room, lies_there in ((place.stop, True), (place.stop - 1, False)):
        area = bytearray(b"\1" * room)
        slot = SlotMemory(Mock(), 0, room, memoryview(area))
        reply, _ = kernel(request, Incoming((b"",), [], 0, slot=slot))
        assert isinstance(reply, TensorReply)
        assert not to_torch(reply.output).any()
        left = b"\1" * place.start + bytes(task.output_bytes)
        assert area == (left if lies_there else b"\1" * room)


@each_row(("request_", "sizes", "kernels_us"), REQUESTS)
def test_a_model_of_an_accelerator_works_on_one_request_after_the_other(
    light: Path, request_: Computed, sizes: tuple[int, int], kernels_us: float
) -> None:
    now, held = 5000, read_served_model(light, weights=False)
    task = RequestChecker(held, MIB).check(request_)
    took_us = kernels_us + sum(map(ROUND.transfer_us, sizes))
    assert request_us(ROUND, task, 2) == pytest.approx(took_us)
    kernel = NullKernels(NullDevice(ROUND), torch.half, clock=lambda: now).prepare(request_, task)
    for free_ns in (5000, 5000 + took_us * 1000, 10**9):
        now = max(now, 10**9 * (free_ns == 10**9))  # once it has nothing to do, it begins at once
        _, work = kernel(request_, None)
        assert work is not None
        assert work() == pytest.approx(free_ns + took_us * 1000, abs=2)


def test_whole_layers_take_the_time_of_their_attention_besides(light: Path) -> None:
    weights = _null_device(light, ROUND)
    handler, free_us = RequestHandler(weights, MIB), 0.0
    # 6 heads of 16, 2 of keys and values; with a window, no more keys than it lets be seen.
    for request, rows, context in ((_segment(5), 5, 5), (_segment(1, 5, sinks=1, recent=2), 1, 4)):
        _, work = handler.apply(request)
        assert work is not None
        free_us += request_us(ROUND, RequestChecker(weights.model, MIB).check(request), 2)
        for sizes in ((16, context), (context, 16)):
            free_us += (LAST + 1) * ROUND.matmul_us(2, 3 * rows, *sizes, 2)
        assert work() / 1000 == pytest.approx(free_us, abs=0.01)
