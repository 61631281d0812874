"""What is asked of a service, in the clear and masked; replies of another shape are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError, ErrorCode, ReplyError, ServiceError
from protocol.messages import (
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    Request,
    Response,
    RingLinearRequest,
    TensorReply,
)
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.quantized import load_quantized
from protocol.tensors import from_torch
from tee_side.engine.sampling import SamplingSettings
from tee_side.protect.masking import MaskRules, linear_masking
from tee_side.protect.masks.shares import Shares
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import FloatSite, FloatSites, load_biases
from tee_side.protect.verifier import UNVERIFIED
from tee_side.remote.linear import CallSettings, RemoteLinear
from tee_side.remote.overlap import run
from tee_side.words import OPERATORS, Operator, Site, is_linear
from tests.kit.fakes import (
    ARGUMENTS,
    Change,
    ChangingChannel,
    Models,
    OneSite,
    Remote,
    remote_under,
)
from tests.kit.model import LoopbackChannel, SavedModel, assemble, token_ids
from tests.kit.rows import each_row
from tsqp.lab.research.row_mix import RowMix
from tsqp.lab.research.row_permutation import RowPermutation

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


def _clear(model: SavedModel, channel: LoopbackChannel, **settings: Any) -> Remote:
    return remote_under(model, [channel], None, **settings)


def _call(
    model: SavedModel, operator: Operator, channel: LoopbackChannel, alone: bool
) -> list[torch.Tensor]:
    remote = _clear(model, channel, one_rpc_per_module=alone)
    return [run(getattr(remote, operator)(*ARGUMENTS[operator][0]))]


def _here(model: SavedModel, operator: Operator, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return what the TEE itself computes."""
    (lane,) = assemble(model.directory).lanes
    if operator == "attn_scores":
        return torch.matmul(arguments[1], arguments[2].transpose(1, 2))
    if operator == "attn_values":
        return torch.matmul(arguments[1], arguments[2])
    if not is_linear(operator):
        return run(getattr(lane.tables["decode"], operator)(*arguments))
    layer, x = arguments
    return run(getattr(lane.tables["decode"], operator)[layer](x))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_returns_what_the_tee_itself_computes(
    saved_model: Models, operator: Operator, alone: bool
) -> None:
    model = saved_model("llama")
    outputs = _call(model, operator, LoopbackChannel(model.directory), alone)
    expected = [_here(model, operator, ARGUMENTS[operator][0])]
    assert [tuple(output.shape) for output in outputs] == ARGUMENTS[operator][1]
    for output, same in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, same, rtol=0, atol=1e-5)


@each_row("change", CHANGES)
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

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Ask for something else."""
        return super().submit(InitRequest(), timeout_s)


def test_a_reply_that_holds_no_tensor_is_refused(saved_model: Models) -> None:
    model = saved_model("llama")
    with pytest.raises(ReplyError, match="got InitReply, expected float32"):
        _call(model, "lm_head", InitChannel(model.directory), alone=False)


def test_a_request_that_the_service_refuses_is_a_service_error(saved_model: Models) -> None:
    model = saved_model("llama")
    remote = _clear(model, LoopbackChannel(model.directory))
    with pytest.raises(ServiceError) as caught:
        run(remote.o_proj(99, torch.ones(3, 96)))
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
            with pytest.raises(ReplyError, match="logits: got values that are not finite"):
                engine.step()
        engine.step()
        engine.step()
        tokens.append(sequence.token_ids)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 2


# -------------------------------------------------------------- masks, integers, two services


def test_in_the_clear_the_service_adds_biases_and_under_a_mask_it_must_not(
    saved_model: Models,
) -> None:
    model = saved_model("qwen2")
    x = torch.randn(3, 48)
    clear, masked = (LoopbackChannel(model.directory) for _ in range(2))
    whole = run(remote_under(model, [clear], None).linear(0, "qkv_proj", x))
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    biases = load_biases(checkpoint, config, ["qkv_proj"], torch.float32)
    remote = remote_under(model, [masked], RowMix(), sites=FloatSites(biases))
    found = run(remote.linear(0, "qkv_proj", x))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
    assert [r.bias for r in masked.requests if isinstance(r, LinearRequest)] == [False]
    assert [r.bias for r in clear.requests if isinstance(r, LinearRequest)] == [True]


@pytest.mark.parametrize("alone", [False, True])
def test_integers_are_asked_for_as_ring_elements(saved_model: Models, alone: bool) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)
    remote = remote_under(
        model, [channel], None, sites=OneSite(torch.int32), one_rpc_per_module=alone
    )
    x = torch.arange(2 * 48.0).reshape(2, 48)
    found = run(remote.linear(1, "qkv_proj", x))
    weights = load_quantized(
        Checkpoint(model.directory), read_config(model.directory), 1, "qkv_proj"
    )
    assert torch.equal(found, ((2 * x).long() @ weights.weight.long().t()).float() / 2)
    assert [type(request) for request in channel.requests] == [RingLinearRequest] * (1 + 2 * alone)


@pytest.mark.parametrize("change", ["float32", "one row less", "one column less", "int64"])
def test_ring_replies_of_another_shape_or_dtype_are_refused(
    saved_model: Models, change: str
) -> None:
    model = saved_model("llama")
    changes: dict[str, Change] = {**CHANGES, "float32": lambda output: output.float()}
    for failing in range(2):
        channels = [LoopbackChannel(model.directory), LoopbackChannel(model.directory)]
        channels[failing] = ChangingChannel(model.directory, changes[change])
        remote = remote_under(model, channels, Shares(), sites=OneSite(torch.int32))
        with pytest.raises(ReplyError) as caught:
            run(remote.linear(0, "o_proj", torch.ones(2, 96)))
        assert caught.value.expected == "int32 [2, 48]"
        assert not any(channel.pending for channel in channels)


def test_both_services_are_asked_before_either_is_waited_for(saved_model: Models) -> None:
    model, order = saved_model("llama"), []

    class Ordered(LoopbackChannel):
        def submit(self, request: Request, timeout_s: float | None = None) -> int:
            order.append("submit")
            return super().submit(request, timeout_s)

        def wait(self, request_id: int) -> Exchange:
            order.append("wait")
            return super().wait(request_id)

    channels: list[LoopbackChannel] = [Ordered(model.directory) for _ in range(2)]
    remote = remote_under(model, channels, Shares(), sites=OneSite(torch.int32))
    run(remote.linear(0, "o_proj", torch.ones(1, 96)))
    assert order == ["submit", "submit", "wait", "wait"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["submit", "wait"])
def test_where_one_service_fails_the_other_is_not_waited_for(
    saved_model: Models, failing: int, when: str
) -> None:
    model = saved_model("llama")

    class Broken(LoopbackChannel):
        def submit(self, request: Request, timeout_s: float | None = None) -> int:
            if when == "submit":
                raise DeadlineExceededError("it", got="nothing", expected="a connection")
            return super().submit(request, timeout_s)

        def wait(self, request_id: int) -> Exchange:
            super().wait(request_id)
            raise DeadlineExceededError("it", got="nothing", expected="a reply")

    channels = [LoopbackChannel(model.directory), LoopbackChannel(model.directory)]
    channels[failing] = Broken(model.directory)
    remote = remote_under(model, channels, Shares(), sites=OneSite(torch.int32))
    with pytest.raises(DeadlineExceededError):
        run(remote.linear(0, "o_proj", torch.ones(1, 96)))
    assert [channel.pending for channel in channels] == [0, 0]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_under_a_row_mask_is_what_it_is_without(
    saved_model: Models, operator: Operator, alone: bool
) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)
    remote = remote_under(
        model,
        [channel],
        RowPermutation(dummy_rows=3),
        sites=FloatSites({}),
        one_rpc_per_module=alone,
    )
    arguments = tuple(
        torch.randn(a.shape) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in ARGUMENTS[operator][0]
    )
    found = run(getattr(remote, operator)(*arguments))
    local = _here(model, operator, arguments)
    torch.testing.assert_close(found, local, rtol=0, atol=1e-4)
    # Dummy rows crossed with the real ones, and one mask serves all modules of an operator's RPCs.
    for request in channel.requests:
        if isinstance(request, LinearRequest):
            assert request.hidden_states.shape[0] == 3 + 3
    sent = {bytes(r.hidden_states.data) for r in channel.requests if isinstance(r, LinearRequest)}
    assert len(sent) == (operator in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))


def test_a_reply_with_the_plain_number_of_rows_is_refused_under_dummy_rows(
    saved_model: Models,
) -> None:
    model = saved_model("llama")
    channel = ChangingChannel(model.directory, lambda output: output[:3])
    remote = remote_under(model, [channel], RowPermutation(dummy_rows=3), sites=FloatSites({}))
    with pytest.raises(ReplyError, match=r"got float32 \[3, 48\], expected float32 \[6, 48\]"):
        run(remote.o_proj(0, torch.ones(3, 96)))


@pytest.mark.parametrize("missing", ["hide", "rules", "check", "bias_leaves"])
def test_how_an_operator_is_protected_has_to_be_said(saved_model: Models, missing: str) -> None:
    """What is left out by mistake must not be taken for a mask of nothing, or for no check."""
    settings: dict[str, Any] = {
        "hide": linear_masking(RowPermutation(), Randomness())((0, "o_proj")),
        "rules": MaskRules(RowPermutation()),
        "check": UNVERIFIED,
        "linear": FloatSite(),
        "bias_leaves": False,
    }
    calls = CallSettings(lambda _layer: [], None, None)
    site: Site = (0, "o_proj")
    config = read_config(saved_model("llama").directory)
    RemoteLinear(site, config, calls, **settings)
    del settings[missing]
    with pytest.raises(TypeError, match=f"'{missing}'"):
        RemoteLinear(site, config, calls, **settings)


def test_plans_are_made_once_for_a_row_count_and_their_number_is_bounded(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tee_side.remote.linear._MAX_PLANS", 2)
    model, made = saved_model("llama"), []
    prepare = RemoteLinear._prepare
    monkeypatch.setattr(
        RemoteLinear,
        "_prepare",
        lambda self, shape, of: made.append(shape[0]) or prepare(self, shape, of),
    )
    calls = CallSettings(lambda _layer: [LoopbackChannel(model.directory)], None, None)
    remote = RemoteLinear(
        (0, "o_proj"),
        read_config(model.directory),
        calls,
        hide=linear_masking(None, Randomness())((0, "o_proj")),
        rules=MaskRules(None),
        check=UNVERIFIED,
        linear=FloatSite(),
        bias_leaves=True,
    )
    for rows in (1, 2, 1, 2, 3, 3, 1):
        x = torch.randn(rows, 96)
        torch.testing.assert_close(
            run(remote(x)), _here(model, "o_proj", (0, x)), rtol=0, atol=1e-5
        )
    assert made == [1, 2, 3, 1]
