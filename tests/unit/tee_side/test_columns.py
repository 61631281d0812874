"""Services that hold a part of the columns each: put together, blamed alone, replaced alone."""

from __future__ import annotations

import gc
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange, Traffic
from protocol.errors import DeadlineExceededError, ReplyError, VerificationError
from protocol.messages import EmbeddingRequest, LMHeadRequest, MatmulRequest, TensorReply
from protocol.model.columns import WHOLE
from protocol.prepared import PreparedRequest
from protocol.tensors import WireTensor, from_torch
from tee_side.remote.services.columns import ColumnParts, Joined
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import Replicas
from tests.kit.fakes import World, wrong
from tests.kit.lie import Models, everything_verified, generate
from tests.kit.rows import each_row
from tests.unit.tee_side.column_parts import PartOf, over

SHAPE, PART = (3, 4), (3, 4)
# Of a vocabulary of 8, each of two parts has as many columns as the fakes' replies have.
CONFIG: Any = SimpleNamespace(vocab_size=8)
EMBEDDING = EmbeddingRequest(input_ids=WireTensor("int64", (3,), b""), dtype="float32")
HEAD = PreparedRequest(
    LMHeadRequest(hidden_states=WireTensor("float32", SHAPE, b"")), (3, 8), "float32"
)


@pytest.fixture
def world() -> World:
    return World()


def _connected(world: World, *parts: tuple[str, ...]) -> ColumnParts:
    world.add(*(name for part in parts for name in part))
    groups = [
        ReplicaGroup(1, 0, 0, names, 1, (part, len(parts))) for part, names in enumerate(parts)
    ]
    (channel,) = world.connect(*groups, config=CONFIG).at(0)
    assert isinstance(channel, ColumnParts)
    return channel


@each_row("message", [EMBEDDING, HEAD.message])
def test_what_a_request_is_parted_into_ends_with_it(
    message: EmbeddingRequest | LMHeadRequest,
) -> None:
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


# ------------------------------------------------------------------- with a model of its own


@each_row(
    ("policy", "kind", "parts"),
    [
        ("shielded", "llama", 2),
        ("quantized-clear", "qwen2", 3),  # sizes that three do not divide, and biases
        ("two-server", "llama", 2),
        ("attention-in-tee", "qwen2", 3),
        ("tsqp", "qwen3", 2),  # an embedding, products of activations, and each module alone
    ],
)
def test_parts_answer_as_one_service_does(
    saved_model: Models, policy: str, kind: str, parts: int
) -> None:
    model = saved_model(kind)
    alone = model.tee(policy)
    shares = [
        [PartOf(model.directory, part, parts) for part in range(parts)] for _ in alone.channels
    ]
    channels: list[Any] = [over(*share) for share in shares]
    assert generate(model.tee(policy, channels=channels), 5) == generate(alone, 5)
    for share in shares:
        assert all(part.replies for part in share)
        assert not any(part.pending for part in share)
        # All but products of activations go to each.
        sent = [
            [type(one) for one in part.requests if not isinstance(one, MatmulRequest)]
            for part in share
        ]
        assert sent[1:] == sent[:-1]
        assert not any(isinstance(one, MatmulRequest) for one in share[1].requests)


@each_row(
    ("policy", "parts", "at"),
    [
        ("shielded", 2, 5),
        ("two-server", 2, 5),
        ("quantized-clear", 3, 2),
        ("attention-in-tee", 3, 0),
        ("attention-in-tee", 2, 3),
        ("tsqp", 2, 0),  # the embedding, whose parts are added up
        ("tsqp", 2, 1),
        ("tsqp-permuted", 2, 4),
    ],
)
@pytest.mark.parametrize("liar", [0, 1])
def test_the_part_that_lies_is_blamed_alone(
    saved_model: Models, policy: str, parts: int, at: int, liar: int
) -> None:
    model, chosen = saved_model("llama"), everything_verified(policy)
    expected = generate(model.tee(policy))

    def share(lies: bool) -> list[PartOf]:
        return [
            PartOf(
                model.directory,
                part,
                parts,
                lambda y: y + 1,  # every row: a mask may have sent some that do not count
                at=at if lies and part == liar else -1,
                others=True,
            )
            for part in range(parts)
        ]

    shares = [share(number == 0) for number in range(chosen.services)]
    channels: list[Any] = [over(*one) for one in shares]
    assert generate(model.tee(chosen, channels=channels)) == expected
    told = [[len(part.distrusted) for part in one] for one in shares]
    assert told == [
        [int(number == 0 and part == liar) for part in range(parts)]
        for number in range(chosen.services)
    ]
    ((_, error),) = shares[0][liar].distrusted
    assert isinstance(error, VerificationError)
    assert error.where.endswith(f" at part-{liar} (columns {liar}/{parts})")


def test_a_part_with_a_reply_of_another_form_is_blamed_alone(saved_model: Models) -> None:
    model = saved_model("llama")
    parts = [
        PartOf(model.directory, 0, 2, others=True),
        PartOf(model.directory, 1, 2, lambda y: y[:, :-1], at=4, others=True),
    ]
    channels: list[Any] = [over(*parts)]
    assert generate(model.tee("shielded", channels=channels)) == generate(model.tee("shielded"))
    assert [len(part.distrusted) for part in parts] == [0, 1]
    ((_, error),) = parts[1].distrusted
    assert isinstance(error, ReplyError)
    assert "part-1 (columns 1/2)" in error.where


# ------------------------------------------------------------------------- over services


def test_one_service_that_has_all_columns_is_asked_itself(world: World) -> None:
    assert isinstance(world.replicas(*[one.endpoint for one in world.add("a", "b")]), Replicas)


def test_each_layer_has_the_parts_of_its_own_services(world: World) -> None:
    world.add("a", "b", "c")
    services = world.connect(
        ReplicaGroup(1, 0, 0, ("a",), 1, (0, 2)),
        ReplicaGroup(1, 0, 0, ("b",), 1, (1, 2)),
        ReplicaGroup(1, 1, 2, ("c",)),
        layers=3,
        config=CONFIG,
    )
    assert [len(services.at(layer)) for layer in range(3)] == [1, 1, 1]
    assert [channel.endpoint for layer in range(3) for channel in services.at(layer)] == [
        "a and b",
        "c",
        "c",
    ]
    assert [world.services[name].checked_columns for name in "abc"] == [[(0, 2)], [(1, 2)], [WHOLE]]


def test_parts_of_an_unknown_model_are_a_mistake_of_ours(world: World) -> None:
    world.add("a", "b")
    groups = [ReplicaGroup(1, 0, 0, (name,), 1, (i, 2)) for i, name in enumerate("ab")]
    with pytest.raises(LookupError):
        world.connect(*groups)


def test_the_whole_costs_what_its_parts_do(world: World) -> None:
    channel = _connected(world, ("a",), ("b",))
    before = channel.traffic.round_trips
    sent = torch.arange(12.0).view(SHAPE)
    found = channel.wait(channel.start(HEAD, sent))
    assert isinstance(found, Joined)
    assert torch.equal(HEAD.output(found), torch.cat([sent, sent], -1))
    assert (found.bytes_sent, found.bytes_received, found.endpoint) == (2, 2, "a and b")
    assert channel.traffic.round_trips == before + 2
    # Prepared once.
    again = channel.wait(channel.start(HEAD, sent))
    assert isinstance(again, Joined)
    assert [one[1] for one in again.parts] == [one[1] for one in found.parts]


def test_the_last_reply_ends_the_whole() -> None:
    class Timed:
        endpoint, traffic = "x", Traffic()

        def __init__(self, sent_ns: int, elapsed_ns: int) -> None:
            self._reply = Exchange(
                TensorReply(output=from_torch(torch.ones(PART))),
                *(10, 20, 1, elapsed_ns, 0, None, sent_ns, "x"),
            )

        def start(self, *_: object) -> int:
            return 1

        def wait(self, _: int) -> Exchange:
            return self._reply

    for first_ns, second_ns, whole_ns in ((1000, 500, 1000), (500, 1000, 1010)):
        parts: list[Any] = [Timed(100, first_ns), Timed(110, second_ns)]
        channel = ColumnParts(parts, CONFIG)
        found = channel.wait(channel.start(HEAD, torch.ones(SHAPE)))
        assert (found.sent_ns, found.elapsed_ns) == (100, whole_ns)
        assert (found.bytes_sent, found.bytes_received, found.encode_ns) == (20, 40, 2)


def test_a_part_that_is_lost_is_replaced_by_one_with_the_same_columns(world: World) -> None:
    channel = _connected(world, ("a",), ("b", "c"))
    world.services["b"].answers = deque(["lost"])
    found = channel.wait(channel.start(HEAD, torch.ones(SHAPE)))
    assert found.endpoint == "a and c"
    assert [len(world.services[name].got) for name in "abc"] == [1, 1, 1]


def test_a_part_that_lied_is_asked_no_more_and_its_replica_is(world: World) -> None:
    channel = _connected(world, ("a",), ("b", "c"))
    found = channel.wait(channel.start(HEAD, torch.ones(SHAPE)))
    assert isinstance(found, Joined)
    liar, _, exchange = found.parts[1]
    liar.distrust(exchange, wrong())
    assert channel.wait(channel.start(HEAD, torch.ones(SHAPE))).endpoint == "a and c"
    # Where nothing tells which lied, all are asked no more, and nobody has the first part then.
    with pytest.raises(VerificationError):
        channel.distrust(channel.wait(channel.start(HEAD, torch.ones(SHAPE))), wrong())


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("when", ["lost", "lost at submit"])
def test_a_part_that_fails_ends_the_whole_and_leaves_nothing_waiting(
    world: World, failing: str, when: str
) -> None:
    channel = _connected(world, ("a",), ("b",))
    world.services[failing].answers = deque([when])
    world.services[failing].up = False
    with pytest.raises(DeadlineExceededError) as caught:
        channel.wait(channel.start(HEAD, torch.ones(SHAPE), 0.2))
    assert failing in str(caught.value)
    assert not any(connection._waiting for connection in world.opened if not connection.closed)
    assert not any(group._in_flight for group in world.made[0]._groups)


def test_a_part_that_cannot_be_asked_leaves_nothing_waiting_at_the_others(world: World) -> None:
    channel = _connected(world, ("a",), ("b",))
    found = channel.wait(channel.start(HEAD, torch.ones(SHAPE)))
    assert isinstance(found, Joined)
    with pytest.raises(VerificationError):
        found.parts[1][0].distrust(found.parts[1][2], wrong())
    with pytest.raises(VerificationError):
        channel.start(HEAD, torch.ones(SHAPE))
    assert not any(connection._waiting for connection in world.opened if not connection.closed)


def test_what_is_given_up_is_given_up_at_every_part(world: World) -> None:
    channel = _connected(world, ("a",), ("b",))
    channel.abandon(channel.start(HEAD, torch.ones(SHAPE)))
    channel.abandon(99)  # unknown ids do nothing
    assert not any(connection._waiting for connection in world.opened)


def test_a_product_of_activations_is_one_parts(world: World) -> None:
    channel = _connected(world, ("a",), ("b",))
    found = channel.wait(channel.submit(LMHeadRequest(hidden_states=from_torch(torch.ones(2)))))
    assert (found.endpoint, len(world.services["b"].got)) == ("a", 0)
    with pytest.raises(VerificationError):
        channel.distrust(found, wrong())
    channel.close()
    assert all(connection.closed for connection in world.opened)
