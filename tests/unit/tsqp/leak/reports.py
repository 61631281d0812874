"""Reports that were never measured, with what a measured one may hold."""

from __future__ import annotations

from tsqp.catalogue import Standing
from tsqp.lab.leak.model import (
    AttackRun,
    Control,
    Cost,
    Curve,
    Lengths,
    Piece,
    Point,
    PolicyLeak,
    Rate,
    Reconstruction,
    Report,
    Score,
    Setup,
)

N = 4096


def score(
    hits: int, n: int = N, where: str = "layer 0 qkv_proj", chance: float = 0.004, whole: int = 0
) -> Score:
    """Half of the tokens are the prompt's; each session has 128 tokens."""
    return Score(
        where=where,
        top1=Rate(hits=hits, n=n),
        top5=Rate(hits=min(n, hits + n // 100), n=n),
        prompt=Rate(hits=hits // 2, n=n // 2),
        answer=Rate(hits=hits - hits // 2, n=n - n // 2),
        whole=Rate(hits=whole, n=max(1, n // 128)),
        chance=chance,
        guessed=n,
        kinds=hits,
    )


def control(attack: str, hits: int = 500, published: float = 0.95) -> Control:
    return Control(
        attack=attack,
        policy="attention-in-tee",
        where="layer 0 qkv_proj",
        rate=Rate(hits=hits, n=512),
        published=published,
    )


def run(attack: str, *scores: Score, worked: bool = True, service: int = 1) -> AttackRun:
    return AttackRun(
        attack=attack,
        service=service,
        refused=None,
        control=control(attack, hits=500 if worked else 61),
        scores=scores,
        compared=4_194_304,
        modelled=96,
        cpu_s=1.25,
    )


def refused(attack: str, reason: str = "no activations crossed") -> AttackRun:
    return AttackRun(
        attack=attack,
        service=1,
        refused=reason,
        control=None,
        scores=(),
        compared=0,
        modelled=0,
        cpu_s=0.0,
    )


def piece(real: str, read: str | None, part: str = "prompt") -> Piece:
    return Piece(real=real, read=read, right=read == real, part=part)  # type: ignore[arg-type]


PROMPT = [
    "Dear",
    "Dr.",
    "Weber,\n",
    "my",
    "blood",
    "test",
    "of",
    "12",
    "March",
    "shows",
    "a",
    "value",
    "that",
    "worries",
    "me",
]
ANSWER = [
    "A",
    "single",
    "value",
    "says",
    "little;",
    "please",
    "bring",
    "the",
    "sheet",
    "to",
    "your",
    "next",
    "visit.",
]


def words(text: list[str]) -> list[str]:
    return [text[0], *(f" {word}" for word in text[1:])]


def reconstruction(
    wrong: tuple[int, ...] = (), *, every: bool = False, unseen: int = 0
) -> Reconstruction:
    """Read but for some tokens (or all), which are read as others or not at all."""
    real = [] if unseen else [(word, "prompt") for word in words(PROMPT)]
    real += [(word, "answer") for word in words(ANSWER)]
    others = [" the", "ing", " Lily", ".\n", None, " very"]
    return Reconstruction(
        attack="vocabulary",
        where="layer 0 qkv_proj",
        unseen=unseen,
        pieces=tuple(
            piece(word, others[place % 6] if every or place in wrong else word, part)
            for place, (word, part) in enumerate(real)
        ),
    )


def policy(
    name: str,
    *runs: AttackRun,
    standing: Standing = "broken",
    cost_ms: float | None = 2.0,
    nothing: str | None = None,
    read: Reconstruction | None = None,
    services: int = 1,
) -> PolicyLeak:
    return PolicyLeak(
        policy=name,
        summary=f"What {name} does.",
        standing=standing,
        services=services,
        nothing=nothing,
        sent_prompt=0 if nothing else N // 2,
        sent_answer=0 if nothing else N // 2,
        cost=None
        if cost_ms is None
        else Cost(
            overhead_ms=cost_ms, rpcs=24.0, bytes_sent=9216.0, bytes_received=21504.0, context=128
        ),
        runs=runs,
        lengths=None
        if nothing
        else Lengths(prompt=Rate(hits=32, n=32), answer=Rate(hits=32, n=32)),
        reconstruction=read,
    )


def setup() -> Setup:
    return Setup(
        command="tsqp leak demo --policy shielded",
        created="2026-11-22 18:00 UTC",
        machine={"cpu": "AMD EPYC 7763", "cores": 2},
        model="demo",
        public="demo",
        dtype="float32",
        vocab_size=1024,
        hidden_size=192,
        sessions=32,
        prompt_tokens=64,
        new_tokens=64,
        temperature=0.0,
        seed=0,
        search_sessions=4,
        search_tokens=96,
    )


def point(strength: float, sigma: float, hits: int, perplexity: float, n: int = N) -> Point:
    return Point(
        strength=strength,
        sigma=sigma,
        rate=Rate(hits=hits, n=n),
        attack="noise-averaging" if n else "none",
        where="all places" if n else "none",
        chance=0.004 if n else 0.0,
        perplexity=perplexity,
        output_error=sigma / 20,
    )


def curve() -> Curve:
    made = ((0.0, 4096, 12.0), (0.5, 4096, 12.1), (1.0, 4090, 12.6), (2.0, 3811, 15.0))
    made += ((4.0, 2600, 31.0), (8.0, 410, 160.0), (16.0, 18, 890.0))
    return Curve(
        policy="float-noise",
        parameter="sigma",
        plain_perplexity=12.0,
        search_sessions=1,
        search_candidates=256,
        points=tuple(point(sigma, sigma, hits, worse) for sigma, hits, worse in made),
    )


def epsilon_curve() -> Curve:
    """Without noise epsilon is infinite; under the most of it no attack works."""
    return Curve(
        policy="cloak-noise",
        parameter="epsilon",
        plain_perplexity=12.0,
        search_sessions=1,
        search_candidates=256,
        points=(
            point(1.7, 64.0, 0, 2.0e6, n=0),
            point(27.5, 8.0, 19, 890.0),
            point(230.0, 2.0, 1210, 44.0),
            point(2100.0, 0.5, 4001, 12.4),
            point(float("inf"), 0.0, 4010, 12.0),
        ),
    )


def report(*policies: PolicyLeak, incomplete: str | None = None) -> Report:
    return Report(setup=setup(), policies=policies, incomplete=incomplete)


def tee_only() -> PolicyLeak:
    return policy(
        "tee-only",
        standing="nothing leaves",
        cost_ms=58.0,
        nothing="nothing crosses: no operator leaves the TEE",
    )


def shielded() -> PolicyLeak:
    """Attacked by two attacks that work elsewhere, and by one that finds nothing to do."""
    return policy(
        "shielded",
        run("pad-reuse", score(17)),
        run("pad-basis", score(14, where="layer 0 qkv_proj")),
        refused("vocabulary", "integers under a pad"),
        standing="not known to be broken",
        cost_ms=9.5,
        read=reconstruction(every=True, unseen=48),
    )


def unjudged() -> PolicyLeak:
    """Attacked by an attack that does not work where it must."""
    return policy(
        "row-mix",
        run("row-space", score(3), worked=False),
        run("norms", score(15), service=1),
        cost_ms=4.0,
    )


def sample() -> Report:
    """The built-in policies, about as they come out."""

    def broken(name: str, attack: str, hits: int, cost_ms: float | None, *wrong: int) -> PolicyLeak:
        return policy(
            name,
            run(
                attack,
                score(hits, whole=30),
                score(hits * 15 // 16 - 60, n=3840, where="layer 3 o_proj"),
            ),
            refused("token-ids", "embedding stays"),
            refused("logits", "lm_head stays"),
            cost_ms=cost_ms,
            standing="broken" if wrong else "clear",
            read=reconstruction(wrong),
        )

    return Report(
        setup=setup(),
        policies=(
            tee_only(),
            shielded(),
            policy(
                "two-server",
                run("pad-reuse", score(15), service=1),
                run("pad-reuse", score(19), service=2),
                standing="not known to be broken",
                services=2,
                cost_ms=12.0,
                read=reconstruction(every=True),
            ),
            broken("stip", "vocabulary-features", 4061, 2.3, 4),
            broken("cloak", "eigenvectors", 4010, 2.4, 3, 9),
            broken("row-rotation", "row-space", 4096, 3.1, 2),
            unjudged(),
            broken("float-noise", "noise-averaging", 4040, 2.9, 7),
            broken("tsqp-permuted", "vocabulary-rows", 3890, 6.8, 1, 5, 8),
            broken("quantized-clear", "nearest-embedding", 4096, 2.2),
            broken("attention-in-tee", "nearest-embedding", 4096, 2.1),
            broken("tsqp", "token-ids", 4096, 5.2),
            broken("pad-low-dimensional", "pad-basis", 4088, None),
        ),
        curves=(curve(), epsilon_curve()),
    )
