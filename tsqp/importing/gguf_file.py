"""A model in one file of GGUF: weights, settings, tokenizer and template.

Read by the library gguf; transformers makes the tokenizer. The file has llama.cpp's names, its
order of the rows of queries and keys, and norms to which what an architecture adds has been added.
What its metadata say and this module does not know is refused: it would change the model.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from mmap import MADV_DONTNEED
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Regex, normalizers, pre_tokenizers

from protocol.errors import ModelError, describe, shown
from protocol.model.architectures import ARCHITECTURES, Architecture
from tsqp.importing.sources import write_json

# Architectures of llama.cpp, and which of ours they are.
NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "arcee": "ArceeForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
}
# Those whose files keep queries and keys of neighbours where ours has halves.
_PERMUTED = ("llama", "granite", "smollm3", "arcee", "mistral3")
# Layers of Gemma 27B, which scales scores by hidden_size / heads: llama.cpp, too, counts them.
_27B = {"gemma2": 46, "gemma3": 62}
# Metadata behind the architecture's name, and the keys of config.json that they are.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "use_parallel_residual": "use_parallel_residual",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
_EPS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
# Read elsewhere, or by nobody: sizes that tensors have, too.
_PATTERN_KEY = "attention.sliding_window_pattern"
_READ = (*_EPS, _PATTERN_KEY, "rope.dimension_count", "logit_scale", "attention.value_length")
# By how much frequencies of Llama 3.1, 3.2 and EXAONE 4 are divided, and what of: the tensor with
# the factors, by what slow ones are divided, and the context that they were trained with.
_FACTORS, _LLAMA3, _TRAINED = "rope_freqs.weight", (8.0, 16.0, 32.0), 8192
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# How texts are cut before their bytes are merged, by the name that a file has for it: digits one by
# one, then words; or by a pattern, of which some have digits alone and some by threes.
_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_WORDS = ("default", "gpt-2", "olmo", "phi-2", "exaone4")
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREES = _PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_CASES_O = _CASES.replace("+|[", f"+{_ENDINGS}[", 1).replace(
    r"*|\p{N}|", rf"*{_ENDINGS}\p{{N}}{{1,3}}|"
)
CUTS = {
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), _PATTERN),
    **dict.fromkeys(("llama-bpe", "llama3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREES),
    "seed-coder": _PATTERN.replace(r"\p{N}]+[\r\n]*|", r"\p{N}\r\n]+|"),
    "tekken": _CASES,
    "gpt-4o": _CASES_O,
}
# Those that llama.cpp puts BOS in front of unless a file says otherwise, and that take a word that
# the vocabulary has whole, whatever merges would make of it.
_WHOLE_WORDS = ("llama-bpe", "llama3", "tekken")
_CONTROL = 3
# Control tokens that end a turn, whatever a file calls its end of text.
_ENDS = re.compile(r"<\|(?:eot_id|eom_id|im_end|end|end_of_turn)\|>|<end_of_turn>")


class _Bounded(gguf.GGUFReader):
    """The library's reader, which looks for no end: neither of a count nor of a text."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise IndexError("more than the file has")
        return super()._get(offset, dtype, count, override_order)


class Gguf:
    """See `sources.Source`. Raises ModelError for a file that is none, damaged, or not known."""

    dtype = torch.bfloat16

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, (path,)
        damages = (ValueError, IndexError, KeyError, OverflowError, RecursionError)
        with ModelError.instead_of(damages, str(path), "a damaged file", "a complete GGUF file"):
            self._reader = _Bounded(path)
            fields = self._reader.fields
            self._said = {key: field.contents() for key, field in fields.items()}
            parts = int(self._said.get("split.count", 0))
            blocks = int(self._said.get(f"{self._said['general.architecture']}.block_count", 0))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        ModelError.unless(
            parts < 2, str(path), "a part of a model", "a whole file: llama-gguf-split --merge"
        )
        self._check_places(path.stat().st_size)
        self._arch = str(self._said.get("general.architecture"))
        ModelError.unless(
            self._arch in NAMES,
            f"{path}: general.architecture",
            shown(self._arch),
            f"one of {', '.join(NAMES)}",
        )
        self._name = NAMES[self._arch]
        if self._arch == "olmo2" and f"olmo2.{_PATTERN_KEY}" in self._said:
            self._name = "Olmo3ForCausalLM"
        self._table: Architecture = ARCHITECTURES[self._name]
        self._check_tokenizer()
        kinds = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(kinds[self._arch], min(blocks, len(self._tensors)))

    def _check_places(self, size: int) -> None:
        """Refuse tensors that overlap, or reach beyond the file."""
        end = 0
        for tensor in sorted(self._reader.tensors, key=lambda one: one.data_offset):
            fits = end <= tensor.data_offset and tensor.data_offset + tensor.n_bytes <= size
            ModelError.unless(
                fits,
                f"{self.path}: {shown(tensor.name)}",
                f"bytes {tensor.data_offset} to {tensor.data_offset + tensor.n_bytes}",
                f"some behind {end} and before {size}",
            )
            end = tensor.data_offset + tensor.n_bytes

    def _own(self, key: str, default: Any = None) -> Any:
        """Return what the file says of its architecture. Raises ModelError where it has to."""
        found = self._said.get(f"{self._arch}.{key}", default)
        where = f"{self.path}: {self._arch}.{key}"
        ModelError.unless(found is not None, where, "nothing", "a value")
        return found

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """See `Source.settings`. Raises ModelError for metadata that are not known."""
        damages = (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError)
        with ModelError.instead_of(
            damages, f"{self.path}: metadata", "values that do not fit", "those of a model"
        ):
            return self._settings()

    def _settings(self) -> dict[str, Any]:
        start = f"{self._arch}."
        # A number that was rounded to 32 bits is the shortest one that is rounded so.
        own: dict[str, Any] = {
            key.removeprefix(start): float(str(np.float32(v))) if isinstance(v, float) else v
            for key, v in self._said.items()
            if key.startswith(start)
        }
        own.pop("vocab_size", None)  # the embedding has it
        unknown = sorted(own.keys() - {*_KEYS, *_SCALING, *_READ})
        got = f"{start}{shown(unknown[0])} = {describe(own[unknown[0]])}" if unknown else ""
        ModelError.unless(not unknown, f"{self.path}: metadata", got, "keys that are known")
        table, found = self._table, {_KEYS[key]: own[key] for key in own.keys() & _KEYS.keys()}
        heads, size = int(self._own("attention.head_count")), int(self._own("embedding_length"))
        head_dim = int(found.get("head_dim", size // heads))
        where = f"{self.path}: {start}attention.value_length"
        value = own.get("attention.value_length", head_dim)
        ModelError.unless(value == head_dim, where, describe(value), f"{head_dim}, as of keys")
        if "head_dim" in table.defaults:
            found["head_dim"] = head_dim
        eps = next((own[key] for key in _EPS if key in own), None)
        ModelError.unless(eps is not None, f"{self.path}: {_EPS[0]}", "nothing", "a value")
        turned = int(own.get("rope.dimension_count", head_dim))
        if turned != head_dim:
            found["partial_rotary_factor"] = turned / head_dim
        if "logit_scale" in own:
            granite = "logits_scaling" in {number.key for number in table.numbers.values()}
            found["logits_scaling" if granite else "logit_scale"] = own["logit_scale"]
        if "query_pre_attn_scalar" in table.defaults:
            large = found["num_hidden_layers"] == _27B[self._arch]
            found["query_pre_attn_scalar"] = size // heads if large else head_dim
        found["sliding_window"] = found.get("sliding_window") or None
        if (pattern := own.get(_PATTERN_KEY)) is not None:
            where, kinds = f"{self.path}: {start}{_PATTERN_KEY}", ("full", "sliding")
            ModelError.unless(isinstance(pattern, list), where, describe(pattern), "a list")
            found["layer_types"] = [f"{kinds[bool(window)]}_attention" for window in pattern]
        elif table.windows == "listed" and found["sliding_window"] is None:
            found["layer_types"] = ["full_attention"] * int(found["num_hidden_layers"])
        biased = {
            key: self.shape(f"model.layers.0.{table.modules[module].path}.bias") is not None
            for module, key in table.biases.items()
            if key and module in table.modules
        }
        rope = self._rope(own, found)
        return {
            "architectures": [self._name],
            "model_type": getattr(transformers, self._name).config_class.model_type,
            table.activation: table.defaults.get(table.activation, "silu"),
            table.norm_eps: eps,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[-1]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **biased,
            **found,
            "rope_parameters": rope,
            "bos_token_id": self._said.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self._said.get("tokenizer.ggml.padding_token_id"),
            "eos_token_id": self._ends(),
        }

    def _rope(self, own: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of RoPE, and of layers with a window their own where they have it."""
        theta = float(found.pop("rope_theta", 10_000.0))
        local = float(found.pop("rope_local_base_freq", 10_000.0))
        rope = {_SCALING[key]: own[key] for key in own.keys() & _SCALING.keys()}
        if _FACTORS in self._tensors:
            rope = self._llama3(theta)
        elif _LONG in self._tensors:
            for key, name in (("long_factor", _LONG), ("short_factor", _SHORT)):
                rope[key] = self._floats(self._tensors[name].data, self._tensors[name]).tolist()
            rope["rope_type"], context = "longrope", "original_max_position_embeddings"
            found[context] = rope[context]
        elif rope.get("rope_type", "none") == "none":  # what else is said is of no scaling
            rope = {"rope_type": "default"}
        elif "mscale_all_dim" in rope:  # to which the other of the two is 1
            rope["mscale"] = 1.0
        rope["rope_theta"] = theta
        if self._table.rope_by_type:
            plain = {"rope_type": "default", "rope_theta": local}
            return {"full_attention": rope, "sliding_attention": plain}
        return rope

    def _llama3(self, theta: float) -> dict[str, Any]:
        """Return the scaling of Llama 3.1 and later, of which a file has what it comes to."""
        found_c = self._floats(self._tensors[_FACTORS].data, self._tensors[_FACTORS])
        exponents_c = torch.arange(len(found_c)) / len(found_c)
        waves_c = 2 * math.pi * theta**exponents_c
        for factor in _LLAMA3:
            blend_c = ((_TRAINED / waves_c - 1.0) / (4.0 - 1.0)).clamp(0, 1)
            if torch.allclose(1 / ((1 - blend_c) / factor + blend_c), found_c, rtol=1e-3):
                scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
                more = {"high_freq_factor": 4.0, "original_max_position_embeddings": _TRAINED}
                return scaling | more
        raise ModelError(
            f"{self.path}: {_FACTORS}", "other factors", "those of Llama 3.1, 3.2 or EXAONE 4"
        )

    def _stored(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        return f"{self._names.get_name(stem)}.{kind}"

    def left(self, wanted: Iterable[str]) -> list[str]:
        """See `Source.left`."""
        read = {_FACTORS, _LONG, _SHORT, *map(self._stored, wanted)}
        return sorted(self._tensors.keys() - read)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Source.shape`."""
        found = self._tensors.get(self._stored(name))
        return None if found is None else tuple(int(n) for n in reversed(found.shape))

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """See `Source.rows`."""
        tensor = self._tensors[self._stored(name)]
        size = self._head_rows(name)
        first, last = rows.start // size, -(-rows.stop // size)
        found = self._floats(tensor.data[first * size : last * size], tensor)
        # Pages that a mapping has read stay in memory for as long as there is some.
        mapping: Any = self._reader.data.base
        mapping.madvise(MADV_DONTNEED)
        if size > 1:  # rows 2 i and 2 i + 1 of a head are i and i + n
            found = found.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)
        offset = self._table.norm_offset if name.endswith("norm.weight") else 0.0
        return found[rows.start - first * size : rows.stop - first * size] - offset

    def _floats(self, data: Any, tensor: Any) -> torch.Tensor:
        found: np.ndarray[Any, Any] = gguf.quants.dequantize(data, tensor.tensor_type)
        return torch.from_numpy(np.array(found, dtype=np.float32, copy=True))

    def _head_rows(self, name: str) -> int:
        """Return how many rows have an order of their own: a head's, or 1."""
        if self._arch not in _PERMUTED or not re.search(r"\.[qk]_proj\.", name):
            return 1
        heads, size = self._own("attention.head_count"), self._own("embedding_length")
        return int(self._own("attention.key_length", size // heads))

    def _check_tokenizer(self) -> None:
        """Refuse one that would cut texts in another way."""
        where = f"{self.path}: tokenizer.ggml"
        model, pre = (self._said.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        right = model in ("llama", "gpt2")
        ModelError.unless(right, f"{where}.model", describe(model), "llama or gpt2")
        cut = (*_DIGITS, *_WORDS, *CUTS)
        right = model == "llama" or pre in (None, *cut)
        ModelError.unless(right, f"{where}.pre", describe(pre), f"one of {', '.join(cut)}")

    def _ends(self) -> list[int]:
        """Return the ids behind which nothing comes: of a text, a message, a turn."""
        named = (self._said.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
        tokens = self._said.get("tokenizer.ggml.tokens") or []
        kinds = self._said.get("tokenizer.ggml.token_type") or []
        both = enumerate(zip(tokens, kinds, strict=False))
        more = (at for at, (text, kind) in both if kind == _CONTROL and _ENDS.fullmatch(text))
        return list(dict.fromkeys(int(end) for end in (*named, *more) if end is not None))

    def copy_beside(self, directory: Path) -> None:
        """See `Source.copy_beside`."""
        pre = self._said.get("tokenizer.ggml.pre")
        more: Any = {"add_bos_token": True} if pre in _WHOLE_WORDS else {}
        tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(
            self.path.parent,
            gguf_file=self.path.name,
            **more,
        )
        raw, words = tokenizer.backend_tokenizer, pre_tokenizers.ByteLevel
        if self._said.get("tokenizer.ggml.model") == "gpt2" and pre is not None:
            if pre in CUTS:
                split = pre_tokenizers.Split(Regex(CUTS[pre]), "isolated")
                cut = [split, words(add_prefix_space=False, use_regex=False)]
                raw.normalizer = normalizers.NFC() if pre in ("qwen2", "deepseek-r1-qwen") else None
            else:
                digits = [pre_tokenizers.Digits(individual_digits=True)] * (pre in _DIGITS)
                cut = [*digits, words(add_prefix_space=False)]
            raw.pre_tokenizer = pre_tokenizers.Sequence(cut)
            raw.model.ignore_merges = pre in _WHOLE_WORDS
        tokenizer.save_pretrained(directory)
        # A class of the library may have added tokens that the model does not know.
        content, size = json.loads(raw.to_str()), len(self._said["tokenizer.ggml.tokens"])
        content["added_tokens"] = [one for one in content["added_tokens"] if one["id"] < size]
        write_json(directory / "tokenizer.json", content)
        write_json(directory / "generation_config.json", {"eos_token_id": self._ends()})
