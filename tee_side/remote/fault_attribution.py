"""The slow path of a call: which service is at fault for a refused result, and what comes next.

Where a reply has another form, its service is at fault. Where the numbers are wrong, each answer is
computed once more, which takes as long as the product does in the TEE, and ends with the time of
the call. Services at fault are asked no more in this run. A service must not gain by keeping the
TEE from finding out: where that fails, every service that answered is asked no more.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from protocol.channel import Channel
from protocol.errors import (
    ActivationRangeError,
    DeadlineExceededError,
    MaskError,
    ReplyError,
    TsqpError,
    VerificationError,
)
from protocol.messages import EmbeddingRequest
from protocol.prepared import Exchange, Payload, PreparedRequest
from tee_side.protect.masks.mask import Seed
from tee_side.protect.recomputation import Blocks, Claim
from tee_side.protect.verification import ResultCheck, Unverified
from tee_side.remote.services.replicas import Replicas
from tee_side.words import Operator

log = logging.getLogger("tee_side")

# Of a part of a product that is computed once more, after which the clock is looked at: some 0.1 s
# on one core.
_MULTIPLICATIONS = 2**31

# Finding out which rank is at fault takes at most so long, and at most this part of what is left of
# the call: it helps who repairs the service, and not the call.
_HINT_S, _HINT_PART = 2.0, 4


class Answer(NamedTuple):
    """What one service was sent, and its reply."""

    channel: Channel
    request: PreparedRequest
    sent: Payload
    exchange: Exchange

    def claim(self) -> Claim:
        """Return what is to be computed once more. Raises ReplyError."""
        return Claim(self.request.request(self.sent), self.request.output(self.exchange))


class Refused(NamedTuple):
    """Whose result was refused: an operator of a layer, asked for over `channels`.

    `mask`: as messages name it; `in_the_clear`: that there is none. `until`: the call's deadline.
    `accuse`: see `CallPlan`. `changed`: that a reply which is lent was wrong as it was read, and is
    right by now.
    """

    operator: Operator
    layer: int | None
    channels: Sequence[Channel]
    mask: str
    in_the_clear: bool
    check: ResultCheck | Unverified
    until: float
    accuse: Callable[[str], TsqpError | None] | None = None
    changed: bool = False


def refuse(
    refused: Refused,
    requests: Sequence[PreparedRequest],
    sent: Sequence[Payload | Seed],
    exchanges: Sequence[Exchange],
) -> None:
    """Ask services at fault no more.

    `sent`: to each service with every request; `exchanges`: the answers that there are, in order.
    Where all have the form that was asked for, it is the numbers that are wrong. Raises what the
    result was refused with where no service, or no time, is left: ReplyError, VerificationError, or
    MaskError where every answer is right.
    """
    asked = [
        (channel, *payload.crossing(request))
        if isinstance(payload, Seed)
        else (channel, request, payload)
        for request in requests
        for channel, payload in zip(refused.channels, sent, strict=True)
    ]
    answers = [Answer(*one, exchange) for one, exchange in zip(asked, exchanges, strict=False)]
    error = _distrust_forms(refused.operator, answers) or _distrust_liars(refused, answers)
    if time.monotonic() >= refused.until:
        raise error


def _distrust_forms(operator: Operator, answers: Sequence[Answer]) -> ReplyError | None:
    """Ask every service no more that sent a reply of another form; return the last error."""
    found: ReplyError | None = None
    for answer in answers:
        try:
            answer.request.output(answer.exchange)
        except ReplyError as error:
            found = ReplyError(
                f"{operator} reply from {answer.exchange.endpoint}",
                error.got,
                error.expected,
            )
            answer.channel.distrust(answer.exchange, found)
    return found


def _distrust_liars(refused: Refused, answers: Sequence[Answer]) -> VerificationError:
    """Ask the services no more that computed wrongly; return the last error.

    Raises MaskError, or what `accuse` returns, where every answer is right.
    """
    operator, layer = refused.operator, refused.layer
    where = operator if layer is None else f"{operator} in layer {layer}"
    if refused.changed:
        answers = [answer for answer in answers if answer.exchange.lent]
    liars = _liars(refused, answers)
    suspects = answers if liars is None else liars
    if not suspects:
        if refused.accuse is not None and (of_dealers := refused.accuse(where)) is not None:
            raise of_dealers
        raise MaskError(
            f"{refused.mask}: {where}",
            "a wrong result, unmasked from right answers",
            "factors that were made from these weights, and an unmask that undoes mask",
        )
    all_of_them = " or ".join(dict.fromkeys(one.exchange.endpoint for one in suspects))
    none_left: VerificationError | None = None
    for suspect in suspects:
        error = VerificationError(
            f"{where} at {all_of_them if liars is None else suspect.exchange.endpoint}",
            "a wrong result" + ("" if liars is None else _ranks(suspect, refused)),
            "what the weights of the TEE's own model give",
        )
        try:
            suspect.channel.distrust(suspect.exchange, error)
        except VerificationError as last:
            none_left = last
    if none_left is not None:
        raise none_left
    return error


def _ranks(liar: Answer, refused: Refused) -> str:
    """Say which ranks of a service computed wrongly, where that can be found out in a moment.

    A hint: the service says itself how many it has.
    """
    channel, check = liar.channel, refused.check
    if isinstance(check, Unverified) or not isinstance(channel, Replicas):
        return ""
    now, endpoint = time.monotonic(), liar.exchange.endpoint
    said = next((one.reply for one in channel.members if one.endpoint == endpoint), None)
    if said is None or said.ranks == 1 or liar.request.method == EmbeddingRequest.method:
        return ""
    ranks = said.ranks
    claims = [liar.claim()._replace(columns=(rank, ranks)) for rank in range(ranks)]
    until = min(now + _HINT_S, now + (refused.until - now) / _HINT_PART)
    try:
        wrong = find_liars(claims, check, lambda: time.monotonic() >= until)
    except TsqpError:
        return ""
    found = " and ".join(str(rank) for rank in wrong)
    return f" in the columns of rank {found} of {ranks}, counted from 0" if found else ""


def _liars(refused: Refused, answers: Sequence[Answer]) -> Sequence[Answer] | None:
    """Return the wrong answers, none where all were unmasked wrongly; None: it is unknown."""
    in_the_clear = refused.in_the_clear
    if (in_the_clear or refused.changed) and len(answers) == 1:
        return answers  # what was refused is this answer, or only this one can have changed
    if isinstance(refused.check, Unverified):
        raise LookupError("a result that was refused, and is not verified")
    try:
        VerificationError.unless(not refused.changed, refused.operator, "a right result", "as read")
        claims = [answer.claim() for answer in answers]
        wrong = find_liars(claims, refused.check, lambda: time.monotonic() >= refused.until)
    except ActivationRangeError:
        raise  # of what our own mask sent: no service can compute with it
    except TsqpError as unknown:
        # The time is up, or the weights on disk, read once more for this, are not there or are
        # others by now. A liar must not be spared for it.
        fields = {"operator": refused.operator, "layer": refused.layer, "detail": str(unknown)}
        log.warning("liar_unknown", extra={"fields": fields})
        return None
    # In the clear nothing was unmasked: who is not off alone is off together with others.
    return answers if in_the_clear and not wrong else [answers[index] for index in wrong]


def find_liars(
    claims: Sequence[Claim], check: ResultCheck, is_over: Callable[[], bool]
) -> Sequence[int]:
    """Return which of the claims about one operator are wrong, after all of it was refused.

    None of them is where the result was unmasked wrongly. `is_over`: asked before every block of a
    weight. Raises DeadlineExceededError once it says so, and as `ResultCheck.wrong` does.
    """
    return check.wrong(claims, lambda blocks, rows: _in_time(blocks, rows, is_over))


def _in_time(blocks: Blocks, rows: int, is_over: Callable[[], bool]) -> Blocks:
    """Hand blocks of a weight on while there is time, none larger than some 0.1 s of work.

    `rows`: of what each is multiplied by. Raises DeadlineExceededError.
    """
    _require_time(is_over)
    for columns, weight_nI in blocks:
        step = max(1, _MULTIPLICATIONS // max(1, rows * weight_nI.shape[1]))
        for start in range(0, len(weight_nI), step):
            part = weight_nI[start : start + step]
            begin = columns.start + start
            yield slice(begin, begin + len(part)), part
            _require_time(is_over)  # before the next is computed, or read


def _require_time(is_over: Callable[[], bool]) -> None:
    DeadlineExceededError.unless(
        not is_over(),
        "finding out which service computed wrongly",
        "the end of the request's time",
        "time to compute the product once more",
    )
