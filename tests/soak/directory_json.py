"""Ways to spoil the JSON files of a model directory."""

from __future__ import annotations

import json

from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE
from tests.soak.directory_draft import BASE, CONFIG, GENERATION, TOKENIZER, Draft, Named, named


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
