"""A manifest pins every byte that is read: nothing else is handed out."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ManifestError, ModelError
from protocol.messages import FUSED_MODULES
from protocol.model import manifest as manifest_module
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
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
    read_file,
    rows_per_block,
)
from protocol.model.quantized import load_quantized
from protocol.model.tensor_file import Entry, TensorFile
from protocol.model.weights import load_linear, load_tensor
from tee_side.engine.tokenizer import Tokenizer
from tee_side.protect.calibration import CALIBRATION_FILE, Calibration
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.cli.program import model_directory
from tsqp.manifest import make_manifest

DOWN = "model.layers.1.mlp.down_proj.weight"
SHA = "0" * 64
SAID = ", as in the manifest, or the manifest of this model"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def directory(directory: Path, saved_model: Callable[..., SavedModel]) -> Path:
    """A model with all the small files that there may be."""
    shutil.copy(saved_model("llama").calibration, directory / CALIBRATION_FILE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_directory("demo") / name, directory / name)
    assert {path.name for path in directory.iterdir()} == {*PINNED_FILES, SINGLE_FILE}
    return directory


@pytest.fixture
def pinned(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Its manifest, with blocks of a few rows: every matrix has several, the last is not full."""
    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", 7 * 48 * 4)
    return make_manifest(directory)


def _spoil(directory: Path, name: str, element: int) -> None:
    """Change one bit of one element where it lies on the disk, or change it back."""
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
    assert pinned.files == {name: _sha256((directory / name).read_bytes()) for name in PINNED_FILES}
    tensors = load_file(directory / SINGLE_FILE)
    assert set(pinned.tensors) == set(tensors)
    for name, tensor in tensors.items():
        pin = pinned.tensors[name]
        assert (pin.dtype, pin.shape) == ("F32", tuple(tensor.shape))
        blocks = tensor.split(max(1, 7 * 48 // (tensor.numel() // tensor.shape[0])))
        assert pin.blocks == tuple(_sha256(block.numpy().tobytes()) for block in blocks)
    assert len(pinned.tensors[EMBEDDING].blocks) == 46  # 320 rows, seven at a time
    (directory / "manifest").write_bytes(pinned.to_bytes())
    for digest in (None, _sha256(pinned.to_bytes()).upper()):
        read = Manifest.load(directory / "manifest", digest)
        assert read.model_dump() == pinned.model_dump()


def test_blocks_have_about_four_mebibytes() -> None:
    assert rows_per_block((128256, 2048), 4096) * 4096 == BLOCK_BYTES
    assert rows_per_block((8, 2**23), 2**24) == 1  # a row is never divided
    assert rows_per_block((48,), 4) == 48


def test_it_pins_what_a_directory_has_in_whatever_files(
    sharded: Path, saved_model: Callable[..., SavedModel], tmp_path: Path
) -> None:
    single = saved_model("llama").directory
    assert make_manifest(sharded).tensors == make_manifest(single).tensors
    tensors, light = load_file(single / SINGLE_FILE), light_tensors(read_config(single))
    shutil.copy(single / "config.json", tmp_path)
    save_file({name: tensors[name] for name in light}, tmp_path / SINGLE_FILE)
    assert set(make_manifest(tmp_path).tensors) == set(light)
    save_file({**tensors, "evil": torch.ones(1)}, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelError, match="evil"):
        make_manifest(tmp_path)


# ------------------------------------------------------------------------- what is read is verified


def test_an_unchanged_directory_reads_as_without_a_manifest(
    directory: Path, pinned: Manifest
) -> None:
    config = read_config(directory)
    assert read_config(directory, pinned) == config
    plain, verified = Checkpoint(directory), Checkpoint(directory, pinned)
    verified.require(light_tensors(config) | linear_tensors(config, FUSED_MODULES))
    for name, tensor in load_file(directory / SINGLE_FILE).items():
        size = len(tensor)
        for start, stop, step in ((0, size, 1), (3, 9, 1), (1, size, 5), (8, 8, 1)):
            for checkpoint in (plain, verified):
                rows = checkpoint.rows(name, start, stop, step)
                assert torch.equal(rows, tensor[start:stop:step])
    assert model_digest(config, plain) == model_digest(config, verified)
    assert linear_digest(config, plain) == linear_digest(config, verified)
    Tokenizer(directory, pinned).apply_chat_template([{"role": "user", "content": "a"}])


READERS: dict[str, Callable[[Checkpoint, Any], object]] = {
    "load_tensor": lambda c, _: load_tensor(c, DOWN, (48, 96), dtype=torch.float32),
    "copy_into": lambda c, _: c.copy_into(DOWN, torch.empty(48, 96, dtype=torch.float16)),
    "rows": lambda c, _: c.rows(DOWN, 0, 48),
    "one row": lambda c, _: c.rows(DOWN, 36, 37),
    "rows of a sample": lambda c, _: c.rows(DOWN, 0, 48, 12),
    "blocks": lambda c, _: list(c.blocks(DOWN, (48, 96))),
    "load_linear": lambda c, config: load_linear(
        c, config, 1, "down_proj", dtype=torch.float32, device=torch.device("cpu")
    ),
    "load_quantized": lambda c, config: load_quantized(c, config, 1, "down_proj"),
    "linear_digest": lambda c, config: linear_digest(config, c),
}


def test_no_reader_hands_out_a_byte_that_differs(directory: Path, pinned: Manifest) -> None:
    config = read_config(directory)
    tensors = {name: pin for name, pin in pinned.tensors.items() if name != DOWN}
    unnamed = pinned.model_copy(update={"tensors": tensors})
    for reader, read in READERS.items():
        read(Checkpoint(directory, pinned), config)
        with pytest.raises(ManifestError, match=f"{DOWN}: got a tensor that the manifest does not"):
            read(Checkpoint(directory, unnamed), config)
        _spoil(directory, DOWN, 36 * 96 + 5)
        with pytest.raises(ManifestError) as caught:
            read(Checkpoint(directory, pinned), config)
        assert caught.value.where == f"{directory / SINGLE_FILE}: {DOWN}: block 12", reader
        assert caught.value.got.startswith("SHA-256 ")
        assert caught.value.expected == f"SHA-256 {pinned.tensors[DOWN].blocks[12]}{SAID}"
        _spoil(directory, DOWN, 36 * 96 + 5)


def test_a_bit_anywhere_is_found_when_its_block_is_read_and_not_before(
    directory: Path, pinned: Manifest
) -> None:
    tensors, config = load_file(directory / SINGLE_FILE), read_config(directory)
    for element in (0, 6 * 48, 7 * 48, 20 * 48, 319 * 48, 320 * 48 - 1):
        _spoil(directory, EMBEDDING, element)
        checkpoint, block = Checkpoint(directory, pinned), element // 48 // 7
        with pytest.raises(ManifestError, match=rf"{EMBEDDING}: block {block}: "):
            load_tensor(checkpoint, EMBEDDING, (320, 48), dtype=torch.float32)
        load_quantized(checkpoint, config, 0, "lm_head")  # another tensor
        good = checkpoint.rows(EMBEDDING, 35, 42)
        assert torch.equal(good, tensors[EMBEDDING][35:42])
        _spoil(directory, EMBEDDING, element)


def test_what_was_verified_is_in_memory_of_its_own(
    directory: Path, pinned: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes the moment after it is read, in place, and no reader sees it."""
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
    other = config.model_copy(update={"rms_norm_eps": 0.5})
    assert len({*before, model_digest(other, verified)}) == 3
    (directory / SINGLE_FILE).unlink()
    assert (model_digest(config, verified), linear_digest(config, verified)) == before
    with pytest.raises(ModelError):
        model_digest(config, plain)


# ---------------------------------------------------------------------------------- the small files


def _calibration(path: Path, pinned: Manifest) -> Calibration:
    config = read_config(path.parent)
    return Calibration.load(
        path, config, model_digest(config, Checkpoint(path.parent)), manifest=pinned
    )


FILE_READERS: dict[str, Callable[[Path, Manifest], object]] = {
    "config.json": read_config,
    "generation_config.json": read_config,
    "tokenizer.json": Tokenizer,
    "tokenizer_config.json": lambda d, m: Tokenizer(d, m).apply_chat_template([]),
    "chat_template.jinja": lambda d, m: Tokenizer(d, m).apply_chat_template([]),
    CALIBRATION_FILE: lambda d, m: _calibration(d / CALIBRATION_FILE, m),
}


def test_a_file_that_differs_or_is_gone_is_refused_by_name(
    directory: Path, pinned: Manifest
) -> None:
    assert set(FILE_READERS) == set(PINNED_FILES)
    for name, read in FILE_READERS.items():
        read(directory, pinned)
        path = directory / name
        content = path.read_bytes()
        # Still good JSON, a good template: only the digest tells.
        json_too = content[:-1] + b" " + content[-1:]
        path.write_bytes(json_too if name.endswith("json") else content[::-1])
        with pytest.raises(ManifestError) as caught:
            read(directory, pinned)
        assert caught.value.where == str(path)
        assert caught.value.expected == f"SHA-256 {dict(pinned.files)[name]}{SAID}"  # type: ignore[index]
        path.unlink()
        # A missing generation_config.json means other EOS ids, which is the owner's to choose.
        if name != CALIBRATION_FILE:
            with pytest.raises(ManifestError, match=f"{name}: got no such file, .* the manifest"):
                read(directory, pinned)
        path.write_bytes(content)


def test_a_file_that_is_not_pinned_counts_as_absent(directory: Path, pinned: Manifest) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    without = pinned.model_copy(update={"files": {"config.json": pinned.files["config.json"]}})
    assert read_config(directory).eos_token_ids == frozenset({5})
    assert read_config(directory, without).eos_token_ids == frozenset()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer(directory, without)
    elsewhere = shutil.copy(directory / CALIBRATION_FILE, directory / "scales")
    _calibration(elsewhere, pinned)
    said = r"scales: got a file that the manifest does not name, .* again, after tsqp calibrate$"
    with pytest.raises(ManifestError, match=said):
        _calibration(elsewhere, without)


def test_a_refusal_names_the_manifest_that_was_read(directory: Path, pinned: Manifest) -> None:
    path = directory / "other.json"
    path.write_bytes(pinned.to_bytes())
    read = Manifest.load(path)
    _spoil(directory, EMBEDDING, 0)

    def changed(**change: object) -> Manifest:
        pin = read.tensors[DOWN].model_copy(update=change)
        return read.model_copy(update={"tensors": {**read.tensors, DOWN: pin}})

    shapes: dict[str, tuple[int, ...]] = {DOWN: (48, 96)}
    refusals: list[tuple[Callable[[], object], str]] = [
        (
            lambda: read_config(directory, read.model_copy(update={"files": {"config.json": SHA}})),
            SHA,
        ),
        (lambda: read.check_file(directory / "unknown", b""), "does not name"),
        (lambda: read_file(directory / "tokenizer.json", 2**20, read), "got no such file"),
        (lambda: Checkpoint(directory, changed(shape=(96, 48))).require(shapes), r"F32 \[96, 48\]"),
        (lambda: Checkpoint(directory, changed(dtype="BF16")).require(shapes), r"BF16 \[48, 96\]"),
        (lambda: Checkpoint(directory, read).rows(EMBEDDING, 0, 1), "block 0"),
    ]
    (directory / "tokenizer.json").unlink()
    for refused, said in refusals:
        with pytest.raises(ManifestError, match=f"the manifest {path}") as caught:
            refused()
        assert re.search(said, str(caught.value))


# ---------------------------------------------------------------------------- the file is malformed


@each_row(
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
def test_a_malformed_manifest_is_refused_by_field(
    pinned: Manifest, tmp_path: Path, change: Change, where: str, said: str
) -> None:
    path, content = tmp_path / "manifest", pinned.model_dump(mode="json")
    change(content)
    path.write_text(json.dumps(content))
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
)
def test_what_is_no_manifest_is_refused_by_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "manifest"
    path.write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path)
    assert str(path) in caught.value.where
    assert said in str(caught.value)
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path, SHA)  # its own digest is checked first
    if len(content) <= MAX_MANIFEST_BYTES:
        assert (caught.value.where, caught.value.got) == (f"{path}: SHA-256", _sha256(content))
        assert SHA in caught.value.expected
    for other, got in (("none", "no such file"), (".", "a directory")):
        with pytest.raises(ManifestError, match=f"got {got}"):
            Manifest.load(tmp_path / other)
