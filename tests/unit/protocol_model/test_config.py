"""What is read of a model directory, config.json and headers of tensors, and what is refused.

A refusal names the file and the field; no link leads out, and nothing is read without an end.
"""

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from protocol.errors import ManifestError, ModelError
from protocol.model import files
from protocol.model.checkpoint import (
    SINGLE_FILE,
    Checkpoint,
    TensorFile,
    parse_header,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.files import parse_object, read_bytes
from tests.kit.rows import each_row

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)


def _read(directory: Path, **changes: Any) -> ModelConfig:
    fields = {k: v for k, v in {**BASE, **changes}.items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return read_config(directory)


def _said(directory: Path, **changes: Any) -> str:
    """Return where a configuration is refused and what of it; nothing for one that is read."""
    try:
        _read(directory, **changes)
    except ModelError as error:
        return str(error).removeprefix(str(directory / "config.json"))
    return ""


def test_a_directory_without_a_good_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, got in (("none", "no such dir"), ("file", "a file"), (".", "no config.json")):
        with pytest.raises(ModelError) as caught:
            read_config(tmp_path / path)
        assert caught.value.where == str(tmp_path / path)
        assert caught.value.got.startswith(got)
    for content, said in (
        (json.dumps(BASE).encode()[:-1] + b', "hidden_size": 64}', "hidden_size: got this key"),
        (b" " * (files.MAX_JSON_BYTES + 1), f"got {files.MAX_JSON_BYTES + 1} bytes"),
        (b"{", "got JSONDecodeError"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=rf"config\.json: {said}"):
            read_config(tmp_path)


ABSURD: dict[str, Sequence[Any]] = {
    "architectures": [
        *(["GPT2LMHeadModel"], ["LlamaModel"], [], None, ..., [["LlamaForCausalLM"]], {"a": 1})
    ],
    # What we cannot compute.
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "hidden_act": ["gelu", None],
    "is_causal": [False],
    **dict.fromkeys(SIZES, (0, -1, 2**40, 2**70, "48", 48.5, None, ..., [48], True)),
    "num_key_value_heads": [-2, 0, False, "", 2**40, "2", 2.5],
    "head_dim": [0, False, "", 1, 7, 2048, 2**40, -16, "16"],
    "rms_norm_eps": [0, -1e-6, "small", float("nan"), float("inf")],
    "dtype": ["int8", "float64", "auto", 16],
    "rope_scaling": ["linear", [1.0], 3, False],
    **dict.fromkeys(["tie_word_embeddings", "attention_bias", "mlp_bias"], ("maybe", 7, [0])),
    "eos_token_id": ["2", [1, "2"], -1, 1.5, [[1]], {"id": 2}, True],
}
LAYERS = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
ABSURD_LAYERS: dict[str, Sequence[Any]] = {
    "sliding_window": [0, -5, 2**40, "8", 4.5],
    "max_window_layers": ["2", 1.5, None, [1], -1],
    "layer_types": [
        *(["full_attention"], ["full_attention"] * 4, "full_attention", {"0": "full_attention"}),
        *(["full_attention", "full_attention", last] for last in ("linear_attention", 3, ["x"])),
        [],
    ],
}


def test_an_absurd_value_is_refused_by_its_field(tmp_path: Path) -> None:
    read = []
    for base, table in (({}, ABSURD), (LAYERS, ABSURD_LAYERS)):
        assert _said(tmp_path, **base) == ""
        for field, values in table.items():
            for value in values:
                said = _said(tmp_path, **{**base, field: value})
                if not said.startswith(f": {field}"):
                    read.append((field, value, said))
    assert read == []
    expected = "num_key_value_heads (4) must divide num_attention_heads (6)"
    assert expected in _said(tmp_path, num_key_value_heads=4)
    for value in ABSURD["eos_token_id"]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert "/generation_config.json: eos_token_id" in _said(tmp_path, eos_token_id=1)
    (tmp_path / "generation_config.json").write_text("{")
    assert "/generation_config.json: got " in _said(tmp_path)


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}


@each_row(
    ("rope", "changes", "said"),
    [
        ({"rope_type": "su", "factor": 2.0}, {}, "rope_type"),
        ({"rope_type": "linear"}, {}, "linear needs factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, {}, "longrope needs long_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, {}, "llama3 needs low_freq_factor"),
        ({"rope_type": "linear", "factor": 0}, {}, "factor"),
        ({"rope_type": "default", "rope_theta": 0}, {}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.4}, {}, "partial_rotary_factor"),
        (
            {"rope_type": "default", "partial_rotary_factor": 2.0},
            {"architectures": ["StableLmForCausalLM"]},
            "partial_rotary_factor: got 2.0, expected less than or equal to 1",
        ),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, {}, "mrope_section"),
        # What would divide by zero, or overflow.
        ({"rope_type": "dynamic", "factor": 2.0}, {"head_dim": 2}, "head_dim of at least 4"),
        (
            {"rope_type": "longrope", "factor": 2.0, **FACTORS},
            {"head_dim": 8, "original_max_position_embeddings": 1},
            "longrope needs original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, {}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}, {}, "beta_fast"),
        ({"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": -7.2}, {}, "mscale_all_dim"),
        ({"rope_type": "longrope", **FACTORS, "long_factor": [1.0] * 3}, {}, "has 3 entries"),
    ],
)
def test_rope_that_we_cannot_compute_is_refused(
    tmp_path: Path, rope: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        assert said in _said(tmp_path, **changes, **{key: rope})


@each_row(
    ("config", "generation", "expected"),
    [
        (None, None, set()),
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, {"eos_token_id": [5, 6]}, {5, 6}),
        (2, {}, {2}),
    ],
)
def test_eos_ids_of_the_generation_config_come_first(
    tmp_path: Path, config: Any, generation: Any, expected: set[int]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert _read(tmp_path, eos_token_id=config).eos_token_ids == expected


def test_settings_that_are_left_out_take_the_values_of_transformers(tmp_path: Path) -> None:
    config = _read(tmp_path, num_key_value_heads=..., rms_norm_eps=..., rope_theta=...)
    assert (config.num_key_value_heads, config.head_dim, config.norm_eps) == (6, 8, 1e-6)
    assert (config.ropes[0].rope_type, config.ropes[0].rope_theta) == ("default", 10000.0)
    assert (config.dtype, config.tie_word_embeddings) == ("float32", False)
    qwen3 = _read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
    # dtype has a new and an old name; what does not change the forward pass is skipped.
    assert _read(tmp_path, torch_dtype="float16").dtype == "float16"
    assert _read(tmp_path, dtype="float32", torch_dtype="bfloat16").dtype == "float32"
    assert _read(tmp_path, initializer_range=0.02, auto_map={}) == _read(tmp_path)


def test_biases_are_those_of_the_architecture(tmp_path: Path) -> None:
    qkv, mlp = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"}
    expected = {"Llama": {*qkv, "o_proj", *mlp}, "Mistral": set(), "Qwen2": qkv}
    expected["Qwen3"] = {*qkv, "o_proj"}
    for name, modules in expected.items():
        both = {"architectures": [f"{name}ForCausalLM"], "attention_bias": True, "mlp_bias": True}
        assert _read(tmp_path, **both).biased_modules == modules


@each_row(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {"sliding_window": None}, (None, None, None)),
        ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Qwen2", {"sliding_window": 8}, (None, None, None)),
        ("Qwen2", LAYERS, (None, None, None)),
        ("Qwen2", LAYERS | {"max_window_layers": 2}, (None, None, 8)),
        (
            "Qwen3",
            LAYERS | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
)
def test_sliding_windows_are_known_per_layer(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    name = [f"{architecture}ForCausalLM"]
    assert _read(tmp_path, **{**changes, "architectures": name}).sliding_windows == expected


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "a").write_bytes(b"inside")
    (tmp_path / "a").write_bytes(b"outside")
    return made


def test_a_file_is_read_up_to_its_limit_whatever_size_it_claims(directory: Path) -> None:
    assert read_bytes(directory / "a", 6) == b"inside"
    with pytest.raises(ModelError, match="a: got 6 bytes, expected at most 5"):
        read_bytes(directory / "a", 5)
    endless = Path("/proc/self/status")
    assert endless.stat().st_size == 0
    assert b"Name:" in read_bytes(endless, 100_000, inside=False)
    with pytest.raises(ModelError, match="got 11 bytes, expected at most 10"):
        read_bytes(endless, 10, inside=False)


def test_links_are_followed_within_the_directory_alone(directory: Path, tmp_path: Path) -> None:
    link = directory / "link"
    (directory / "up").symlink_to("..")
    for target in ("../a", "../../etc/passwd", "/dev/zero", "../nowhere", "up/a"):
        link.symlink_to(target)
        with pytest.raises(ModelError, match="link: got a link that leads out of the directory"):
            read_bytes(link, 100)
        assert files.is_there(link)
        link.unlink()
    link.symlink_to("../a")  # where a person names the file
    assert read_bytes(link, 100, inside=False) == b"outside"
    link.unlink()
    link.symlink_to("a")
    assert read_bytes(link, 100) == b"inside"
    (tmp_path / "other").symlink_to(directory)  # the directory itself may be a link
    assert read_bytes(tmp_path / "other" / "link", 100) == b"inside"


def test_a_snapshot_of_hugging_faces_cache_is_links_to_blobs(tmp_path: Path) -> None:
    root = tmp_path / "models--x--y"
    (root / "snapshots" / "abc").mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "blobs" / "0123").write_bytes(b"blob")
    (root / "refs").write_bytes(b"no blob")
    link = root / "snapshots" / "abc" / "config.json"
    link.symlink_to("../../blobs/0123")
    assert read_bytes(link, 100) == b"blob"
    assert files.require_inside(link) == root / "blobs" / "0123"
    inner = link.with_name("1_Pooling") / "config.json"
    inner.parent.mkdir()
    inner.symlink_to("../../../blobs/0123")
    assert read_bytes(inner, 100) == b"blob"
    inner.unlink()
    inner.symlink_to("../../../refs")
    with pytest.raises(ModelError, match="leads out"):
        read_bytes(inner, 100)
    link.unlink()
    link.symlink_to("../../refs")
    with pytest.raises(ModelError, match="leads out"):
        read_bytes(link, 100)


def test_what_is_no_file_or_too_short_is_refused_without_waiting(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    (directory / "folder").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory"), ("/dev/zero", "a device")):
        with pytest.raises(ModelError, match=f"{name}: got {kind}, expected a regular file"):
            read_bytes(directory / name, 100, inside=not name.startswith("/"))
    for name in ("none", "x" * 300, "a\0b", "\ud800", "a/b"):
        with pytest.raises(ModelError), files.opened(directory / name, inside=False):
            pass
        assert not files.is_there(directory / name)
    path, buffer = directory / "a", memoryview(bytearray(4))
    with files.opened(path) as file:
        file.fill(buffer, 1)
        assert buffer == b"nsid"
        with pytest.raises(ModelError, match=r"a: got 6 bytes, expected 9$"):
            file.fill(buffer, 5)


@each_row(
    ("content", "said"),
    [
        *((content, "") for content in (b"", b"{", b"\xff", b"[]", b"[" * 10_000)),
        (b'{"a":' * 10_000, ""),
        (b'{"x": [{"a": 1, "b": 2, "b": 2}]}', ": b: got this key twice"),
    ],
)
def test_what_is_no_json_object_is_refused(content: bytes, said: str) -> None:
    for error in (ModelError, ManifestError):
        with pytest.raises(error, match=rf"^f{said}" if said else r"^f: got .*, expected a JSON"):
            parse_object(content, "f", error)
    good = b'{"a": {"b": 1}, "b": [{"a": 2}]}'
    assert parse_object(good, "f") == {"a": {"b": 1}, "b": [{"a": 2}]}


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _file(header: object, data: bytes = bytes(24)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def _with(**changes: object) -> dict[str, Any]:
    return {"a": {**ENTRY, **changes}}


# Whole files, and what of them is refused.
FILES: list[tuple[bytes, str]] = [
    (_file({}, b""), ""),
    (_file({"a": ENTRY}), ""),
    (_file({"a": ENTRY, "__metadata__": {"k": "v"}}), ""),
    (_file(json.dumps({"a": ENTRY}).encode() + b"   "), ""),
    (_file(_with(data_offsets=[0, 20])), "a"),
    (_file(_with(data_offsets=[0, 25]), bytes(25)), "a"),
    (_file(_with(data_offsets=[24, 0])), "a"),
    (_file(_with(data_offsets=[4, 28]), bytes(28)), "a: data_offsets"),
    (_file(_with(data_offsets=[-24, 0])), "a: data_offsets.0"),
    (_file(_with(data_offsets=[0])), "a: data_offsets.1"),
    (_file({"a": ENTRY, "b": ENTRY}), "b: data_offsets"),
    (_file(_with(shape=[2, -3])), "a: shape.1"),
    (_file(_with(shape=[2**64, 2**64])), "a: shape.0"),
    (_file(_with(shape=[True, 6])), "a: shape.0"),
    (_file(_with(dtype="F33")), "a: dtype"),
    (_file(_with(extra=0)), "a: extra"),
    (_file({"__metadata__": {"k": 1}, "a": ENTRY}), "__metadata__"),
    (_file(b'{"a": {}, "a": {}}'), "header: a"),
    *((_file(raw), "header") for raw in (b"", b"[]", b"{", b"\xff", b"\0\0", b"[" * 5_000)),
    (_file({"a": ENTRY}, bytes(25)), "!"),
    # The library reads bytes too; we do not.
    (_file(_with(dtype="F4", shape=[24])), "a: dtype"),
]


@each_row(("content", "field"), FILES, ids=map(str, range(len(FILES))))
def test_a_file_is_refused_by_tensor_and_field(content: bytes, field: str) -> None:
    if not field:
        parse_header(content, len(content), "file")
        return
    with pytest.raises(ModelError) as caught:
        parse_header(content, len(content), "file")
    assert caught.value.where == ("file" if field == "!" else f"file: {field}")


def test_a_header_that_is_too_long_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(_file(b"{}" + b" " * (files.MAX_TENSORS_BYTES - 2), b""))
    assert TensorFile(path).header.entries == {}
    path.write_bytes(_file(b"{}" + b" " * (files.MAX_TENSORS_BYTES - 1), b""))
    with pytest.raises(
        ModelError, match=f"f: header length: got {files.MAX_TENSORS_BYTES + 1}, expected"
    ):
        TensorFile(path)


def test_a_file_that_has_changed_is_not_read_by_the_old_header(tmp_path: Path) -> None:
    path, other = tmp_path / SINGLE_FILE, tmp_path / "g"
    for how in ("rewritten", "replaced", "gone"):
        path.write_bytes(_file({"a": ENTRY}))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.rows("a", 0, 1)
        if how == "rewritten":
            path.write_bytes(_file({"a": ENTRY}, bytes(23) + b"x") + b"x")
        elif how == "replaced":
            other.write_bytes(_file({"a": ENTRY}))
            other.replace(path)
        else:
            path.unlink()
        said = "no such file" if how == "gone" else "since the file was checked"
        with pytest.raises(ModelError, match=said):
            checkpoint.rows("a", 0, 1)


@each_row(
    "header",
    [
        {},
        {"a": ENTRY, "__metadata__": {"k": "v"}},
        {"a": ENTRY, "b": {"dtype": "F16", "shape": [0], "data_offsets": [24, 24]}},
        json.dumps({"a": ENTRY}).encode() + b"   ",
    ],
)
def test_a_good_header_is_taken_as_the_library_takes_it(tmp_path: Path, header: Any) -> None:
    content = _file(header, bytes(24) if header else b"")
    (tmp_path / "f").write_bytes(content)
    with safe_open(tmp_path / "f", framework="pt") as file:
        assert set(file.keys()) == set(parse_header(content, len(content), "file").entries)
