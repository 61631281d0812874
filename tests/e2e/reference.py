"""What transformers generates, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def greedy(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Return the new token ids, and the logits [new tokens, vocab] that each was taken from."""
    prompt = torch.tensor([list(prompt_ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, prompt.shape[1] :].tolist(), torch.cat(output.logits)
