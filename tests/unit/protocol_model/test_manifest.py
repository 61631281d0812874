"""A manifest pins every byte that is read: nothing else is handed out."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ManifestError, ModelError
from protocol.model import files
from protocol.model.at_rest import MAX_MANIFEST_BYTES, Manifest
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_digest,
    linear_tensors,
)
from protocol.model.config import read_config
from protocol.model.weights import load_quantized, load_tensor
from tee_side.chat.template import ChatTemplate
from tee_side.engine.embedding import read_embedding
from tee_side.engine.tokenizer import Tokenizer
from tests.kit.model import KINDS, Models
from tests.kit.rows import each_row
from tsqp.model_at_rest import PINNED_FILES, make_manifest
from tsqp.run.settings import model_directory

DOWN = "model.layers.1.mlp.down_proj.weight"
SHA = "0" * 64
SAID = ", as in the manifest, or the manifest of this model"
Change = Callable[[dict[str, Any]], object]
_MODULES = [{"type": f"models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]
_FILES = {
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "modules.json": json.dumps(_MODULES),
    "1_Pooling/config.json": '{"pooling_mode": "mean"}',
    "config_sentence_transformers.json": "{}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}


def _embedding(directory: Path, manifest: Manifest) -> object:
    return read_embedding(directory, None, manifest)


@pytest.fixture
def directory(directory: Path) -> Path:
    """A model with all the small files that there may be."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_directory("demo") / name, directory / name)
    for name, content in _FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)
    there = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert there == {*PINNED_FILES, SINGLE_FILE}
    return directory


@pytest.fixture
def pinned(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Its manifest, with blocks of a few rows: every matrix has several, the last is not full."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 7 * 48 * 4)
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
    assert files.rows_per_block((8, 2**23), 2**24) == 1  # a row is never divided
    save_file({**tensors, "evil": torch.ones(1)}, directory / SINGLE_FILE)
    with pytest.raises(ModelError, match="evil"):
        make_manifest(directory)


READERS: dict[str, Callable[[Checkpoint, Any], object]] = {
    "load_tensor": lambda c, _: load_tensor(c, DOWN, (48, 96), dtype=torch.float32),
    "copy_into": lambda c, _: c.copy_into(DOWN, torch.empty(48, 96, dtype=torch.float16)),
    "rows": lambda c, _: c.rows(DOWN, 0, 48),
    "rows of a sample": lambda c, _: c.rows(DOWN, 0, 48, 12),
    "blocks": lambda c, _: list(c.blocks(DOWN, (48, 96))),
    "load_quantized": lambda c, config: load_quantized(c, config, 1, "down_proj"),
    "linear_digest": lambda c, config: linear_digest(config, c),
}


@each_row("kind", KINDS)
def test_a_model_of_every_family_is_read_as_it_was_pinned(saved_model: Models, kind: str) -> None:
    directory = saved_model(kind).directory
    config, checkpoint = Checkpoint.open(directory, make_manifest(directory))
    for name, shape in (light_tensors(config) | linear_tensors(config)).items():
        assert load_tensor(checkpoint, name, shape, dtype=torch.float32).shape == shape


def test_no_reader_hands_out_a_byte_that_differs(directory: Path, pinned: Manifest) -> None:
    config = read_config(directory)
    tensors = {name: pin for name, pin in pinned.tensors.items() if name != DOWN}
    unnamed = pinned.model_copy(update={"tensors": tensors})
    down = load_file(directory / SINGLE_FILE)[DOWN]
    for rows in ((0, 48), (3, 9), (1, 48, 5), (8, 8)):
        assert torch.equal(Checkpoint(directory, pinned).rows(DOWN, *rows), down[slice(*rows)])
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
    shapes: dict[str, tuple[int, ...]] = {DOWN: (48, 96)}
    for change, said in (({"shape": (96, 48)}, r"\[96, 48\]"), ({"dtype": "BF16"}, "BF16")):
        pin = pinned.tensors[DOWN].model_copy(update=change)
        other = pinned.model_copy(update={"tensors": {**tensors, DOWN: pin}})
        with pytest.raises(ManifestError, match=rf"got F32 \[48, 96\], expected .*{said}"):
            Checkpoint(directory, other).require(shapes)


def test_what_was_verified_is_in_memory_of_its_own(
    directory: Path, pinned: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes the moment after it is read, in place, and no reader sees it."""
    # A copy: the library gives a view of the file, and would show the change.
    expected = load_file(directory / SINGLE_FILE)[FINAL_NORM].clone()
    whole = files.OpenFile.fill

    def read_and_spoil(self: files.OpenFile, buffer: memoryview, offset: int) -> None:
        whole(self, buffer, offset)
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(len(buffer)))

    checkpoint = Checkpoint(directory, pinned)
    monkeypatch.setattr(files.OpenFile, "fill", read_and_spoil)
    assert torch.equal(checkpoint.rows(FINAL_NORM, 0, 48), expected)


FILE_READERS: dict[str, Callable[[Path, Manifest], object]] = {
    "config.json": read_config,
    "generation_config.json": read_config,
    "tokenizer.json": Tokenizer,
    "tokenizer_config.json": lambda d, m: ChatTemplate(Tokenizer(d, m)),
    "chat_template.jinja": lambda d, m: ChatTemplate(Tokenizer(d, m)),
    "additional_chat_templates/tool_use.jinja": lambda d, m: ChatTemplate(Tokenizer(d, m)),
    **dict.fromkeys(("special_tokens_map.json", "added_tokens.json"), Tokenizer),
    **dict.fromkeys(
        ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"), _embedding
    ),
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
    with pytest.raises(ManifestError, match="got a file that the manifest does not name"):
        files.read_json(directory / "generation_config.json", without)


@each_row(
    ("change", "where", "said"),
    [
        (lambda m: m.pop("version"), "version", "got nothing, expected a value"),
        (lambda m: m.update(version=2), "version", "got 2, expected less than or equal to 1"),
        (lambda m: m["files"].pop("config.json"), "", "expected a digest of config.json"),
        (lambda m: m["files"].update({"../x": SHA}), "files.../x", "got '../x'"),
        (lambda m: m["files"].update({"config.json": SHA[:-1] + "A"}), "files.config.json", "got"),
        (lambda m: m["tensors"][DOWN].update(dtype="I8"), f"tensors.{DOWN}.dtype", "got 'I8'"),
        (lambda m: m["tensors"][DOWN].update(shape=[2**40, 1]), f"tensors.{DOWN}.shape.0", "got"),
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
        (b"[]", "got [], expected"),
        (b"[" * 20_000, "got nested too deeply, expected a JSON object"),
        (b"[{" * 10_001, "got 20002 lists, expected at most 20000"),
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
