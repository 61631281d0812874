"""One session as an attacker reads it, beside what was said."""

from __future__ import annotations

from collections.abc import Sequence

from tsqp.lab.leak.attack import Reading
from tsqp.lab.leak.model import Piece, Reconstruction
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import Truth
from tsqp.lab.leak.score import stream


def reconstruct(
    readings: Sequence[Reading],
    attack: str,
    where: str,
    truths: Sequence[Truth],
    public: PublicModel,
) -> Reconstruction | None:
    """Return the first session that was read at a place, token by token.

    A token alone is decoded for each piece; bytes that are no character yet are shown as such.
    """
    own = [reading for reading in readings if reading.where == where]
    if not own:
        return None
    reading = min(own, key=lambda one: one.session)
    truth = truths[reading.session]
    tokens = stream(truth)
    pieces = []
    for index in reading.tokens:
        if index >= len(tokens):
            continue
        token, is_answer = tokens[index]
        guesses = reading.guesses.get(index, ())
        pieces.append(
            Piece(
                real=_text(public, token),
                read=_text(public, guesses[0]) if guesses else None,
                right=bool(guesses) and guesses[0] == token,
                part="answer" if is_answer else "prompt",
            )
        )
    sent = sum(not flag for flag in truth.answers)
    return Reconstruction(
        attack=attack, where=where, unseen=len(truth.prompt) - sent, pieces=tuple(pieces)
    )


def _text(public: PublicModel, token: int) -> str:
    """Return a token's text; a special one has none, and a model of random weights no tokenizer."""
    if not public.has_tokenizer:
        return f"<{token}>"
    return public.tokenizer.decode([token]) or f"<{token}>"
