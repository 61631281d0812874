"""Targets that read files: of models, tokenizers, pads, keys, calibrations, policies and settings.

A case is one file. What stands around it (the other files of a model directory, the key of a bank)
is written once. Where a file is authenticated, a second target seals what it changed, so that what
lies behind the seal is reached as well.
"""

from __future__ import annotations

import hmac
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from multiprocessing import util
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save, save_file

from gpu_side.access import read_allow_list
from gpu_side.provision import PROVISION_FILE, Provision, read_provision, write_provision
from protocol import curve
from protocol.errors import (
    CalibrationError,
    FeatureKeyError,
    KeyFileError,
    ManifestError,
    ModelError,
    PadBankError,
    PolicyError,
    PromptError,
    SettingsError,
)
from protocol.model.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.manifest import Manifest
from tee_side.engine.text_stream import TextStream
from tee_side.engine.tokenizer import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE, Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.protect.calibration import CALIBRATION_FILE, Calibration
from tee_side.protect.pads import bank_format
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tests.fuzz.engine import Case, Target
from tests.fuzz.mutate import Mutator, json_junk
from tests.kit import pads as tiny
from tsqp.calibrate import calibrate_on, save_calibration
from tsqp.cli.settings import CONTEXT, config_option
from tsqp.key_files import public_key_of
from tsqp.lab.research.feature_key import FeatureKey
from tsqp.manifest import make_manifest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [2, 3],
    "torch_dtype": "float32",
    "attention_bias": False,
}


@cache
def _root() -> Path:
    """Return a folder of this process, in memory where there is such a file system."""
    shared = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="tsqp-fuzz-", dir=shared if shared.is_dir() else None)
    # Not atexit: a worker of a pool ends without it.
    util.Finalize(None, shutil.rmtree, (made, True), exitpriority=1)
    return Path(made)


@cache
def _folder(name: str) -> Path:
    folder = _root() / name
    folder.mkdir()
    return folder


def _tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    operators = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    shapes = light_tensors(config) | linear_tensors(config, operators)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@cache
def tiny_model() -> Path:
    """Return the directory of a model of two layers and 8 wide."""
    folder = _folder("model")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(_tensors(read_config(folder)), folder / SINGLE_FILE)
    return folder


@cache
def tiny_calibration() -> bytes:
    """Return the calibration file of the tiny model."""
    model, path = tiny_model(), _folder("calibrated") / CALIBRATION_FILE
    config, checkpoint = read_config(model), Checkpoint(model)
    save_calibration(calibrate_on(config, checkpoint, [[1, 2, 3, 4]]), path)
    return path.read_bytes()


def _without_headroom() -> Case:
    """Return a calibration with a limit that is positive, and nothing once it is divided."""
    content = bytearray(tiny_calibration())
    size = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + size])["norm_limit"]["data_offsets"]
    least = (1).to_bytes(8, "little")  # the smallest float64 above zero
    content[8 + size + begin : 8 + size + end] = least * ((end - begin) // 8)
    return (bytes(content),)


# ------------------------------------------------------------------------------------ executing


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def _config(case: Case) -> str:
    folder = _folder("config")
    _write(folder / "config.json", case[0])
    config = read_config(folder)
    return f"{config.architecture} {config.rope.rope_type} {len(config.biased_modules)}"


def _generation(case: Case) -> str:
    folder = _folder("generation")
    _write(folder / "config.json", json.dumps(CONFIG).encode())
    _write(folder / "generation_config.json", case[0])
    return f"{min(3, len(read_config(folder).eos_token_ids))} ids"


def _weights(case: Case) -> str:
    folder = _folder("weights")
    _write(folder / SINGLE_FILE, case[0])
    return _use(folder)


def _use(folder: Path) -> str:
    config = read_config(tiny_model())
    checkpoint = Checkpoint(folder)
    checkpoint.require(light_tensors(config))
    checkpoint.refuse_extra(config)
    name = "model.norm.weight"
    destination = torch.empty(light_tensors(config)[name])
    checkpoint.copy_into(name, destination)
    return f"{checkpoint.holds(linear_tensors(config, ('o_proj',)))}"


def _index(case: Case) -> str:
    folder = _folder("index")
    if not (folder / "a.safetensors").exists():
        tensors = _tensors(read_config(tiny_model()))
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names[:4]}, folder / "a.safetensors")
        save_file({name: tensors[name] for name in names[4:]}, folder / "b.safetensors")
    _write(folder / INDEX_FILE, case[0])
    return _use(folder)


def _provision(case: Case) -> str:
    folder = _folder("provision")
    _write(folder / PROVISION_FILE, case[0])
    return f"{read_provision(folder) is not None}"


def _tokenizer(case: Case) -> str:
    """Load, encode, decode at once and token by token."""
    folder = _folder("tokenizer")
    _write(folder / TOKENIZER_FILE, case[0])
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("the café 🙂")
    tokenizer.decode([*ids, 0, 1, 2**31])
    streamer = TextStream(tokenizer)
    for token_id in ids[:20]:
        streamer.feed(token_id)
    streamer.flush()
    return f"{min(3, len(ids))} ids"


def _chat_template(case: Case) -> str:
    folder = _folder("chat-template")
    if not (folder / TOKENIZER_FILE).exists():
        _write(folder / TOKENIZER_FILE, _tokenizer_seeds()[0][0])
        _write(folder / CONFIG_FILE, b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    _write(folder / TEMPLATE_FILE, case[0])
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
    return f"{min(3, len(Tokenizer(folder).apply_chat_template(messages)))} ids"


def _feature_key(case: Case) -> str:
    path = _folder("feature") / "key"
    _write(path, case[0])
    return f"key {FeatureKey.load(path).version}"


def _calibration(case: Case) -> str:
    path = _folder("calibration") / CALIBRATION_FILE
    _write(path, case[0])
    config, checkpoint = read_config(tiny_model()), Checkpoint(tiny_model())
    found = Calibration.load(path, config, _digests()[0], _digests()[1])
    if len(found.sites) != 4 * config.num_hidden_layers or not checkpoint:
        raise ValueError("sites are missing")
    return "calibration"


@cache
def _digests() -> tuple[str, str | None]:
    config, checkpoint = read_config(tiny_model()), Checkpoint(tiny_model())
    return model_digest(config, checkpoint), linear_digest(config, checkpoint)


@cache
def _bank_files() -> dict[str, bytes]:
    folder = _folder("bank-original")
    with tiny.create(folder) as bank:
        tiny.fill(bank, 4)
        bank.take(1)
    return {name: (folder / name).read_bytes() for name in ("bank", "bank.key", "bank.index")}


def _bank(changed: str, case: Case) -> str:
    folder = _folder(f"bank-of-{changed}")
    for name, content in _bank_files().items():
        if name == changed or not (folder / name).exists():
            _write(folder / name, case[0] if name == changed else content)
    if changed == "bank.index":
        return f"{min(9, read_bank_status(tiny.place(folder)).available)} left"
    with BankFile.open(tiny.place(folder), tiny.PURPOSE) as bank:
        return f"{min(9, bank.available)} left"


def _bank_sealed(case: Case) -> str:
    """Read a bank whose header says this, with its HMAC."""
    key = bytes.fromhex(_bank_files()["bank.key"].split()[-1].decode())
    preamble = bank_format._PREAMBLE
    magic, version, key_id, _ = preamble.unpack(_bank_files()["bank"][: preamble.size])
    body = preamble.pack(magic, version, key_id, len(case[0])) + case[0]
    head = body + hmac.digest(bank_format.Keys.derive(key, body).header_mac, body, "sha256")
    records = _bank_files()["bank"][4096:]
    return _bank("bank", (head + bytes(-len(head) % 4096) + records,))


def _policy(case: Case) -> str:
    path = _folder("policy") / "policy.toml"
    _write(path, case[0])
    return f"policy of {load_policy(str(path)).services} services"


@click.command("tsqp", context_settings=CONTEXT)
@config_option
@click.option("--threads", type=click.IntRange(1, 8))
@click.option("--flag", is_flag=True)
@click.option("--stop", multiple=True)
@click.option("--name")
@click.option("--timeout-s", type=click.FloatRange(0))
@click.argument("anything", required=False)
def _program(**_: object) -> None:
    """Take settings of every kind."""


def _settings(case: Case) -> str:
    path = _folder("settings") / "settings.toml"
    _write(path, case[0])
    try:
        _program.main(["--config", str(path)], standalone_mode=False)
    except click.UsageError as error:
        # What click itself refuses is shown by it, with the setting's name.
        return f"usage {type(error).__name__}"
    return "settings"


def _manifest(case: Case) -> str:
    path = _folder("manifest") / "manifest.json"
    _write(path, case[0])
    return f"{min(3, len(Manifest.load(path).tensors))} tensors"


def _secret_key(case: Case) -> str:
    path = _folder("curve-secret") / "name.key"
    _write(path, case[0])
    key = curve.read_secret_key(path)
    return f"a secret key of {len(key)}, {len(public_key_of(path))} public"


def _public_key(case: Case) -> str:
    path = _folder("curve-public") / "name.pub"
    _write(path, case[0])
    return f"a public key of {len(curve.read_public_key(path))}"


def _allow_list(case: Case) -> str:
    path = _folder("curve-allow") / "allow"
    _write(path, case[0])
    keys = read_allow_list(path)
    if any(len(key) != 40 for key in keys):
        raise ValueError("a key that is none")
    return f"{min(3, len(keys))} keys"


# ------------------------------------------------------------------------------------- mutating


def _as_json(mutator: Mutator, content: bytes, words: Sequence[bytes] = ()) -> bytes:
    if mutator.chance(0.6):
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return mutator.text(content, words)
        for _ in range(1 + mutator.below(2)):
            value = mutator.tree(value, json_junk)
        try:
            return json.dumps(value).encode()
        except (ValueError, TypeError, RecursionError):
            return mutator.text(content, words)
    if mutator.chance(0.01):
        return mutator.pick((b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"1" * 100_000 + b"}"))
    return mutator.text(content, words)


def _mutate_json(mutator: Mutator, case: Case, other: Case) -> Case:
    return (_as_json(mutator, case[0]),)


def _mutate_text(mutator: Mutator, case: Case, other: Case) -> Case:
    words = other[0].split()[:50]
    if mutator.chance(0.003):
        return (b"a = " + mutator.pick((b"[" * 50_000, b"{a=" * 20_000, b"9" * 20_000)),)
    return (mutator.text(case[0], words),)


def _mutate_safetensors(mutator: Mutator, case: Case, other: Case) -> Case:
    content = case[0]
    if mutator.chance(0.25) or len(content) < 10:
        return (mutator.bytes(content),)
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    header = _as_json(mutator, header)
    if mutator.chance(0.7):
        header += b" " * (-len(header) % 8)
    claimed = len(header) if mutator.chance(0.95) else mutator.pick((0, 2**40, 2**63, 10**8))
    if mutator.chance(0.05):
        data = data[: mutator.below(len(data) + 1)]
    return (claimed.to_bytes(8, "little") + header + data,)


def _mutate_template(mutator: Mutator, case: Case, other: Case) -> Case:
    return (mutator.text(case[0], _TEMPLATE_WORDS),)


def _mutate_bytes(mutator: Mutator, case: Case, other: Case) -> Case:
    return (mutator.bytes(case[0]),)


def _mutate_index(mutator: Mutator, case: Case, other: Case) -> Case:
    names = (
        b"a.safetensors",
        b"b.safetensors",
        b"../a.safetensors",
        b"c",
        b"/dev/zero",
        b".",
        b"\\n",
    )
    if mutator.chance(0.4):
        return (mutator.text(case[0], names),)
    return _mutate_json(mutator, case, other)


# ----------------------------------------------------------------------------------------- seeds


def _config_seeds() -> list[Case]:
    others = [
        {},
        {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": None, "use_sliding_window": True},
        {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 8,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": True},
        },
        {
            "architectures": ["Qwen3ForCausalLM"],
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.0],
                "long_factor": [1.0, 2.0],
            },
        },
    ]
    return [(json.dumps({**CONFIG, **other}).encode(),) for other in others]


def _index_seeds() -> list[Case]:
    names = sorted(_tensors(read_config(tiny_model())))
    weight_map = {
        name: "a.safetensors" if at < 4 else "b.safetensors" for at, name in enumerate(names)
    }
    return [
        (json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode(),),
        (json.dumps({"weight_map": {names[0]: "a.safetensors"}}).encode(),),
    ]


def _weight_seeds() -> list[Case]:
    tensors = _tensors(read_config(tiny_model()))
    halves = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    return [(save(tensors),), (save(halves, {"format": "pt"}),), (save({"x": torch.ones(1)}),)]


_TEMPLATE_WORDS = tuple(
    b"{{|}}|{%|%}|{% if|{% endif %}|{% for x in|{% endfor %}|{% set x =|messages|message|range(9)|"
    b"loop.index|loop.last|{% break %}|trim|tojson|~|+|*|**|%|[0]|['role']|.content|.__class__|"
    b"raise_exception('no')|namespace(a=1)|bos_token|none|is defined|{% macro f(x) %}|"
    b"{% endmacro %}|f(1)|lower|map|join|list".split(b"|")
)
_TEMPLATES = (
    b"{{ bos_token }}{% for message in messages %}\n{% if message['role'] == 'tool' %}\n"
    b"{{ raise_exception('no') }}\n{% endif %}\n{{ message['content'] | trim }}{{ eos_token }}\n"
    b"{% if loop.last %}{% break %}{% endif %}\n{% endfor %}\n"
    b"{% if add_generation_prompt %}a{% endif %}",
    b"{% set x = namespace(n=2 ** 3) %}{% macro f(m) %}{{ m.content * 2 }}{% endmacro %}\n"
    b"{% for i in range(x.n) %}{{ f(messages[i % 2]) }}{% endfor %}\n{{ messages | tojson }}",
)


@cache
def _tokenizer_seeds() -> list[Case]:
    letters = {letter: at for at, letter in enumerate("théacfĠÃ©ðŁĻĤ")}
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {**letters, "th": 20, "the": 21, "e": 22},
        "merges": [["t", "h"], ["th", "e"]],
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {
        "type": "Split",
        "pattern": {"Regex": "\\s?\\w+"},
        "behavior": "Isolated",
        "invert": False,
    }
    after = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": _SEQUENCE}],
        "pair": [{"Sequence": _SEQUENCE}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [30], "tokens": ["<s>"]}},
    }
    special = {"id": 30, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": 8,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "t",
    }
    first = {
        "version": "1.0",
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": padding,
        "added_tokens": [{**special, "normalized": False, "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, _REPLACE]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": after,
        "decoder": level,
        "model": bpe,
    }
    unigram = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["▁the", -1.5], ["▁", -2.0], ["<0xC3>", -9.0]],
        "byte_fallback": True,
    }
    decoders = [
        _REPLACE,
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    second = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Prepend", "prepend": "▁"},
        "pre_tokenizer": {"type": "FixedLength", "length": 5},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": unigram,
    }
    pieces = {"[UNK]": 0, "the": 1, "##é": 2}
    third = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": pieces,
        },
    }
    return [(json.dumps(content).encode(),) for content in (first, second, third)]


_SEQUENCE = {"id": "A", "type_id": 0}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@cache
def _provision_seeds() -> list[Case]:
    folder = _folder("provision-original")
    write_provision(folder, Provision(mask="feature-rotation", provision_id="a" * 64))
    return [((folder / PROVISION_FILE).read_bytes(),)]


@cache
def _feature_key_seeds() -> list[Case]:
    path = _folder("feature-original") / "key"
    FeatureKey.bind(
        mask="feature-rotation",
        options={"block": 8},
        seed="1" * 64,
        model_digest="a" * 64,
        linear_digest="b" * 64,
        server_linear_digest="c" * 64,
    ).save(path)
    return [(path.read_bytes(),)]


def _header_seeds() -> list[Case]:
    bank = _bank_files()["bank"]
    size = bank_format._PREAMBLE.size
    length = int.from_bytes(bank[size - 4 : size], "big")
    return [(bank[size : size + length],)]


def _policy_seeds() -> list[Case]:
    folder = files("tee_side.policy") / "builtin"
    policies = [path.read_bytes() for path in folder.iterdir() if path.name.endswith(".toml")]
    # An integer that Python does not read.
    return [(policy,) for policy in (*policies, b"arithmetic = " + b"9" * 5000)]


_SECRET = b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"
_PUBLIC = b"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def _list_seeds() -> list[Case]:
    return [
        (b"# who\n" + _PUBLIC + b"  # the runner\n\n" + _PUBLIC + b"\n",),
        (b"# tsqp public key\n" + _PUBLIC + b"\n",),
        (b"",),
    ]


def _settings_seeds() -> list[Case]:
    return [
        (b'threads = 2\nflag = true\nstop = ["a", "b"]\n[tsqp]\nname = "x"\ntimeout-s = 1.5\n',),
        (b"[tsqp]\ntimeout_s = 3\n",),
    ]


def _bank_target(changed: str, weight: float) -> Target:
    return Target(
        f"pad-{changed.replace('.', '-')}",
        lambda: [(_bank_files()[changed],)],
        _mutate_bytes,
        partial(_bank, changed),
        (PadBankError,),
        weight,
    )


def _target(
    name: str,
    seeds: Callable[[], list[Case]],
    mutate: Callable[[Mutator, Case, Case], Case],
    execute: Callable[[Case], str],
    error: type[Any],
    weight: float = 0.1,
) -> Target:
    return Target(name, seeds, mutate, execute, (error,), weight)


FILE_TARGETS = (
    _target("config", _config_seeds, _mutate_json, _config, ModelError, 0.2),
    _target(
        "generation-config",
        lambda: [(b'{"eos_token_id": [1, 2]}',), (b'{"eos_token_id": 1}',)],
        _mutate_json,
        _generation,
        ModelError,
        0.05,
    ),
    _target("safetensors", _weight_seeds, _mutate_safetensors, _weights, ModelError, 0.2),
    _target("safetensors-index", _index_seeds, _mutate_index, _index, ModelError),
    _target(
        "manifest",
        lambda: [(make_manifest(tiny_model()).to_bytes(),)],
        _mutate_json,
        _manifest,
        ManifestError,
        0.2,
    ),
    _target("tokenizer", _tokenizer_seeds, _mutate_json, _tokenizer, ModelError),
    Target(
        "chat-template",
        lambda: [(template,) for template in _TEMPLATES],
        _mutate_template,
        _chat_template,
        (ModelError, PromptError),
        0.05,
    ),
    _target("provision", _provision_seeds, _mutate_json, _provision, ModelError),
    _target("feature-key", _feature_key_seeds, _mutate_json, _feature_key, FeatureKeyError),
    _target(
        "calibration",
        lambda: [(tiny_calibration(),), _without_headroom()],
        _mutate_safetensors,
        _calibration,
        CalibrationError,
        0.2,
    ),
    _bank_target("bank", 0.05),
    _bank_target("bank.key", 0.05),
    _bank_target("bank.index", 0.05),
    _target("pad-bank-sealed", _header_seeds, _mutate_json, _bank_sealed, PadBankError),
    _target(
        "curve-secret-key",
        lambda: [(b"# tsqp secret key\n" + _SECRET + b"\n",)],
        _mutate_text,
        _secret_key,
        KeyFileError,
    ),
    _target(
        "curve-public-key",
        lambda: [(b"# tsqp public key\n" + _PUBLIC + b"\n",)],
        _mutate_text,
        _public_key,
        KeyFileError,
    ),
    _target("curve-allow-list", _list_seeds, _mutate_text, _allow_list, KeyFileError),
    _target("policy", _policy_seeds, _mutate_text, _policy, PolicyError, 0.2),
    _target("settings", _settings_seeds, _mutate_text, _settings, SettingsError),
)
