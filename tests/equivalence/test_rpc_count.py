"""What each policy costs in round trips, and that nothing else is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
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
def test_a_step_asks_for_each_operator_once_and_for_nothing_else(
    saved_model: Models, layers: int
) -> None:
    model = saved_model("llama", num_hidden_layers=layers)
    requests = _requests(model, "tsqp")
    assert isinstance(requests[0], EmbeddingRequest)
    assert isinstance(requests[-1], LMHeadRequest)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert _names(requests) == Counter(
        {"Embedding": 1, "LMHead": 1, "Matmul": 2 * layers} | dict.fromkeys(modules, layers)
    )
    fused = ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj")
    assert _names(_requests(model, "attention-in-tee")) == Counter(dict.fromkeys(fused, layers))
    assert _requests(model, "tee-only") == []
