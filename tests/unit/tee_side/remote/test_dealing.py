"""Pads that dealers multiply: exact, of seeds of their own, and not used where one has lied."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from protocol.errors import EndpointError, ReplyError, TsqpError, VerificationError
from protocol.keystream import seeded
from protocol.messages import SeededRingLinearRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import load_quantized
from protocol.prepared import Exchange, PreparedRequest
from protocol.tensors import to_torch
from tee_side.assembly import DEALT_GROUP
from tee_side.protect.pads.dealt import DealtKeystream
from tee_side.protect.pads.source import Pads
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import PadLayout, SiteShape
from tee_side.protect.verification import ExactCheck
from tee_side.remote import dealing
from tee_side.remote.dealing import holds_in_ring
from tee_side.words import PadsFrom
from tests.kit.lie import Lying
from tests.kit.model import LoopbackChannel, Models, SavedModel, Tee, token_ids
from tests.kit.rows import each_row

NAMES = ("one", "two")
SITES = 3 * 4 + 1


@pytest.fixture
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


def _pads(tee: Tee) -> Pads:
    (pads,) = tee.assembly.pads.values()
    return pads


def _seeds(channel: LoopbackChannel) -> list[bytes]:
    asked = channel.requests
    return [bytes(one.seed.data) for one in asked if isinstance(one, SeededRingLinearRequest)]


def test_pads_of_several_dealers_are_exact_products_of_seeds_that_each_has_alone(
    model: SavedModel,
) -> None:
    channels = [LoopbackChannel(model.directory) for _ in range(3)]
    tee = model.tee("dealt", channels=channels, dealers=NAMES)
    pads, config = _pads(tee), read_config(model.directory)
    pads.fill(DEALT_GROUP + 1)
    assert pads.store.available == 2 * DEALT_GROUP
    assert [len(channel.requests) for channel in channels] == [0, 2 * SITES, 2 * SITES]
    first, second = map(_seeds, channels[1:])
    assert len({*first, *second}) == len(first) + len(second) == 2 * 2 * (SITES - 1)
    pads.store.take(5)
    indices = pads.store.take(DEALT_GROUP)  # of two groups
    for site in pads.store.layout.sites:
        pad, u_TO = pads.store.start(indices, site.number)()
        r_TI = pad.elements()
        weight_OI = load_quantized(Checkpoint(model.directory), config, *site.site).weight
        assert torch.equal(u_TO, (r_TI.long() @ weight_OI.long().t()).to(torch.int32)), str(site)
    # Another run, of the same model and dealers, begins with other seeds.
    again = model.tee("dealt", channels=channels, dealers=NAMES)
    _pads(again).fill(1)
    assert not {*first, *second} & {*_seeds(channels[1])[len(first) :]}


class Counting(LoopbackChannel):
    most = waiting = 0

    def start(self, *asked: Any) -> int:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return super().start(*asked)

    def wait(self, request_id: int) -> Exchange:
        self.waiting -= 1
        return super().wait(request_id)


@each_row(("group", "tokens", "most"), [(1, 1, 8), (4, 8, 8), (1, 8, 16), (1, 10, 10)])
def test_a_dealer_has_the_next_site_to_work_on_and_no_more_than_it_queues(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch, group: int, tokens: int, most: int
) -> None:
    monkeypatch.setattr("tee_side.assembly.DEALT_GROUP", group)
    dealer = Counting(model.directory)
    channels = [LoopbackChannel(model.directory), dealer]
    _pads(model.tee("dealt", channels=channels, dealers=NAMES[:1])).fill(tokens)
    assert (dealer.most, dealer.waiting) == (most, 0)


# Rows of whole blocks of the cipher, and rows that begin within one.
@each_row("features", [8, 7])
def test_a_dealers_part_is_what_it_makes_of_its_seed_whichever_rows_are_drawn(
    features: int,
) -> None:
    group, site = 4, 9
    layout = PadLayout((SiteShape(8, "lm_head", 1, 1),))
    stream = DealtKeystream(bytes(range(32)), NAMES, group, layout)
    groups = [
        seeded(
            [stream.seed(dealer, first, site) for dealer in range(2)], group, features
        ).elements()
        for first in (8, 12, 16)
    ]
    whole = torch.cat(groups)
    for start, stop in ((8, 20), (9, 10), (11, 13), (13, 19)):
        found = stream.rows(range(start, stop), {4: 3, site: features})[site].elements()
        assert torch.equal(found, whole[start - 8 : stop - 8])
    # Threads of a store draw several sites at once.
    places = [(first, site) for first in (8, 12, 16) for site in range(40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda place: stream.seed(0, *place), places * 5))
    assert found == [stream.seed(0, *place) for place in places] * 5
    known = [stream.seed(*place) for place in ((0, 8, 9), (1, 8, 9), (0, 12, 9), (0, 8, 8))]
    for key, names in ((bytes(32), NAMES), (bytes(range(32)), NAMES[::-1])):
        known.append(DealtKeystream(key, names, group, layout).seed(0, 8, 9))
    # The second dealer's, whatever its number is.
    assert known.count(known[1]) == 2
    assert len(set(known)) == len(known) - 1


@each_row(
    ("change", "error", "said"),
    [
        (lambda u: u + torch.eye(*u.shape, dtype=u.dtype), VerificationError, "a wrong product"),
        # Rows of another seed, as far as anybody can tell.
        (lambda u: u.roll(1, 0), VerificationError, "pads of layer 0 qkv_proj from loopback"),
        (lambda u: u[:-1], ReplyError, r"\[31, .*\], expected int32 \[32, "),
    ],
)
def test_a_dealer_that_lies_is_found_before_its_pads_are_used_and_asked_no_more(
    model: SavedModel,
    change: Callable[[torch.Tensor], torch.Tensor],
    error: type[TsqpError],
    said: str,
) -> None:
    liar = Lying(model.directory, change, at=0)
    service, honest = (LoopbackChannel(model.directory) for _ in range(2))
    tee = model.tee("dealt", channels=[service, honest, liar], dealers=NAMES)
    pads = _pads(tee)
    with pytest.raises(error, match=said):
        pads.fill(1)
    assert pads.store.available == 0
    assert (pads.store.room, liar.pending, honest.pending) == (pads.store.capacity, 0, 0)
    asked = len(liar.requests)
    assert [told for _, told in liar.distrusted] == [pads.dealing and pads.dealing.failure]
    with pytest.raises(error, match=said):
        pads.fill(1)
    assert len(liar.requests) == asked


def test_a_pad_without_a_part_of_each_dealer_is_none(model: SavedModel) -> None:
    channels = [LoopbackChannel(model.directory) for _ in range(2)]
    pads = _pads(model.tee("dealt", channels=channels, dealers=NAMES))
    with pytest.raises(ValueError, match="dealers: got 1, expected 2"):
        pads.fill(1)
    assert pads.store.available == 0


@each_row("dealers", [1, 2])
def test_what_a_dealer_may_still_change_is_read_once(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch, dealers: int
) -> None:
    replies: list[torch.Tensor] = []

    class Lending(LoopbackChannel):
        def start(self, prepared: PreparedRequest, *payload: Any) -> int:
            assert prepared.read_once
            return super().start(prepared, *payload)

        def wait(self, request_id: int) -> Exchange:
            exchange = super().wait(request_id)
            replies.append(to_torch(exchange.response.output).clone())
            return replace(exchange, output=replies[-1], lent=True)

    def changed(check: ExactCheck, r_TI: torch.Tensor, u_TO: torch.Tensor) -> bool:
        replies[-1].zero_()
        return holds_in_ring(check, r_TI, u_TO)

    monkeypatch.setattr(dealing, "holds_in_ring", changed)
    lending = [Lending(model.directory) for _ in range(dealers)]
    channels = [LoopbackChannel(model.directory), *lending]
    pads = _pads(model.tee("dealt", channels=channels, dealers=NAMES[:dealers]))
    pads.fill(1)
    found = pads.store.start(pads.store.take(1), 0)()[1]
    assert found.any()
    assert not any(reply.any() for reply in replies)


def test_a_pad_that_is_wrong_is_not_the_services_fault_and_no_other_of_its_dealer_is_used(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a lie in the highest bit alone has come through, with 1/4."""
    service = Lying(model.directory, lambda y: y, at=-1)
    dealer = Lying(model.directory, lambda u: u, at=-1)
    tee = model.tee("dealt", channels=[service, dealer])
    pads, engine = _pads(tee), tee.engine()
    monkeypatch.setattr(dealing, "holds_in_ring", lambda *_: True)
    engine.add(token_ids(4), max_new_tokens=3, eos_token_ids=frozenset())
    engine.step()
    dealer.tell(lambda u: u ^ (u.new_ones(()) << 31), at=2)
    with pytest.raises(
        VerificationError, match=r"gate_up_proj in layer 0: a pad from loopback: got"
    ):
        engine.step()
    assert not service.distrusted
    assert pads.store.available == 0
    asked = len(dealer.requests)
    with pytest.raises(VerificationError, match="a pad from loopback"):
        engine.step()
    assert len(dealer.requests) == asked


def test_the_check_in_the_ring_finds_what_is_wrong_below_the_highest_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    weight_OI = torch.randint(-127, 128, (40, 24), generator=generator).to(torch.int8)
    r_TI = torch.randint(-(2**31), 2**31, (6, 24), generator=generator).to(torch.int32)
    u_TO = (r_TI.long() @ weight_OI.long().t()).to(torch.int32)
    passed = 0
    for _ in range(64):
        check = ExactCheck.draw(weight_OI, Randomness())
        assert holds_in_ring(check, r_TI, u_TO)
        for bit in (0, 7, 16):
            wrong_TO = u_TO.clone()
            wrong_TO[4, 39] ^= 1 << bit
            assert not holds_in_ring(check, r_TI, wrong_TO)
        u_TO[4, 39] ^= -(2**31)
        passed += holds_in_ring(check, r_TI, u_TO)
        u_TO[4, 39] ^= -(2**31)
    assert 0 < passed < 40  # a quarter of 64, but for one in 10^9


def test_a_prompt_is_computed_to_the_same_bits_whatever_its_pads_are(model: SavedModel) -> None:
    tee, prompt = model.tee("dealt", when_out="tee"), token_ids(19)
    expected = model.tee("quantized-clear").logits(prompt)
    _pads(tee).fill(len(prompt))
    for pads in get_args(PadsFrom):
        assert torch.equal(tee.logits(prompt, pads=pads), expected), pads


class Away(LoopbackChannel):
    """A dealer that can be away."""

    away = False

    def answer(self, request: object) -> object:
        EndpointError.unless(not self.away, "loopback", "nobody", "a gpu-service")
        return super().answer(request)  # type: ignore[arg-type]


def test_while_a_dealer_is_away_the_stock_is_used_then_what_the_settings_say(
    model: SavedModel,
) -> None:
    service, dealer = LoopbackChannel(model.directory), Away(model.directory)
    right = model.tee("quantized-clear").greedy([1, 2, 3], 4)
    tee = model.tee("dealt", channels=[service, dealer], when_out="tee")
    pads = _pads(tee)
    pads.fill(1)
    dealer.away = True
    # A prompt cannot wait for pads that are dealt as they are used, once that is known.
    with pytest.raises(EndpointError):
        pads.fill(1)
    for left in (DEALT_GROUP - 3, DEALT_GROUP - 6):
        assert tee.greedy([1, 2, 3], 4) == right
        assert pads.store.available == left
    pads.store.release(pads.store.take(pads.store.available))
    before = len(dealer.requests)
    assert tee.greedy([1, 2, 3], 4) == right  # in the TEE
    assert len(dealer.requests) == before
    dealer.away = False
    pads.fill(1)
    assert tee.greedy([1, 2, 3], 4) == right
    assert pads.store.available == DEALT_GROUP - 3
    assert len(dealer.requests) > before + SITES
