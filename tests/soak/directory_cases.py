"""Model directories that must be refused, made at random from a good one.

Each function of `CASES` spoils a copy of a small model, and returns what the refusal must name:
the file, and the field where there is one.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file

from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE
from tests.soak.directory_draft import CONFIG, GENERATION, TOKENIZER, Draft, Named, named
from tests.soak.directory_json import (
    change_tokenizer,
    damaged_json,
    eos,
    huge_sizes,
    large_json,
    longrope_of_one_token,
    nested,
    nested_header,
    other_fields,
    panicking_tokenizer,
    repeated_key,
    rope_of_tiny_heads,
    sizes,
    sliding_window,
    too_many_layers,
    worst_json,
    worst_tokenizer,
)
from tests.soak.directory_weights import (
    bad_entry,
    bad_metadata,
    bad_offsets,
    extra_tensor,
    header_length,
    large_header,
    many_entries,
    missing_tensor,
    not_finite,
    not_json,
    trailing,
    truncated,
    worst_header,
    wrong_dtype,
    wrong_shape,
)

# -------------------------------------------------------------------------------- names and kinds


def index_outside(d: Draft) -> Named:
    """An index that names what is not a file of its directory."""
    weight_map = d.shard()
    name = d.rng.choice(sorted(weight_map))
    shutil.copy(d / "a.safetensors", d.directory.parent / "outside.safetensors")
    paths = [
        "../outside.safetensors",
        str(d.directory.parent / "outside.safetensors"),
        f"../{d.directory.name}/a.safetensors",
        "./a.safetensors",
        "sub/../a.safetensors",
        "/etc/passwd",
        "a.safetensors\0",
        "",
        ".",
        "..",
        7,
        None,
        ["a.safetensors"],
    ]
    d.index({**weight_map, name: d.rng.choice(paths)})
    return named(INDEX_FILE, name)


def index_missing_shard(d: Draft) -> Named:
    """An index that names a file that is not there."""
    weight_map = d.shard()
    gone = d.rng.choice(["a.safetensors", "c.safetensors", "\ud800", "x" * 300])
    if gone == "a.safetensors":
        (d / gone).unlink()
        return named(gone)
    d.index({**weight_map, d.rng.choice(sorted(weight_map)): gone})
    return named(gone if gone == "c.safetensors" else INDEX_FILE)


def index_wrong_shard(d: Draft) -> Named:
    """An index that names a tensor that its file has not."""
    weight_map = d.shard()
    name = d.rng.choice(sorted(weight_map))
    other = "b.safetensors" if weight_map[name] == "a.safetensors" else "a.safetensors"
    d.index({**weight_map, name: other})
    return named(other, name)


def index_without_map(d: Draft) -> Named:
    """An index that maps nothing."""
    d.shard()
    d.index(d.rng.choice([None, [], {}, "a.safetensors", 7]))
    return named(INDEX_FILE, "weight_map")


def two_shards(d: Draft) -> Named:
    """A tensor in two files."""
    d.shard()
    first, second = load_file(d / "a.safetensors"), load_file(d / "b.safetensors")
    name = d.rng.choice(sorted(first))
    save_file({**second, name: first[name]}, d / "b.safetensors")
    return named("b.safetensors", name)


def link_outside(d: Draft) -> Named:
    """A link that leads out of the directory, to a good file or to nothing, or in a circle."""
    name, by = d.rng.choice(
        [
            (CONFIG, ("tee", "service")),
            (SINGLE_FILE, ("tee", "service")),
            (GENERATION, ("tee", "service")),
            (TOKENIZER, ("tee",)),
            (INDEX_FILE, ("tee", "service")),
            ("a.safetensors", ("tee", "service")),
        ]
    )
    if name in (INDEX_FILE, "a.safetensors"):
        d.shard()
    outside = d.directory.parent / f"outside-{name}"
    (d / name).rename(outside)
    target = d.rng.choice([outside, Path("..") / outside.name, Path("nowhere"), Path(name)])
    (d / name).symlink_to(target)
    return Named((name,), by)


def other_kind(d: Draft) -> Named:
    """A directory, a pipe, a socket, a device or an empty file where a file should be."""
    name, by = d.rng.choice(
        [
            (CONFIG, ("tee", "service")),
            (SINGLE_FILE, ("tee", "service")),
            (GENERATION, ("tee", "service")),
            (TOKENIZER, ("tee",)),
            (INDEX_FILE, ("tee", "service")),
            ("b.safetensors", ("tee", "service")),
        ]
    )
    if name in (INDEX_FILE, "b.safetensors"):
        d.shard()
    path = d / name
    path.unlink()
    kind = d.rng.choice(["directory", "pipe", "socket", "device", "empty"])
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        # The name of a socket is short: it is bound through the directory's descriptor.
        folder = os.open(d.directory, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{name}")
        os.close(folder)
    elif kind == "device":
        path.symlink_to(d.rng.choice(["/dev/zero", "/dev/stdin", "/dev/tty", "/proc/self/mem"]))
    else:
        path.touch()
    return Named((name,), by)


class _Runs:
    """Unpickled, it ends the process."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.abort, ()


def pickle_by_name(d: Draft) -> Named:
    """Weights under a name of pickles, alone or in an index."""
    name = d.rng.choice(["pytorch_model.bin", "model.pt", "a.pth", "b.ckpt", "c.pkl"])
    if d.rng.random() < 0.5:
        d.weights.unlink()
    else:
        d.index(dict.fromkeys(d.tensors(), name))
        d.weights.unlink()
    (d / name).write_bytes(pickle.dumps(_Runs(), protocol=d.rng.randint(2, 5)))
    return named(name)


def pickle_by_magic(d: Draft) -> Named:
    """A pickle under the name of safetensors: every protocol, and torch's zip."""
    protocol = d.rng.randint(1, 5)
    if protocol == 1:
        with zipfile.ZipFile(d.weights, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(_Runs(), protocol=2))
    else:
        d.weights.write_bytes(pickle.dumps(_Runs(), protocol=protocol) + bytes(100))
    return named(SINGLE_FILE)


def no_weights(d: Draft) -> Named:
    """Nothing to read at all."""
    d.weights.unlink()
    return named(d.directory.name)


def no_config(d: Draft) -> Named:
    """No configuration."""
    (d / CONFIG).unlink()
    return named(d.directory.name)


Spoil: TypeAlias = Callable[[Draft], Named]

CASES: tuple[Spoil, ...] = (
    truncated,
    trailing,
    header_length,
    many_entries,
    large_header,
    worst_header,
    bad_offsets,
    bad_entry,
    bad_metadata,
    not_json,
    wrong_shape,
    wrong_dtype,
    missing_tensor,
    extra_tensor,
    not_finite,
    sizes,
    huge_sizes,
    too_many_layers,
    other_fields,
    rope_of_tiny_heads,
    longrope_of_one_token,
    sliding_window,
    eos,
    nested,
    nested_header,
    large_json,
    worst_json,
    worst_tokenizer,
    panicking_tokenizer,
    damaged_json,
    repeated_key,
    index_outside,
    index_missing_shard,
    index_wrong_shard,
    index_without_map,
    two_shards,
    link_outside,
    other_kind,
    pickle_by_name,
    pickle_by_magic,
    no_weights,
    no_config,
)


# --------------------------------------------------------------------- what must not be refused


def untouched(d: Draft) -> None:
    """Leave it as it is."""


def sharded(d: Draft) -> None:
    """The same in two files."""
    d.shard()


def cached(d: Draft) -> None:
    """The folders of Hugging Face's cache: a snapshot is links to blobs beside it."""
    root = d.directory
    snapshot, blobs = root / "snapshots" / "abc", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(p for p in root.iterdir() if p.is_file())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    d.directory = snapshot


def half_precision(d: Draft) -> None:
    """Other floats, with zeros and the largest ones among them."""
    changed = {name: tensor.to(torch.bfloat16) for name, tensor in d.tensors().items()}
    next(iter(changed.values())).view(-1)[0] = torch.finfo(torch.bfloat16).max
    next(iter(changed.values())).view(-1)[1] = 0
    d.change(dict(changed))


def with_other_files(d: Draft) -> None:
    """Files and tensors that mean nothing."""
    (d / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (d / "README.md").write_text("text")
    d.change({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def filled_up(d: Draft) -> None:
    """A tokenizer that would fill every prompt up to four terabytes."""
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": 2**40,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    change_tokenizer(d, padding=padding)


def cut_off(d: Draft) -> None:
    """A tokenizer that would cut every prompt off."""
    truncation = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    change_tokenizer(d, truncation=truncation)


GOOD: tuple[Callable[[Draft], None], ...] = (
    untouched,
    sharded,
    cached,
    half_precision,
    with_other_files,
    filled_up,
    cut_off,
)
