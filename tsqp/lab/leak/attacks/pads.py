"""Pads that are not fresh: used twice, or mixed from a few.

Both attacks work in the ring Z_2^32 on rows of the first layer, where a token's integers are known
but for the token. Under a pad that is used once they guess at random; how often they are right
then is left to the comparison with chance.

Shape suffixes: R rows, I in_features, V vocabulary size, K pads, N rows that pads are learnt from,
C columns that are compared, B dtypes that the TEE may compute in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from tee_side.model.local_ops import rms_norm
from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Work
from tsqp.lab.leak.matching import FIRST
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import place_name

# What the TEE may compute in. The integers of a token differ between them, in one of six entries.
_DTYPES = (torch.float32, torch.bfloat16)
# Columns that rows are compared in, which tell any vocabulary's tokens apart.
_COMPARED = 64
# Rows under one pad are close to each other in every column; rows under two are in all of these by
# a chance of (rows * bound / 2^32)^16.
_GROUPED = 16
# Differences that have to fit the token of a row, and how many entries of each are looked at.
_FITTED, _KEYED = 8, 8
_PAIRS_AT_ONCE = 2**23


class PadReuse(Attack):
    """Rows under the same pad differ by what is under it (arXiv 2602.11088).

    Such rows are close to each other, which under other pads they are not. Of each set, the token
    of one row is the one to which all differences fit: x_j - x_i + e(t) has to be an entry of the
    dictionary for every j. Where tokens fit equally well it is BOS. That row gives the pad.
    """

    name: ClassVar[str] = "pad-reuse"
    control: ClassVar[str] = "weakened/pad-reused.toml"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = ("layer 0 stays", "floats")

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Group rows by pad, find each pad, and look up what is under it."""
        tables_BVI, (owners, rows_RI) = _tables(view.public), _crossed(view)
        plain_RI = rows_RI.clone()
        bound = 2 * int(tables_BVI.abs().amax())
        for members in _under_one_pad(rows_RI, bound):
            away_MI = rows_RI[members] - rows_RI[members[0]]
            token_I = _that_fits(away_MI, tables_BVI, view.public.first_id, work)
            if token_I is not None:
                plain_RI[members] = away_MI + token_I
        # A row under a pad of its own is looked up as it is: some token is the nearest.
        yield from _looked_up(view, owners, plain_RI, tables_BVI, work)


class LowDimensionalPads(Attack):
    """Rows of one known token differ by pads alone, so they give the space that the pads span.

    See arXiv 2602.11088.
    Over the ring, that space is a row-reduced basis with a one at each pivot. Taking multiples of
    it away until the pivots' columns are zero leaves of any row what the pads do not touch, and the
    same of each token's. BOS, in front of every prompt, is the known token: one row a session.
    """

    name: ClassVar[str] = "pad-basis"
    control: ClassVar[str] = "weakened/pad-low-dimensional.toml"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = ("layer 0 stays", "floats")

    def refuses(self, view: View) -> str | None:
        """No integers of the first layer crossed, or too few of a known token."""
        if refusal := super().refuses(view):
            return refusal
        if view.public.first_id is None:
            return "the tokenizer puts no token in front"
        known = len(_known_rows(view))
        if not known:
            return "no row of a known token crossed"
        return None if known >= 3 else f"only {known} rows of a known token crossed"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Learn the span, take it away from rows and from the dictionary, and compare."""
        tables_BVI, known_NI = _tables(view.public), _known_rows(view)
        owners, rows_RI = _crossed(view)
        # Relative to the known row, which takes its pad out of all others.
        known_BVI = tables_BVI[:, view.public.first_id, None]
        outside_RI, outside_BVI = outside(
            known_NI[1:] - known_NI[0], rows_RI - known_NI[0], tables_BVI - known_BVI
        )
        for reading in _looked_up(view, owners, outside_RI, outside_BVI, work):
            # The first token is not read but assumed.
            yield replace(reading, tokens=reading.tokens[1:])


def outside(pads_NI: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Take what pads span over the ring away from tensors: [..., I] -> [..., I - K].

    The span is reduced to rows that are the identity in some columns, the pivots; as many as leave
    half of the columns to compare. Multiples of these make the pivots zero. What is returned is
    equal where two rows differ by a pad, modulo 2^bits, held in the high bits of 32.

    A pivot has to be odd to have an inverse. Where only even entries are left, they are halved
    at the price of the highest bit: what spans 2 x modulo 2^32 spans x modulo 2^31.
    """
    left_NI = pads_NI[: pads_NI.shape[1] // 2].clone()
    bits, pivots = 32, list[int]()
    while len(pivots) < len(left_NI):
        to = len(pivots)
        below_NI = left_NI[to:]
        odd = (below_NI & 1).nonzero()
        if len(odd):
            row, column = int(odd[0, 0]) + to, int(odd[0, 1])
            # It takes the place `to`; its entry in the column becomes 1 and that of all others 0.
            left_NI[[row, to]] = left_NI[[to, row]]
            inverse = pow(int(left_NI[to, column]), -1, 2**32)
            left_NI[to] *= inverse - 2**32 * (inverse >> 31)
            factors_N1 = left_NI[:, column, None].clone()
            factors_N1[to] = 0
            left_NI -= factors_N1 * left_NI[to]
            pivots.append(column)
            continue
        # Nothing is left, or fewer bits would not be enough for a token's integers.
        if bits <= 26 or not (below_NI << (32 - bits)).any():
            break
        below_NI >>= 1
        bits -= 1
    kept = [column for column in range(pads_NI.shape[1]) if column not in pivots]
    found = []
    for x in tensors:
        rest = x.clone()
        for row_I, column in zip(left_NI, pivots, strict=False):
            rest -= x[..., column, None] * row_I
        found.append(rest[..., kept] << (32 - bits))
    return found


def _crossed(view: View) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Return of which session and token each row of the first layer is, and the rows [R, I]."""
    owners: list[tuple[int, int]] = []
    rows: list[torch.Tensor] = []
    for session, step, call in view.calls_at(FIRST):
        if call.rows.dtype == torch.int32 and len(call.rows) == step.tokens:
            owners += [(session, step.first + token) for token in range(step.tokens)]
            rows.append(call.rows)
    return owners, torch.cat(rows) if rows else torch.empty(0, 0, dtype=torch.int32)


def _known_rows(view: View) -> torch.Tensor:
    """Return the rows [N, I] of the first token of each prompt, where prompts cross."""
    prefill = view.policy.at("qkv_proj", 0, "prefill")
    owners, rows_RI = _crossed(view)
    first = [row for row, (_, token) in enumerate(owners) if token == 0]
    return rows_RI[first if prefill.leaves else []]


def _tables(public: PublicModel) -> torch.Tensor:
    """Return the integers of every token, for each dtype that they may come from: [B, V, I]."""
    norm, eps = public.light.norms[0].input_layernorm, public.config.rms_norm_eps
    tables = []
    for dtype in _DTYPES:
        h_VD = public.embedding_VD.to(dtype, copy=True)
        normed_VD = rms_norm(h_VD, norm.to(dtype), eps).to(torch.float32)
        tables.append(normed_VD.div(public.input_scale((0, "qkv_proj"))).round_().to(torch.int32))
    return torch.stack(tables)


def _under_one_pad(rows_RI: torch.Tensor, bound: int) -> list[list[int]]:
    """Return sets of at least two rows, each within `bound` of another of its set, in order.

    A set that lies across the end of the ring comes in two, which does no harm.
    """
    group_R = torch.zeros(len(rows_RI), dtype=torch.int64)
    for values_R in rows_RI.T[:_GROUPED].to(torch.int64):
        order_R = values_R.argsort(stable=True)
        order_R = order_R[group_R[order_R].argsort(stable=True)]
        apart_R = group_R[order_R].diff().ne(0) | (values_R[order_R].diff() > bound)
        group_R[order_R[1:]] = apart_R.cumsum(0)
        group_R[order_R[:1]] = 0
    sets: dict[int, list[int]] = {}
    for row, group in enumerate(group_R.tolist()):
        sets.setdefault(group, []).append(row)
    return [rows for rows in sets.values() if len(rows) > 1]


def _that_fits(
    away_MI: torch.Tensor, tables_BVI: torch.Tensor, likely: int | None, work: Work
) -> torch.Tensor | None:
    """Return the integers [I] of the token that others differ from by `away_MI`.

    None if no token fits. Sums of entries times random numbers stand for rows: adding is adding.
    """
    columns = _columns(away_MI.shape[1], _KEYED)
    generator = torch.Generator().manual_seed(0)
    weights_C = torch.randint(-(2**62), 2**62, (len(columns),), generator=generator)
    distinct_MI = away_MI.unique(dim=0)
    distinct_MI = distinct_MI[distinct_MI.any(-1)][:_FITTED]
    best, found_I = 0, None
    for table_VI in tables_BVI:
        keys_V = (table_VI[:, columns].long() * weights_C).sum(-1)
        keys_M = (distinct_MI[:, columns].long() * weights_C).sum(-1)
        fits_V = torch.isin(keys_V[:, None] + keys_M, keys_V).sum(-1)
        work.compared += len(keys_V) * len(keys_M)
        # Where all rows are of one token every token fits.
        token = int(fits_V.argmax())
        if likely is not None and fits_V[likely] == fits_V[token]:
            token = likely
        if int(fits_V[token]) > best or (found_I is None and not len(keys_M)):
            best, found_I = int(fits_V[token]), table_VI[token]
    return found_I


def _looked_up(
    view: View,
    owners: list[tuple[int, int]],
    rows_RI: torch.Tensor,
    tables_BVI: torch.Tensor,
    work: Work,
) -> Iterator[Reading]:
    """Name the token that is nearest to each row, in the dtype in which it comes nearer."""
    columns = _columns(rows_RI.shape[1], _COMPARED)
    rows_RC, tables_BVC = rows_RI[:, columns], tables_BVI[:, :, columns]
    nearest: list[list[int]] = []
    at_once = max(1, _PAIRS_AT_ONCE // tables_BVC.shape[1])
    for start in range(0, len(rows_RC), at_once):
        block_RC = rows_RC[start : start + at_once]
        apart_RV = torch.stack([_apart(block_RC, table_VC) for table_VC in tables_BVC]).amin(0)
        work.compared += tables_BVC.shape[0] * apart_RV.numel()
        nearest += apart_RV.topk(min(TOP, apart_RV.shape[1]), largest=False).indices.tolist()
    found = zip(owners, nearest, strict=True)
    yield from view.readings(place_name(FIRST), ((*owner, tuple(ids)) for owner, ids in found))


def _apart(rows_RC: torch.Tensor, table_VC: torch.Tensor) -> torch.Tensor:
    """Return how far the low bytes of rows are from those of tokens, summed: int16 [R, V].

    Low bytes are enough to tell tokens apart, rounded differently here and there or not. And of
    rows under a fresh pad they make any token the nearest with about the same chance, where larger
    numbers would favour some token, maybe a frequent one.
    """
    apart_RV = torch.zeros(len(rows_RC), len(table_VC), dtype=torch.int16)
    for rows_R, table_V in zip(rows_RC.T.to(torch.int8), table_VC.T.to(torch.int8), strict=True):
        # The shorter way around, as bytes wrap; -128 has no absolute value in a byte.
        apart_RV += (rows_R[:, None] - table_V).to(torch.int16).abs_()
    return apart_RV


def _columns(available: int, wanted: int) -> list[int]:
    """Return so many columns, spread over all."""
    wanted = min(available, wanted)
    return [index * available // wanted for index in range(wanted)]
