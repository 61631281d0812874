"""Scores what an attack read against what was said, and noisy logits against plain ones."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from protocol.errors import SettingsError
from protocol.validation import validate_file
from tee_side.engine.tokenizer import TOKENIZER_FILE
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import Mask
from tsqp.lab.leak.attack import TOP, AttackError, Reading, Trace
from tsqp.lab.leak.model import Lengths, Piece, Rate, Reconstruction, Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.recording import RecordedSession, Truth, with_masks
from tsqp.lab.research.feature_masks import RotationMask

# What is counted: hits and tries, as the fields of `Score` are called.
_RATES = ("top1", "top5", "prompt", "answer", "whole")


def score(readings: Iterable[Reading], truths: Sequence[Truth]) -> tuple[Score, ...]:
    """Score readings of all sessions, place by place, in the order of their first appearance.

    Raises AttackError for what would be counted twice, or is about nothing.
    """
    places: dict[str, dict[int, Reading]] = {}
    for reading in readings:
        seen, session = places.setdefault(reading.where, {}), reading.session
        AttackError.unless(
            session not in seen and 0 <= session < len(truths) and reading.tokens.start >= 0,
            f"reading of session {session} at {reading.where}",
            f"tokens {reading.tokens}" + (", a second time" if session in seen else ""),
            f"each place once in each of {len(truths)} sessions, tokens counted from 0",
        )
        seen[session] = reading
    return tuple(_score(where, seen, truths) for where, seen in places.items())


def _score(where: str, readings: Mapping[int, Reading], truths: Sequence[Truth]) -> Score:
    """Score the readings at a place, by their sessions."""
    flags: dict[str, list[bool]] = {name: [] for name in _RATES}
    guessed, by_chance, kinds = 0, 0.0, set[int]()
    for session, reading in readings.items():
        own = truths[session].tokens
        others = [one.tokens for index, one in enumerate(truths) if index != session]
        tried = [index for index in reading.tokens if index < len(own)]
        right = set()
        for index in tried:
            token, is_answer = own[index], index >= truths[session].prompted
            guesses = reading.guesses.get(index, ())[:TOP]
            hit = bool(guesses) and guesses[0] == token
            flags["top1"].append(hit)
            flags["top5"].append(token in guesses)
            flags["answer" if is_answer else "prompt"].append(hit)
            if hit:
                right.add(index)
                kinds.add(token)
            if guesses:
                guessed += 1
                there = [one[index] for one in others if index < len(one)]
                by_chance += sum(t == guesses[0] for t in there) / max(1, len(there))
        prompt = set(range(truths[session].prompted))
        if prompt and prompt.issubset(tried):
            flags["whole"].append(prompt <= right)
    return Score(
        where=where,
        **{name: Rate(hits=sum(own), n=len(own)) for name, own in flags.items()},
        chance=by_chance / max(1, len(flags["top1"])),
        guessed=guessed,
        kinds=len(kinds),
    )


def reconstruct(
    readings: Sequence[Reading],
    attack: str,
    where: str,
    truths: Sequence[Truth],
    public: PublicModel,
) -> Reconstruction:
    """Return the first session that was read at a place, token by token.

    A token alone is decoded for each piece; bytes that are no character yet are shown as such.
    """
    own = (reading for reading in readings if reading.where == where)
    reading = min(own, key=lambda one: one.session)
    truth = truths[reading.session]
    pieces = []
    for index in (index for index in reading.tokens if index < len(truth.tokens)):
        token = truth.tokens[index]
        guesses = reading.guesses.get(index, ())
        pieces.append(
            Piece(
                real=_text(public, token),
                read=_text(public, guesses[0]) if guesses else None,
                right=bool(guesses) and guesses[0] == token,
                part="answer" if index >= truth.prompted else "prompt",
            )
        )
    unseen = len(truth.prompt) - truth.prompted
    return Reconstruction(attack=attack, where=where, unseen=unseen, pieces=tuple(pieces))


def _text(public: PublicModel, token: int) -> str:
    """Return a token's text; a special one has none, and a model of random weights no tokenizer."""
    if not (public.directory / TOKENIZER_FILE).is_file():
        return f"<{token}>"
    return public.tokenizer.decode([token]) or f"<{token}>"


def read_lengths(trace: Trace) -> tuple[int | None, int]:
    """Return the number of tokens of prompt and answer as the shapes of requests tell them.

    None where no step has more than a token: then the prompt did not cross. The token that is
    sampled last goes through no model, and is counted.
    """
    sizes = [step.tokens for step in trace.steps]
    answer = sum(size == 1 for size in sizes) + 1
    prompt = sum(size for size in sizes if size > 1)
    return (prompt, answer) if prompt else (None, answer)


def lengths(sessions: Sequence[RecordedSession]) -> Lengths:
    """Compare them with the truth. What the first service sees is enough."""
    read = [(read_lengths(session.traces[0]), session.truth) for session in sessions]
    prompts = [(found, len(truth.prompt)) for (found, _), truth in read if found is not None]
    right = sum(found == len(truth.answer) for (_, found), truth in read)
    return Lengths(
        prompt=Rate(hits=sum(a == b for a, b in prompts), n=len(prompts)) if prompts else None,
        answer=Rate(hits=right, n=len(read)),
    )


# -------------------------------------------------------------------------------------- curves

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


def strength(policy: Policy, sigma: float, public: PublicModel) -> tuple[str, float]:
    """Return "epsilon", and that of a row, where the mask can state it; "sigma" otherwise.

    Of a segment's first layer: the rows of the embedding have a longest one.
    """
    mask = noisy_mask(policy)
    if not isinstance(mask, RotationMask):
        return _SIGMA, sigma
    lengths_V = torch.linalg.vector_norm(public.embedding_VD, dim=1)
    epsilon = mask.epsilon(mask.longest_row(public.config, lambda: float(lengths_V.max())))
    return "epsilon", epsilon


def harm(
    texts: Sequence[Sequence[int]], plain: Sequence[torch.Tensor], noisy: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Compare logits [T, V] of each text with those without noise.

    Returns the perplexity, and the error of logits: relative, root of the mean square.
    """
    loss, tokens, error, size = 0.0, 0, 0.0, 0.0
    for ids, plain_TV, noisy_TV in zip(texts, plain, noisy, strict=True):
        following = torch.tensor(list(ids[1:]))
        log_TV = noisy_TV[:-1].log_softmax(-1)
        loss -= float(log_TV.gather(1, following[:, None]).sum())
        tokens += len(following)
        error += float((noisy_TV - plain_TV).square().sum())
        size += float(plain_TV.square().sum())
    return math.exp(min(loss / tokens, 700.0)), math.sqrt(error / size)
