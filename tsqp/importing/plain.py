"""Writes what is imported: a plain directory, tensor by tensor.

It grows under a name of its own beside the directory that it becomes, a shard after the other. A
run that was interrupted goes on behind the last whole shard, if the source is the same.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from protocol.errors import ModelError, SettingsError, TsqpError, shown
from protocol.messages import FloatDtype
from protocol.model.checkpoint import (
    INDEX_FILE,
    Shapes,
    bytes_of,
    explained,
    file_places,
    find_names,
)
from protocol.model.config import ModelConfig, what_it_is
from protocol.tensors import short_name, torch_dtype
from tsqp.extras import needing
from tsqp.importing.header import header
from tsqp.importing.sources import (
    ADAPTER_FILE,
    Adapter,
    Directory,
    Source,
    checked_config,
    new_directory,
    write_json,
)

RECORD_FILE = "import.json"
_GGUF_MAGIC = b"GGUF"
_SAME = ("sources", "settings")
_SHARD_BYTES = 2 * 1024**3
_BLOCK_ELEMENTS = 4 * 1024**2
# Tells how many bytes are written, of how many.
Progress = Callable[[int, int], None]


@contextmanager
def as_its_library_writes_it(path: Path) -> Iterator[None]:
    """Name a source whose parts do not fit together: other libraries, too, say so in any way."""
    try:
        yield
    except (TsqpError, OSError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {shown(str(error))}"
        raise ModelError(str(path), said, "a model as its library writes it") from error


def open_source(path: Path, base: Path | None = None) -> Source:
    """Return what reads a model. `base`: of an adapter. Raises ModelError, SettingsError."""
    ModelError.unless(path.exists(), str(path), *what_it_is(path))
    if path.is_dir() and (path / ADAPTER_FILE).is_file():
        if base is None:
            raise SettingsError("--base", "none", "the model that the adapter was made for")
        return Adapter(path, open_source(base))
    SettingsError.unless(base is None, "--base", str(base), "none: SOURCE is no adapter")
    if path.is_dir():
        single = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file() or len(single) != 1:
            ModelError.unless((path / "config.json").is_file(), str(path), *what_it_is(path))
            return Directory(path)
        (path,) = single
    with path.open("rb") as file:
        start = file.read(4)
    right = "a GGUF file, or a directory"
    ModelError.unless(start == _GGUF_MAGIC, str(path), f"a file that begins with {start!r}", right)
    with needing(str(path), "pip install 'tsqp[import]'"):
        from tsqp.importing.gguf_file import Gguf
    return Gguf(path)


def import_model(
    source: Source,
    directory: Path,
    dtype: FloatDtype | None = None,
    progress: Progress = lambda _done, _total: None,
) -> dict[str, Any]:
    """Write a plain directory; return what is recorded of it.

    `dtype`: of the tensors; None for the source's. One block of rows is in memory at a time.
    Raises ModelError for tensors that the table does not explain, SettingsError for a directory
    that is there, OSError.
    """
    draft = new_directory(directory).with_name(f".{directory.name}.import")
    element = source.dtype if dtype is None else torch_dtype(dtype)
    settings: dict[str, Any] = deepcopy(dict(source.settings))
    for said in (settings, settings.get("text_config")):
        if isinstance(said, dict):
            said.pop("torch_dtype", None)
            said["dtype"] = short_name(element)
    first = source.files[0]
    where = first if first.name != "config.json" else first.parent
    shapes = _wanted(source, checked_config(settings, str(where)), where)
    draft.mkdir(exist_ok=True)
    record = _resumed(source, draft, settings)
    total = sum(math.prod(shape) for shape in shapes.values()) * element.itemsize
    source.copy_beside(draft)
    done, shards = 0, _shards(shapes, element.itemsize)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, name)
        size = sum(math.prod(shapes[one]) for one in names) * element.itemsize
        if record["files"].get(name) is None or not (draft / name).is_file():
            own = {one: shapes[one] for one in names}
            told = progress, done, total
            record["files"][name] = _write(source, draft / name, own, element, *told)
            write_json(draft / RECORD_FILE, record)
        done += size
        progress(done, total)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(draft / INDEX_FILE, index)
    draft.rename(directory)
    return record


def _wanted(source: Source, config: ModelConfig, where: Path) -> Shapes:
    """Return names and shapes of what is written, each compared with what the source has."""
    prefix, head = find_names(lambda name: source.shape(name) is not None)
    apart = config.model_copy(update={"tie_word_embeddings": False})
    shapes = {place.name: place.shape for place in file_places(apart, prefix, head).values()}
    if (config.tie_word_embeddings or not prefix) and source.shape(head) is None:
        del shapes[head]
    for name, shape in shapes.items():
        found = source.shape(name)
        got = "no such tensor" if found is None else f"shape {list(found)}"
        ModelError.unless(found == shape, f"{where}: {shown(name)}", got, f"{list(shape)}")
    if left := explained(source.left(shapes), prefix, config, where):
        got = f"what config.json does not explain, {len(left)} in all: {shown(', '.join(left[:3]))}"
        raise ModelError(f"{where}: tensors", got, f"only those of a {config.architecture}")
    return shapes


def _shards(shapes: Shapes, itemsize: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        own = math.prod(shape) * itemsize
        if shards[-1] and size + own > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += own
    return shards


def _resumed(source: Source, draft: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record to go on with: of the same source, or a new one in an empty draft."""
    top = Path(os.path.commonpath([path.parent for path in source.files]))
    sources = {str(path.relative_to(top)): _digest(path) for path in source.files}
    record: dict[str, Any] = {"sources": sources, "settings": settings, "files": {}}
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((draft / RECORD_FILE).read_text(encoding="utf-8"))
    same = isinstance(found, dict) and all(found.get(key) == record[key] for key in _SAME)
    if not same:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        write_json(draft / "config.json", settings)
        found = record
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(
    source: Source,
    path: Path,
    shapes: Shapes,
    dtype: torch.dtype,
    progress: Progress,
    written: int,
    total: int,
) -> str:
    """Write a shard under a name of its own first; return its SHA-256, in hex."""
    draft = path.with_suffix(".partial")
    with draft.open("wb") as file:
        file.write(header(shapes, dtype)[0])
        for name, shape in shapes.items():
            high, wide = (shape[0] if shape else 1), math.prod(shape[1:])
            step = max(1, _BLOCK_ELEMENTS // max(1, wide))
            for first in range(0, high, step):
                rows = slice(first, min(high, first + step))
                found = source.rows(name, rows).to(dtype)
                expected = (rows.stop - rows.start) * wide
                finite = found.numel() == expected and bool(found.isfinite().all())
                right = f"{expected} weights that are finite in {short_name(dtype)}"
                ModelError.unless(finite, shown(name), "NaN or infinity, or others", right)
                file.write(bytes_of(found.contiguous()))
                written += expected * dtype.itemsize
                progress(written, total)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    return _digest(path)
