"""One error for what several services said."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ModelMismatchError,
    ProtocolError,
    ReplyError,
    ServiceError,
    TsqpError,
    VerificationError,
)

_ANYBODY = "one of them that answers"
# Of errors of different kinds, the one that says most of what to do. A ProtocolError has a code.
_GRAVEST = (VerificationError, ModelMismatchError, ReplyError)


def aggregate_errors(
    method: str, said: Mapping[str, TsqpError], timeout_s: float | None
) -> TsqpError:
    """Return one error that says in one line what each of some services said, by endpoint.

    `timeout_s`: that was up, which makes it a DeadlineExceededError; None: nobody is left to ask,
    and it is of the gravest kind among them. What a single service said is returned as it is.
    """
    errors = list(said.values())
    if timeout_s is not None:
        # That one was asked last with little time left says nothing.
        each = _each({e: x for e, x in said.items() if not isinstance(x, DeadlineExceededError)})
        got = f"no reply within {timeout_s:g} s" + (f" ({each})" if each else "")
        where = f"{method} at {' and '.join(said)}" if said else method
        return DeadlineExceededError(where, got=got, expected="a gpu-service that answers there")
    if len(errors) == 1:
        return errors[0]
    return _of_kind(f"{method} at {' and '.join(said)}", _each(said), errors)


def _each(said: Mapping[str, TsqpError]) -> str:
    return "; ".join(f"{endpoint}: {error.got}" for endpoint, error in said.items())


def _of_kind(where: str, each: str, errors: list[TsqpError]) -> TsqpError:
    for kind in _GRAVEST:
        if any(isinstance(error, kind) for error in errors):
            return kind(where, got=each, expected=_ANYBODY)
    for error in errors:
        if isinstance(error, ProtocolError):
            return ProtocolError(where, got=each, expected=_ANYBODY, code=error.code)
    codes = {error.code if isinstance(error, ServiceError) else None for error in errors}
    if len(codes) == 1 and (code := codes.pop()) is not None:
        return ServiceError(where, code=code)
    return EndpointError(where, got=each, expected=_ANYBODY)
