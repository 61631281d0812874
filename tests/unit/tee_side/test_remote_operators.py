"""A reply of another shape or dtype than the TEE's own configuration implies is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.errors import ErrorCode, ReplyError, ServiceError, TsqpError
from protocol.messages import InitRequest, LMHeadRequest, Request, Response, TensorReply
from protocol.model.config import read_config
from protocol.tensors import from_torch, to_torch
from tee_side.policy import OPERATORS, Operator
from tee_side.remote_operators import RemoteOperators
from tee_side.sampling import SamplingSettings
from tests.support import LoopbackChannel, SavedModel, assemble, token_ids

Models = Callable[..., SavedModel]

Change = Callable[[torch.Tensor], torch.Tensor]

# Inputs of every operator for the model of `tests.support.SIZES`, and the shapes that come back.
ARGUMENTS: dict[Operator, tuple[tuple[int | torch.Tensor, ...], list[tuple[int, ...]]]] = {
    "embedding": ((torch.tensor([1, 2, 3]),), [(3, 48)]),
    "qkv_proj": ((0, torch.ones(3, 48)), [(3, 96), (3, 32), (3, 32)]),
    "attn_scores": ((0, torch.ones(2, 9, 16), torch.ones(2, 5, 16)), [(2, 9, 5)]),
    "attn_values": ((0, torch.ones(2, 9, 5), torch.ones(2, 5, 16)), [(2, 9, 16)]),
    "o_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "gate_up_proj": ((0, torch.ones(3, 48)), [(3, 96), (3, 96)]),
    "down_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "lm_head": ((torch.ones(3, 48),), [(3, 320)]),
}

CHANGES: dict[str, Change] = {
    "one row less": lambda output: output[:-1],
    "one column less": lambda output: output[..., :-1],
    "transposed": lambda output: output.transpose(-1, -2),
    "flat": lambda output: output.reshape(-1),
    "one dimension more": lambda output: output[None],
    "float16": lambda output: output.half(),
    "bfloat16": lambda output: output.bfloat16(),
    "int64": lambda output: output.long(),
}


class ChangingChannel(LoopbackChannel):
    """A service that changes every tensor before it sends it."""

    def __init__(self, directory: Path, change: Change) -> None:
        super().__init__(directory)
        self._change = change

    def answer(self, request: Request) -> Response:
        """Compute the true reply and change it."""
        reply = super().answer(request)
        if not isinstance(reply, TensorReply):
            return reply
        return TensorReply(output=from_torch(self._change(to_torch(reply.output))))


def _call(
    model: SavedModel, operator: Operator, channel: LoopbackChannel, alone: bool
) -> list[torch.Tensor]:
    remote = RemoteOperators(
        channel, read_config(model.directory), torch.float32, one_rpc_per_module=alone
    )
    result = getattr(remote, operator)(*ARGUMENTS[operator][0])
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_returns_what_the_tee_itself_computes(
    saved_model: Models, operator: Operator, alone: bool
) -> None:
    model = saved_model("llama")
    outputs = _call(model, operator, LoopbackChannel(model.directory), alone)
    local = getattr(assemble(model.directory).ops, operator)(*ARGUMENTS[operator][0])
    expected = list(local) if isinstance(local, tuple) else [local]
    assert [tuple(output.shape) for output in outputs] == ARGUMENTS[operator][1]
    for output, same in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, same, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_reply_of_another_shape_or_dtype_is_refused(
    saved_model: Models, operator: Operator, change: str
) -> None:
    model = saved_model("llama")
    with pytest.raises(ReplyError) as caught:
        _call(model, operator, ChangingChannel(model.directory, CHANGES[change]), alone=False)
    assert caught.value.where == f"{operator} reply from loopback"
    assert caught.value.expected.startswith("float32 [")
    assert caught.value.got != caught.value.expected


class InitChannel(LoopbackChannel):
    """A service that answers every request with an Init reply."""

    def call(self, request, timeout_s=None):  # type: ignore[no-untyped-def]
        """Ask for something else."""
        return super().call(InitRequest(), timeout_s)


def test_a_reply_that_holds_no_tensor_is_refused(saved_model: Models) -> None:
    model = saved_model("llama")
    with pytest.raises(ReplyError, match="got InitReply, expected a tensor"):
        _call(model, "lm_head", InitChannel(model.directory), alone=False)


def test_a_request_that_the_service_refuses_is_a_service_error(saved_model: Models) -> None:
    model = saved_model("llama")
    remote = RemoteOperators(
        LoopbackChannel(model.directory), read_config(model.directory), torch.float32
    )
    with pytest.raises(ServiceError) as caught:
        remote.o_proj(99, torch.ones(3, 96))
    assert caught.value.code is ErrorCode.INVALID_FIELD
    assert not caught.value.retryable


class NotANumberChannel(LoopbackChannel):
    """A service whose first logits have the right shape and are no numbers."""

    def __init__(self, directory: Path, value: float) -> None:
        super().__init__(directory)
        self._value = value
        self._spoiled = False

    def answer(self, request: Request) -> Response:
        """Compute the true reply, and spoil logits."""
        reply = super().answer(request)
        if self._spoiled or not isinstance(request, LMHeadRequest):
            return reply
        self._spoiled = True
        return TensorReply(output=from_torch(torch.full((1, 320), self._value)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_a_typed_error_and_change_nothing(
    saved_model: Models, value: float, temperature: float
) -> None:
    directory = saved_model("llama").directory
    sampling = SamplingSettings(temperature=temperature, seed=0)
    tokens = []
    for channel in (NotANumberChannel(directory, value), LoopbackChannel(directory)):
        engine = assemble(directory, "tsqp", channel=channel).engine()
        sequence = engine.add(token_ids(3), max_new_tokens=2, sampling=sampling)
        if isinstance(channel, NotANumberChannel):
            with pytest.raises(TsqpError):
                engine.step()
        engine.step()
        engine.step()
        tokens.append(sequence.token_ids)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 2
