"""In bfloat16 we are as close to float32 as transformers is, and close to transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.equivalence.tolerances import BFLOAT16_ERROR_RATIO, BFLOAT16_LOGITS
from tests.kit.model import ARCHITECTURES, POLICIES, SavedModel, assemble, token_ids

Models = Callable[..., SavedModel]


def _reference_in_bfloat16(model: SavedModel) -> SavedModel:
    loaded = type(model.reference).from_pretrained(model.directory, dtype=torch.bfloat16)
    return SavedModel(model.directory, loaded.eval())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_bfloat16_logits_are_close_to_transformers(saved_model: Models, kind: str) -> None:
    model, ids = saved_model(kind), token_ids(48)
    exact, reference = model.logits(ids), _reference_in_bfloat16(model).logits(ids).float()
    for policy in POLICIES:
        actual = assemble(model.directory, policy, "bfloat16").logits(ids)
        assert actual.dtype == torch.bfloat16
        BFLOAT16_LOGITS.check(actual.float(), reference)
        ours, theirs = (actual.float() - exact).abs().mean(), (reference - exact).abs().mean()
        assert ours <= BFLOAT16_ERROR_RATIO * theirs
