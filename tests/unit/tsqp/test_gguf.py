"""A GGUF file becomes the directory that it was made of; a damaged one is refused, and in time."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from protocol.errors import ModelError
from protocol.model.config import read_config
from tee_side.engine.tokenizer import Tokenizer
from tests.kit import gguf_files
from tests.kit.model import Models, assemble, token_ids
from tests.kit.rows import each_row
from tsqp.importing import plain
from tsqp.importing.gguf_file import CUTS
from tsqp.importing.plain import import_model, open_source

DOWN = "blk.1.ffn_down.weight"
_PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
_YARN = {**_YARN, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "low_freq_factor": 1.0}
_LLAMA3 = {**_LLAMA3, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_WINDOW = {"sliding_window": 5}


def _layers(count: int, every: int) -> dict[str, Any]:
    """Windows but in every so manyth layer."""
    types = [f"{'sliding' if at % every else 'full'}_attention" for at in range(1, count + 1)]
    return {"num_hidden_layers": count, "layer_types": types, "sliding_window": 5}


def _by_type(full: dict[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": _PLAIN | {"rope_theta": theta},
        }
    }


# Of each kind what a file can say, with what llama.cpp takes for granted.
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    ("llama", {"rope_parameters": _LLAMA3 | {"factor": 8.0}, "max_position_embeddings": 131_072}),
    ("llama", {"rope_parameters": _PLAIN | {"rope_type": "linear", "factor": 4.0}}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"rope_parameters": _YARN}),
    ("qwen3", {"rope_parameters": _YARN | {"attention_factor": 1.0}}),
    ("gemma", {}),
    ("gemma2", {"query_pre_attn_scalar": 16, **_layers(4, 2)}),
    ("gemma2", {"query_pre_attn_scalar": 8, **_layers(46, 2)}),
    ("gemma3", {"query_pre_attn_scalar": 16, **_layers(7, 6), **_by_type(_PLAIN, 500.0)}),
    (
        "gemma3",
        {"query_pre_attn_scalar": 8, **_layers(62, 6)}
        | _by_type(_PLAIN | {"rope_type": "linear", "factor": 8.0}),
    ),
    ("phi3", {}),
    ("phi4-mini", {}),
    ("granite", {"attention_bias": True}),
    ("olmo2", {}),
    ("olmo3", {**_layers(4, 2), **_by_type(_YARN)}),
    ("exaone4", _layers(4, 4)),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    ("cohere", {}),
    ("cohere2", _layers(5, 4)),
    ("glm4", {}),
    ("ernie4.5", {"use_bias": False}),
    ("ministral3", {}),
    ("stablelm", {}),
    ("starcoder2", {"sliding_window": None}),
    ("nemotron", {}),
    ("seed-oss", {"attention_out_bias": False}),
    ("arcee", {}),
]


@each_row("row", MODELS)
def test_it_becomes_the_model_that_it_was_made_of(
    saved_model: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: tuple[str, dict[str, Any]],
) -> None:
    """Also where a block of rows ends within a head."""
    monkeypatch.setattr(plain, "_BLOCK_ELEMENTS", 5 * 48)
    kind, settings = row
    model = saved_model(kind, **settings)
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
    gguf_files.write(file, model.directory, kind.replace("phi4-mini", "phi3"))
    import_model(open_source(file), file.with_suffix(""), "float32")
    found, said = (read_config(path) for path in (file.with_suffix(""), model.directory))
    assert (found.norm_eps, found.score_scale) == (said.norm_eps, said.score_scale)
    ids, right = token_ids(24), model.logits(token_ids(24))
    error = (assemble(file.with_suffix("")).logits(ids) - right).abs().max() / right.abs().max()
    assert error < 5e-5  # of 46 layers; a mistake shows in hundredths


def test_numbers_in_eight_bits_the_tokenizer_and_the_ends_of_turns(
    saved_model: Models, tmp_path: Path
) -> None:
    model = saved_model("llama")
    file, made = tmp_path / "model.gguf", tmp_path / "made"
    gguf_files.write(file, model.directory, "llama", few="ffn_down")
    import_model(open_source(file), made, "float32")
    (shard,) = made.glob("*.safetensors")
    found, right = load_file(shard), load_file(model.directory / "model.safetensors")
    assert found.keys() == right.keys()
    for name, weight in right.items():
        # A block of eight bits has a scale in sixteen.
        bound = float(weight.abs().max()) / 127 if "down" in name else 0.0
        torch.testing.assert_close(found[name], weight, rtol=0, atol=bound)
    assert read_config(made).eos_token_ids == {1, 2}
    tokenizer = Tokenizer(made)
    ids = tokenizer.encode("the the 12", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the the 12"
    # Digits are cut before they could be merged.
    assert len(ids) == 5
    # What a class of transformers adds, and the model does not have.
    assert len(tokenizer.encode("<|endoftext|>", add_special_tokens=False)) > 1


TEXT = "It's WE'RE\tnaïve 12345 Ünïcode4you?!\r\n\n  x = a_b;  …你好\n // end  "


@each_row("name", sorted(set(CUTS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_texts_are_cut_as_transformers_cuts_them(name: str) -> None:
    ours, theirs = (
        Split(Regex(one[name]), "isolated").pre_tokenize_str(TEXT)
        for one in (CUTS, GGUF_PRE_TOKENIZER_SPLITS)
    )
    assert ours == theirs
    assert len(ours) > 20


def test_seed_s_signs_do_not_take_the_end_of_a_line() -> None:
    """As in llama.cpp: transformers does not have this one. All else is Qwen's way."""
    pieces = [
        [piece for piece, _ in Split(Regex(CUTS[name]), "isolated").pre_tokenize_str(TEXT)]
        for name in ("seed-coder", "qwen2")
    ]
    seed, qwen = (cut.index("you") for cut in pieces)
    assert pieces[0][seed + 1 : seed + 3] == ["?!", "\r\n\n"]
    assert pieces[1][qwen + 1] == "?!\r\n\n"
    assert pieces[0][: seed + 1] == pieces[1][: qwen + 1]


def test_llama_3_begins_with_bos_and_takes_words_whole(saved_model: Models, tmp_path: Path) -> None:
    """As llama.cpp does, whose files may leave that out."""
    file, made = tmp_path / "model.gguf", tmp_path / "made"
    gguf_files.write(file, saved_model("llama").directory, "llama", pre="llama-bpe")
    import_model(open_source(file), made)
    tokenizer = Tokenizer(made)
    assert tokenizer.encode("the") == [0, tokenizer.raw.token_to_id("the")]
    # In the vocabulary, and no merge makes it.
    assert tokenizer.encode("ab", add_special_tokens=False) == [tokenizer.raw.token_to_id("ab")]


def _patched(content: bytes, name: str, change: Callable[[list[int]], None]) -> bytes:
    """Change what the file says of a tensor: dims, then its type and its offset."""
    at = content.index(name.encode()) + len(name)
    (axes,) = struct.unpack_from("<I", content, at)
    form = f"<{axes}QIQ"
    said = list(struct.unpack_from(form, content, at + 4))
    change(said)
    spoilt = bytearray(content)
    struct.pack_into(form, spoilt, at + 4, *said)
    return bytes(spoilt)


def _set(index: int, value: int) -> Callable[[bytes], bytes]:
    def change(said: list[int]) -> None:
        said[index] = value

    return lambda content: _patched(content, DOWN, change)


def _counted(count: int) -> Callable[[bytes], bytes]:
    """Change how many tokens there are."""
    key = b"tokenizer.ggml.tokens"

    def change(content: bytes) -> bytes:
        at = content.index(key) + len(key) + 8  # behind the types of an array and of what it holds
        return content[:at] + struct.pack("<Q", count) + content[at + 8 :]

    return change


def _said(text: str, other: str) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(text.encode(), other.encode())


@each_row(
    ("spoil", "said"),
    [
        (lambda c: b"PK\x03\x04" + c[4:], "begins with b'PK.*expected a GGUF file"),
        (lambda c: c[: len(c) // 2], "damaged file"),
        (lambda c: c[:100], "damaged file"),
        (lambda c: c[:9], "damaged file"),
        (_set(0, 2**60), "damaged file"),
        (_set(1, 2**60), "damaged file"),
        (_set(0, 64), r"got shape \[48, 64\]"),
        (_set(-1, 0), "expected some behind"),
        (_set(-1, 2**40), "damaged file"),
        (_set(-2, 99), "damaged file"),
        (_counted(2**60), "damaged file"),
        (_said("llama.rope.freq_base", "llama.rope.freq_bass"), "freq_bass = 10000"),
        (_said("llama", "mamba"), "general.architecture: got mamba"),
        (_said("smollm", "smalls"), "pre: got 'smalls'"),
        (_said("gpt2", "bert"), "model: got 'bert'"),
    ],
)
def test_a_damaged_file_is_refused_and_leaves_nothing_that_looks_whole(
    saved_model: Models, tmp_path: Path, spoil: Callable[[bytes], bytes], said: str
) -> None:
    file = tmp_path / "model.gguf"
    gguf_files.write(file, saved_model("llama").directory, "llama")
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ModelError, match=said) as caught:
        import_model(open_source(file), tmp_path / "made")
    assert str(file) in str(caught.value) or "down" in str(caught.value)
    assert not (tmp_path / "made").exists()
