"""Compares what an attack read with what was said, after it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tsqp.lab.leak.attack import TOP, AttackError, Reading
from tsqp.lab.leak.model import Rate, Score
from tsqp.lab.leak.record_session import Truth


@dataclass
class _Tally:
    top1: list[int] = field(default_factory=lambda: [0, 0])
    top5: list[int] = field(default_factory=lambda: [0, 0])
    prompt: list[int] = field(default_factory=lambda: [0, 0])
    answer: list[int] = field(default_factory=lambda: [0, 0])
    whole: list[int] = field(default_factory=lambda: [0, 0])
    by_chance: float = 0.0
    guessed: int = 0
    hit: set[int] = field(default_factory=set)


def score(readings: Iterable[Reading], truths: Sequence[Truth]) -> tuple[Score, ...]:
    """Score readings of all sessions, place by place, in the order of their first appearance."""
    tallies: dict[str, _Tally] = {}
    streams = [stream(truth) for truth in truths]
    seen: set[tuple[str, int]] = set()
    for reading in readings:
        _check(reading, len(truths), seen)
        tally = tallies.setdefault(reading.where, _Tally())
        _count(tally, reading, streams)
    return tuple(
        Score(
            where=where,
            top1=_rate(tally.top1),
            top5=_rate(tally.top5),
            prompt=_rate(tally.prompt),
            answer=_rate(tally.answer),
            whole=_rate(tally.whole),
            chance=tally.by_chance / max(1, tally.top1[1]),
            guessed=tally.guessed,
            kinds=len(tally.hit),
        )
        for where, tally in tallies.items()
    )


def _check(reading: Reading, sessions: int, seen: set[tuple[str, int]]) -> None:
    """Refuse what would be counted twice, or is about nothing. Raises AttackError."""
    key = (reading.where, reading.session)
    if key in seen or not 0 <= reading.session < sessions or reading.tokens.start < 0:
        raise AttackError(
            f"reading of session {reading.session} at {reading.where}",
            got=f"tokens {reading.tokens}" + (", a second time" if key in seen else ""),
            expected=f"each place once in each of {sessions} sessions, tokens counted from 0",
        )
    seen.add(key)


def stream(truth: Truth) -> list[tuple[int, bool]]:
    """Return the tokens that a trace is about, in order, and whether each is the answer's.

    Those that went through the model while the service was asked, and the one behind them.
    """
    found = list(zip(truth.sent, truth.answers, strict=True))
    return found if truth.last is None else [*found, (truth.last, True)]


def _count(tally: _Tally, reading: Reading, streams: Sequence[list[tuple[int, bool]]]) -> None:
    own = streams[reading.session]
    others = [one for index, one in enumerate(streams) if index != reading.session]
    tried = [index for index in reading.tokens if index < len(own)]
    right = set()
    for index in tried:
        token, is_answer = own[index]
        guesses = reading.guesses.get(index, ())[:TOP]
        hit = bool(guesses) and guesses[0] == token
        _add(tally.top1, hit)
        _add(tally.top5, token in guesses)
        _add(tally.answer if is_answer else tally.prompt, hit)
        if hit:
            right.add(index)
            tally.hit.add(token)
        if guesses:
            tally.guessed += 1
            there = [one[index][0] for one in others if index < len(one)]
            tally.by_chance += sum(t == guesses[0] for t in there) / max(1, len(there))
    prompt = {index for index, (_, is_answer) in enumerate(own) if not is_answer}
    if prompt and prompt.issubset(tried):
        _add(tally.whole, prompt <= right)


def _add(pair: list[int], hit: bool) -> None:
    pair[0] += hit
    pair[1] += 1


def _rate(pair: list[int]) -> Rate:
    return Rate(hits=pair[0], n=pair[1])
