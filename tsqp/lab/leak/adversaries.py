"""The adversaries: one service, an observer of all links, or services that collude.

Under a policy whose masks span services, a service holds one share. An adversary with the
requests to all of them adds the shares modulo 2^32, and has what one service would get unmasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpu_side.encoding import open_request, read_request
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_request
from protocol.messages import Request, RingLinearRequest, SeededRingLinearRequest
from protocol.model.config import ModelConfig
from protocol.tensors import from_torch, to_torch
from tee_side.policy.placement import Policy
from tsqp.lab.leak.record_session import Recording, Session, added_rows
from tsqp.lab.leak.trace import PolicyTrace, Trace, TraceError


def together(recording: Recording, config: ModelConfig) -> Recording:
    """Return a recording of shares as an adversary with all of them reads it: in the clear.

    Raises TraceError where requests to the services do not belong together.
    """
    added = added_rows(recording.policy, config)
    sessions = tuple(
        Session((PolicyTrace(_summed(session.traces), added),), session.truth)
        for session in recording.sessions
    )
    return replace(recording, policy=_unmasked(recording.policy), sessions=sessions)


def _unmasked(policy: Policy) -> Policy:
    """Return the policy without the masks that span services: their shares are known."""
    operators = {
        operator: tuple(
            one.model_copy(update={"mask": None}) if one.mask and one.mask.services > 1 else one
            for one in placements
        )
        for operator, placements in policy.operators.items()
    }
    return policy.model_copy(update={"operators": operators})


def _summed(traces: Sequence[Trace]) -> tuple[tuple[bytes, ...], ...]:
    """Add every request to the second service to the one to the first that it belongs to.

    Requests keep their order, and those that are no shares go to the first service alone.
    """
    first, second = traces
    shares = [_read(frames) for frames in second.messages]
    messages: list[tuple[bytes, ...]] = []
    for frames in first.messages:
        request = _read(frames)
        if shares and (whole := _sum(request, shares[0])) is not None:
            del shares[0]
            summed = encode_request(whole, len(messages) + 1, 1)
            messages.append(tuple(bytes(frame) for frame in summed))
        else:
            messages.append(frames)
    if shares:
        raise TraceError(
            "shares", got=f"{len(shares)} requests to the second service alone", expected="none"
        )
    return tuple(messages)


def _read(frames: Sequence[bytes]) -> Request:
    request = read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
    return request.expanded() if isinstance(request, SeededRingLinearRequest) else request


def _sum(one: Request, other: Request) -> Request | None:
    """Return both shares of a request added modulo 2^32; None if they are of two requests."""
    if not isinstance(one, RingLinearRequest) or not isinstance(other, RingLinearRequest):
        return None
    if (one.layer_idx, one.module_names) != (other.layer_idx, other.module_names):
        return None
    if one.elements.shape != other.elements.shape:
        return None
    elements = to_torch(one.elements) + to_torch(other.elements)
    return one.model_copy(update={"elements": from_torch(elements)})
