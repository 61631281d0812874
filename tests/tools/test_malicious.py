"""Each lie is one: otherwise that it was not accepted says nothing."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest
import torch

from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.encoding import decode_reply
from protocol.errors import DeadlineExceededError, ModelMismatchError, ProtocolError, TsqpError
from protocol.messages import (
    InitReply,
    InitRequest,
    LinearRequest,
    Response,
    RingLinearRequest,
    TensorReply,
)
from protocol.tensors import from_torch, to_torch
from tests.kit.lie import MaliciousService, operators_of
from tests.kit.lies import (
    CROSS_SESSION,
    INIT_LIES,
    OVERSIZED_BYTES,
    REORDERED,
    RESULT_LIES,
    WIRE_LIES,
    Lie,
    Memory,
    Occasion,
)
from tests.kit.model import make_model
from tests.kit.rows import each_row

# Of these some, or all, are a good reply with right numbers, at another time or twice.
HARMLESS = {
    "replayed", "late", "reordered", "duplicate", "right, then wrong", "bit flipped in the header"
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MaliciousService]:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    with MaliciousService(operators_of(directory)) as running:
        yield running


@pytest.fixture
def channel(service: MaliciousService) -> Iterator[Channel]:
    limit = OVERSIZED_BYTES // 2
    opened = open_channel(service.endpoint, timeout_s=10, max_message_bytes=limit)
    yield opened
    opened.close()
    service.be_honest()


# Of a lie that is told in several ways: in so many each is met, by any chance.
_TRIES = 100

# No two requests are the same: another's reply is wrong.
_seeds = itertools.count(100)


def linear(layer: int = 0, seed: int | None = None) -> LinearRequest:
    seed = next(_seeds) if seed is None else seed
    hidden = torch.randn(2, 48, generator=torch.Generator().manual_seed(seed))
    return LinearRequest(
        layer_idx=layer, module_names=("o_proj",), hidden_states=from_torch(hidden.repeat(1, 2))
    )


def result(response: Response) -> torch.Tensor:
    assert isinstance(response, TensorReply)
    return to_torch(response.output)


def wait_until_told(service: MaliciousService, lies: int) -> None:
    """See that it has told so many; a silent one perhaps only after the client's deadline."""
    until = time.monotonic() + 30
    while service.told < lies:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert service.told == lies


def occasion(dtype: torch.dtype) -> Occasion:
    """Return a request to a service that multiplies by its layer, plus two."""
    ones = from_torch(torch.arange(1, 13, dtype=dtype).view(2, 6))
    request = (
        RingLinearRequest(layer_idx=1, module_names=("o_proj",), elements=ones)
        if dtype == torch.int32
        else LinearRequest(layer_idx=1, module_names=("o_proj",), hidden_states=ones)
    )

    def compute(asked: object) -> Response:
        assert isinstance(asked, LinearRequest | RingLinearRequest)
        return TensorReply(output=from_torch(to_torch(ones) * (asked.layer_idx + 2)))

    memory = Memory()
    memory.results.append(torch.zeros(2, 6, dtype=dtype))
    chance = random.Random(3)
    return Occasion(b"client", request, 77, compute(request), compute, memory, chance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@each_row("lie", RESULT_LIES, ids=str)
def test_wrong_result_has_the_right_form_and_other_numbers(lie: Lie, dtype: torch.dtype) -> None:
    told = occasion(dtype)
    (frames,) = lie.tell(told)
    reply = decode_reply([memoryview(bytearray(frame)) for frame in frames])
    assert (reply.request_id, reply.method) == (77, told.request.method)
    assert reply.response is not None
    wrong = result(reply.response)
    assert (wrong.dtype, wrong.shape) == (dtype, told.output.shape)
    assert not torch.equal(wrong, told.output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@each_row("lie", WIRE_LIES, ids=str)
def test_lie_on_the_wire_is_not_the_right_reply(lie: Lie, dtype: torch.dtype) -> None:
    for _ in range(20):
        told = occasion(dtype)
        right = told.encoded()
        sent = [list(frames) for frames in lie.tell(told)]
        assert sent != [right]


@pytest.mark.parametrize("lie", [lie for lie in WIRE_LIES if lie.name not in HARMLESS], ids=str)
def test_lie_ends_in_an_error_or_in_other_numbers(
    lie: Lie, service: MaliciousService, channel: Channel
) -> None:
    request = linear()
    right = result(channel.call(request).response).clone()
    told = service.told
    service.tell(lie)
    try:
        found = result(channel.call(request, 0.3 if lie.silent else None).response)
    except lie.endings:
        pass
    else:
        # What the channel cannot know: for whoever knows the product, or its shape.
        assert found.dtype != right.dtype or not torch.equal(found, right)
    wait_until_told(service, told + 1)


@pytest.mark.parametrize("lie", INIT_LIES, ids=str)
def test_lie_of_init_is_another_reply_or_breaks_the_schema(
    lie: Lie, service: MaliciousService, channel: Channel
) -> None:
    right = channel.call(InitRequest()).response
    assert isinstance(right, InitReply)
    assert channel.call(InitRequest()).response == right
    service.tell_init(lie)
    # What it ends in: a good message that is a lie is for the handshake to refuse.
    found: set[type[TsqpError]] = set()
    for _ in range(_TRIES):
        try:
            assert channel.call(InitRequest()).response != right
            found.add(ModelMismatchError)
        except ProtocolError:
            found.add(ProtocolError)
    assert found == set(lie.endings)


def test_lies_on_the_request_that_it_was_told_to(
    service: MaliciousService, channel: Channel
) -> None:
    requests = [linear(seed=seed) for seed in range(5)]
    right = [result(channel.call(request).response).clone() for request in requests]
    service.tell(next(lie for lie in RESULT_LIES if lie.name == "zeros"), after=2)
    found = [result(channel.call(request).response) for request in requests]
    assert [torch.equal(*pair) for pair in zip(found, right, strict=True)] == [
        *(True, True, False, True, True)
    ]


def test_late_reply_comes_before_the_next_one(service: MaliciousService, channel: Channel) -> None:
    channel.call(linear())  # or the time would be up before there is a connection
    told = service.told
    service.tell(next(lie for lie in WIRE_LIES if lie.name == "late"))
    with pytest.raises(DeadlineExceededError):
        channel.call(linear(), 0.1)
    wait_until_told(service, told + 1)
    assert len(service.memory.owed) == 1
    assert result(channel.call(linear(seed=1)).response).shape == (2, 48)
    assert service.memory.owed == []


def test_reordered_replies_are_swapped(service: MaliciousService, channel: Channel) -> None:
    requests = [linear(seed=1), linear(seed=2), linear(seed=3)]
    first, second, third = (result(channel.call(one).response).clone() for one in requests)
    service.tell(REORDERED)
    ids = [channel.submit(request) for request in requests]
    found = [result(channel.wait(request_id).response) for request_id in ids]
    for got, expected in zip(found, (second, first, third), strict=True):
        assert torch.equal(got, expected)
    assert service.memory.had[REORDERED.name] == 1


def test_one_reply_is_not_swapped(service: MaliciousService, channel: Channel) -> None:
    had = service.memory.had[REORDERED.name]
    service.tell(REORDERED)
    with pytest.raises(DeadlineExceededError):
        channel.call(linear(), 0.1)
    assert service.memory.had[REORDERED.name] == had


@pytest.mark.parametrize("lie", CROSS_SESSION, ids=str)
def test_reply_of_another_session_is_one_of_the_bystander(
    lie: Lie, service: MaliciousService
) -> None:
    channels = [open_channel(service.endpoint, timeout_s=10) for _ in range(3)]
    victim, other, bystander = channels
    request, theirs = linear(), linear()
    right = result(bystander.call(theirs).response).clone()
    service.overhear()
    result(other.call(linear()).response)
    had = service.memory.had[lie.name]
    service.tell(lie)
    if lie.name == "cross-session":
        with pytest.raises(TsqpError):
            victim.call(request)
    else:
        assert torch.equal(result(victim.call(request).response), right)
    assert service.memory.had[lie.name] == had + 1
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("lie", CROSS_SESSION, ids=str)
def test_what_is_made_up_is_no_reply_of_another_session(lie: Lie) -> None:
    told = occasion(torch.float32)
    told.memory.earlier.append((told.client, told.encoded()))
    told.memory.earlier.append((b"other", told.encoded(request_id=3)))
    told.memory.bystander = b"bystander"
    lie.tell(told)
    assert told.memory.had[lie.name] == 0
    told.memory.bystander = None
    lie.tell(told)
    assert told.memory.had[lie.name] == 1
