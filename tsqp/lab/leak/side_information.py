"""What stays visible under every mask: how many tokens went by, and when.

A step's requests have a row for each of its tokens. A prompt's tokens come together, those of an
answer one by one, so that an observer that counts rows knows both lengths exactly. What a mask adds
to each request is the same for all, and a decoded token shows how many that is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tsqp.lab.leak.model import Lengths, Rate
from tsqp.lab.leak.record_session import Session
from tsqp.lab.leak.trace import Trace


def read_lengths(trace: Trace) -> tuple[int | None, int]:
    """Return the number of tokens of prompt and answer as the shapes of requests tell them.

    None where no step has more than a token: then the prompt did not cross. The token that is
    sampled last goes through no model, and is counted.
    """
    sizes = [step.tokens for step in trace.steps]
    answer = sum(size == 1 for size in sizes) + 1
    prompt = sum(size for size in sizes if size > 1)
    return (prompt, answer) if prompt else (None, answer)


def lengths(sessions: Sequence[Session]) -> Lengths:
    """Compare them with the truth. What the first service sees is enough."""
    read = [(read_lengths(session.traces[0]), session.truth) for session in sessions]
    prompts = [(found, len(truth.prompt)) for (found, _), truth in read if found is not None]
    right = sum(found == len(truth.answer) for (_, found), truth in read)
    return Lengths(
        prompt=Rate(hits=sum(a == b for a, b in prompts), n=len(prompts)) if prompts else None,
        answer=Rate(hits=right, n=len(read)),
    )
