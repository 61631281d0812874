"""How much memory and disk a benchmark takes, so that it is refused before it runs and not killed.

Sums of what is known to be held, by process and policy; what a process needs without any model, and
the temporaries of a step, are estimates on the large side.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import SettingsError
from protocol.messages import FUSED_MODULES, Arithmetic
from protocol.model.config import ModelConfig
from protocol.model.weights import row_layout
from tee_side.assembly import AHEAD_IN_MEMORY
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.model.local_operators import sites_here, sites_under
from tee_side.policy.placement import Policy, PolicyArithmetic
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.layout import PadLayout
from tee_side.words import Site

# An interpreter with torch and our own code: 229 MB once (benchmarks/results/memory.json).
PROCESS_BYTES = 300 * 10**6
_FLOAT_BYTES = 4
_IN_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Need:
    """What one process needs, in bytes, part by part."""

    process: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_amount(size)}" for name, size in self.parts.items() if size)
        return f"{_amount(self.total)} for {self.process} ({parts})"


def tee_need(
    config: ModelConfig,
    policy: Policy,
    *,
    tokens: int,
    sequences: int = 1,
    itemsize: int = 2,
    step_tokens: int = DEFAULT_STEP_TOKENS,
) -> Need:
    """Return what the TEE side holds under a policy.

    `tokens`: that each of `sequences` sequences may become; `itemsize`: of the model's dtype. Pads
    are counted as if there were no bank.
    """
    rows, layers = min(step_tokens, tokens * sequences), config.num_hidden_layers
    # Services keep those of segments.
    elsewhere = sum(one.last + 1 - one.first for one in policy.segments(layers))
    kv_cache = kv_bytes(config, tokens=tokens, sequences=sequences, itemsize=itemsize)
    parts = {
        "process": PROCESS_BYTES,
        "embedding and LM head": vocabulary_bytes(config, policy, itemsize),
        "linear weights": _linear_bytes(
            config, sites_here(policy, layers), policy.arithmetic, itemsize
        ),
        "pads": _pad_bytes(config, policy, prefill=rows, decode=min(step_tokens, sequences)),
        "KV cache": kv_cache * (layers - elsewhere) // layers,
        "temporaries": _temporary_bytes(config, rows, tokens),
    }
    return Need(f"tee-runner under {policy.name}", parts)


def gpu_need(
    config: ModelConfig,
    arithmetic: Iterable[Arithmetic],
    *,
    device: str,
    tokens: int,
    itemsize: int = 2,
    step_tokens: int = DEFAULT_STEP_TOKENS,
) -> Need:
    """Return what a service holds in this machine's memory.

    `device`: as `gpu-service --device` takes it; only `cpu` keeps weights here. `arithmetic`: which
    linear weights it holds; `tokens`: of the longest prompt.
    """
    rows = min(step_tokens, tokens)
    parts = {
        "process": PROCESS_BYTES,
        "temporaries": _temporary_bytes(config, rows, tokens),
    }
    if device == "cpu":
        sites: list[Site] = [
            (layer, operator)
            for layer in range(config.num_hidden_layers)
            for operator in FUSED_MODULES
        ]
        vocabulary = config.vocab_size * config.hidden_size * itemsize
        parts["embedding and LM head"] = vocabulary * (1 if config.tie_word_embeddings else 2)
        for kind in sorted(set(arithmetic)):
            parts[f"{kind} weights"] = _linear_bytes(config, sites, kind, itemsize)
            if kind == "int8":  # an LM head of its own, also where the floats are tied
                parts[f"{kind} weights"] += config.vocab_size * (config.hidden_size + _FLOAT_BYTES)
    return Need("gpu-service", parts)


def whole_model_need(config: ModelConfig, process: str, *, tokens: int, itemsize: int = 2) -> Need:
    """Return what a process needs that runs the model alone in floats, such as transformers."""
    sites: list[Site] = [
        (layer, operator) for layer in range(config.num_hidden_layers) for operator in FUSED_MODULES
    ]
    vocabulary = config.vocab_size * config.hidden_size * itemsize
    return Need(
        process,
        {
            "process": PROCESS_BYTES,
            "embedding and LM head": vocabulary * (1 if config.tie_word_embeddings else 2),
            "linear weights": _linear_bytes(config, sites, "float", itemsize),
            "KV cache": kv_bytes(config, tokens=tokens, itemsize=itemsize),
            "temporaries": _temporary_bytes(config, tokens, tokens),
        },
    )


def kv_bytes(config: ModelConfig, *, tokens: int, sequences: int = 1, itemsize: int = 2) -> int:
    """Return the size of the KV cache of some sequences of so many tokens each."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * tokens * sequences * itemsize


def check_memory(
    needs: Sequence[Need], *, where: str = "memory", available_bytes: int | None = None
) -> None:
    """Check that processes that run at the same time fit into memory together.

    `available_bytes`: None to ask the system. Raises SettingsError that says what each needs.
    """
    available = available_memory() if available_bytes is None else available_bytes
    needed = sum(need.total for need in needs)
    if needed > available:
        raise SettingsError(
            where,
            got=f"{_amount(available)} available",
            expected=f"at least {_amount(needed)}: {'; '.join(map(str, needs))}",
        )


def check_disk(folder: Path, needed: int, *, where: str = "disk space") -> None:
    """Check that a folder's file system has room for so many bytes. Raises SettingsError."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise SettingsError(
            f"{where} in {folder}",
            got=f"{_amount(free)} free",
            expected=f"at least {_amount(needed)} (TMPDIR names another folder)",
        )


def files_need(folder: Path, size: int, mounts: Path = Path("/proc/self/mounts")) -> list[Need]:
    """Return what files of this size in a folder take of memory: nothing, except on a tmpfs."""
    resolved, found, kind = folder.resolve(), "", ""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, file_system, *_ = line.split(" ")
        # A later mount hides an earlier one at the same place.
        if resolved.is_relative_to(point) and len(point) >= len(found):
            found, kind = point, file_system
    if kind not in _IN_MEMORY_FILE_SYSTEMS:
        return []
    return [Need(f"the {kind} at {found}", {"model files": size})]


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that new processes may take: of the machine, or of our control group."""
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    available = int(kilobytes) * 1024
    group = root / "sys/fs/cgroup"
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counters = (group / "memory.stat").read_text(encoding="ascii")
        # Pages of files are given back when memory is short.
        files = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", counters, re.MULTILINE)))
        available = min(available, int(text) - used + files)
    return max(0, available)


def vocabulary_bytes(config: ModelConfig, policy: Policy, itemsize: int) -> int:
    """Return the size of the embedding and the LM head that stay in the TEE."""
    elements = config.vocab_size * config.hidden_size
    stays = {
        name: any(placement.place == "tee" for placement in policy.operators[name])
        for name in ("embedding", "lm_head")
    }
    size = elements * itemsize if stays["embedding"] else 0
    # In integers it is one of the linear weights.
    in_floats = policy.arithmetic == "float"
    if stays["lm_head"] and in_floats and not (stays["embedding"] and config.tie_word_embeddings):
        size += elements * itemsize
    return size


def _linear_bytes(
    config: ModelConfig, sites: Iterable[Site], arithmetic: PolicyArithmetic, itemsize: int
) -> int:
    total = 0
    for _, operator in sites:
        _, (out_features, in_features) = row_layout(config, operator)
        if arithmetic != "float":
            total += out_features * (in_features + _FLOAT_BYTES)
        else:
            total += out_features * in_features * itemsize
    return total


def _pad_bytes(config: ModelConfig, policy: Policy, *, prefill: int, decode: int) -> int:
    """Count pads made in memory ahead of use, for as many rows as a step may have."""
    total = 0
    for mask in policy.masks:
        if not isinstance(mask, AdditiveMask):
            continue
        layout = PadLayout.of(config, sites_under(policy, config.num_hidden_layers, mask))
        in_prefill = any(
            policy.at(site.operator, site.layer, "prefill").mask == mask for site in layout.sites
        )
        # One site's weight is quantised at a time while pads are made.
        weight = max(site.in_features * site.out_features for site in layout.sites)
        rows = max(AHEAD_IN_MEMORY, prefill if in_prefill else decode)
        total += layout.token_bytes * rows + weight
    return total


def _temporary_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """Return a step's widest moment: attention scores twice, or the MLP's tensors, in float32.

    Beside them an input and an output, as they are on the wire.
    """
    attention = 2 * config.num_attention_heads * rows * context
    wide = 3 * config.intermediate_size * rows
    crossing = rows * (config.hidden_size + 2 * config.intermediate_size)
    return (max(attention, wide) + crossing + config.vocab_size) * _FLOAT_BYTES


def _amount(size: int) -> str:
    """Return bytes for people, rounded up in the last digit: half a megabyte short is short."""
    if size >= 10**9:
        return f"{math.ceil(size / 10**8) / 10:.1f} GB"
    return f"{math.ceil(size / 10**6)} MB"
