"""What a service answers to the segments of a trace: its owner has the weights, and the logits.

Shape suffixes: V vocabulary, N rows that are wanted, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_side.encoding import open_request, read_request
from gpu_side.weights import load_weights
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.messages import SegmentRequest, TensorReply
from protocol.model.checkpoint import Checkpoint, lm_head_name
from protocol.model.config import read_config
from protocol.model.weights import CPU, load_tensor
from protocol.tensors import to_torch
from tsqp.lab.leak.attack import View
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.leak.trace import Trace


def has_head(view: View) -> bool:
    """Whether the LM head is within a segment that crossed."""
    crossed = any(call.operator == "segment" for trace in view.traces for call in trace.calls)
    segments = view.policy.segments(view.public.config.num_hidden_layers)
    return crossed and any(segment.head for segment in segments)


def answers(view: View, trace: Trace) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute the logits that the service answered in a session, by running its weights again.

    Yields how many tokens went by, and the logits [V] behind the last of them, in the service's
    order. Raises ModelError.
    """
    dtype = trace.calls[-1].rows.dtype
    weights = load_weights(view.served, device=CPU, dtype=dtype, arithmetic=["float"])
    service, tokens = RecordingChannel(weights), 0
    for frames in trace.messages:
        request = read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
        if not isinstance(request, SegmentRequest):
            continue
        reply = service.answer(request)
        if request.lm_head and isinstance(reply, TensorReply):
            tokens += request.hidden_states.shape[0]
            yield tokens, to_torch(reply.output)[-1].float()


def vocabulary(view: View) -> torch.Tensor:
    """Return which token each of the service's logits is of: [V], -1 where nothing tells.

    A row of a transformed LM head has the numbers of the public one's row, in whatever order.
    """
    if view.policy.feature_mask is None:
        return torch.arange(view.public.vocab_size)
    served = Checkpoint(view.served)
    name = lm_head_name(read_config(view.served))
    shape = (view.public.vocab_size, view.public.config.hidden_size)
    served_VD = load_tensor(served, name, shape, dtype=torch.float32)
    ids = {row: token for token, row in enumerate(_numbers(view.public.lm_head_VD))}
    return torch.tensor([ids.get(row, -1) for row in _numbers(served_VD)])


def _numbers(head_VD: torch.Tensor) -> Iterator[int]:
    """Yield what is the same for rows of the same numbers, and hardly ever for others."""
    for row_D in head_VD.sort(dim=-1).values:
        yield hash(row_D.numpy().tobytes())
