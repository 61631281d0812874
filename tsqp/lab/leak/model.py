"""What `tsqp leak` reports: the JSON document, from which table, page and pictures are drawn.

Rates are shares of tokens, 0 to 1; every rate comes with its n. Intervals are Wilson's at 95 %.
"""

import math
from bisect import bisect_left
from statistics import NormalDist
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field, model_validator

from tsqp.catalogue import Standing

# What it is worth in a comparison to have tried both prompts and answers.
_BOTH_PARTS = 0.1
# Of the tokens that an attack tried: with fewer guesses it gave up.
_ENOUGH_GUESSED = 0.5
# Of a control: fewer show that an attack can work, not how often.
_LEAST_CONTROL = 20
# Above chance: what an attack must read to count although its control failed.
_BEYOND_DOUBT = 0.05

CONFIDENCE = 0.95
# How often luck alone may make the laboratory say that something is read: of all places of a policy
# together, of which there are hundreds.
LUCK = 1e-4
_PLACES = 100
_NEGLIGIBLE = 1e-12
# More hits, and more tokens, than anybody will ever count.
_MOST_HITS, _MOST_TOKENS = 2**30, 2**60


# The adversaries; where pads are dealt, "service" is the service alone, or the dealer alone.
Adversary = Literal["service", "observer of all links", "colluding services"]


class _ReportModel(BaseModel):
    # Infinite is an epsilon without noise, which JSON has no number for.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, data: Any) -> Any:
        """Leave out what follows from the rest, and is written for readers of the document."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.model_computed_fields}


class Rate(_ReportModel):
    """So many of so many. `value`, `low`, `high` follow from them; None of none."""

    hits: int
    n: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def value(self) -> float | None:
        """The share."""
        return self.hits / self.n if self.n else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return wilson(self.hits, self.n)[0]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return wilson(self.hits, self.n)[1]


class Score(_ReportModel):
    """What an attack read at one place, of all sessions that it tried to read there.

    `where`: "layer 0 qkv_proj"; `top1`: tokens whose first guess is right, and of them those of
    prompts and of answers; `top5`: tokens that are among the first five guesses; `whole`: prompts
    of which every token is right, of those that were tried to their end. `chance`: the share that
    the same guesses would get right in the other sessions, whose texts they have nothing to do
    with. `guessed`: tokens for which there was a guess; `kinds`: different tokens among those that
    were right.
    """

    where: str
    top1: Rate
    top5: Rate
    prompt: Rate
    answer: Rate
    whole: Rate
    chance: float
    guessed: int
    kinds: int

    @property
    def gave_up(self) -> bool:
        """Whether there were too few guesses for a low rate to say anything."""
        return self.guessed < _ENOUGH_GUESSED * self.top1.n

    @property
    def strength(self) -> tuple[float, int]:
        """What scores are compared by: how much was read at least, then of how many tokens.

        Beyond doubt, by the rate's lower end alone: a smaller chance, as of an attack that leaves
        out what is easy, makes no better one. Otherwise by how far that is above chance.
        """
        sure = self.excess_low > _BEYOND_DOUBT
        return (1.0 + self.top1.low if sure else self.excess_low, self.top1.n)

    @property
    def excess_high(self) -> float:
        """Upper end of the interval less chance."""
        return self.top1.high - self.chance

    @property
    def excess_low(self) -> float:
        """Lower end of the interval less chance: above 0 something was read, at 95 %."""
        return self.top1.low - self.chance


class Control(_ReportModel):
    """An attack under the policy where it must work. `published`: what it must read there.

    `rate`: at its best place, `where`; `places`: what it read at every place there.
    """

    attack: str
    policy: str
    where: str | None
    rate: Rate
    published: float
    places: dict[str, Rate] = {}

    def works_at(self, where: str | None = None) -> bool:
        """Whether it worked, so that a low rate elsewhere means something.

        At a place; at the best one without it, and where it is none of the control's.
        """
        rate = self.places.get(where or "", self.rate)
        return rate.n >= _LEAST_CONTROL and rate.hits >= self.published * rate.n


class AttackRun(_ReportModel):
    """One attack against one service under one policy.

    `refused`: why it found nothing to do; then there are no scores. `compared`, `modelled`,
    `cpu_s`: the work: comparisons of a candidate with something observed, token positions run
    through the public model, and processor seconds here.
    """

    attack: str
    service: int
    refused: str | None
    control: Control | None
    scores: tuple[Score, ...]
    compared: int
    modelled: int
    cpu_s: float

    @property
    def meaningful(self) -> tuple[Score, ...]:
        """Scores of places at which it works where it must, or that are beyond doubt.

        Not of those at which it gave up: what it did not guess it did not fail to read.
        """
        control = self.control
        return tuple(
            score
            for score in self.scores
            if control is not None
            and (
                (control.works_at(score.where) and not score.gave_up)
                or score.excess_low > _BEYOND_DOUBT
            )
        )

    @property
    def failed(self) -> bool:
        """Whether it applies and did not work, as where it gave no reading."""
        return self.refused is None and not self.meaningful and not self.gave_up

    @property
    def gave_up(self) -> bool:
        """Whether it works where it must, and gave up here, wherever it looked."""
        return (
            self.control is not None
            and self.control.works_at()
            and bool(self.scores)
            and all(score.gave_up for score in self.scores)
        )


class DecodeCost(_ReportModel):
    """Of one decoded token, measured by `tsqp bench` with a service that answers at once.

    `overhead_ms`: all but Embedding and LM head computed in the TEE; `context`: tokens behind it.
    """

    overhead_ms: float
    rpcs: float
    bytes_sent: float
    bytes_received: float
    context: int


class Lengths(_ReportModel):
    """Sessions whose exact number of tokens follows from what crossed, under any mask.

    `prompt`: None where prefill stays in the TEE, which shows nothing of it.
    """

    prompt: Rate | None
    answer: Rate


class Piece(_ReportModel):
    """One token as it was and as it was read; `read`: None where nothing was guessed."""

    real: str
    read: str | None
    right: bool
    part: Literal["prompt", "answer"]


class Reconstruction(_ReportModel):
    """One session as the best attack reads it. `unseen`: tokens of the prompt that stayed."""

    attack: str
    where: str
    unseen: int
    pieces: tuple[Piece, ...]


class PolicyLeak(_ReportModel):
    """One policy against one adversary: what it costs, and what each attack read.

    `nothing`: why there was nothing to attack. `sent`: tokens of prompts and of answers that went
    through the model while a service was asked, of all sessions. `untried`: places that crossed,
    that no attack tried, and whose mask no attack tried anywhere. `blind`: the chance of a guess
    at random, one of the vocabulary's size.
    """

    policy: str
    adversary: Adversary = "service"
    summary: str
    standing: Standing
    services: int
    nothing: str | None
    sent_prompt: int
    sent_answer: int
    cost: DecodeCost | None
    runs: tuple[AttackRun, ...]
    untried: tuple[str, ...] = ()
    blind: float = 0.0
    lengths: Lengths | None
    reconstruction: Reconstruction | None

    @property
    def title(self) -> str:
        """The policy, with the adversary where there is more than one."""
        alone = self.adversary == "service" and self.services < 2
        return self.policy if alone else f"{self.policy} ({self.adversary})"

    @property
    def apart(self) -> bool:
        """Whether a run is against one of several services, which it names."""
        return self.adversary == "service" and self.services > 1

    @property
    def scored(self) -> list[tuple[AttackRun, Score]]:
        """What each attack read at each place, where that means something."""
        return [(run, score) for run in self.runs for score in run.meaningful]

    @property
    def best(self) -> tuple[AttackRun, Score] | None:
        """The attack and place of which most was read, of attacks that mean something.

        One that tried both prompts and answers, as far as these were sent, counts a little more:
        it says more, but must not hide that all of one part is read. Of equals the one that took
        the least work.
        """
        return max(self.scored, key=self._rank, default=None)

    def _rank(self, found: tuple[AttackRun, Score]) -> tuple[float, int, int, int]:
        run, score = found
        read, n = score.strength
        both = (score.prompt.n > 0 or not self.sent_prompt) and score.answer.n > 0
        return (read + _BOTH_PARTS * both, n, -run.modelled, -run.compared)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def above_chance(self) -> bool:
        """Whether any attack reads more than luck explains, for all places together.

        Of a hundred places one is lucky: each gets its part of `LUCK` (Bonferroni). A guess that
        was right nowhere else may still be lucky: no chance is smaller than a blind one. Under a
        mask that stays the same a token is guessed alike wherever it stands: what counts is how
        many different ones are right. A large share is no luck in any case.
        """
        part = LUCK / max(1, len(self.scored))
        return any(
            by_luck(score.kinds, score.top1.n, max(score.chance, self.blind)) < part
            or score.excess_low > _BEYOND_DOUBT
            for _, score in self.scored
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def excess_high(self) -> float | None:
        """How far above chance the rate may be at most, of every attack and place.

        None if nothing was attacked. 1 where an attack that applies did not work, or something
        crossed that none tried, or none without giving up.
        """
        found = [score.excess_high for _, score in self.scored]
        applied = [run for run in self.runs if run.refused is None]
        if self.untried or any(run.failed for run in self.runs) or (applied and not found):
            found.append(1.0)
        return max(found, default=None)


class Point(_ReportModel):
    """One strength of noise: what is read, and what becomes of the output.

    `perplexity`: of a text; `output_error`: of logits, relative, root of the mean square.
    `strength`: in the curve's parameter, infinite (as epsilon) without noise; `sigma`: the mask's.
    """

    perplexity: float
    output_error: float
    strength: float
    sigma: float
    rate: Rate
    attack: str
    where: str
    chance: float


class Curve(_ReportModel):
    """Recovery against the strength of a mask's noise.

    `parameter`: "sigma" or "epsilon"; `plain_perplexity`: without noise. `output_error`: of logits,
    relative, root of the mean square. `search_*`: see `tsqp.lab.leak.attack.View`.
    """

    policy: str
    parameter: str
    plain_perplexity: float
    search_sessions: int
    search_candidates: int
    points: tuple[Point, ...]


class LeakSetup(_ReportModel):
    """What was attacked, and how. `search_*`: see `tsqp.lab.leak.attack.View`.

    `noisy_candidates`: `search_candidates` where there was noise in what crossed.
    `public_layers`: whether the attacker has linear weights, and not embedding and norms alone.
    """

    command: str
    created: str
    machine: dict[str, str | int]
    model: str
    public: str
    public_layers: bool = True
    dtype: str
    vocab_size: int
    hidden_size: int
    sessions: int
    prompt_tokens: int
    new_tokens: int
    temperature: float
    seed: int
    search_sessions: int
    search_tokens: int
    search_candidates: int | None = None
    noisy_candidates: int | None = None


class LeakReport(_ReportModel):
    """The document. `incomplete`: why it lacks policies, None if it lacks none."""

    version: Literal[1] = 1
    setup: LeakSetup
    policies: tuple[PolicyLeak, ...]
    curves: tuple[Curve, ...] = ()
    incomplete: str | None = None


# ------------------------------------------------------------------------- how sure a rate is


def wilson(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a share, as E. B. Wilson (1927) has it; (0, 1) of none.

    Tokens count as independent. Those of one text are not quite: docs/leakage.md says what that
    means.
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = hits / n, z * z / n
    centre = share + spread / 2
    half = z * math.sqrt((share * (1 - share) + spread / 4) / n)
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    # Where all or none were hit an end is exact, and rounding would say otherwise.
    return (0.0 if hits == 0 else max(0.0, low)), (1.0 if hits == n else min(1.0, high))


def by_luck(hits: int, n: int, chance: float) -> float:
    """Return how likely it is to hit so many of n or more by chance alone: the binomial tail."""
    if hits == 0 or chance >= 1:
        return 1.0
    if chance <= 0:
        return 0.0
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    total = 0.0
    for count in range(hits, n + 1):
        log_ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
        term = math.exp(log_ways + count * log_hit + (n - count) * log_miss)
        total += term
        if count > chance * n and term <= total * _NEGLIGIBLE:  # and all behind it still smaller
            break
    return min(1.0, total)


def needed(margin: float, chance: float = 0.0) -> int:
    """Return how many tokens it takes for an upper end that is at most `margin` above chance.

    Where guesses are right by chance alone; luck may still end higher, in one of 1 / `LUCK` runs
    through a hundred places. With a chance of 0 nothing is ever right.
    """

    def fewest(hits: int) -> int:
        """Return the fewest tokens of which so many may be hit for such an upper end."""
        return bisect_left(
            range(_MOST_TOKENS),
            True,
            lo=hits + 1,
            key=lambda n: wilson(hits, n)[1] - chance <= margin,
        )

    def enough(hits: int) -> bool:
        return by_luck(hits + 1, fewest(hits), chance) <= LUCK / _PLACES

    return fewest(bisect_left(range(_MOST_HITS), True, key=enough))
