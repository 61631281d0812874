"""Who computed wrongly, after a result was refused: each answer is computed once more.

That takes as long as the product does in the TEE, so that it ends with the time of the request.
Whoever is found is asked no more. A liar that could keep us from finding it must not gain by that:
where nothing is found out, everybody who answered is asked no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from protocol.errors import (
    ActivationRangeError,
    DeadlineExceededError,
    MaskError,
    TsqpError,
    VerificationError,
)
from protocol.integer import exact_product
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
)
from protocol.tensors import to_torch
from tee_side.answers import Answer, Deadline
from tee_side.mask_rules import MaskRules
from tee_side.verification import within_tolerance
from tee_side.verifier import Verifier
from tee_side.vocabulary import Operator

log = logging.getLogger("tee_side")

# Layer and modules of a product.
_Product: TypeAlias = tuple[int, tuple[ModuleName, ...]]

# Of a part of a product that is computed once more, after which the clock is looked at: some 0.1 s
# on one core.
_MULTIPLICATIONS = 2**31


class Refused(NamedTuple):
    """A result that was refused. `answers`: all that it was made of.

    `rules`: of the mask that they were unmasked under; `deadline`: of finding out.
    """

    operator: Operator
    layer: int | None
    answers: Sequence[Answer]
    verifier: Verifier
    deadline: Deadline
    rules: MaskRules


def distrust_liars(refused: Refused) -> VerificationError:
    """Let those who computed wrongly be asked no more, and return what is said of the last.

    Raises that where nobody else is left, and MaskError where all answers are right.
    """
    operator, layer = refused.operator, refused.layer
    where = operator if layer is None else f"{operator} in layer {layer}"
    liars = _liars(refused)
    known = liars is not None
    if liars is None:
        liars = refused.answers
    if not liars:
        raise MaskError(
            f"{refused.rules.name}: {where}",
            got="a wrong result, unmasked from right answers",
            expected="factors that were made from these weights, and an unmask that undoes mask",
        )
    everybody = " or ".join(dict.fromkeys(answer.exchange.endpoint for answer in liars))
    nobody_left: VerificationError | None = None
    for channel, _, exchange, _ in liars:
        error = VerificationError(
            f"{where} at {exchange.endpoint if known else everybody}",
            got="a wrong result",
            expected="what the weights of the TEE's own model give",
        )
        try:
            channel.distrust(exchange, error)
        except VerificationError as last:
            nobody_left = last
    if nobody_left is not None:
        raise nobody_left
    return error


def _liars(refused: Refused) -> Sequence[Answer] | None:
    """Return whose answers are wrong, nobody's where they were unmasked wrongly; None: unknown."""
    answers, in_the_clear = refused.answers, refused.rules.in_the_clear
    if in_the_clear and len(answers) == 1:
        return answers  # the result that was refused is the answer itself
    try:
        asked = [(answer.request, answer.output) for answer in answers]
        wrong = find_liars(asked, refused.verifier, refused.deadline.is_over)
    except ActivationRangeError:
        raise  # of what our own mask sent: nobody can compute with it
    except TsqpError as unknown:
        # The time is up, or the weights on disk, read once more for this, are not there or are
        # others by now. A liar must not be spared for it.
        fields = {"operator": refused.operator, "layer": refused.layer, "detail": str(unknown)}
        log.warning("liar_unknown", extra={"fields": fields})
        return None
    # In the clear nothing was unmasked: who is not off alone is off together with others.
    return answers if in_the_clear and not wrong else [answers[index] for index in wrong]


def find_liars(
    answers: Sequence[tuple[Request, torch.Tensor]],
    verifier: Verifier,
    is_over: Callable[[], bool],
) -> list[int]:
    """Return which of the answers to one operator are wrong, after all of it was refused.

    Each is compared with what was asked, by multiplying once more: the weights are read for it, a
    block of rows after the other. None of them is wrong where the result was unmasked wrongly. Of
    services with other weights than the TEE has, all count as wrong.

    `is_over`: asked before every block. Raises DeadlineExceededError once it says so, ModelError
    and ManifestError for weights that cannot be read again, and ActivationRangeError where what was
    sent is not finite.
    """
    if verifier.cloaked:
        return list(range(len(answers)))
    right: dict[int, bool] = {}
    # Shares of one product meet each block together: it is read once for all of them.
    rings: dict[_Product, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
    for index, (request, output) in enumerate(answers):
        if isinstance(request, RingLinearRequest):
            site = request.layer_idx, request.module_names
            rings.setdefault(site, {})[index] = to_torch(request.elements), output
        else:
            right[index] = _is_right(request, output, verifier, is_over)
    for (layer, modules), pairs in rings.items():
        blocks = verifier.weights.integer_blocks(layer, modules)
        rows = max(len(elements) for elements, _ in pairs.values())
        wrong = _wrong_products(pairs, _in_time(blocks, rows, is_over))
        right |= {index: index not in wrong for index in pairs}
    return [index for index in range(len(answers)) if not right[index]]


def _is_right(
    request: Request, output: torch.Tensor, verifier: Verifier, is_over: Callable[[], bool]
) -> bool:
    """Compare an answer in floats with what was asked, and hidden or not, crossed."""
    weights, tolerance = verifier.weights, verifier.tolerance.of_answers()
    match request:
        case LinearRequest():
            x = to_torch(request.hidden_states)
            blocks = weights.float_blocks(request.layer_idx, request.module_names)
        case LMHeadRequest():
            x = to_torch(request.hidden_states)
            blocks = weights.lm_head_blocks()
        case MatmulRequest():
            a_BMJ, b_BJN = to_torch(request.a), to_torch(request.b)
            return all(
                within_tolerance(a, _in_time(_whole(b.t()), len(a), is_over), y, tolerance)
                for a, b, y in zip(a_BMJ, b_BJN, output, strict=True)
            )
        case EmbeddingRequest():
            return verifier.embedding(to_torch(request.input_ids), output)
        case _:
            raise LookupError(f"an answer to {request.method} that was verified")
    return within_tolerance(x, _in_time(blocks, len(x), is_over), output, tolerance)


def _wrong_products(
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    blocks: Iterable[tuple[slice, torch.Tensor]],
) -> set[int]:
    """Return whose elements, int32 [T, I], times the weight are not its output, int32 [T, O].

    Stops where all of them are wrong.
    """
    wrong: set[int] = set()
    for columns, weight_nI in blocks:
        for index in pairs.keys() - wrong:
            elements_TI, output_TO = pairs[index]
            if not torch.equal(exact_product(elements_TI, weight_nI), output_TO[:, columns]):
                wrong.add(index)
        if len(wrong) == len(pairs):
            break
    return wrong


def _in_time(
    blocks: Iterator[tuple[slice, torch.Tensor]], rows: int, is_over: Callable[[], bool]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Hand blocks of a weight on while there is time, none larger than some 0.1 s of work.

    `rows`: of what each is multiplied by. Raises DeadlineExceededError.
    """
    blocks = iter(blocks)
    while True:
        _require_time(is_over)
        found = next(blocks, None)
        if found is None:
            return
        columns, weight_nI = found
        step = max(1, _MULTIPLICATIONS // max(1, rows * weight_nI.shape[1]))
        for start in range(0, len(weight_nI), step):
            if start:
                _require_time(is_over)
            part = weight_nI[start : start + step]
            begin = columns.start + start
            yield slice(begin, begin + len(part)), part


def _require_time(is_over: Callable[[], bool]) -> None:
    if is_over():
        raise DeadlineExceededError(
            "finding out who computed wrongly",
            got="the end of the request's time",
            expected="time to compute the product once more",
        )


def _whole(weight_OI: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    yield slice(0, len(weight_OI)), weight_OI
