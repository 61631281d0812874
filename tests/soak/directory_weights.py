"""Ways to spoil a weight file: its bytes, and its tensors."""

from __future__ import annotations

import torch

from protocol.model.checkpoint import SINGLE_FILE
from tests.soak.directory_draft import Draft, Named, named


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
