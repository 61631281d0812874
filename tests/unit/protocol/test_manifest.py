"""A manifest pins every byte that is read: nothing else is handed out."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from protocol.errors import ManifestError, ModelError
from protocol.messages import FUSED_MODULES
from protocol.model import manifest as manifest_module
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.manifest import (
    BLOCK_BYTES,
    MAX_MANIFEST_BYTES,
    PINNED_FILES,
    Manifest,
    TensorPin,
    read_file,
    rows_per_block,
)
from protocol.model.quantized import load_quantized
from protocol.model.tensor_file import Entry, TensorFile, bytes_of
from protocol.model.weights import load_linear, load_tensor
from tee_side.engine.tokenizer import Tokenizer
from tee_side.protect.calibration import CALIBRATION_FILE, Calibration
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.cli.program import model_directory
from tsqp.manifest import make_manifest

Models = Callable[..., SavedModel]

DOWN = "model.layers.1.mlp.down_proj.weight"
VOCABULARY = (320, 48)
CPU = torch.device("cpu")


@pytest.fixture
def directory(saved_model: Models, tmp_path: Path) -> Path:
    """A model of its own, with all the small files that there may be."""
    copy = tmp_path / "model"
    saved = saved_model("llama")
    shutil.copytree(saved.directory, copy)
    shutil.copy(saved.calibration, copy / CALIBRATION_FILE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_directory("demo") / name, copy / name)
    assert {path.name for path in copy.iterdir()} == {*PINNED_FILES, SINGLE_FILE}
    return copy


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that every matrix has several and the last is not full."""
    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", 7 * 48 * 4)


@pytest.fixture
def pinned(directory: Path, small_blocks: None) -> Manifest:
    return make_manifest(directory)


def _spoil(directory: Path, name: str, element: int) -> None:
    """Change one bit of one element where it lies on the disk."""
    path = directory / SINGLE_FILE
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:end])[name]
    content[end + entry["data_offsets"][0] + 4 * element] ^= 1
    path.write_bytes(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --------------------------------------------------------------------------------------- what it is


def test_it_pins_files_and_blocks_of_rows_as_stored(directory: Path, pinned: Manifest) -> None:
    assert set(pinned.files) == set(PINNED_FILES)
    for name, digest in pinned.files.items():
        assert digest == _sha256((directory / name).read_bytes())
    tensors = load_file(directory / SINGLE_FILE)
    assert set(pinned.tensors) == set(tensors)
    for name, tensor in tensors.items():
        pin = pinned.tensors[name]
        assert (pin.dtype, pin.shape) == ("F32", tuple(tensor.shape))
        rows = max(1, 7 * 48 // (tensor.numel() // tensor.shape[0]))
        blocks = tensor.split(rows)
        assert pin.blocks == tuple(_sha256(block.numpy().tobytes()) for block in blocks)
    assert len(pinned.tensors[EMBEDDING].blocks) == 46  # 320 rows, seven at a time


def test_blocks_have_about_four_mebibytes() -> None:
    assert rows_per_block((128256, 2048), 4096) * 4096 == BLOCK_BYTES
    assert rows_per_block((8, 2**23), 2**24) == 1  # a row is never divided
    assert rows_per_block((48,), 4) == 48


def test_it_is_the_same_after_writing_and_reading(tmp_path: Path, pinned: Manifest) -> None:
    path = tmp_path / "manifest"
    path.write_bytes(pinned.to_bytes())
    for digest in (None, _sha256(pinned.to_bytes()).upper()):
        assert Manifest.load(path, digest).model_dump() == pinned.model_dump()


def test_it_does_not_depend_on_how_tensors_are_spread_over_files(
    directory: Path, pinned: Manifest
) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    (directory / SINGLE_FILE).unlink()
    weight_map = {}
    for file, names in (("a", sorted(tensors)[::2]), ("b", sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, directory / f"{file}.safetensors")
        weight_map |= dict.fromkeys(names, f"{file}.safetensors")
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert make_manifest(directory) == pinned


def test_a_directory_without_linear_weights_pins_what_it_has(directory: Path) -> None:
    config = read_config(directory)
    tensors = load_file(directory / SINGLE_FILE)
    light = {name: tensors[name] for name in light_tensors(config)}
    save_file(light, directory / SINGLE_FILE)
    assert set(make_manifest(directory).tensors) == set(light)


def test_none_is_made_of_a_directory_that_would_be_refused(directory: Path) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    save_file({**tensors, "evil": torch.ones(1)}, directory / SINGLE_FILE)
    with pytest.raises(ModelError, match="evil"):
        make_manifest(directory)


# ------------------------------------------------------------------------- what is read is verified


def test_an_unchanged_directory_reads_as_without_a_manifest(
    directory: Path, pinned: Manifest
) -> None:
    config = read_config(directory)
    assert read_config(directory, pinned) == config
    plain, verified = Checkpoint(directory), Checkpoint(directory, pinned)
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
    verified.require(shapes)
    for name, shape in shapes.items():
        one, two = (load_tensor(c, name, shape, dtype=torch.bfloat16) for c in (plain, verified))
        assert torch.equal(one, two)
        for start, stop, step in ((0, shape[0], 1), (3, 9, 1), (1, shape[0], 5), (8, 8, 1)):
            expected = load_file(directory / SINGLE_FILE)[name][start:stop:step]
            assert torch.equal(plain.rows(name, start, stop, step), expected)
            assert torch.equal(verified.rows(name, start, stop, step), expected)
    assert model_digest(config, plain) == model_digest(config, verified)
    assert linear_digest(config, plain) == linear_digest(config, verified)
    both = [load_quantized(c, config, 1, "qkv_proj").weight for c in (plain, verified)]
    assert torch.equal(*both)
    Tokenizer(directory, pinned).apply_chat_template([{"role": "user", "content": "a"}])


READERS: dict[str, Callable[[Checkpoint, Any], object]] = {
    "load_tensor": lambda c, _: load_tensor(c, DOWN, (48, 96), dtype=torch.float32),
    "copy_into": lambda c, _: c.copy_into(DOWN, torch.empty(48, 96, dtype=torch.float16)),
    "rows": lambda c, _: c.rows(DOWN, 0, 48),
    "one row": lambda c, _: c.rows(DOWN, 36, 37),
    "rows of a sample": lambda c, _: c.rows(DOWN, 0, 48, 12),
    "blocks": lambda c, _: list(c.blocks(DOWN, (48, 96))),
    "load_linear": lambda c, config: load_linear(
        c, config, 1, "down_proj", dtype=torch.float32, device=CPU
    ),
    "load_quantized": lambda c, config: load_quantized(c, config, 1, "down_proj"),
    "linear_digest": lambda c, config: linear_digest(config, c),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_hands_out_a_byte_that_differs(
    directory: Path, pinned: Manifest, reader: str
) -> None:
    config = read_config(directory)
    READERS[reader](Checkpoint(directory, pinned), config)
    _spoil(directory, DOWN, 36 * 96 + 5)
    with pytest.raises(ManifestError) as caught:
        READERS[reader](Checkpoint(directory, pinned), config)
    assert caught.value.where == f"{directory / SINGLE_FILE}: {DOWN}: block 12"
    assert caught.value.got.startswith("SHA-256 ")
    said = ", as in the manifest, or the manifest of this model"
    assert caught.value.expected == f"SHA-256 {pinned.tensors[DOWN].blocks[12]}{said}"


@pytest.mark.parametrize("element", [0, 6 * 48, 7 * 48, 319 * 48, 320 * 48 - 1])
def test_a_bit_anywhere_is_found_when_its_block_is_read(
    directory: Path, pinned: Manifest, element: int
) -> None:
    _spoil(directory, EMBEDDING, element)
    config, checkpoint = read_config(directory), Checkpoint(directory, pinned)
    with pytest.raises(ManifestError, match=rf"{EMBEDDING}: block {element // 48 // 7}: "):
        load_tensor(checkpoint, EMBEDDING, VOCABULARY, dtype=torch.float32)
    load_quantized(checkpoint, config, 0, "lm_head")  # another tensor


def test_rows_of_other_blocks_are_still_good(directory: Path, pinned: Manifest) -> None:
    _spoil(directory, EMBEDDING, 20 * 48)
    checkpoint = Checkpoint(directory, pinned)
    good = load_file(directory / SINGLE_FILE)[EMBEDDING][7:14]
    assert torch.equal(checkpoint.rows(EMBEDDING, 7, 14), good)
    with pytest.raises(ManifestError, match="block 2"):
        checkpoint.rows(EMBEDDING, 7, 15)


def test_what_was_verified_is_in_memory_of_its_own(
    directory: Path, pinned: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes the moment after it is read, in place: nobody may see it."""
    # A copy: the library gives a view of the file, and would show the change.
    expected = load_file(directory / SINGLE_FILE)[FINAL_NORM].clone()
    whole = TensorFile.read_rows

    def read_and_spoil(
        self: TensorFile, descriptor: int, entry: Entry, start: int, into: torch.Tensor
    ) -> None:
        whole(self, descriptor, entry, start, into)
        with self.path.open("r+b") as file:
            begin, end = entry.data_offsets
            file.seek(self.header.data_begin + begin)
            file.write(bytes(end - begin))

    checkpoint = Checkpoint(directory, pinned)
    monkeypatch.setattr(TensorFile, "read_rows", read_and_spoil)
    assert torch.equal(checkpoint.rows(FINAL_NORM, 0, 48), expected)


def test_a_digest_is_computed_once_where_the_content_cannot_change(
    directory: Path, pinned: Manifest
) -> None:
    config = read_config(directory)
    verified, plain = Checkpoint(directory, pinned), Checkpoint(directory)
    before = model_digest(config, verified), linear_digest(config, verified)
    assert before[0] != before[1]
    other = config.model_copy(update={"rms_norm_eps": 0.5})
    assert model_digest(other, verified) != before[0]
    (directory / SINGLE_FILE).unlink()
    assert (model_digest(config, verified), linear_digest(config, verified)) == before
    with pytest.raises(ModelError):
        model_digest(config, plain)


# ---------------------------------------------------------------------------------- the small files


FILE_READERS: dict[str, Callable[[Path, Manifest], object]] = {
    "config.json": read_config,
    "generation_config.json": read_config,
    "tokenizer.json": Tokenizer,
    "tokenizer_config.json": lambda d, m: Tokenizer(d, m).apply_chat_template([]),
    "chat_template.jinja": lambda d, m: Tokenizer(d, m).apply_chat_template([]),
    CALIBRATION_FILE: lambda d, m: _calibration(d / CALIBRATION_FILE, d, m),
}


def _calibration(path: Path, directory: Path, pinned: Manifest) -> Calibration:
    config = read_config(directory)
    digest = model_digest(config, Checkpoint(directory))
    return Calibration.load(path, config, digest, manifest=pinned)


@pytest.mark.parametrize("name", PINNED_FILES)
def test_a_file_that_differs_is_refused_by_name(
    directory: Path, pinned: Manifest, name: str
) -> None:
    FILE_READERS[name](directory, pinned)
    path = directory / name
    content = path.read_bytes()
    # Still good JSON, a good template: only the digest tells.
    path.write_bytes(content[:-1] + b" " + content[-1:] if name.endswith("json") else content[::-1])
    with pytest.raises(ManifestError) as caught:
        FILE_READERS[name](directory, pinned)
    assert caught.value.where == str(path)
    said = ", as in the manifest, or the manifest of this model"
    assert caught.value.expected == f"SHA-256 {pinned.files[name]}{said}"


@pytest.mark.parametrize("name", sorted(set(PINNED_FILES) - {CALIBRATION_FILE}))
def test_a_pinned_file_that_is_gone_is_missed(directory: Path, pinned: Manifest, name: str) -> None:
    """A missing generation_config.json means other EOS ids; nobody may choose that."""
    (directory / name).unlink()
    with pytest.raises(ManifestError, match=rf"{name}: got no such file, .* in the manifest"):
        FILE_READERS[name](directory, pinned)


def test_a_file_that_is_not_pinned_counts_as_absent(directory: Path, pinned: Manifest) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    files = {name: digest for name, digest in pinned.files.items() if name != "tokenizer.json"}
    del files["generation_config.json"]
    without = pinned.model_copy(update={"files": files})
    assert read_config(directory).eos_token_ids == frozenset({5})
    assert read_config(directory, without).eos_token_ids == frozenset()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(directory, without)


def test_a_calibration_elsewhere_must_be_the_pinned_one(
    directory: Path, pinned: Manifest, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "scales"
    shutil.copy(directory / CALIBRATION_FILE, elsewhere)
    _calibration(elsewhere, directory, pinned)
    files = {name: d for name, d in pinned.files.items() if name != CALIBRATION_FILE}
    said = r"scales: got a file that the manifest does not name, .* again, after tsqp calibrate$"
    with pytest.raises(ManifestError, match=said):
        _calibration(elsewhere, directory, pinned.model_copy(update={"files": files}))


# ---------------------------------------------------------------------- a manifest of another model


def test_another_models_manifest_is_refused_at_once(
    directory: Path, saved_model: Models, small_blocks: None
) -> None:
    other = make_manifest(saved_model("qwen2").directory)
    with pytest.raises(ManifestError, match=r"config\.json: got SHA-256 .* as in the manifest"):
        read_config(directory, other)


def test_a_refusal_names_the_manifest_that_was_read(
    directory: Path, pinned: Manifest, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(pinned.to_bytes())
    read = Manifest.load(path)
    read_config(directory, read)
    _spoil(directory, EMBEDDING, 0)
    tensors = {name: pin for name, pin in read.tensors.items() if name != DOWN}
    without = read.model_copy(update={"tensors": tensors})
    shape = read.tensors[DOWN].model_copy(update={"shape": (96, 48)})
    reshaped = read.model_copy(update={"tensors": {**read.tensors, DOWN: shape}})
    elsewhere = read.model_copy(update={"files": {"config.json": SHA}})
    refusals: list[Callable[[], object]] = [
        lambda: read_config(directory, elsewhere),
        lambda: read.check_file(directory / "unknown", b""),
        lambda: read_file(directory / "tokenizer.json", 2**20, read),
        lambda: Checkpoint(directory, without).require({DOWN: (48, 96)}),
        lambda: Checkpoint(directory, reshaped).require({DOWN: (48, 96)}),
        lambda: Checkpoint(directory, read).rows(EMBEDDING, 0, 1),
    ]
    (directory / "tokenizer.json").unlink()
    for refused in refusals:
        with pytest.raises(ManifestError, match=f"the manifest {path}"):
            refused()


def test_a_tensor_that_it_does_not_name_is_refused_when_it_is_required(
    directory: Path, pinned: Manifest
) -> None:
    tensors = {name: pin for name, pin in pinned.tensors.items() if name != DOWN}
    checkpoint = Checkpoint(directory, pinned.model_copy(update={"tensors": tensors}))
    config = read_config(directory)
    checkpoint.require(light_tensors(config))
    linears = linear_tensors(config, FUSED_MODULES)
    said = rf"{DOWN}: got a tensor that the manifest does not name"
    with pytest.raises(ManifestError, match=said):
        checkpoint.require(linears)
    for read in READERS.values():  # nor does any reader that nobody has required it for
        with pytest.raises(ManifestError, match=said):
            read(checkpoint, config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "BF16"}, r"got F32 \[48, 96\], expected BF16 \[48, 96\], as in the manifest"),
        ({"shape": (96, 48)}, r"got F32 \[48, 96\], expected F32 \[96, 48\], as in the manifest"),
    ],
)
def test_another_dtype_or_shape_is_refused_before_anything_is_read(
    directory: Path, pinned: Manifest, change: dict[str, Any], said: str
) -> None:
    pin = pinned.tensors[DOWN].model_copy(update=change)
    changed = pinned.model_copy(update={"tensors": {**pinned.tensors, DOWN: pin}})
    with pytest.raises(ManifestError, match=said):
        Checkpoint(directory, changed).require({DOWN: (48, 96)})


# ---------------------------------------------------------------------------- the file is malformed


def _written(path: Path, pinned: Manifest, change: Callable[[dict[str, Any]], object]) -> Path:
    content = pinned.model_dump(mode="json")
    change(content)
    path.write_text(json.dumps(content))
    return path


SHA = "0" * 64


@pytest.mark.parametrize(
    ("change", "where", "said"),
    [
        (lambda m: m.pop("version"), "version", "got nothing, expected a value"),
        (lambda m: m.update(version=2), "version", "got 2, expected less than or equal to 1"),
        (lambda m: m.update(version=True), "version", "got True, expected a valid integer"),
        (lambda m: m.update(extra=1), "extra", "expected no such key"),
        (lambda m: m["files"].pop("config.json"), "", "expected a digest of config.json"),
        (lambda m: m["files"].update({"../x": SHA}), "files.../x", "got '../x'"),
        (lambda m: m["files"].update({"/etc/passwd": SHA}), "files./etc/passwd", "got '/etc"),
        (lambda m: m["files"].update({"config.json": "x"}), "files.config.json", "got 'x'"),
        (lambda m: m["files"].update({"config.json": SHA[:-1] + "A"}), "files.config.json", "got"),
        (lambda m: m["tensors"].update(a=7), "tensors.a", "got 7"),
        (lambda m: m["tensors"][DOWN].update(dtype="I8"), f"tensors.{DOWN}.dtype", "got 'I8'"),
        (lambda m: m["tensors"][DOWN].update(shape=[]), f"tensors.{DOWN}.shape", "got []"),
        (lambda m: m["tensors"][DOWN].update(shape=[2**40, 1]), f"tensors.{DOWN}.shape.0", "got"),
        (lambda m: m["tensors"][DOWN].update(shape=[48.0, 96]), f"tensors.{DOWN}.shape.0", "got"),
        (lambda m: m["tensors"][DOWN].update(shape=[-1, 96]), f"tensors.{DOWN}.shape.0", "got -1"),
        (lambda m: m["tensors"][DOWN]["blocks"].pop(), f"tensors.{DOWN}", "16 blocks, not 15"),
        (lambda m: m["tensors"][DOWN]["blocks"].append(SHA), f"tensors.{DOWN}", "not 17"),
        (lambda m: m["tensors"][DOWN].update(extra=1), f"tensors.{DOWN}.extra", "no such key"),
    ],
)
def test_a_malformed_manifest_is_refused_by_file_and_field(
    tmp_path: Path,
    pinned: Manifest,
    change: Callable[[dict[str, Any]], object],
    where: str,
    said: str,
) -> None:
    path = _written(tmp_path / "manifest", pinned, lambda _: None)
    assert Manifest.load(path).model_dump() == pinned.model_dump()
    _written(path, pinned, change)
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path)
    assert caught.value.where == (f"{path}: {where}" if where else str(path))
    assert said in str(caught.value)


@each_row(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"[]", "got [], expected"),
        (b"\xff", "codec can't decode"),
        (b"[" * 20_000, "got nested too deeply, expected a JSON object"),
        (b"[{" * 10_001, "got 20002 lists, expected at most 20000"),
        (b"," * 300_001, "got 300001 items, expected at most 300000"),
        (b":" * 20_001, "got 20001 keys, expected at most 20000"),
        (b'{"version": 1, "version": 1}', "version: got this key twice"),
        (b" " * (MAX_MANIFEST_BYTES + 1), f"{MAX_MANIFEST_BYTES + 1} bytes, expected at most"),
    ],
    ids=[
        "empty",
        "a list",
        "not UTF-8",
        "nested",
        "lists",
        "items",
        "keys",
        "a key twice",
        "too large",
    ],
)
def test_what_is_no_manifest_is_refused_by_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "manifest"
    path.write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path)
    assert str(path) in caught.value.where
    assert said in str(caught.value)


def test_of_many_faults_in_a_list_one_is_gathered() -> None:
    """Pydantic takes kilobytes for each, and a manifest may have 300,000 items."""
    for field in ("shape", "blocks"):
        fields: dict[str, Any] = {"dtype": "F32", "shape": (1,), "blocks": (SHA,)}
        with pytest.raises(ValidationError) as caught:
            TensorPin(**fields | {field: ["x"] * 1000})
        assert caught.value.error_count() <= 2  # the length of a shape is one of its own


def test_a_manifest_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="got no such file"):
        Manifest.load(tmp_path / "none")
    with pytest.raises(ManifestError, match="got a directory"):
        Manifest.load(tmp_path)


def test_its_own_digest_is_checked_first(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    path.write_bytes(b"anything")
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path, SHA)
    assert caught.value.where == f"{path}: SHA-256"
    assert caught.value.got == _sha256(b"anything")
    assert SHA in caught.value.expected


def test_a_pin_has_as_many_blocks_as_the_tensor() -> None:
    fields: dict[str, Any] = {"dtype": "BF16", "shape": (4096, 2048)}
    TensorPin(**fields, blocks=(SHA,) * 4)
    with pytest.raises(ValueError, match="4 blocks, not 3"):
        TensorPin(**fields, blocks=(SHA,) * 3)


def test_the_bytes_of_a_tensor_are_its_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    bytes_of(tensor)[:2] = b"\x80\x3f"
    assert tensor[0, 0] == 1.0
    assert len(bytes_of(tensor)) == 12
