"""What a run of the laboratory is to do, and where it reports its progress."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import PolicyError, PromptError, SettingsError
from protocol.messages import FloatDtype
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig, read_config
from protocol.validation import validate_file
from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import Mask
from tee_side.words import OPERATORS, PHASES, PRODUCTS
from tsqp.calibrate import default_text
from tsqp.lab.bench.model import Report as BenchReport
from tsqp.lab.leak.attack import Attack
from tsqp.lab.leak.interval import needed
from tsqp.lab.leak.record_session import with_masks

# Share of places at which two prompts may have the same token.
_MOST_ALIKE = 0.2
# What the demo model was validated with stands beside it, one text after each such token.
_TEXT_FILE = "validation.txt"
_LEAST_TOKENS = 4
# Under noise no candidate is certain, and each would be run for every token at every place.
NOISY_CANDIDATES = 256


@dataclass(frozen=True)
class LeakSettings:
    """One run of the laboratory.

    `policies`: with the name or path that each was given by; `prompts`: token ids, a session each;
    `public`: what the attacker has, None for the model itself; `margin`: the largest allowed upper
    confidence bound above chance, None: no limit. `cost`: "measure", "none", or a report of `tsqp
    bench`; `curves`: strengths of noise to try, for policies whose mask has any. `workers`:
    processes that attack side by side, with `threads` each. `shares_in_the_clear`: whether links
    that shares depend on are in the clear, for the observer of all of them.
    """

    command: str
    model: Path
    policies: tuple[tuple[str, Policy], ...]
    attacks: tuple[type[Attack], ...]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    public: Path | None = None
    dtype: FloatDtype | None = None
    temperature: float = 0.0
    seed: int = 0
    search_sessions: int = 2
    search_tokens: int = 64
    search_candidates: int | None = None
    threads: int = 1
    margin: float | None = None
    cost: BenchReport | str = "none"
    curves: tuple[float, ...] = ()
    workers: int = 1
    shares_in_the_clear: bool = False

    @property
    def noisy_candidates(self) -> int:
        """As `search_candidates`, of what crossed with noise."""
        return self.search_candidates or NOISY_CANDIDATES


@dataclass
class LeakProgress:
    """What is told of the progress: `doing` says what, `step` how many of `total` are done.

    `done`: a line of each policy, and of each curve, that is done; `say`: what a person must know.
    """

    total: Callable[[int], None] = field(default=lambda _total: None)
    doing: Callable[[str], None] = field(default=lambda _what: None)
    step: Callable[[int], None] = field(default=lambda _steps: None)
    done: Callable[[str], None] = field(default=lambda _line: None)
    say: Callable[[str], None] = field(default=lambda _line: None)


def check_settings(settings: LeakSettings, config: ModelConfig) -> None:
    """Refuse what cannot work, before anything runs. `config`: of the model.

    Raises SettingsError, PolicyError, ModelError.
    """
    Checkpoint(settings.model).require(light_tensors(config))
    for _, policy in settings.policies:
        policy.check(config.num_hidden_layers)
        _check_products(policy, config.num_hidden_layers)
        for sigma in settings.curves:
            with_sigma(policy, sigma)
    if settings.public is not None:
        _check_public(read_config(settings.public), config, settings.public)
    prompts, new_tokens, margin = settings.prompts, settings.new_tokens, settings.margin
    policies = [policy.name for _, policy in settings.policies]
    attacks = [attack.name for attack in settings.attacks]
    alike = agreement(prompts)
    # Where prefill stays only the answer's tokens cross, the last one of each excepted.
    tokens = len(prompts) * (new_tokens - 1)
    least = 0 if margin is None else needed(margin, 1 / config.vocab_size)
    twice, once = "two of one name", "a name for each"
    rows = [
        (len(set(policies)) < len(policies), "--policy", twice, once),
        (len(set(attacks)) < len(attacks), "--attack", twice, once),
        (
            new_tokens < 2,
            "--new-tokens",
            str(new_tokens),
            "at least 2: the token that is sampled last goes through no model",
        ),
        (
            len(prompts) < 2,
            "--prompts",
            str(len(prompts)),
            "at least 2: chance is measured on the other sessions' texts",
        ),
        (
            alike > _MOST_ALIKE,
            "prompts",
            f"the same token at {alike:.0%} of places in two of them",
            f"at most {_MOST_ALIKE:.0%}: what they share counts as chance (longer --prompt-tokens,"
            " or another --text, helps)",
        ),
        (
            tokens < least,
            f"interval of {margin}",
            f"{tokens} tokens of answers ({len(prompts)} prompts)",
            f"at least {least}, or the upper end is higher even where nothing is read, by luck"
            " (more --prompts or --new-tokens)",
        ),
    ]
    for refused, where, got, expected in rows:
        if refused:
            raise SettingsError(where, got=got, expected=expected)


def agreement(prompts: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two prompts have the same token, mean of neighbours.

    Without the token that all begin with, as BOS: it says nothing of the texts.
    """
    begun = len({tuple(ids[:1]) for ids in prompts}) == 1
    rests = [ids[begun:] for ids in prompts]
    same = size = 0
    for one, other in itertools.pairwise(rests):
        same += sum(a == b for a, b in zip(one, other, strict=False))
        size += min(len(one), len(other))
    return same / size if size else 0.0


def _check_public(public: ModelConfig, config: ModelConfig, directory: Path) -> None:
    """Refuse a model of another shape. Raises SettingsError."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "heads"):
        if (got := getattr(public, name)) != (expected := getattr(config, name)):
            raise SettingsError(
                f"--public {directory}: {name}", got=str(got), expected=f"{expected}, as MODEL has"
            )


def weakened_policies() -> list[str]:
    """Return the paths of the policies that are broken on purpose."""
    return sorted(map(str, (Path(__file__).parent / "weakened").glob("*.toml")))


def _check_products(policy: Policy, layers: int) -> None:
    """Refuse attention products whose layer no other request tells. Raises PolicyError."""
    for layer in range(layers):
        for phase in PHASES:
            leaves = {op for op in OPERATORS if policy.at(op, layer, phase).leaves}
            PolicyError.unless(
                not leaves.intersection(PRODUCTS) or leaves.issuperset((*PRODUCTS, "qkv_proj")),
                f"policy {policy.name}, layer {layer}",
                "some of qkv_proj, attn_scores and attn_values on the GPU",
                "all or none: a product does not say whose it is, the requests around it do",
            )


# -------------------------------------------------------------------------------------- noise

_SIGMA = "sigma"


def noisy_mask(policy: Policy) -> Mask | None:
    """Return the mask whose strength can be changed: the one with an option `sigma`, if any."""
    return next((mask for mask in policy.masks if _SIGMA in type(mask).model_fields), None)


def is_noisy(policy: Policy) -> bool:
    """Whether what crosses under a policy has noise in it."""
    sigmas = [getattr(mask, _SIGMA, None) for mask in policy.masks]
    return any(isinstance(sigma, int | float) and sigma > 0 for sigma in sigmas)


def with_sigma(policy: Policy, sigma: float) -> Policy:
    """Return a policy with another strength of noise.

    Raises SettingsError if its mask does not take it.
    """

    def changed(mask: Mask) -> Mask:
        if _SIGMA not in type(mask).model_fields:
            return mask
        strong = {**mask.model_dump(), _SIGMA: sigma}
        where = f"sigma of a curve, policy {policy.name}"
        return validate_file(type(mask), strong, where, SettingsError)

    return with_masks(policy, changed)


# -------------------------------------------------------------------------------------- texts


def text_of(model: Path, file: Path | None) -> str:
    """Return the text that prompts are cut from: a file's, the model's own, or ours.

    Raises PromptError.
    """
    path = file if file is not None else model / _TEXT_FILE
    if file is None and not path.is_file():
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(str(path), got=type(error).__name__, expected="UTF-8 text") from None


def cut_prompts(tokenizer: Tokenizer, text: str, count: int, tokens: int) -> list[list[int]]:
    """Cut a text into prompts of at most `tokens` tokens, each from the beginning of a piece.

    A piece begins with each BOS token in the text, or else after an empty line, and then gets what
    the tokenizer puts before a text. Raises PromptError where there are too few.
    """
    start = tokenizer.encode("")
    every = tokenizer.encode(text, add_special_tokens=False)
    pieces = (
        _split(every, start[0])
        if start and start[0] in every
        else [
            [*start, *tokenizer.encode(part, add_special_tokens=False)]
            for part in text.split("\n\n")
            if part.strip()
        ]
    )
    long_enough = [piece[:tokens] for piece in pieces if len(piece) >= _LEAST_TOKENS]
    # Two that are equal would be each other's chance.
    found = [list(piece) for piece in dict.fromkeys(map(tuple, long_enough))]
    PromptError.unless(
        len(found) >= count,
        "prompts",
        f"{len(found)} different ones of at least {_LEAST_TOKENS} tokens in the text",
        f"{count} (--text FILE with more, or fewer --prompts)",
    )
    return found[:count]


def random_prompts(vocab_size: int, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Return random token ids, for a model that was never trained."""
    chance = random.Random(seed)
    return [[chance.randrange(vocab_size) for _ in range(tokens)] for _ in range(count)]


def _split(ids: list[int], bos: int) -> list[list[int]]:
    starts = [index for index, token in enumerate(ids) if token == bos]
    ends = [*starts[1:], len(ids)]
    return [ids[start:end] for start, end in zip(starts, ends, strict=True)]
