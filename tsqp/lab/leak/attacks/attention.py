"""Keys and values of the first layer: in products of attention, and in a cache on a disk.

A product of attention sends the whole cache again at every step.

In the first layer a token's key depends on the token and its position alone, so what crosses can be
compared with every token's key at that position. Masks of products shuffle features and positions,
or scale them; what they do is the same for all heads of a call, and leaves as much as a dictionary
needs.

Shape suffixes: T tokens in a step, S positions, N candidates, V vocabulary size, K key/value heads,
C head dim, X what is compared, M keys that may be a token's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import linear, normalize

from tee_side.model.local_ops import apply_rope, rms_norm
from tee_side.protect.masks.mask import Mask
from tee_side.words import Phase
from tsqp.lab.leak.attack import Attack, Reading, View, Work, best
from tsqp.lab.leak.matching import apart
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Where, place_name
from tsqp.lab.research.row_masks import RowMix, RowPermutation

_FIRST: Where = (0, "attn_scores")


def invariant(mask: Mask | None, k_NKC: torch.Tensor) -> torch.Tensor:
    """Return what stays of keys under a mask of products: [N, X].

    In the clear positions stay in order, too; otherwise each may be any of those that crossed.
    Under a mask that is not known it is norms, as under a rotation. Scaling a feature of all heads
    by the same factor leaves each head's part in it, with its sign beside that of the first head;
    so nothing where there is but one head.
    """
    if mask is None:
        return k_NKC.flatten(1)
    if isinstance(mask, RowMix):
        squares_N1C = k_NKC.square().sum(1, keepdim=True).clamp(min=1e-30)
        k_NKC = k_NKC * k_NKC[:, :1] / squares_N1C
    if isinstance(mask, RowMix | RowPermutation):
        return k_NKC.sort(dim=-1).values.flatten(1)
    return torch.linalg.vector_norm(k_NKC, dim=-1)


def first_layer_keys(public: PublicModel) -> torch.Tensor:
    """Return the key of every token in the first layer, before RoPE: float32 [V, K, C]."""
    _, K, C = public.config.heads
    fused = public.linear(0, "qkv_proj")
    rows = fused.rows["k_proj"]
    bias = None if fused.bias is None else fused.bias[rows]
    k_VKC = linear(public.dictionary_VD, fused.weight[rows], bias).view(-1, K, C)
    if not public.config.qk_norm:
        return k_VKC
    return rms_norm(k_VKC.clone(), public.light.norms[0].k_norm, public.config.rms_norm_eps)


class AttentionKeys(Attack):
    """Looks up the key that a step appends to the cache, among those of all tokens at its position.

    The key cache crosses at every step; TSQP's covers of Q K^T leave it.

    Where positions are shuffled, the token is the one whose key there is nearest to any that
    crossed: which one that is says nothing that the position does not.
    """

    name: ClassVar[str] = "attention-keys"
    control: ClassVar[str] = "published"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "no keys of layer 0 crossed",
        "no public weights to compare with",
    )

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look up what each step appends: of all sessions together, a position at a time."""
        return view.readings(place_name(_FIRST), self._found(view, work))

    def _found(self, view: View, work: Work) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        rope, plain_VKC = view.public.light.rope, first_layer_keys(view.public)
        for (position, phase), appended in sorted(_appended(view).items()):
            k_VKC = apply_rope(plain_VKC, *rope.of([(position, position + 1, position + 1)]))
            table_VX = invariant(view.policy.at("attn_scores", 0, phase).mask, k_VKC)
            ids_V = torch.arange(len(table_VX))
            for session, token, among_MX in appended:
                distances_V = apart(among_MX, table_VX).amin(0)
                work.compared += len(ids_V)
                yield session, token, best(distances_V, ids_V)


def _appended(
    view: View,
) -> dict[tuple[int, Phase], list[tuple[int, int, torch.Tensor]]]:
    """Return the tokens whose keys steps appended to the cache, by position and phase.

    Of prefill where the step appended others, too. Of each token the session, its index, and what
    the mask leaves of the keys that may be its own: [M, X].
    """
    found: dict[tuple[int, Phase], list[tuple[int, int, torch.Tensor]]] = {}
    for session, step, call in view.calls_at(_FIRST):
        _, b_KCS = call.tensors
        phase: Phase = "prefill" if step.tokens > 1 else "decode"
        mask = view.policy.at("attn_scores", 0, phase).mask
        crossed_SX = invariant(mask, b_KCS.permute(2, 0, 1).float())
        # A step appends to a cache that holds the whole context, in a sliding window, too.
        start = len(crossed_SX) - step.tokens
        for token in range(step.tokens if start >= 0 else 0):
            own = slice(start + token, start + token + 1)
            # Of its own a copy: a part would keep the whole.
            among_MX = crossed_SX[own].clone() if mask is None else crossed_SX
            found.setdefault((start + token, phase), []).append(
                (session, step.first + token, among_MX)
            )
    return found


# ----------------------------------------------------------------------------------------- at rest


class CacheAtRest(Attack):
    """Compares the first layer's values in a session's file with those of every token.

    A value depends on its token alone, not on its position. The channels of a head are compared in
    ascending order, whatever order a mask gives them. The control is the same file without
    encryption. That encryption protects disks, not against the service, which sees each row in the
    request that the value is computed from: other attacks read those.
    """

    name: ClassVar[str] = "cache-at-rest"
    control: ClassVar[str] = "clear-segment"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "no cache is at the service",
        "layer 0 is in no cache",
        "no public weights to compare with",
    )

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look every value up."""
        public = view.public
        _, K, C = public.config.heads
        values_VX = public.linear(0, "qkv_proj")(public.dictionary_VD)[:, -K * C :]
        table_VX = _directions(values_VX, view)
        ids_V = torch.arange(len(table_VX))
        layers = view.segments[0].last + 1 - view.segments[0].first
        for session, disk in enumerate(view.disks):
            # A file is taken for plain numbers: keys of layer 0 first, and its values behind them.
            dtype = view.traces[session].calls[-1].rows.dtype
            tokens = len(disk) // (2 * layers * K * C * dtype.itemsize)
            numbers = torch.frombuffer(bytearray(disk), dtype=dtype, count=2 * K * tokens * C)
            values_KTC = numbers.view(2, K, tokens, C)[1]
            rows_TX = _directions(values_KTC.transpose(0, 1).reshape(tokens, K * C), view)
            cosines_TV = rows_TX @ table_VX.t()
            work.compared += cosines_TV.numel()
            guesses = {token: best(1 - own_V, ids_V) for token, own_V in enumerate(cosines_TV)}
            yield Reading("cache on disk", session, range(len(rows_TX)), guesses)


def _directions(values_TX: torch.Tensor, view: View) -> torch.Tensor:
    """Return values with each head's channels in ascending order, of length 1: float64.

    What is no number, as some bytes of a cipher, counts as 0.
    """
    _, K, C = view.public.config.heads
    numbers = values_TX.double().nan_to_num(0, 0, 0)
    return normalize(numbers.view(-1, K, C).sort(dim=-1).values.flatten(1), dim=-1)
