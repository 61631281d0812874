"""A prompt leaves under pads where they are in stock; what computes it changes no bit."""

from __future__ import annotations

from itertools import product

import torch

from tee_side.policy.placement import load_policy
from tests.kit.model import Models, Tee, stocked, token_ids
from tests.kit.rows import each_row

PROMPT, NEW_TOKENS, STEP_TOKENS = token_ids(13), 4, 16
# A quarter of the 128 tokens that pads are kept ready for in memory.
LEFT_TO_DECODE = 32


STOCK = load_policy("shielded-prefill").model_copy(
    update={"name": "from-stock", "prefill": "stock", "decode_share": 0.25}
)


def _logits(tee: Tee, prompt: list[int] = PROMPT) -> tuple[torch.Tensor, list[int]]:
    engine = tee.engine(STEP_TOKENS)
    sequence = engine.add(prompt, max_new_tokens=NEW_TOKENS, eos_token_ids=frozenset())
    logits, asked, before = [], [], 0
    while sequence.finish_reason is None:
        logits += [sampled.logits_V for sampled in engine.step()]
        asked.append(len(tee.channels[0].requests) - before)
        before += asked[-1]
    return torch.stack(logits), asked


@each_row(("spare", "micro_batches"), product((-1, 0), (1, 2)))
def test_a_prompt_leaves_where_decode_keeps_its_share(
    saved_model: Models, spare: int, micro_batches: int
) -> None:
    model = saved_model("llama")
    tee = model.tee(STOCK, step_tokens=STEP_TOKENS, micro_batches=micro_batches)
    pads = stocked(tee, LEFT_TO_DECODE + len(PROMPT) + spare)
    found, asked = _logits(tee)
    token = 3 * 4 + 1
    if spare < 0:
        assert asked == [0, token, token, token]
        assert pads._store.available == LEFT_TO_DECODE + len(PROMPT) - 1 - 3
    else:
        # Of a prompt in two parts, one has the row that logits are wanted of.
        assert asked[0] == micro_batches * 3 * 4 + 1
        assert asked[1:] == [token, token, token]
        assert pads._store.available == LEFT_TO_DECODE - 3
    assert torch.equal(found, _logits(model.tee("quantized-clear"))[0])


def test_each_step_of_a_long_prompt_asks_anew(saved_model: Models) -> None:
    model, prompt = saved_model("llama"), token_ids(40)
    tee = model.tee(STOCK, step_tokens=STEP_TOKENS)
    stocked(tee, LEFT_TO_DECODE + 2 * STEP_TOKENS)
    found, asked = _logits(tee, prompt)
    # The last eight find what is left to decode, and no more.
    assert [count > 0 for count in asked] == [True, True, False, True, True, True]
    assert torch.equal(found, _logits(model.tee("quantized-clear"), prompt)[0])
