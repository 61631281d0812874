"""Model directories that are spoilt in every way, and good ones that look odd."""

import json
import os
import pickle
import random
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
SHARDS = ("a.safetensors", "b.safetensors")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    **SIZES,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}

Parts = tuple[str, ...]


class Draft:
    """A good model directory that is about to be spoilt.

    What changes it returns what the refusal must name: the file, and the field if there is one.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.chance = directory, random.Random(seed)

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    def pick(self, *values: Any) -> Any:
        return self.chance.choice(values)

    def raw(self, name: str, content: bytes) -> Parts:
        (self / name).write_bytes(content)
        return (name,)

    def json(self, name: str) -> Any:
        return json.loads((self / name).read_text(encoding="utf-8"))

    def put(self, name: str, **fields: object) -> Parts:
        self.raw(name, json.dumps({**self.json(name), **fields}).encode())
        return name, *fields

    @property
    def weights(self) -> bytes:
        return (self / SINGLE_FILE).read_bytes()

    @property
    def header(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.weights[8 : self._data_at])
        return found

    @property
    def _data_at(self) -> int:
        return 8 + int.from_bytes(self.weights[:8], "little")

    def write(self, header: object, data: bytes | None = None) -> Parts:
        """Write weights with any header: an object, or bytes as they are."""
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        data = self.weights[self._data_at :] if data is None else data
        return self.raw(SINGLE_FILE, len(raw).to_bytes(8, "little") + raw + data)

    def shard(self) -> None:
        """Divide the weights in two files and an index."""
        tensors, files = load_file(self / SINGLE_FILE), dict[str, str]()
        (self / SINGLE_FILE).unlink()
        for number, file in enumerate(SHARDS):
            part = {name: tensors[name] for name in sorted(tensors)[number::2]}
            save_file(part, self / file)
            files |= dict.fromkeys(part, file)
        self.raw(INDEX_FILE, json.dumps({"metadata": {}, "weight_map": files}).encode())

    def a_file(self, *names: str) -> str:
        """Choose a file, which is there then."""
        name: str = self.pick(*names)
        if name in (INDEX_FILE, *SHARDS):
            self.shard()
        return name

    def worst(self, size: int) -> bytes:
        """Return as much JSON, of a kind that takes most memory."""
        unit: bytes = self.pick(b"[],", b"{},", b'"\xc3\xa9",', b"1.5,")
        return b"[" + unit * (size // len(unit)) + b"0]"


JSON = (CONFIG, GENERATION, TOKENIZER, INDEX_FILE)
ALL = (CONFIG, SINGLE_FILE, GENERATION, TOKENIZER, INDEX_FILE, *SHARDS[:1])


def header_length(d: Draft) -> Parts:
    right, most = int.from_bytes(d.weights[:8], "little"), len(d.weights)
    near = (right - 1, right - 50, right + 1, right + 200, most)
    wrong: int = d.pick(0, 1, *near, 2**32, 2**63, 2**64 - 1)
    return d.raw(SINGLE_FILE, wrong.to_bytes(8, "little") + d.weights[8:])


def large_header(d: Draft) -> Parts:
    filling, size = d.pick(b" ", b"[],", b'"a":1,', b"\0"), 100_000_000
    d.write((b"{" + filling * (size // len(filling)))[:size], b"")
    return SINGLE_FILE, "header length"


def bad_offsets(d: Draft) -> Parts:
    """Offsets that overlap, leave a gap, end outside, or are no numbers."""
    header = d.header
    ends = {name: one["data_offsets"] for name, one in header.items() if name != "__metadata__"}
    name = d.pick(*sorted(ends))
    begin, end = ends[name]
    size, most = end - begin, max(one for _, one in ends.values())
    other = next(one for one, _ in ends.values() if one != begin)
    outside = [[other, other + size], [begin + 4, end + 4], [most, most + size], [end, begin]]
    outside += [[begin - 2**40, end - 2**40], [begin, 2**63], [2**70, 2**70 + size]]
    nonsense = [[float(begin), float(end)], [str(begin), str(end)], [begin, end, end], [begin]]
    wrong = d.pick(*outside, *nonsense, None, [True, end])
    d.write({**header, name: header[name] | {"data_offsets": wrong}})
    return SINGLE_FILE, "data_offsets"


def nested(d: Draft) -> Parts:
    opening, depth = d.pick(b"[", b'{"a":', b'{"version":', b'{"weight_map":'), 100_000
    closing, depth = b"]" if opening == b"[" else b"}", d.pick(1_100, 5_000, depth, 2 * depth)
    return d.raw(d.a_file(*JSON), opening * depth + d.pick(b"", b"0" + closing * depth))


def large_json(d: Draft) -> Parts:
    name = d.a_file(*JSON)
    os.truncate(d / name, d.pick(40_000_000, 10**9, 2**40))
    return (name,)


def panicking_tokenizer(d: Draft) -> Parts:
    """One at which the library panics instead of raising."""
    suffix = {"continuing_subword_prefix": "x" * d.chance.randint(20, 40)}
    normalizer = {"type": "Precompiled", "precompiled_charsmap": d.pick("AAAA", "AA==")}
    model = d.json(TOKENIZER)["model"] | suffix
    return d.put(TOKENIZER, **d.pick({"model": model}, {"normalizer": normalizer}))[:1]


def repeated_key(d: Draft) -> Parts:
    """Two readers could take different ones."""
    name = d.a_file(CONFIG, GENERATION, INDEX_FILE, SINGLE_FILE)
    found = d.header if name == SINGLE_FILE else d.json(name)
    inner, depth = (found["weight_map"], 2) if name == INDEX_FILE else (found, 1)
    key = d.pick(*sorted(inner.keys() - {"__metadata__"}))
    again = f", {json.dumps(key)}: {json.dumps(inner[key])}" + "}" * depth
    raw = (json.dumps(found)[:-depth] + again).encode()
    return (*(d.write(raw) if name == SINGLE_FILE else d.raw(name, raw)), key)


def link_outside(d: Draft) -> Parts:
    name = d.a_file(*ALL)
    outside = d.directory.parent / f"outside-{name}"
    (d / name).rename(outside)
    (d / name).symlink_to(d.pick(outside, Path("..") / outside.name, "nowhere", name))
    return (name,)


def _bind(path: Path) -> None:
    # The name of a socket is short: it is bound through the directory's descriptor.
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def other_kind(d: Draft) -> Parts:
    """A directory, a pipe, a socket, a device or an empty file where a file should be."""
    name, device = d.a_file(*ALL), d.pick("/dev/zero", "/dev/stdin", "/dev/tty", "/proc/self/mem")
    (d / name).unlink()
    d.pick(Path.mkdir, os.mkfifo, _bind, Path.touch, lambda p: p.symlink_to(device))(d / name)
    return (name,)


class _Runs:
    """Unpickled, it ends the process."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.abort, ()


def pickle_by_magic(d: Draft) -> Parts:
    """A pickle under the name of safetensors: every protocol, and torch's zip."""
    if (protocol := d.chance.randint(1, 5)) > 1:
        return d.raw(SINGLE_FILE, pickle.dumps(_Runs(), protocol=protocol) + bytes(100))
    with zipfile.ZipFile(d / SINGLE_FILE, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Runs(), protocol=2))
    return (SINGLE_FILE,)


def remove(d: Draft, name: str) -> Parts:
    (d / name).unlink()
    return (d.directory.name,)


_NO_SIZES = (2**40, 2**70, 10**400, -1, 0, 48.0, 1.5, True, False, "48", "", [], {})
# Sizes that could be, and are not those of the tensors.
HUGE = {
    **{f"{name}_size": 2**24 for name in ("vocab", "hidden", "intermediate")},
    "num_hidden_layers": 4095,
    "num_attention_heads": 2**23,
    "head_dim": 1024,
}
CASES: dict[str, Callable[[Draft], Parts]] = {
    "truncated": lambda d: d.raw(SINGLE_FILE, d.weights[: d.chance.randrange(len(d.weights))]),
    "trailing": lambda d: d.raw(
        SINGLE_FILE, d.weights + d.chance.randbytes(d.chance.randint(1, 2000))
    ),
    "header length": header_length,
    "large header": large_header,
    "nested header": lambda d: d.write(d.pick(b"[", b'{"a":') * d.pick(2_000, 500_000), b""),
    "bad offsets": bad_offsets,
    "no size": lambda d: d.put(CONFIG, **{d.pick(*SIZES): d.pick(*_NO_SIZES)}),
    "huge size": lambda d: (d.put(CONFIG, **dict([d.pick(*HUGE.items())])), ("model.",))[1],
    "too many layers": lambda d: d.put(CONFIG, num_hidden_layers=d.pick(4096, 10**6, 2**31, 2**62)),
    "nested": nested,
    "large JSON": large_json,
    "worst JSON": lambda d: d.raw(d.a_file(*JSON), d.worst(2_000_000)),
    "worst tokenizer": lambda d: d.raw(
        TOKENIZER,
        b'{"%s": %s}'
        % (d.pick(b"a", b"model", b"added_tokens", b"normalizer"), d.worst(25_000_000)),
    ),
    "panicking tokenizer": panicking_tokenizer,
    "repeated key": repeated_key,
    "link outside": link_outside,
    "other kind of file": other_kind,
    "pickle by magic": pickle_by_magic,
    "no weights": lambda d: remove(d, SINGLE_FILE),
    "no configuration": lambda d: remove(d, CONFIG),
}


# What must not be refused.
GOOD: tuple[Callable[[Draft], object], ...] = (lambda _: None, Draft.shard)
