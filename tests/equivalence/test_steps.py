"""How work is cut into steps, and what runs beside it, does not change the result."""

from __future__ import annotations

from itertools import cycle

from tests.equivalence.tolerances import FLOAT32_STEPS
from tests.kit.model import ARCHITECTURES, POLICIES, Models, assemble, finish, token_ids
from tests.kit.rows import each_row

# A window smaller than the prompt makes chunks see different parts of the cache.
WINDOWS = {"mistral": {"sliding_window": 5}}


@each_row(("kind", "chunk"), [*zip(ARCHITECTURES, (22, 3, 7, 1), strict=True), ("mistral", 1)])
def test_prefill_in_chunks_equals_prefill_at_once(
    saved_model: Models, kind: str, chunk: int
) -> None:
    model, ids = saved_model(kind, **WINDOWS.get(kind, {})), token_ids(23)
    tee = assemble(model.directory)
    FLOAT32_STEPS.check(tee.logits(ids, chunk), tee.logits(ids))


@each_row(("policy", "step_tokens"), zip(cycle(POLICIES), (1, 2, 3, 5, 7, 16, 512)))
def test_sequences_in_one_batch_equal_each_alone(
    saved_model: Models, policy: str, step_tokens: int
) -> None:
    model = saved_model("mistral", **WINDOWS["mistral"])
    tee = assemble(model.directory, policy)
    requests = [(token_ids(length, seed=length), 4 + length % 5) for length in (1, 3, 19, 8)]
    engine = tee.engine(step_tokens)
    sequences = [engine.add(prompt, max_new_tokens=new) for prompt, new in requests]
    finish(engine)
    for sequence, (prompt, new) in zip(sequences, requests, strict=True):
        assert sequence.token_ids == model.greedy(prompt, new)
        assert sequence.finish_reason == "length"
