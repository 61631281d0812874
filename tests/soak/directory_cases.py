"""Model directories that must be refused, made at random from a good one.

Each function of `CASES` spoils a copy of a small model, and returns what the refusal must name:
the file, and the field where there is one.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import socket
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE, light_tensors, linear_tensors
from protocol.model.config import read_config

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
_ABSENT = object()


@dataclass(frozen=True)
class Named:
    """What a refusal must name; `by`: the readers that must refuse."""

    parts: tuple[str, ...]
    by: tuple[str, ...] = ("tee", "service")


def named(*parts: str) -> Named:
    """Return what both readers must name."""
    return Named(parts)


class Draft:
    """A good model directory that is about to be spoilt."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.rng = rng

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    @property
    def weights(self) -> Path:
        """The one file of weights."""
        return self / SINGLE_FILE

    def set(self, **changes: Any) -> None:
        """Change config.json."""
        fields = {k: v for k, v in {**BASE, **changes}.items() if v is not _ABSENT}
        (self / CONFIG).write_text(json.dumps(fields), encoding="utf-8")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors."""
        found: dict[str, torch.Tensor] = load_file(self.weights)
        return found

    def any_tensor(self) -> str:
        """Return the name of one."""
        return self.rng.choice(sorted(self.tensors()))

    def change(self, changed: dict[str, torch.Tensor | None]) -> None:
        """Replace tensors, or leave them out, in a file that is otherwise good."""
        kept = {name: t for name, t in {**self.tensors(), **changed}.items() if t is not None}
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, self.weights)

    def header(self) -> tuple[dict[str, Any], bytes]:
        """Return the header, parsed, and the data behind it."""
        content = self.weights.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return json.loads(content[8:end]), content[end:]

    def write(self, header: object, data: bytes, length: int | None = None) -> None:
        """Write a file with any header: an object, or bytes as they are."""
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = len(raw) if length is None else length
        self.weights.write_bytes(size.to_bytes(8, "little") + raw + data)

    def shard(self) -> dict[str, str]:
        """Divide the weights in two files and an index; return its map."""
        tensors = self.tensors()
        self.weights.unlink()
        files = ("a.safetensors", "b.safetensors")
        found: dict[str, str] = {}
        for number, file in enumerate(files):
            part = {name: tensors[name] for name in sorted(tensors)[number::2]}
            save_file(part, self / file)
            found |= dict.fromkeys(part, file)
        self.index(found)
        return found

    def index(self, weight_map: object) -> None:
        """Write the index."""
        (self / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_base(directory: Path, tokenizer: Path) -> None:
    """Make the good directory."""
    directory.mkdir()
    Draft(directory, random.Random(0)).set()
    config = read_config(directory)
    generator = torch.Generator().manual_seed(0)
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, directory / SINGLE_FILE)
    (directory / GENERATION).write_text('{"eos_token_id": 1}', encoding="utf-8")
    shutil.copyfile(tokenizer, directory / TOKENIZER)


# ------------------------------------------------------------------ the bytes of a weight file


def truncated(d: Draft) -> Named:
    """Cut at any point."""
    content = d.weights.read_bytes()
    d.weights.write_bytes(content[: d.rng.randrange(len(content))])
    return named(SINGLE_FILE)


def trailing(d: Draft) -> Named:
    """Bytes that belong to no tensor."""
    with d.weights.open("ab") as file:
        file.write(d.rng.randbytes(d.rng.randint(1, 2000)))
    return named(SINGLE_FILE)


def header_length(d: Draft) -> Named:
    """A header that is said to be shorter or longer than it is."""
    content = d.weights.read_bytes()
    right = int.from_bytes(content[:8], "little")
    wrong = d.rng.choice(
        [0, 1, right - 1, right - 50, right + 1, right + 200, len(content), 2**32, 2**63, 2**64 - 1]
    )
    d.weights.write_bytes(wrong.to_bytes(8, "little") + content[8:])
    return named(SINGLE_FILE)


def many_entries(d: Draft) -> Named:
    """A header of 100,000 tensors, of nothing or of a byte each; half below our limit in bytes."""
    size = d.rng.randint(0, 1)
    short = d.rng.random() < 0.5
    entries = [
        f'"{i:x}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{i * size},{(i + 1) * size}]}}'
        for i in range(30_000 if short else 100_000)
    ]
    d.write(("{" + ",".join(entries) + "}").encode(), bytes(size * len(entries)))
    return named(SINGLE_FILE)


def large_header(d: Draft) -> Named:
    """A header of 100 MB, of any JSON."""
    filling = d.rng.choice([b" ", b"[],", b'"a":1,', b"\0"])
    size = 100_000_000
    d.write((b"{" + filling * (size // len(filling)))[:size], b"")
    return named(SINGLE_FILE, "header length")


def worst_header(d: Draft) -> Named:
    """As much JSON as a header may have, of the kind that takes most memory."""
    unit = d.rng.choice([b"[],", b"{},", b'"\xc3\xa9",', b"1.5,"])
    d.write(b"[" + unit * (2_000_000 // len(unit)) + b"0]", b"")
    return named(SINGLE_FILE)


def bad_offsets(d: Draft) -> Named:
    """Offsets that overlap, leave a gap, end outside, or are no numbers."""
    header, data = d.header()
    names = [name for name in header if name != "__metadata__"]
    name = d.rng.choice(names)
    begin, end = header[name]["data_offsets"]
    other = header[d.rng.choice([n for n in names if n != name])]["data_offsets"][0]
    header[name]["data_offsets"] = d.rng.choice(
        [
            [other, other + end - begin],
            [begin + 4, end + 4],
            [len(data), len(data) + end - begin],
            [begin - 2**40, end - 2**40],
            [end, begin],
            [begin, 2**63],
            [2**70, 2**70 + end - begin],
            [float(begin), float(end)],
            [str(begin), str(end)],
            [begin, end, end],
            [begin],
            None,
            [True, end],
        ]
    )
    d.write(header, data)
    return named(SINGLE_FILE, "data_offsets")


def bad_entry(d: Draft) -> Named:
    """An entry that is not one: keys missing or too many, another type, absurd sizes."""
    header, data = d.header()
    name = d.any_tensor()
    entry = header[name]
    header[name] = d.rng.choice(
        [
            None,
            [],
            {},
            7,
            {**entry, "extra": 1},
            {k: v for k, v in entry.items() if k != "dtype"},
            {**entry, "dtype": d.rng.choice(["F12", "", 7, None, "float32", ["F32"]])},
            {**entry, "shape": d.rng.choice([-1, "x", [-1, 16], [1.5], [True], [2**80] * 8])},
            {**entry, "shape": [1] * 100},
        ]
    )
    d.write(header, data)
    return named(SINGLE_FILE, name)


def bad_metadata(d: Draft) -> Named:
    """Metadata that is not texts by name."""
    header, data = d.header()
    header["__metadata__"] = d.rng.choice([[], 7, None, {"a": 1}, {"a": {}}, "text"])
    d.write(header, data)
    return named(SINGLE_FILE, "__metadata__")


def not_json(d: Draft) -> Named:
    """A header that is no JSON object in UTF-8."""
    d.write(d.rng.choice([b"", b"[]", b"null", b"\xff\xfe{}", b"{", b"{'a':1}", b"\0" * 64]), b"")
    return named(SINGLE_FILE)


# ------------------------------------------------------------------------------------ the tensors


def wrong_shape(d: Draft) -> Named:
    """One row more or less, one axis more, transposed."""
    name = d.any_tensor()
    found = d.tensors()[name]
    changed = [found[:-1], torch.cat((found, found[:1])), found[None], found.reshape(-1, 1)]
    if found.dim() == 2 and found.shape[0] != found.shape[1]:
        changed.append(found.t())
    d.change({name: d.rng.choice(changed)})
    return named(SINGLE_FILE, name)


def wrong_dtype(d: Draft) -> Named:
    """Numbers that are no floats, or floats that we do not read."""
    name = d.any_tensor()
    dtypes = (torch.int64, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn)
    d.change({name: d.tensors()[name].to(d.rng.choice(dtypes))})
    return named(SINGLE_FILE, name, "")


def missing_tensor(d: Draft) -> Named:
    """One or several tensors are not there."""
    gone = d.rng.sample(sorted(d.tensors()), d.rng.randint(1, 3))
    d.change(dict.fromkeys(gone))
    return named(SINGLE_FILE)


def extra_tensor(d: Draft) -> Named:
    """A tensor that the configuration does not explain."""
    name, shown = d.rng.choice(
        [
            ("model.layers.0.self_attn.q_proj.bias",) * 2,
            ("model.layers.2.mlp.up_proj.weight",) * 2,
            ("model.layers.0.self_attn.q_norm.weight",) * 2,
            ("evil",) * 2,
            ("a\nb\x1b[2J", "a\\nb\\x1b"),
            ("x" * 100_000, "xxxx"),
        ]
    )
    d.change({name: torch.ones(d.rng.randint(1, 4))})
    return named(SINGLE_FILE, shown)


def not_finite(d: Draft) -> Named:
    """NaN or infinity anywhere in a norm or a weight, in any of the dtypes."""
    name = d.any_tensor()
    found = d.tensors()[name].to(d.rng.choice([torch.float32, torch.float16, torch.bfloat16]))
    value = d.rng.choice([float("nan"), float("inf"), -float("inf")])
    found.view(-1)[d.rng.randrange(found.numel())] = value
    d.change({name: found})
    return named(name)


# ------------------------------------------------------------------------------------ JSON files


def sizes(d: Draft) -> Named:
    """A size that is none."""
    field = d.rng.choice(
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ]
    )
    value = d.rng.choice([2**40, 2**70, 10**400, -1, 0, 48.0, 1.5, True, False, "48", "", [], {}])
    d.set(**{field: value})
    return named(CONFIG, field)


def huge_sizes(d: Draft) -> Named:
    """Sizes that could be, and are not those of the tensors."""
    field, value = d.rng.choice(
        [
            ("num_hidden_layers", 4095),
            ("vocab_size", 2**24),
            ("hidden_size", 2**24),
            ("intermediate_size", 2**24),
            ("num_attention_heads", 2**23),
            ("head_dim", 1024),
        ]
    )
    d.set(**{field: value})
    return named("model.")


def too_many_layers(d: Draft) -> Named:
    """Layers that nobody has."""
    d.set(num_hidden_layers=d.rng.choice([4096, 10**6, 2**31, 2**62]))
    return named(CONFIG, "num_hidden_layers")


def other_fields(d: Draft) -> Named:
    """Fields of config.json with another type, or beyond what a formula can take."""
    field, value = d.rng.choice(
        [
            ("rms_norm_eps", "small"),
            ("rms_norm_eps", 0),
            ("rms_norm_eps", float("nan")),
            ("rope_theta", -1.0),
            ("rope_theta", 1.0),
            ("rope_theta", 1e300),
            ("rope_scaling", {"rope_type": "warp"}),
            ("rope_scaling", {"rope_type": "yarn", "mscale": -1e9, "factor": 2.0}),
            ("rope_scaling", {"rope_type": "yarn", "beta_fast": 1e-320, "factor": 2.0}),
            ("rope_scaling", {"rope_type": "llama3"}),
            ("rope_scaling", 0),
            ("rope_scaling", "linear"),
            ("rope_scaling", {"rope_type": {}}),
            ("rope_parameters", []),
            ("tie_word_embeddings", "yes"),
            ("attention_bias", 1),
            ("dtype", 0),
            ("dtype", "int8"),
            ("dtype", ["float32"]),
            ("architectures", [[]]),
            ("architectures", ["GPT2LMHeadModel"]),
            ("architectures", {"a": "LlamaForCausalLM"}),
            ("hidden_act", {}),
            ("quantization_config", {}),
            ("pretraining_tp", "1"),
        ]
    )
    d.set(**{field: value})
    return named(CONFIG, field)


def rope_of_tiny_heads(d: Draft) -> Named:
    """Dynamic RoPE divides by the head's size less 2."""
    d.set(head_dim=2, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    return named(CONFIG)


def longrope_of_one_token(d: Draft) -> Named:
    """LongRoPE divides by the logarithm of the original context."""
    factors = [1.0] * 4
    d.set(
        original_max_position_embeddings=1,
        rope_scaling={
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": factors,
            "long_factor": factors,
        },
    )
    return named(CONFIG)


def sliding_window(d: Draft) -> Named:
    """A window that is none."""
    d.set(
        architectures=["MistralForCausalLM"],
        sliding_window=d.rng.choice([0, -5, 2**40, "8", 4.5, True, []]),
    )
    return named(CONFIG, "sliding_window")


def eos(d: Draft) -> Named:
    """EOS ids that are none, in the file that has the last word."""
    value = d.rng.choice(["2", [1, "2"], -1, 1.5, [[1]], {"id": 2}, True])
    (d / GENERATION).write_text(json.dumps({"eos_token_id": value}), encoding="utf-8")
    return named(GENERATION, "eos_token_id")


def json_file(d: Draft) -> tuple[str, tuple[str, ...]]:
    """Choose a JSON file; return its name and who reads it."""
    both = ("tee", "service")
    name = d.rng.choice([CONFIG, GENERATION, TOKENIZER, INDEX_FILE])
    if name == INDEX_FILE:
        d.shard()
    return name, ("tee",) if name == TOKENIZER else both


def nested(d: Draft) -> Named:
    """JSON that is nested a hundred thousand times, alone or behind a field."""
    name, by = json_file(d)
    opening = d.rng.choice([b"[", b'{"a":', b'{"version":', b'{"weight_map":'])
    depth = d.rng.choice([1_100, 5_000, 100_000, 200_000])
    closing = b"]" if opening == b"[" else b"}"
    whole = d.rng.random() < 0.5
    (d / name).write_bytes(opening * depth + (b"0" + closing * depth if whole else b""))
    return Named((name,), by)


def nested_header(d: Draft) -> Named:
    """The same in the header of the weights."""
    d.write(d.rng.choice([b"[", b'{"a":']) * d.rng.choice([2_000, 500_000]), b"")
    return named(SINGLE_FILE)


def large_json(d: Draft) -> Named:
    """A file that is larger than any that means something."""
    name, by = json_file(d)
    with (d / name).open("r+b") as file:
        file.truncate(d.rng.choice([40_000_000, 10**9, 2**40]))
    return Named((name,), by)


def worst_json(d: Draft) -> Named:
    """As much JSON as may be, of the kind that takes most memory; a list, where none may be."""
    name, by = json_file(d)
    unit = d.rng.choice([b"[],", b"{},", b'"\xc3\xa9",', b"1.5,"])
    (d / name).write_bytes(b"[" + unit * (2_000_000 // len(unit)) + b"0]")
    return Named((name,), by)


def worst_tokenizer(d: Draft) -> Named:
    """The same for the tokenizer, which may be larger, and as large as it may be."""
    unit = d.rng.choice([b"[],", b"{},", b'"\xc3\xa9",', b"1.5,"])
    unit = unit[:-1] + b" " * d.rng.choice([0, 9, 11, 40]) + b","
    field = d.rng.choice([b"a", b"model", b"added_tokens", b"normalizer"])
    body = b'{"' + field + b'": [' + unit * (25_000_000 // len(unit)) + b"0]}"
    (d / TOKENIZER).write_bytes(body)
    return Named((TOKENIZER,), ("tee",))


def change_tokenizer(d: Draft, **changes: object) -> None:
    """Exchange parts of the tokenizer."""
    content = json.loads((d / TOKENIZER).read_text(encoding="utf-8"))
    (d / TOKENIZER).write_text(json.dumps({**content, **changes}), encoding="utf-8")


def panicking_tokenizer(d: Draft) -> Named:
    """A tokenizer at which the library panics instead of raising."""
    content = json.loads((d / TOKENIZER).read_text(encoding="utf-8"))
    suffix = {**content["model"], "continuing_subword_prefix": "x" * d.rng.randint(20, 40)}
    charsmap = d.rng.choice(["AAAA", "AA=="])
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    change_tokenizer(d, **d.rng.choice([{"model": suffix}, {"normalizer": normalizer}]))
    return Named((TOKENIZER,), ("tee",))


def damaged_json(d: Draft) -> Named:
    """Cut off, empty, not UTF-8, no object."""
    name, by = json_file(d)
    content = (d / name).read_bytes()
    cut = content[: d.rng.randrange(len(content) - 1)]
    spoilt = [cut, b"", b"\xff\xfe", b"null", b"[]", b'"text"', b"\x80\x04N.", b"\0" * 100]
    (d / name).write_bytes(d.rng.choice(spoilt))
    return Named((name,), by)


def repeated_key(d: Draft) -> Named:
    """One key twice: two readers could take different ones."""
    where = d.rng.choice([CONFIG, GENERATION, INDEX_FILE, SINGLE_FILE])
    if where == CONFIG:
        key = d.rng.choice(sorted(BASE))
        text = (d / CONFIG).read_text(encoding="utf-8")
        (d / CONFIG).write_text(text[:-1] + f', "{key}": {json.dumps(BASE[key])}}}')
    elif where == GENERATION:
        key = "eos_token_id"
        (d / GENERATION).write_text('{"eos_token_id": 1, "eos_token_id": 1}')
    elif where == INDEX_FILE:
        key = d.rng.choice(sorted(d.shard()))
        text = (d / INDEX_FILE).read_text(encoding="utf-8")
        (d / INDEX_FILE).write_text(text[:-2] + f', "{key}": "a.safetensors"}}}}')
    else:
        header, data = d.header()
        key = d.any_tensor()
        raw = json.dumps(header)[:-1] + f', "{key}": {json.dumps(header[key])}}}'
        d.write(raw.encode(), data)
    return named(where, key)


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
