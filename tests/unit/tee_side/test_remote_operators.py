"""What is asked of a service, in the clear and masked; replies of another shape are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import (
    DeadlineExceededError,
    ErrorCode,
    MaskError,
    ModelError,
    ReplyError,
    ServiceError,
    TsqpError,
    VerificationError,
)
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
from protocol.tensors import from_torch, to_torch
from tee_side.masking import linear_masking
from tee_side.masks.mask import Mask, Masked, MaskedProduct
from tee_side.masks.pad import Pad
from tee_side.masks.row_mix import RowMix
from tee_side.masks.row_permutation import RowPermutation
from tee_side.masks.shares import Shares
from tee_side.overlap import run
from tee_side.randomness import Randomness
from tee_side.remote_operators import RemoteOperators
from tee_side.sampling import SamplingSettings
from tee_side.sites import FloatSites, load_biases
from tee_side.verifier import UNVERIFIED
from tee_side.vocabulary import OPERATORS, PRODUCTS, Operator
from tests.support import LoopbackChannel, SavedModel, assemble, token_ids

Models = Callable[..., SavedModel]

Change = Callable[[torch.Tensor], torch.Tensor]

# Inputs of every operator for the model of `tests.support.SIZES`, and the shapes that come back.
ARGUMENTS: dict[Operator, tuple[tuple[int | torch.Tensor, ...], list[tuple[int, ...]]]] = {
    "embedding": ((torch.tensor([1, 2, 3]),), [(3, 48)]),
    "qkv_proj": ((0, torch.ones(3, 48)), [(3, 96 + 32 + 32)]),
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


def _clear(model: SavedModel, channel: LoopbackChannel, **settings: Any) -> RemoteOperators:
    return RemoteOperators(
        lambda _layer: [channel],
        read_config(model.directory),
        torch.float32,
        mask=None,
        hide=linear_masking(None, Randomness()),
        verifier=UNVERIFIED,
        **settings,
    )


def _call(
    model: SavedModel, operator: Operator, channel: LoopbackChannel, alone: bool
) -> list[torch.Tensor]:
    remote = _clear(model, channel, one_rpc_per_module=alone)
    result = run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
    return list(result) if isinstance(result, tuple) else [result]


def _here(model: SavedModel, operator: Operator, arguments: tuple[Any, ...]) -> Any:
    """Return what the TEE itself computes."""
    (lane,) = assemble(model.directory).lanes
    return run(getattr(lane["decode"], operator)(*arguments))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_returns_what_the_tee_itself_computes(
    saved_model: Models, operator: Operator, alone: bool
) -> None:
    model = saved_model("llama")
    outputs = _call(model, operator, LoopbackChannel(model.directory), alone)
    local = _here(model, operator, ARGUMENTS[operator][0])
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

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Ask for something else."""
        return super().submit(InitRequest(), timeout_s)


def test_a_reply_that_holds_no_tensor_is_refused(saved_model: Models) -> None:
    model = saved_model("llama")
    with pytest.raises(ReplyError, match="got InitReply, expected a tensor"):
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
            with pytest.raises(TsqpError):
                engine.step()
        engine.step()
        engine.step()
        tokens.append(sequence.token_ids)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 2


# -------------------------------------------------------------- masks, integers, two services


class OneSite:
    """Doubles inputs into integers, and halves products."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, layer: int, operator: str, x_TI: torch.Tensor) -> torch.Tensor:
        return (2 * x_TI).to(self._dtype)

    def decode(self, layer: int, operator: str, y_TO: torch.Tensor) -> torch.Tensor:
        return y_TO.float() / 2


def _remote(
    model: SavedModel, channels: list[LoopbackChannel], mask: Mask | None, **settings: Any
) -> RemoteOperators:
    randomness = Randomness(bytes(32))
    return RemoteOperators(
        lambda _layer: channels,
        read_config(model.directory),
        torch.float32,
        mask=mask,
        hide=linear_masking(mask, randomness),
        randomness=randomness,
        **{"verifier": UNVERIFIED, **settings},
    )


def test_in_the_clear_the_service_adds_biases_and_under_a_mask_it_must_not(
    saved_model: Models,
) -> None:
    model = saved_model("qwen2")
    x = torch.randn(3, 48)
    clear, masked = (LoopbackChannel(model.directory) for _ in range(2))
    whole = run(_remote(model, [clear], None).linear(0, "qkv_proj", x))
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    biases = load_biases(checkpoint, config, ["qkv_proj"], torch.float32)
    remote = _remote(model, [masked], RowMix(), sites=FloatSites(biases))
    found = run(remote.linear(0, "qkv_proj", x))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)
    assert [r.bias for r in masked.requests if isinstance(r, LinearRequest)] == [False]
    assert [r.bias for r in clear.requests if isinstance(r, LinearRequest)] == [True]


@pytest.mark.parametrize("alone", [False, True])
def test_integers_are_asked_for_as_ring_elements(saved_model: Models, alone: bool) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)
    remote = _remote(model, [channel], None, sites=OneSite(torch.int32), one_rpc_per_module=alone)
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
        remote = _remote(model, channels, Shares(), sites=OneSite(torch.int32))
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
    remote = _remote(model, channels, Shares(), sites=OneSite(torch.int32))
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
    remote = _remote(model, channels, Shares(), sites=OneSite(torch.int32))
    with pytest.raises(DeadlineExceededError):
        run(remote.linear(0, "o_proj", torch.ones(1, 96)))
    assert [channel.pending for channel in channels] == [0, 0]


def test_without_factors_the_tee_computes_and_nothing_is_sent(saved_model: Models) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)

    class Here:
        async def linear(self, layer: int, operator: str, x_TI: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x_TI), 48), float(layer))

    settings: dict[str, Any] = {"sites": OneSite(torch.int32)}
    remote = RemoteOperators(
        lambda _layer: [channel],
        read_config(model.directory),
        torch.float32,
        mask=Pad(),
        hide=lambda layer, operator, x_TI: None,
        verifier=UNVERIFIED,
        without_factors=Here(),  # type: ignore[arg-type]
        **settings,
    )
    assert torch.equal(run(remote.o_proj(2, torch.ones(3, 96))), torch.full((3, 48), 2.0))
    assert not channel.requests
    alone = RemoteOperators(
        lambda _layer: [channel],
        read_config(model.directory),
        torch.float32,
        mask=Pad(),
        hide=lambda layer, operator, x_TI: None,
        verifier=UNVERIFIED,
        **settings,
    )
    with pytest.raises(LookupError, match="no unmasking factors"):
        run(alone.o_proj(2, torch.ones(3, 96)))
    assert not channel.requests


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_under_a_row_mask_is_what_it_is_without(
    saved_model: Models, operator: Operator, alone: bool
) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)
    remote = _remote(
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
    for output, same in zip(
        found if isinstance(found, tuple) else [found],
        local if isinstance(local, tuple) else [local],
        strict=True,
    ):
        torch.testing.assert_close(output, same, rtol=0, atol=1e-4)
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
    remote = _remote(model, [channel], RowPermutation(dummy_rows=3), sites=FloatSites({}))
    with pytest.raises(ReplyError, match=r"got float32 \[3, 48\], expected float32 \[6, 48\]"):
        run(remote.o_proj(0, torch.ones(3, 96)))


@pytest.mark.parametrize(
    ("mask", "named"), [(RowPermutation(), "mask row-permutation"), (None, "no mask")]
)
@pytest.mark.parametrize(
    ("masked", "said"),
    [
        (lambda x: x, "got Tensor, expected Masked"),
        (lambda x: Masked(x, lambda y: y), "got Masked, expected Masked"),
        (lambda x: Masked((x, x), lambda y: y), "got 2 tensors to send, expected 1 tensors"),
        (
            lambda x: Masked((x.double(),), lambda y: y),
            "got float64 .3, 96. to send",
        ),
        (lambda x: Masked((x[:, :5],), lambda y: y), "got float32 .3, 5. to send, expected floa"),
        (
            lambda x: Masked((x[0],), lambda y: y),
            "got float32 .96. to send, expected float32 .rows",
        ),
        (lambda x: Masked((x,), lambda y: None), "got nothing from unmask, expected float32"),
        (lambda x: Masked((x,), lambda y: y.double()), "got float64 .3, 48. from unmask"),
        (lambda x: Masked((x,), lambda y: y[:2]), "got float32 .2, 48. from unmask, expected floa"),
    ],
)
def test_a_mask_that_is_wrong_is_named_with_its_operator(
    saved_model: Models,
    masked: Callable[[torch.Tensor], Any],
    said: str,
    mask: Mask | None,
    named: str,
) -> None:
    model = saved_model("llama")
    remote = RemoteOperators(
        lambda _layer: [LoopbackChannel(model.directory)],
        read_config(model.directory),
        torch.float32,
        mask=mask,
        hide=lambda _layer, _operator, x_TI: masked(x_TI),
        verifier=UNVERIFIED,
    )
    # No mask has to be said; and it is not a reason to look away.
    with pytest.raises(MaskError, match=f"{named}: o_proj: {said}"):
        run(remote.o_proj(0, torch.ones(3, 96)))


UNMASKED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nothing": (lambda y: None, "nothing from unmask"),
    "another dtype": (lambda y: y.double(), "float64 .* from unmask"),
    "a row less": (lambda y: y[..., :-1, :], "float32 .* from unmask"),
    "a column more": (lambda y: torch.cat((y, y[..., :1]), -1), "float32 .* from unmask"),
}


class Wrong(RowPermutation):
    """A mask that permutes, and returns something else than the result."""

    name = "wrong"
    unmasked: str

    def _spoil(self, masked: Any) -> Any:
        change, _ = UNMASKED[self.unmasked]
        return dataclasses.replace(masked, unmask=lambda y: change(masked.unmask(y)))

    def mask(self, *arguments: Any) -> Any:
        return self._spoil(super().mask(*arguments))

    def mask_ids(self, *arguments: Any) -> Any:
        return self._spoil(super().mask_ids(*arguments))

    def mask_product(self, *arguments: Any) -> Any:
        return self._spoil(super().mask_product(*arguments))


@pytest.mark.parametrize("unmasked", UNMASKED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_unmask_returns_is_checked_at_every_operator(
    saved_model: Models, operator: Operator, unmasked: str
) -> None:
    model = saved_model("llama")
    remote = _remote(
        model, [LoopbackChannel(model.directory)], Wrong(unmasked=unmasked), sites=FloatSites({})
    )
    with pytest.raises(MaskError, match=f"mask wrong: {operator}: got {UNMASKED[unmasked][1]}"):
        run(getattr(remote, operator)(*ARGUMENTS[operator][0]))


def test_no_mask_has_to_be_said(saved_model: Models) -> None:
    """What is left out by mistake must not be taken for a mask of nothing."""
    model = saved_model("llama")
    with pytest.raises(TypeError, match="'mask'"):
        RemoteOperators(  # type: ignore[call-arg]
            lambda _layer: [LoopbackChannel(model.directory)],
            read_config(model.directory),
            torch.float32,
            hide=linear_masking(RowPermutation(), Randomness()),
            verifier=UNVERIFIED,
        )


# -------------------------------------------------------------------- refused, and asked again


class Refuses:
    """A `Verifier` to which no result is right; `disk`: the error that looking for liars meets."""

    def __init__(self, disk: TsqpError | None = None) -> None:
        self._disk = disk

    def linear(self, *_: Any) -> bool:
        return False

    def lm_head(self, *_: Any) -> bool:
        return False

    def liars(self, answers: Sequence[Any], is_over: Callable[[], bool]) -> list[int]:
        if self._disk is not None:
            raise self._disk
        if is_over():
            raise DeadlineExceededError("finding out", got="the end", expected="time")
        return [0]


class Slow(ChangingChannel):
    """Takes ten seconds a reply, of a clock that the test has, and stands for many services."""

    def __init__(self, directory: Path, change: Change, clock: SimpleNamespace) -> None:
        super().__init__(directory, change)
        self._clock = clock
        self.given: list[float | None] = []
        self.distrusted: list[TsqpError] = []

    def submit(self, request: Request, timeout_s: float | None = None, **_: Any) -> int:
        """Note how long it may take."""
        self.given.append(timeout_s)
        return super().submit(request, timeout_s)

    def wait(self, request_id: int) -> Exchange:
        """Let time pass."""
        self._clock.now += 10.0
        return super().wait(request_id)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """There is always somebody else."""
        self.distrusted.append(error)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only clock that a deadline is counted by."""
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr("tee_side.answers.time", found)
    return found


@pytest.mark.parametrize("operator", ["o_proj", "lm_head"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda y: y[:-1], ReplyError), (lambda y: y, VerificationError)],
    ids=["wrong form", "wrong result"],
)
def test_liars_share_one_deadline(
    saved_model: Models,
    clock: SimpleNamespace,
    operator: Operator,
    change: Change,
    expected: type[TsqpError],
) -> None:
    """However many there are; the first has the channel's own, which costs nothing to say."""
    model = saved_model("llama")
    channel = Slow(model.directory, change, clock)
    settings: dict[str, Any] = {"verifier": Refuses(), "timeout_s": 25.0}
    remote = _remote(model, [channel], None, **settings)
    with pytest.raises(expected) as caught:
        run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
    assert channel.given == [None, 15.0, 5.0]
    # Whoever was the last is barred before there is no time for another.
    assert len(channel.distrusted) == 3
    assert caught.value is channel.distrusted[-1]


def test_a_deadline_begins_anew_with_each_operator(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    remote = _remote(model, [channel], None, timeout_s=25.0)
    for _ in range(4):
        run(remote.o_proj(0, torch.ones(3, 96)))
    assert channel.given == [None] * 4


def test_modules_that_travel_alone_share_what_is_left_of_a_deadline(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    rows = iter([2])
    channel = Slow(model.directory, lambda y: y[: next(rows, 3)], clock)
    remote = _remote(model, [channel], None, one_rpc_per_module=True, timeout_s=45.0)
    run(remote.linear(0, "qkv_proj", torch.ones(3, 48)))
    assert channel.given == [None, 35.0, 25.0, 15.0]


def test_without_a_limit_each_has_the_channels_own_deadline(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    rows = iter([2, 2, 2])
    channel = Slow(model.directory, lambda y: y[: next(rows, 3)], clock)
    run(_remote(model, [channel], None).linear(0, "o_proj", torch.ones(3, 96)))
    assert channel.given == [None] * 4


def test_where_weights_cannot_be_read_again_everybody_is_barred(
    saved_model: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """A liar that can also spoil the disk must not get away, and the run must not go on."""
    model = saved_model("llama")

    class Last(LoopbackChannel):
        distrusted: TsqpError | None = None

        def distrust(self, exchange: Exchange, error: TsqpError) -> None:
            self.distrusted = error
            raise error

    channels = [Last(model.directory), Last(model.directory)]
    disk = ModelError("model.safetensors", got="other bytes", expected="those of the manifest")
    remote = _remote(
        model, list(channels), Shares(), sites=OneSite(torch.int32), verifier=Refuses(disk)
    )
    with pytest.raises(VerificationError, match="o_proj in layer 1 at loopback"):
        run(remote.linear(1, "o_proj", torch.ones(1, 96)))
    assert [type(channel.distrusted) for channel in channels] == [VerificationError] * 2
    (record,) = [one for one in caplog.records if one.getMessage() == "liar_unknown"]
    assert record.fields == {  # type: ignore[attr-defined]
        "operator": "o_proj",
        "layer": 1,
        "detail": str(disk),
    }


def test_in_the_clear_the_only_answer_is_the_lie_and_nothing_is_read_for_it(
    saved_model: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was unmasked that could be wrong."""
    model = saved_model("llama")
    unread = ModelError("model.safetensors", got="a read", expected="none")
    remote = _remote(
        model, [LoopbackChannel(model.directory)], None, verifier=Refuses(unread), timeout_s=60.0
    )
    with pytest.raises(VerificationError, match="o_proj in layer 1 at loopback"):
        run(remote.linear(1, "o_proj", torch.ones(1, 96)))
    assert not caplog.records


@pytest.mark.parametrize("mask", [Shares(), RowMix()], ids=["two shares", "one answer"])
def test_where_no_time_is_left_everybody_who_answered_is_named_and_barred(
    saved_model: Models, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture, mask: Mask
) -> None:
    """To find out who lied takes reading a weight: that is not begun after the deadline."""
    model = saved_model("llama")
    channels = [Slow(model.directory, lambda y: y, clock) for _ in range(mask.services)]
    names = ["tcp://a:1", "tcp://b:1"][: mask.services]
    for channel, name in zip(channels, names, strict=True):
        channel.endpoint = name
    dtype = torch.int32 if mask.arithmetic == "int8" else torch.float32
    remote = _remote(
        model,
        list(channels),
        mask,
        sites=OneSite(dtype),
        verifier=Refuses(),
        timeout_s=10.0 * mask.services,
    )
    with pytest.raises(VerificationError) as caught:
        run(remote.linear(1, "o_proj", torch.ones(1, 96)))
    assert caught.value.where == f"o_proj in layer 1 at {' or '.join(names)}"
    assert [len(channel.distrusted) for channel in channels] == [1] * mask.services
    assert [one.getMessage() for one in caplog.records] == ["liar_unknown"]


@pytest.mark.parametrize("mask", [RowPermutation(dummy_rows=3), RowMix(), None])
@pytest.mark.parametrize("operator", OPERATORS)
def test_more_rows_than_a_reply_may_have_are_refused_before_they_are_sent(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch, operator: Operator, mask: Mask | None
) -> None:
    """The service would answer honestly, and be barred for a reply that is too large."""
    model, most = saved_model("llama"), 4096
    plain = ARGUMENTS[operator][0][-2 if operator in PRODUCTS else -1]
    assert isinstance(plain, torch.Tensor)
    rows = plain.shape[0] if operator not in PRODUCTS else plain.shape[1]
    allowed = rows if mask is None else 2 * rows + most
    for extra, refused in ((0, False), (1, True)):
        channel = LoopbackChannel(model.directory)
        remote = _remote(model, [channel], mask, sites=FloatSites({}))

        def padded(x: torch.Tensor, axis: int, size: int = allowed + extra) -> torch.Tensor:
            shape = list(x.shape)
            shape[axis] = size - shape[axis]
            return torch.cat([x, torch.zeros(shape, dtype=x.dtype)], axis)

        def many(x_TI: torch.Tensor) -> Masked:
            return Masked((padded(x_TI, 0),), lambda y: y[: len(x_TI)])

        def product(a: torch.Tensor, b: torch.Tensor) -> MaskedProduct:
            return MaskedProduct(padded(a, 1), b, lambda y: y[:, : a.shape[1]])

        monkeypatch.setattr(remote, "_hide", lambda _layer, _operator, x_TI: many(x_TI))
        rows_mask = SimpleNamespace(
            mask=lambda x, _: many(x),
            mask_ids=lambda ids, _size, _: many(ids),
            mask_product=lambda a, b, _: product(a, b),
        )
        monkeypatch.setattr(remote, "_rows", rows_mask)
        if refused:
            with pytest.raises(MaskError, match=f": {operator}: got .* at most {allowed} rows"):
                run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
        else:
            run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
        assert len(channel.requests) == (0 if refused else 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda masked: (masked.a, masked.b),
        lambda masked: dataclasses.replace(masked, a=masked.a.double()),
        lambda masked: dataclasses.replace(masked, a=masked.a[:1]),
        lambda masked: dataclasses.replace(masked, b=masked.b[:, :-1]),
        lambda masked: dataclasses.replace(masked, b=torch.cat([masked.b] * 2, 2)),
        lambda masked: dataclasses.replace(masked, a=masked.a[0]),
    ],
    ids=["no product", "dtype", "batch", "inner size", "columns", "dimensions"],
)
@pytest.mark.parametrize("operator", PRODUCTS)
def test_operands_that_do_not_fit_are_the_masks_fault(
    saved_model: Models, operator: Operator, change: Callable[[Any], Any]
) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)

    class Spoiled(RowPermutation):
        name = "spoiled"

        def mask_product(self, *arguments: Any) -> Any:
            return change(super().mask_product(*arguments))

    remote = _remote(model, [channel], Spoiled(), sites=FloatSites({}))
    with pytest.raises(MaskError, match=f"mask spoiled: {operator}: got .*, expected .*"):
        run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
    assert not channel.requests
