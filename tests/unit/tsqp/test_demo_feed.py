"""What the demo measures on the wire: counts of bytes, and tokens read out of hidden states."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from tsqp.cli.program import model_directory
from tsqp.demo.feed import Feed
from tsqp.demo.intercepting_proxy import Seen
from tsqp.demo.matching import Matcher

PROMPT = "Once upon a time there was a lamp"


def linear(tensor: torch.Tensor, layer: int | None = 0, what: str = "q_proj k_proj v_proj") -> Seen:
    return Seen(what, layer, (tensor,))


def words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (4 * count,), generator=generator, dtype=torch.uint8)
    return raw.view(torch.int32)


def test_bytes_are_counted_over_all_tensors() -> None:
    feed = Feed(kept=1)
    assert feed.bytes() is None
    pair = torch.tensor([0x01020304, 0x01020304], dtype=torch.int32)
    feed.add(Seen("Matmul", None, (pair, torch.tensor([0x05]))))
    found = feed.bytes()
    assert found is not None
    assert found.total == 16
    assert found.values == 6  # 1 to 4 twice, 5 once, and seven zeros
    assert (found.rarest, found.commonest) == (0, 7 / 16)
    expected = 4 * (1 / 8) * 3 + (7 / 16) * math.log2(16 / 7) + (1 / 16) * 4
    assert found.entropy_bits == pytest.approx(expected)
    assert feed.histogram(64)[:2] == [7 + 6, 2 + 1]
    assert sum(feed.histogram(64)) == 16
    assert feed.dtypes == ["int32", "int64"]


def test_uniform_words_are_even_and_others_are_not() -> None:
    def even(tensor: torch.Tensor) -> bool:
        feed = Feed(kept=1)
        feed.add(linear(tensor))
        found = feed.bytes()
        return found is not None and found.even

    uniform = words(250_000)
    assert even(uniform)
    # One byte in fifty is 0 beyond what chance would make of it: not visible, but not even.
    tampered = uniform.view(torch.uint8).clone()
    tampered[::50] = 0
    assert not even(tampered.view(torch.int32))
    assert not even(torch.randn(250_000, generator=torch.Generator().manual_seed(0)))
    # Every value once is as even as it gets, but too little to say so.
    assert not even(torch.arange(256).to(torch.uint8).view(torch.int32))


def test_first_and_last_requests_are_kept() -> None:
    feed = Feed(kept=2)
    for layer in range(5):
        feed.add(linear(words(1), layer))
    assert feed.count == 5
    assert [seen.layer for seen in feed.first] == [0, 1]
    assert [seen.layer for seen in feed.last] == [3, 4]


def test_inputs_of_the_first_layer_alone_are_kept_for_matching() -> None:
    feed = Feed(kept=1)
    wanted = [words(2, seed=1)[None], words(3, seed=2)[None]]
    feed.add(linear(wanted[0]))
    feed.add(linear(words(8)))  # a seed
    feed.add(linear(words(1)[None], layer=1))
    feed.add(linear(words(1)[None], what="o_proj"))
    feed.add(linear(wanted[1], what="q_proj"))
    feed.add(linear(words(1)[None], what="k_proj"))
    assert [tensor.tolist() for tensor in feed.inputs] == [tensor.tolist() for tensor in wanted]


@pytest.fixture(scope="module")
def hidden() -> tuple[list[int], torch.Tensor]:
    """Token ids, and what transformers gives to the first layer's q_proj for them."""
    directory = model_directory("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(directory)(PROMPT)["input_ids"]
    caught: list[torch.Tensor] = []
    hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _module, arguments: caught.append(arguments[0])
    )
    with torch.inference_mode():
        model(torch.tensor([ids]))
    hook.remove()
    return ids, caught[0]


def test_hidden_states_are_read(hidden: tuple[list[int], torch.Tensor]) -> None:
    ids, rows = hidden
    reading = Matcher().read([rows[:, :3], rows[0, 3:]], ids)
    assert reading is not None
    assert PROMPT in reading.text
    assert (reading.tokens, reading.right) == (len(ids), len(ids))
    # Quantised, they are as readable.
    quantised = Matcher().read([(rows * 100).round().to(torch.int32)], ids)
    assert quantised is not None
    assert quantised.right == len(ids)


def test_only_the_last_tokens_may_have_been_sent(hidden: tuple[list[int], torch.Tensor]) -> None:
    ids, rows = hidden
    reading = Matcher().read([rows[0, 4:]], ids)
    assert reading is not None
    assert (reading.tokens, reading.right) == (len(ids) - 4, len(ids) - 4)


def test_padded_words_are_not_read(hidden: tuple[list[int], torch.Tensor]) -> None:
    ids, rows = hidden
    pads = words(rows.numel()).reshape(rows.shape)
    reading = Matcher().read([(rows * 100).round().to(torch.int32) + pads], ids)
    assert reading is not None
    assert reading.right is not None
    assert reading.right <= 1


def test_more_rows_than_tokens_are_not_counted(hidden: tuple[list[int], torch.Tensor]) -> None:
    ids, rows = hidden
    reading = Matcher().read([rows, rows], ids)
    assert reading is not None
    assert (reading.tokens, reading.right) == (2 * len(ids), None)
    assert Matcher().read([], ids) is None
