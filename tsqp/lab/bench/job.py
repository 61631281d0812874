"""What `tsqp bench` is asked, what that takes, and what the process that measures answers.

How much memory and disk a run takes is said before it begins, so that it is refused and not killed.
These are sums of what is known to be held; what a process needs without any model, and the
temporaries of a step, are estimates on the large side.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from protocol.errors import SettingsError
from protocol.messages import FUSED_MODULES, FloatDtype
from protocol.model.config import ModelConfig
from tee_side.assembly import AHEAD_IN_MEMORY
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.words import PHASES, Phase
from tsqp.lab.bench.results import Case, Document, Finished, RequestTimes, Timeline
from tsqp.link import Link
from tsqp.run.bank import pad_layouts

# Of every case, before anything is timed.
WARM_UP = 2
_LEAST_OBSERVED, _MOST_OBSERVED = 3, 12
# An interpreter with torch and our own code: 229 MB once (benchmarks/results/memory.json).
PROCESS_BYTES = 300 * 10**6
_FLOAT_BYTES = 4


class Requests(NamedTuple):
    """`batch` requests side by side, and that `times` times. `option`: what asks for them."""

    option: str
    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    times: int = 1


class Plan(Document):
    """Which cases to measure, and how often.

    `prefill`: prompt lengths; `decode`: (context, sequences); `generation`: (prompt, new tokens).
    """

    prefill: tuple[int, ...] = (1, 128, 512)
    decode: tuple[tuple[int, int], ...] = ((128, 1), (128, 8), (512, 1))
    generation: tuple[int, int] | None = (128, 32)
    repeats: int = 5
    decode_steps: int = 24

    @property
    def sequences(self) -> int:
        """Sequences that run together at most."""
        return max((batch for _, batch in self.decode), default=1)

    def observed(self, phase: Phase, timed: int) -> int:
        """Return how often a case is run with an observer after it was timed so often."""
        if phase == "prefill":
            return min(_LEAST_OBSERVED, timed)
        return min(_MOST_OBSERVED, max(_LEAST_OBSERVED, timed))

    def runs(self, phase: Phase) -> int:
        """Return how often a case is run in all, at most: a prompt, or a decode step."""
        timed = self.repeats if phase == "prefill" else self.decode_steps
        return WARM_UP + timed + self.observed(phase, timed)

    def new_tokens(self, context: int, batch: int, step_tokens: int) -> int:
        """Return how many tokens each sequence of a decode case generates, at most.

        The first comes with its prompt. Where prompts are more than a step takes, the first
        sequences decode while the last ones are still in prefill.
        """
        # Decoding sequences go first, one token each; the rest of a step is for prompts.
        prompts = -(-context * batch // max(1, step_tokens - batch + 1))
        return prompts + self.runs("decode")

    def requests(self, step_tokens: int) -> Iterator[Requests]:
        """Yield all that is asked for in a run, at most."""
        for tokens in self.prefill:
            yield Requests("--prefill", tokens, 1, times=self.runs("prefill"))
        for context, batch in self.decode:
            new = self.new_tokens(context, batch, step_tokens)
            yield Requests("--context, --decode-steps", context, new, batch)
        if self.generation:
            yield Requests("the request", *self.generation)

    def longest(self, step_tokens: int) -> int:
        """Return how many tokens a sequence may become."""
        return max(
            (one.prompt_tokens + one.new_tokens for one in self.requests(step_tokens)), default=1
        )

    def cached_tokens(self, step_tokens: int) -> int:
        """Return how many tokens of all sequences together are in KV caches, at most."""
        return max(
            (
                one.batch * (one.prompt_tokens + one.new_tokens - 1)
                for one in self.requests(step_tokens)
            ),
            default=0,
        )

    def pads(self, phases: Collection[Phase], step_tokens: int) -> int:
        """Return how many pads a policy uses up, at most, where tokens of these phases take one."""
        needed = 0
        for one in self.requests(step_tokens):
            tokens = one.prompt_tokens if "prefill" in phases else 0
            # The first new token comes with the prompt.
            tokens += one.new_tokens if "decode" in phases and one.new_tokens > 1 else 0
            needed += one.times * one.batch * tokens
        return needed

    def check(self, context_length: int, step_tokens: int) -> None:
        """Refuse cases that do not fit a model's context. Raises SettingsError."""
        SettingsError.unless(
            self.sequences <= step_tokens,
            "--batch",
            f"{self.sequences} sequences",
            f"at most {step_tokens}, which is what --step-tokens puts into a step",
        )
        for one in self.requests(step_tokens):
            SettingsError.unless(
                one.prompt_tokens + one.new_tokens <= context_length,
                one.option,
                f"{one.prompt_tokens} tokens and {one.new_tokens} new ones after them",
                f"at most {context_length}, the model's context, together",
            )

    def fitted(self, context_length: int, step_tokens: int, defaults: Collection[str]) -> Plan:
        """Return a plan whose cases fit a model's context.

        `defaults`: of "prefill" and "context" those that are defaults. Then prompts that are too
        long are dropped, and contexts that are too long become the longest that is possible.
        """

        def shortened(length: int, batch: int) -> tuple[int, int]:
            longest = context_length - self.new_tokens(length, batch, step_tokens)
            # One for which there is no room at all is kept, and refused by `check`.
            return min(length, longest) if longest > 0 else length, batch

        prompts, decode, generation = self.prefill, self.decode, self.generation
        if "prefill" in defaults:
            prompts = tuple(tokens for tokens in prompts if tokens < context_length)
        if "context" in defaults:
            decode = tuple(dict.fromkeys(shortened(*one) for one in decode))
        if generation:
            prompt = min(generation[0], context_length - generation[1])
            generation = (prompt, generation[1]) if prompt > 0 else None
        return self.model_copy(
            update={"prefill": prompts, "decode": decode, "generation": generation}
        )


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What `bench` and `plan` measure, and with which services of their own.

    `model`: a directory, or `shape`: the name of one whose weights are made at random. `device`,
    `transport`, `kernels`, `gpu_threads`: of services; `kernels`, `dtype`, `spin_us`: of both
    sides.
    """

    model: Path | None = None
    shape: str | None = None
    device: str = "null"
    transport: str = "tcp"
    kernels: str = "auto"
    gpu_threads: int = 1
    spin_us: float = 0.0
    dtype: FloatDtype | None = None
    step_tokens: int = DEFAULT_STEP_TOKENS
    micro_batches: int = 1


@dataclass(frozen=True)
class BenchSettings(Measuring):
    """One run of the benchmark.

    `endpoints`: of services that run already, in place of those that are started. `policies`: with
    the name or path that each was given by. `baselines`: whether to measure the others, too.
    `command`: as it was typed, for the report. `defaults`: which of the plan's lengths, "prefill"
    or "context", are defaults, so that they may give way to a short context.
    `dealer_in_the_clear`: whether `endpoints` may get shares over links without keys.
    """

    command: str
    policies: tuple[tuple[str, Policy], ...]
    endpoints: tuple[str, ...] = ()
    threads: int = 1
    link: Link | None = None
    key: Path | None = None
    server_model: Path | None = None
    baselines: bool = True
    plan: Plan = field(default_factory=Plan)
    defaults: Collection[str] = ()
    dealer_in_the_clear: bool = False

    @property
    def computes(self) -> bool:
        """Whether the services really compute, so that what they answer is right."""
        # Services that run already are taken for real ones.
        return bool(self.endpoints) or not (
            self.device == "null" or self.device.startswith("model:")
        )


# What a process that measures a policy tells: what it does now, what it has measured, and at last
# what is known at its end.
Answer: TypeAlias = str | Case | Timeline | RequestTimes | Finished


# -------------------------------------------------------------------------- what it takes


def needs_linear(policy: Policy, config: ModelConfig) -> bool:
    """Whether the TEE needs linear weights: to compute, to scale results, or to make pads."""
    return (
        policy.arithmetic == "int8"
        or bool(policy.sites_here(config.num_hidden_layers))
        or any(isinstance(mask, AdditiveMask) for mask in policy.masks)
    )


def pad_phases(policy: Policy, mask: AdditiveMask | None = None) -> tuple[Phase, ...]:
    """Return the phases of which each token uses up a pad, of a mask or of any.

    Those of a prompt are dealt as they are used, but for what a policy with a stock has of them.
    """
    masked: set[Phase | None] = set()
    for _, one in policy.leaving():
        if isinstance(one.mask, AdditiveMask) and mask in (None, one.mask):
            now = one.mask.dealt and policy.prefill == "always"
            masked.add("decode" if now and one.phase is None else one.phase)
    return tuple(phase for phase in PHASES if masked & {None, phase})


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
    # Made in memory ahead of use, for as many rows as a step may have.
    pads = 0
    for mask, layout in pad_layouts(policy, config).items():
        in_prefill = any(
            policy.at(site.operator, site.layer, "prefill").mask == mask for site in layout.sites
        )
        # One site's weight is quantised at a time while pads are made.
        weight = max(site.in_features * site.out_features for site in layout.sites)
        each = rows if in_prefill else min(step_tokens, sequences)
        pads += layout.token_bytes * max(AHEAD_IN_MEMORY, each) + weight
    return {
        "process": PROCESS_BYTES,
        "embedding and LM head": vocabulary_bytes(config, policy, itemsize),
        "linear weights": linear,
        "pads": pads,
        "KV cache": (
            (layers - elsewhere)
            * (2 * config.num_key_value_heads * config.head_dim)
            * (tokens * sequences * itemsize)
        ),
        "temporaries": _temporary_bytes(config, rows, tokens),
    }


def vocabulary_bytes(config: ModelConfig, policy: Policy, itemsize: int) -> int:
    """Return the size of the embedding and the LM head that stay in the TEE."""
    embedding, head = (
        any(placement.place == "tee" for placement in policy.operators[name])
        for name in ("embedding", "lm_head")
    )
    # In integers the LM head is one of the linear weights.
    apart = head and policy.arithmetic == "float" and not (embedding and config.tie_word_embeddings)
    return (embedding + apart) * config.vocab_size * config.hidden_size * itemsize


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
    SettingsError.unless(
        needed <= available,
        "memory",
        f"{_amount(available)} available",
        f"at least {_amount(needed)}: {words}",
    )


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
