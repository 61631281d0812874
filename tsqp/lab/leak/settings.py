"""What a run of the laboratory is to do, and where it reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from protocol.messages import FloatDtype
from tee_side.policy.placement import Policy
from tsqp.lab.bench.model import Report as BenchReport
from tsqp.lab.leak.attack import Attack

# Under noise no candidate is certain, and each would be run for every token at every place.
NOISY_CANDIDATES = 256


@dataclass(frozen=True)
class LeakSettings:
    """One run of the laboratory.

    `policies`: with the name or path that each was given by; `prompts`: token ids, a session each;
    `public`: what the attacker has, None for the model itself; `margin`: how far above nothing the
    upper end of an interval may be at most, None: whatever it is. `cost`: "measure", "none", or a
    report of `tsqp bench`; `curves`: strengths of noise to try, for policies whose mask has any.
    `workers`: processes that attack side by side, with `threads` each; more than one of them find
    policies by what they were given by, and attacks by `attack_names`. `shares_in_the_clear`:
    whether links that shares depend on are in the clear, for the observer of all of them.
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
    attack_names: tuple[str, ...] = ()
    shares_in_the_clear: bool = False

    @property
    def noisy_candidates(self) -> int:
        """As `search_candidates`, of what crossed with noise."""
        return self.search_candidates or NOISY_CANDIDATES


@dataclass
class Watch:
    """What is told of the progress: `doing` says what, `step` how many of `total` are done.

    `done`: a line of each policy, and of each curve, that is done; `say`: what a person must know.
    """

    total: Callable[[int], None] = field(default=lambda _total: None)
    doing: Callable[[str], None] = field(default=lambda _what: None)
    step: Callable[[int], None] = field(default=lambda _steps: None)
    done: Callable[[str], None] = field(default=lambda _line: None)
    say: Callable[[str], None] = field(default=lambda _line: None)
