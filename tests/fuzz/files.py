"""What reads files: of models, tokenizers, pads, keys and policies.

A case is one file. What stands around it (the other files of a model directory, the key of a bank)
is written once. Where a file is authenticated, a second target seals what it changed, so that what
lies behind the seal is reached as well.
"""

import hmac
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from multiprocessing import util
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_side.access import read_allow_list
from gpu_side.weights import PROVISION_FILE, read_provision
from protocol import curve
from protocol.errors import (
    KeyFileError,
    ManifestError,
    ModelError,
    PadBankError,
    PolicyError,
    PromptError,
    TsqpError,
)
from protocol.model.at_rest import Manifest
from protocol.model.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import read_config
from tee_side.chat.template import TEMPLATE_FILES, ChatTemplate, Conversation
from tee_side.engine.tokenizer import CONFIG_FILE, TOKENIZER_FILE, TextStream, Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.protect.pads import bank_files
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.sites import PadLayout, SiteShape
from tests.fuzz.engine import Target
from tests.kit import mutate
from tests.kit.mutate import Case
from tsqp.key_files import public_key_of


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


def _put(folder: str, name: str, content: bytes) -> Path:
    """Write a file, which only its owner may read, and return its path."""
    path = _folder(folder) / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    return path


@cache
def tiny_model() -> Path:
    """Return the directory of a model of two layers and 8 wide; the same weights everywhere."""
    folder = _put("model", "config.json", CONFIG.seeds()[0][0]).parent
    config = read_config(folder)
    tensors = {}
    for name, shape in (light_tensors(config) | linear_tensors(config)).items():
        count = torch.Size(shape).numel()
        tensors[name] = ((torch.arange(count) * 37 + len(name)) % 255 - 127).view(shape) / 64
    save_file(tensors, folder / SINGLE_FILE)
    names = sorted(tensors)
    for shard, part in (("a", names[:4]), ("b", names[4:])):
        held = {name: tensors[name] for name in part}
        save_file(held, _folder("index") / f"{shard}.safetensors")
    return folder


def _config(case: Case) -> str:
    config = read_config(_put("config", "config.json", case[0]).parent)
    return f"{config.architecture} {config.ropes[0].rope_type} {len(config.biased_modules)}"


def _generation(case: Case) -> str:
    _put("generation", "config.json", CONFIG.seeds()[0][0])
    folder = _put("generation", "generation_config.json", case[0]).parent
    return f"{min(3, len(read_config(folder).eos_token_ids))} ids"


def _weights(folder: str, name: str, case: Case) -> str:
    config = read_config(tiny_model())
    checkpoint = Checkpoint(_put(folder, name, case[0]).parent)
    checkpoint.require(light_tensors(config))
    checkpoint.refuse_extra(config)
    norm = "model.norm.weight"
    checkpoint.copy_into(norm, torch.empty(light_tensors(config)[norm]))
    return f"{checkpoint.holds(linear_tensors(config))}"


def _manifest(case: Case) -> str:
    tensors = Manifest.load(_put("manifest", "manifest.json", case[0])).tensors
    return f"{min(3, len(tensors))} tensors"


def _provision(case: Case) -> str:
    return str(read_provision(_put("p", PROVISION_FILE, case[0]).parent) is not None)


def _tokenizer(case: Case) -> str:
    """Load, encode, decode at once and token by token."""
    tokenizer = Tokenizer(_put("tokenizer", TOKENIZER_FILE, case[0]).parent)
    ids = tokenizer.encode("the café 🙂")
    tokenizer.decode([*ids, 0, 1, 2**31])
    streamer = TextStream(tokenizer)
    for token_id in ids[:20]:
        streamer.feed(token_id)
    streamer.flush()
    return f"{min(3, len(ids))} ids"


def _template(case: Case) -> str:
    _put("template", TOKENIZER_FILE, TOKENIZER.seeds()[0][0])
    _put("template", CONFIG_FILE, b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer(_put("template", TEMPLATE_FILES["default"], case[0]).parent)
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
    return f"{min(3, len(ChatTemplate(tokenizer).encode(Conversation(messages=messages))))} ids"


_LAYOUT = PadLayout((SiteShape(0, "o_proj", 3, 2), SiteShape(1, "qkv_proj", 2, 5)))
_PURPOSE = bank_files.Purpose.of(
    _LAYOUT, mask="pad", model="tiny", model_digest="a" * 64, linear_digest="b" * 64
)


def _place(folder: Path) -> BankPlace:
    return BankPlace.at(folder / "bank", beside_bank=True)


@cache
def _bank_files() -> dict[str, bytes]:
    folder = _folder("bank-original")
    with BankFile.create(_place(folder), _PURPOSE, capacity=8, block=16) as bank:
        with bank.begin(4) as batch:
            for site in _LAYOUT.sites:
                batch.put(site.number, torch.zeros(4, site.out_features, dtype=torch.int32))
            batch.commit()
        bank.take(1)
    return {name: (folder / name).read_bytes() for name in ("bank", "bank.key", "bank.index")}


def _bank(changed: str, case: Case) -> str:
    for name, content in _bank_files().items():
        path = _put(f"bank-of-{changed}", name, case[0] if name == changed else content)
    if changed == "bank.index":
        _, state = read_bank_status(_place(path.parent))
        return f"{min(9, state.filled - state.reserved)} left"
    with BankFile.open(_place(path.parent), _PURPOSE) as bank:
        return f"{min(9, bank.available)} left"


def _headers() -> list[Case]:
    bank, size = _bank_files()["bank"], bank_files._PREAMBLE.size
    return [(bank[size : size + int.from_bytes(bank[size - 4 : size], "big")],)]


def _bank_sealed(case: Case) -> str:
    """Read a bank whose header says this, with its HMAC."""
    key = bytes.fromhex(_bank_files()["bank.key"].split()[-1].decode())
    preamble, bank = bank_files._PREAMBLE, _bank_files()["bank"]
    magic, version, key_id, _ = preamble.unpack(bank[: preamble.size])
    body = preamble.pack(magic, version, key_id, len(case[0])) + case[0]
    head = body + hmac.digest(bank_files.Keys.derive(key, body).header_mac, body, "sha256")
    return _bank("bank", (head + bytes(-len(head) % 4096) + bank[4096:],))


def _secret_key(case: Case) -> str:
    path = _put("keys", "name.key", case[0])
    secret, public = curve.read_key(path, secret=True), public_key_of(path)
    return f"a secret key of {len(secret)}, {len(public)} public"


def _public_key(case: Case) -> str:
    return f"{len(curve.read_key(_put('keys', 'name.pub', case[0]), secret=False))}"


def _allow_list(case: Case) -> str:
    keys = read_allow_list(_put("keys", "allow", case[0]))
    if any(len(key) != 40 for key in keys):
        raise ValueError("a key that is none")
    return f"{min(3, len(keys))} keys"


def _policy(case: Case) -> str:
    path = _put("policy", "policy.toml", case[0])
    return f"policy of {load_policy(str(path)).services} services"


def _policies() -> list[Case]:
    folder = files("tee_side.policy") / "builtin"
    return [(path.read_bytes(),) for path in folder.iterdir() if path.name.endswith(".toml")]


def _bank_target(changed: str) -> Target:
    made = lambda: [(_bank_files()[changed],)]  # noqa: E731
    name = f"pad-{changed.replace('.', '-')}"
    return Target(name, partial(_bank, changed), mutate.one, (PadBankError,), 0.05, made)


# A name, a reader, its error, and how many of all executions in proportion.
_ROWS: tuple[tuple[str, Callable[[Case], str], type[TsqpError], float], ...] = (
    ("config", _config, ModelError, 0.2),
    ("tokenizer", _tokenizer, ModelError, 0.1),
    ("generation-config", _generation, ModelError, 0.05),
    ("safetensors", partial(_weights, "weights", SINGLE_FILE), ModelError, 0.2),
    ("safetensors-index", partial(_weights, "index", INDEX_FILE), ModelError, 0.1),
    ("manifest", _manifest, ManifestError, 0.2),
    ("provision", _provision, ModelError, 0.1),
    ("curve-secret-key", _secret_key, KeyFileError, 0.1),
    ("curve-public-key", _public_key, KeyFileError, 0.1),
    ("curve-allow-list", _allow_list, KeyFileError, 0.1),
)
FILES = (
    *(Target(name, read, mutate.one, (error,), weight) for name, read, error, weight in _ROWS),
    Target("chat-template", _template, mutate.one, (ModelError, PromptError), 0.05),
    Target("pad-bank-sealed", _bank_sealed, mutate.one, (PadBankError,), 0.1, _headers),
    Target("policy", _policy, mutate.one, (PolicyError,), 0.2, _policies),
    *map(_bank_target, ("bank", "bank.key", "bank.index")),
)
CONFIG, TOKENIZER = FILES[:2]
