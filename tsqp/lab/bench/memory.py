"""How much memory and disk a run takes, so that it is refused before it begins and not killed.

Sums of what is known to be held; what a process needs without any model, and the temporaries of a
step, are estimates on the large side.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import SettingsError
from protocol.messages import FUSED_MODULES
from protocol.model.config import ModelConfig
from tee_side.assembly import AHEAD_IN_MEMORY
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy
from tsqp.lab.bench.prepare import pad_layouts

# An interpreter with torch and our own code: 229 MB once (benchmarks/results/memory.json).
PROCESS_BYTES = 300 * 10**6
_FLOAT_BYTES = 4


def tee_parts(
    config: ModelConfig,
    policy: Policy,
    *,
    tokens: int,
    sequences: int = 1,
    itemsize: int = 2,
    step_tokens: int = DEFAULT_STEP_TOKENS,
) -> dict[str, int]:
    """Return what the TEE side holds under a policy, in bytes, part by part.

    `tokens`: that each of `sequences` sequences may become; `itemsize`: of the model's dtype. Pads
    are counted as if there were no bank.
    """
    rows, layers = min(step_tokens, tokens * sequences), config.num_hidden_layers
    # Services keep those of segments.
    elsewhere = sum(one.last + 1 - one.first for one in policy.segments(layers))
    linear = 0
    for _, operator in policy.sites_here(layers):
        _, (out_features, in_features) = config.row_layout(operator)
        if policy.arithmetic == "float":
            linear += out_features * in_features * itemsize
        else:
            linear += out_features * (in_features + _FLOAT_BYTES)
    kv_cache = kv_bytes(config, tokens=tokens, sequences=sequences, itemsize=itemsize)
    return {
        "process": PROCESS_BYTES,
        "embedding and LM head": vocabulary_bytes(config, policy, itemsize),
        "linear weights": linear,
        "pads": _pad_bytes(config, policy, prefill=rows, decode=min(step_tokens, sequences)),
        "KV cache": kv_cache * (layers - elsewhere) // layers,
        "temporaries": _temporary_bytes(config, rows, tokens),
    }


def kv_bytes(config: ModelConfig, *, tokens: int, sequences: int = 1, itemsize: int = 2) -> int:
    """Return the size of the KV cache of some sequences of so many tokens each."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * tokens * sequences * itemsize


def vocabulary_bytes(config: ModelConfig, policy: Policy, itemsize: int) -> int:
    """Return the size of the embedding and the LM head that stay in the TEE."""
    embedding, head = (
        any(placement.place == "tee" for placement in policy.operators[name])
        for name in ("embedding", "lm_head")
    )
    # In integers the LM head is one of the linear weights.
    apart = head and policy.arithmetic == "float" and not (embedding and config.tie_word_embeddings)
    return (embedding + apart) * config.vocab_size * config.hidden_size * itemsize


def _pad_bytes(config: ModelConfig, policy: Policy, *, prefill: int, decode: int) -> int:
    """Count pads made in memory ahead of use, for as many rows as a step may have."""
    total = 0
    for mask, layout in pad_layouts(policy, config).items():
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


def check_memory(
    config: ModelConfig,
    policies: Iterable[Policy],
    *,
    device: str,
    services: int,
    sequences: int,
    tokens: int,
    itemsize: int,
    step_tokens: int,
) -> None:
    """Check that the TEE side under each policy fits into this machine's memory, beside services.

    For sizes see `tee_parts`. Raises SettingsError with the parts of the policy that needs most.
    """
    each = (
        tee_parts(
            config,
            policy,
            tokens=tokens,
            sequences=sequences,
            itemsize=itemsize,
            step_tokens=step_tokens,
        )
        for policy in policies
    )
    parts = max(each, key=lambda parts: sum(parts.values()))
    service = PROCESS_BYTES + _temporary_bytes(config, min(step_tokens, tokens), tokens)
    if device == "cpu":  # the one that keeps weights in this machine's memory
        elements = 2 * config.vocab_size * config.hidden_size
        layouts = (config.row_layout(operator)[1] for operator in FUSED_MODULES)
        elements += config.num_hidden_layers * sum(map(math.prod, layouts))
        service += elements * itemsize
    parts["services"] = services * service
    available, needed = _available_memory(), sum(parts.values())
    words = ", ".join(f"{name} {_amount(size)}" for name, size in parts.items() if size)
    expected = f"at least {_amount(needed)}: {words}"
    SettingsError.unless(needed <= available, "memory", f"{_amount(available)} available", expected)


def check_disk(needed: int) -> None:
    """Check that the folder for temporary files has so many bytes of room. Raises SettingsError."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    SettingsError.unless(
        needed <= free,
        f"disk space in {folder}",
        f"{_amount(free)} free",
        f"at least {_amount(needed)} (TMPDIR names another folder)",
    )


def _available_memory() -> int:
    """Return the bytes that new processes may take: of the machine, or of our control group."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    available = int(kilobytes) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counters = (group / "memory.stat").read_text(encoding="ascii")
        # Pages of files are given back when memory is short.
        files = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", counters, re.MULTILINE)))
        available = min(available, int(text) - used + files)
    return max(0, available)


def _amount(size: int) -> str:
    """Return bytes for people, rounded up in the last digit: half a megabyte short is short."""
    if size >= 10**9:
        return f"{math.ceil(size / 10**8) / 10:.1f} GB"
    return f"{math.ceil(size / 10**6)} MB"
