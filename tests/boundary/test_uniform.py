"""What services and dealers receive under `pad` is uniform, and no pad is used twice.

Fresh keys from the operating system in every run: the bounds are such that a true uniform source
fails once in forty thousand runs (24 p-values at 1e-6). The same tests must fail for what crosses
in the clear.
"""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from protocol.errors import DeadlineExceededError
from protocol.keystream import expanded
from protocol.messages import Request, RingLinearRequest, RingLMHeadRequest, SeededRingLinearRequest
from protocol.prepared import Exchange
from protocol.tensors import to_torch
from tee_side.engine.engine import Engine
from tee_side.policy.placement import load_policy
from tee_side.protect.pads.source import Drawn, PadLane
from tee_side.protect.pads.store import Draw, Words
from tests.kit.model import LoopbackChannel, Models, SavedModel, Tee, finish, token_ids

Twice = Callable[[str], list[list[torch.Tensor]]]

# Wide enough for megabytes in a few prompts: 16 KiB a token.
WIDE = {
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
ENOUGH_BYTES = 5_000_000
LEAST_P = 1e-6
# 1.7 million positions and 2^-32 each: four or more have a probability below 1e-14.
MOST_EQUAL_WORDS = 3


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama", **WIDE)


def received(channel: LoopbackChannel) -> torch.Tensor:
    """Return all ring elements that a service got or can make of a seed, int32 [n], in order."""
    parts = [to_torch(expanded(request).elements).reshape(-1) for request in channel.requests]
    return torch.cat(parts)


def p_value(cells: torch.Tensor, count: int) -> float:
    """Return the p-value of Pearson's chi-square for equally likely cells, int64 in 0 .. count-1.

    From above only: the probability that a uniform source is at least as uneven.
    """
    counts = torch.bincount(cells, minlength=count).double()
    assert len(counts) == count
    expected = counts.sum() / count
    assert expected >= 5, "too few for the approximation"
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((count - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def p_values(words: torch.Tensor) -> dict[str, float]:
    """Return p-values of bytes and 16-bit words, of all of them and of some that may differ."""
    octets = words.view(torch.uint8).long()
    pairs = words.view(torch.int16).long() + 2**15
    found = {"bytes": p_value(octets, 256), "16-bit words": p_value(pairs, 65536)}
    # Each byte of an element by itself: a fault in one would be diluted by the other three.
    for place, column in enumerate(octets.view(-1, 4).unbind(1)):
        found[f"byte {place}"] = p_value(column, 256)
    return found


def prompts() -> Iterator[list[int]]:
    """Yield prompts, as different as they come: one token over and over, then random ones."""
    yield [7] * 200
    seed = 0
    while True:
        seed += 1
        yield token_ids(200, seed)


def run(tee: Tee, prompt: list[int], new_tokens: int) -> None:
    engine = tee.engine()
    engine.add(prompt, max_new_tokens=new_tokens, eos_token_ids=frozenset())
    finish(engine)


@pytest.fixture(scope="module")
def twice(model: SavedModel) -> Twice:
    """Return a function that runs a policy with prompts, and with the same again.

    What each service got, of both times: more than `ENOUGH_BYTES`.
    """

    @cache
    def get(policy: str) -> list[list[torch.Tensor]]:
        tee, source, found = model.tee(policy), prompts(), []
        chosen = [next(source) for _ in range(2)]
        for _ in range(2):
            for prompt in chosen:
                run(tee, prompt, new_tokens=8)
            found.append([received(channel) for channel in tee.channels])
            for channel in tee.channels:
                channel.requests.clear()
        assert min(words.nbytes for each in found for words in each) >= ENOUGH_BYTES
        return found

    return get


@pytest.mark.parametrize("policy", ["shielded-prefill", "dealt"])
def test_megabytes_are_uniform_at_each_service(twice: Twice, policy: str) -> None:
    each, again = twice(policy)
    assert len(each) == load_policy(policy).services
    for words in each:
        for what, p in p_values(words).items():
            assert p > LEAST_P, f"{what} are not uniform"
    # And the same prompts again share no more words with them than chance.
    for one, two in zip(each, again, strict=True):
        size = min(len(one), len(two))  # a dealer makes more pads in one go than are used
        assert size >= 1_250_000
        assert int((one[:size] == two[:size]).sum()) <= MOST_EQUAL_WORDS


def test_the_same_test_fails_for_what_crosses_in_the_clear(twice: Twice) -> None:
    (words,), (again,) = twice("quantized-clear")
    found = p_values(words)
    assert all(p < 1e-30 for p in found.values()), found
    assert torch.equal(words, again)


def test_decode_under_the_default_policy_is_uniform(model: SavedModel) -> None:
    """Many sequences at once, one token each; of a prompt nothing crosses."""
    tee = model.tee("shielded")
    engine = tee.engine()
    for seed in range(24):
        engine.add(token_ids(1 + seed % 3, seed), max_new_tokens=15, eos_token_ids=frozenset())
    engine.step()
    assert not tee.channels[0].requests
    finish(engine)
    words = received(tee.channels[0])
    assert words.nbytes >= ENOUGH_BYTES
    for what, p in p_values(words).items():
        assert p > LEAST_P, f"{what} are not uniform"


@pytest.mark.parametrize("policy", ["shielded-prefill", "dealt"])
def test_neither_token_ids_nor_logits_nor_text_ever_cross_and_every_call_has_a_seed_of_its_own(
    model: SavedModel, policy: str
) -> None:
    ring = ("RingLinear", {"layer_idx", "module_names", "elements"})
    seeded = ("SeededRingLinear", {"layer_idx", "module_names", "rows", "columns", "seed"})
    seeds = []
    for _ in range(2):  # of the same prompt
        tee = model.tee(policy)
        run(tee, token_ids(20), new_tokens=4)
        for index, channel in enumerate(tee.channels):
            # Nothing but these fields, so that nothing else can carry anything.
            method, fields = seeded if index == 1 else ring
            allowed = {method: fields, "RingLMHead": {"elements"}}
            assert {request.method for request in channel.requests} == allowed.keys()
            for request in channel.requests:
                assert set(request.model_dump()) == allowed[request.method]
                if isinstance(request, SeededRingLinearRequest):
                    assert (request.seed.dtype, request.seed.shape) == ("int32", (8,))
                    seeds.append(bytes(request.seed.data))
    assert len(set(seeds)) == len(seeds)
    # At every operator of both layers: of the prompt, and of the pads for what follows; twice.
    assert len(seeds) == 2 * 4 * 2 * 2 or policy != "dealt"
    assert not any(seed[:16] == seed[16:] for seed in seeds)


def _ring_requests(channel: LoopbackChannel) -> list[RingLinearRequest | RingLMHeadRequest]:
    kinds = RingLinearRequest | RingLMHeadRequest
    return [request for request in channel.requests if isinstance(request, kinds)]


def test_what_the_dealer_gets_hides_a_prompt_and_neither_alone_is_it(model: SavedModel) -> None:
    dealt, clear = model.tee("dealt"), model.tee("quantized-clear")
    for tee in (dealt, clear):
        run(tee, token_ids(30), new_tokens=1)
        for channel in tee.channels:  # in the clear the LM head stays
            of_head = [one for one in channel.requests if isinstance(one, RingLMHeadRequest)]
            channel.requests = [one for one in channel.requests if one not in of_head]
    first, second = (received(channel) for channel in dealt.channels)
    plain = received(clear.channels[0])
    assert torch.equal(first - second, plain)
    # At most a coincidence: neither is the plaintext, or the other, anywhere.
    for one, two in ((first, plain), (second, plain)):
        assert int((one == two).sum()) <= MOST_EQUAL_WORDS


class UnreliableChannel(LoopbackChannel):
    """Loses every 19th request, and every 17th reply; a `rarely`-th of them."""

    failures = 0
    rarely = 1

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        request_id = super().submit(request, timeout_s)
        self._lose(request_id % (19 * self.rarely) == 0)
        return request_id

    def wait(self, request_id: int) -> Exchange:
        exchange = super().wait(request_id)
        self._lose(request_id % (17 * self.rarely) == 0)
        return exchange

    def _lose(self, lost: bool) -> None:
        if lost:
            self.failures += 1
            raise DeadlineExceededError("loopback", got="no reply", expected="one")


def _step_until_done(engine: Engine) -> None:
    while engine.running:
        try:
            engine.step()
        except DeadlineExceededError:
            continue


@pytest.mark.parametrize(("policy", "micro_batches"), [("shielded", 1), ("shielded-prefill", 3)])
def test_no_pad_is_used_twice_where_steps_fail_and_are_repeated(
    saved_model: Models, policy: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing: set[int] = set()
    used: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    rows: list[bytes] = []
    draw = PadLane.words

    def drawn(lane: PadLane, site: int, count: int) -> Drawn:
        found = draw(lane, site, count)
        assert lane._indices is not None
        drawing.add(id(lane))
        used.extend((index, site) for index in lane._indices[:count])
        rows.extend(row.numpy().tobytes() for row in found[0].elements())
        return found

    # Before the lanes are made: each keeps the method that it found.
    monkeypatch.setattr(PadLane, "words", drawn)
    model = saved_model("llama")
    channel = UnreliableChannel(model.directory)
    channel.rarely = micro_batches  # a step sends as many times as much, and must get through
    tee = model.tee(policy, channels=[channel], micro_batches=micro_batches)
    (pads,) = tee.assembly.pads.values()
    start, all_factors = pads.store.start, pads.store.all_factors

    def one_read(indices: range, site: int) -> Draw:
        read.extend((index, site) for index in indices)
        return start(indices, site)

    def all_read(indices: range) -> dict[int, Words]:
        found = all_factors(indices)
        read.extend((index, site) for index in indices for site in found)
        return found

    monkeypatch.setattr(pads.store, "start", one_read)
    monkeypatch.setattr(pads.store, "all_factors", all_read)
    engine = tee.engine(step_tokens=6 * micro_batches)
    for seed in range(3 * micro_batches):
        engine.add(token_ids(5 + seed, seed), max_new_tokens=12, eos_token_ids=frozenset())
    _step_until_done(engine)
    assert channel.failures > 15
    assert len(drawing) > 1 or micro_batches == 1
    assert len(used) == len(set(used)), "a pad was used for two inputs"
    assert len(read) == len(set(read)), "a pad was read twice"
    assert set(used) <= set(read)
    assert len(rows) == len(set(rows)), "two pads are equal"
    # Every row that crossed had a pad of its own: sent and repeated ones together.
    sent = sum(request.elements.shape[0] for request in _ring_requests(channel))
    assert sent == len(used)
    # Nothing was sent twice, in particular not when a step was repeated.
    crossed = [
        row.numpy().tobytes()
        for request in _ring_requests(channel)
        for row in to_torch(request.elements)
    ]
    assert len(set(crossed)) == len(crossed)
