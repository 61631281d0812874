"""What each policy costs in round trips, and that nothing else is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
)
from tests.kit.model import SavedModel, assemble, token_ids
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]


def _requests(model: SavedModel, policy: str) -> list[Request]:
    tee = assemble(model.directory, policy)
    tee.logits(token_ids(12))
    return tee.channel.requests if tee.channel else []


def _names(requests: list[Request]) -> Counter[str]:
    return Counter(
        "+".join(r.module_names) if isinstance(r, LinearRequest) else r.method for r in requests
    )


@each_row("layers", [1, 3])
def test_tsqp_makes_nine_rpcs_a_layer_and_two_per_forward(saved_model: Models, layers: int) -> None:
    requests = _requests(saved_model("llama", num_hidden_layers=layers), "tsqp")
    assert len(requests) == 9 * layers + 2
    assert isinstance(requests[0], EmbeddingRequest)
    assert isinstance(requests[-1], LMHeadRequest)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert _names(requests) == Counter(
        {"Embedding": 1, "LMHead": 1, "Matmul": 2 * layers} | dict.fromkeys(modules, layers)
    )


@each_row("layers", [1, 3])
def test_attention_in_tee_makes_four_rpcs_a_layer_and_nothing_else(
    saved_model: Models, layers: int
) -> None:
    requests = _requests(saved_model("llama", num_hidden_layers=layers), "attention-in-tee")
    fused = ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj")
    assert _names(requests) == Counter(dict.fromkeys(fused, layers))


def test_a_step_that_wants_no_logits_asks_for_none(saved_model: Models) -> None:
    tee = assemble(saved_model("llama").directory, "tsqp")
    engine = tee.engine(step_tokens=4)
    engine.add(token_ids(6), max_new_tokens=1)
    assert engine.step() == []
    assert tee.channel is not None
    assert not any(isinstance(r, LMHeadRequest) for r in tee.channel.requests)
    assert len(engine.step()) == 1
    heads = [r for r in tee.channel.requests if isinstance(r, LMHeadRequest)]
    assert [r.hidden_states.shape for r in heads] == [(1, 48)]


def test_linear_rpcs_are_shared_by_the_batch_and_matmuls_are_per_sequence(
    saved_model: Models,
) -> None:
    tee = assemble(saved_model("llama").directory, "tsqp")
    engine = tee.engine()
    for length in (3, 5):
        engine.add(token_ids(length), max_new_tokens=1)
    engine.step()
    assert tee.channel is not None
    counts = _names(tee.channel.requests)
    assert (counts["q_proj"], counts["Matmul"]) == (3, 2 * 2 * 3)
    q_rows = [
        r.hidden_states.shape[0] for r in tee.channel.requests if isinstance(r, LinearRequest)
    ]
    assert set(q_rows) == {8}
    assert all(isinstance(r, MatmulRequest) for r in tee.channel.requests if r.method == "Matmul")
