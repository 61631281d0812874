"""Services that hold a part of the columns each: put together, blamed alone, replaced alone."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange, Traffic
from protocol.errors import DeadlineExceededError, ReplyError, VerificationError
from protocol.messages import (
    EmbeddingRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    Response,
    TensorReply,
)
from protocol.model.columns import part_of
from protocol.model.config import read_config
from protocol.prepared import PreparedRequest
from protocol.tensors import WireTensor, from_torch, to_torch
from tee_side.remote.services.columns import ColumnParts, Joined
from tee_side.remote.services.plan import ReplicaGroup
from tests.kit.fakes import World, wrong
from tests.kit.lie import Change, Lying, generate
from tests.kit.model import LoopbackChannel, Models, with_results
from tests.kit.rows import each_row

SHAPE = (3, 4)
# Of a vocabulary of 8, each of two parts has as many columns as the fakes' replies have.
CONFIG: Any = SimpleNamespace(vocab_size=8)
EMBEDDING = EmbeddingRequest(input_ids=WireTensor("int64", (3,), b""), dtype="float32")
HEAD = PreparedRequest(
    LMHeadRequest(hidden_states=WireTensor("float32", SHAPE, b"")), (3, 8), "float32"
)


class Cutting(LoopbackChannel):
    """A service that cuts its part out of what one that has all columns would answer."""

    part: tuple[int, int]
    config: Any

    def answer(self, request: Request) -> Response:
        reply = super().answer(request)
        if not isinstance(reply, TensorReply) or isinstance(request, MatmulRequest):
            return reply
        y = to_torch(reply.output)
        if isinstance(request, EmbeddingRequest):
            mine, ids = part_of(self.config.vocab_size, *self.part), to_torch(request.input_ids)
            y = torch.where(((ids >= mine.start) & (ids < mine.stop))[..., None], y, 0)
        else:
            names = getattr(request, "module_names", ())
            sizes = [self.config.module_shape(name)[0] for name in names] or [y.shape[-1]]
            y = torch.cat(
                [one[..., part_of(one.shape[-1], *self.part)] for one in y.split(sizes, -1)], -1
            )
        return TensorReply(output=from_torch(y.contiguous()))


class PartOf(Lying, Cutting):
    """One that lies about its part, in its `at`-th reply."""

    def __init__(
        self, directory: Path, part: int, parts: int, change: Change = torch.neg, at: int = -1
    ) -> None:
        picks = lambda request: not isinstance(request, MatmulRequest)  # noqa: E731
        super().__init__(directory, change, picks, at=at, others=True)
        self.endpoint, self.part = f"part-{part}", (part, parts)
        self.config = read_config(directory)


@each_row(
    ("policy", "parts", "at", "liar", "change"),
    [
        ("shielded", 2, 5, 1, None),
        ("two-server", 2, 5, 0, None),
        ("quantized-clear", 3, 2, 1, None),  # sizes that three do not divide, and biases
        ("attention-in-tee", 3, 0, 0, None),
        ("published", 2, 0, 0, None),  # the embedding, whose parts are added up
        ("published", 2, 1, 1, None),
        ("published-permuted", 2, 4, 0, None),
        ("shielded", 2, 4, 1, lambda y: y[:, :-1]),  # another form
    ],
)
def test_parts_answer_as_one_service_does_and_the_one_that_lies_is_blamed_alone(
    saved_model: Models, policy: str, parts: int, at: int, liar: int, change: Change | None
) -> None:
    kind = "qwen2" if policy == "quantized-clear" else "llama"
    model = saved_model(kind, num_hidden_layers=2)
    chosen = with_results(policy, "freivalds")
    shares = [
        [PartOf(model.directory, part, parts) for part in range(parts)]
        for _ in range(chosen.services)
    ]
    shares[0][liar] = PartOf(model.directory, liar, parts, change or (lambda y: y + 1), at)
    channels = [ColumnParts(share, share[0].config) for share in shares]
    tee = model.tee(chosen, channels=channels)
    assert generate(tee) == generate(model.tee(policy))
    told = [[len(part.distrusted) for part in share] for share in shares]
    blamed = [int(part == liar) for part in range(parts)]
    assert told == [blamed, *[[0] * parts] * (len(shares) - 1)]
    # Products of activations need no weight: the first part computes them.
    others = [request for share in shares for part in share[1:] for request in part.requests]
    assert not any(isinstance(request, MatmulRequest) for request in others)
    ((_, error),) = shares[0][liar].distrusted
    assert isinstance(error, ReplyError if change else VerificationError)
    assert error.where.endswith(f" part-{liar} (columns {liar}/{parts})")


def test_the_last_reply_ends_the_whole_and_all_are_told_what_only_they_could_tell() -> None:
    told: list[tuple[int, object]] = []

    def timed(sent_ns: int, elapsed_ns: int) -> Any:
        reply = TensorReply(output=from_torch(torch.ones(SHAPE)))
        found = Exchange(reply, 10, 20, 1, elapsed_ns, 0, None, sent_ns, "x")
        return SimpleNamespace(
            endpoint="x",
            traffic=Traffic(),
            start=lambda *_: 1,
            wait=lambda _: found,
            distrust=lambda exchange, _: told.append((sent_ns, exchange)),
        )

    for first_ns, second_ns, whole_ns in ((1000, 500, 1000), (500, 1000, 1010)):
        channel = ColumnParts([timed(100, first_ns), timed(110, second_ns)], CONFIG)
        found = channel.wait(channel.start(HEAD, torch.ones(SHAPE)))
        assert (found.sent_ns, found.elapsed_ns) == (100, whole_ns)
        assert (found.bytes_sent, found.bytes_received, found.encode_ns) == (20, 40, 2)
        assert isinstance(found, Joined)
        channel.distrust(found, VerificationError("x", got="a wrong result", expected="x W"))
        assert told[-2:] == [(exchange.sent_ns, exchange) for _, _, exchange in found.parts]
    # Products of activations are the first part's.
    channel.distrust(found.parts[1][2], wrong())
    assert told[4:] == [(100, found.parts[1][2])]


@each_row("message", [EMBEDDING, HEAD.message])
def test_what_a_request_is_parted_into_ends_with_it(message: Any) -> None:
    part: Any = SimpleNamespace(
        endpoint="a", traffic=Traffic(), start=lambda *_: 1, abandon=lambda _: None
    )
    channel = ColumnParts([part, part], CONFIG)
    prepared = PreparedRequest(message, (3, 8), "float32")
    channel.abandon(channel.start(prepared, torch.zeros(3)))
    assert len(channel._parted) == 1
    del prepared
    gc.collect()
    assert not channel._parted


def _waiting(world: World) -> int:
    opened = sum(len(one._waiting) for one in world.opened if not one.closed)
    return opened + sum(len(group._in_flight) for made in world.made for group in made._groups)


@each_row(
    ("failing", "when"), [(name, when) for name in "ab" for when in ("lost", "lost at submit")]
)
def test_what_a_part_fails_at_or_cannot_be_asked_is_given_up_at_every_part(
    failing: str, when: str
) -> None:
    world = World()
    world.add("a", "b")
    groups = [ReplicaGroup(1, 0, 0, (name,), 1, (part, 2)) for part, name in enumerate("ab")]
    (channel,) = world.connect(*groups, config=CONFIG).at(0)
    assert isinstance(channel, ColumnParts)
    channel.abandon(channel.start(HEAD, torch.ones(SHAPE)))
    assert not _waiting(world)
    found = channel.wait(channel.start(HEAD, torch.ones(SHAPE)))
    assert isinstance(found, Joined)
    one = world.services[failing]
    one.answers, one.up = deque([when]), False
    with pytest.raises(DeadlineExceededError) as caught:
        channel.wait(channel.start(HEAD, torch.ones(SHAPE), 0.1))
    assert failing in str(caught.value)
    assert not _waiting(world)
    one.up = True
    with pytest.raises(VerificationError):
        found.parts[1][0].distrust(found.parts[1][2], wrong())
    with pytest.raises(VerificationError):
        channel.start(HEAD, torch.ones(SHAPE))
    assert not _waiting(world)
    # Where nothing tells which part lied, all are asked no more.
    with pytest.raises(VerificationError):
        channel.distrust(found, wrong())
    assert all(group.members[0].quarantined for group in world.made[0]._groups)
    channel.close()
    assert all(connection.closed for connection in world.opened)
