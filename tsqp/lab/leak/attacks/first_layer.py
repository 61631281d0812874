"""What the first layer tells, where a token's row, key and value depend on it alone.

Keys are compared as they cross in products of attention, which send the whole cache again at every
step, and values in a cache on a disk: with every token's key at that position, and every token's
value. Masks of products shuffle features and positions, or scale them; what they do is the same for
all heads of a call, and leaves as much as a dictionary needs.

Rows under pads that are not fresh, used twice or mixed from a few, are compared in the ring Z_2^32:
a token's integers are known but for the token, since a row's scale follows from the row. Under a
pad that is used once these attacks guess at random; how often they are right then is left to the
comparison with chance.

Shape suffixes: T tokens in a step, S positions, N candidates or rows that pads are learnt from, V
vocabulary size, K key/value heads or pads, C head dim or columns that are compared, X what is
compared, M keys or rows that may be a token's, R rows, I in_features, B dtypes that the TEE may
compute in.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch.nn.functional import linear, normalize

from tee_side.protect.masks.mask import Mask
from tee_side.words import Phase
from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Where, Work, best, place_name
from tsqp.lab.leak.matching import FIRST, apart, squares
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.research.row_masks import RowMix, RowPermutation

_KEYS: Where = (0, "attn_scores")
# What the TEE may compute in. The integers of a token differ between them, in most entries.
_DTYPES = (torch.float32, torch.bfloat16)
# Columns that rows are compared in, which tell any vocabulary's tokens apart.
_COMPARED = 64
# Rows under one pad are close to each other in every column; rows under two are in all of these by
# a chance of (rows * bound / 2^32)^16.
_GROUPED = 16
# Differences that have to fit the token of a row, and how many entries of each are looked at.
_FITTED, _KEYED = 8, 8
_PAIRS_AT_ONCE = 2**23


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
    return k_NKC.square().sum(-1).sqrt()


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
        return view.readings(place_name(_KEYS), self._found(view, work))

    def _found(self, view: View, work: Work) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        # The key of every token in the first layer, before RoPE.
        public, (H, K, C) = view.public, view.public.config.heads
        fused = public.linear(0, "qkv_proj")
        rows = fused.rows["k_proj"]
        bias = None if fused.bias is None else fused.bias[rows]
        plain_VKC = linear(public.dictionary_VD, fused.weight[rows], bias).view(-1, K, C)
        # Queries beside them, of which nothing is used.
        beside_VXC = torch.cat((plain_VKC.new_zeros(len(plain_VKC), H, C), plain_VKC), dim=1)
        for (position, phase), appended in sorted(_appended(view).items()):
            ropes = public.light.rope.of([(position, position + 1, position + 1)])
            k_VKC = public.layers[0].turn(beside_VXC.clone(), ropes)[:, H:]
            table_VX = invariant(view.policy.at("attn_scores", 0, phase).mask, k_VKC)
            squares_V = squares(table_VX)
            for session, token, among_MX in appended:
                distances_V = apart(among_MX, table_VX, squares_V).amin(0)
                work.compared += len(table_VX)
                yield session, token, best(distances_V)


def _appended(
    view: View,
) -> dict[tuple[int, Phase], list[tuple[int, int, torch.Tensor]]]:
    """Return the tokens whose keys steps appended to the cache, by position and phase.

    Of prefill where the step appended others, too. Of each token the session, its index, and what
    the mask leaves of the keys that may be its own: [M, X].
    """
    found: dict[tuple[int, Phase], list[tuple[int, int, torch.Tensor]]] = {}
    for session, step, call in view.calls_at(_KEYS):
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
            guesses = {token: best(1 - own_V) for token, own_V in enumerate(cosines_TV)}
            yield Reading("cache on disk", session, range(len(rows_TX)), guesses)


def _directions(values_TX: torch.Tensor, view: View) -> torch.Tensor:
    """Return values with each head's channels in ascending order, of length 1: float64.

    What is no number, as some bytes of a cipher, counts as 0.
    """
    _, K, C = view.public.config.heads
    numbers = values_TX.double().nan_to_num(0, 0, 0)
    return normalize(numbers.view(-1, K, C).sort(dim=-1).values.flatten(1), dim=-1)


# -------------------------------------------------------------------------------------------- pads


class PadReuse(Attack):
    """Rows under the same pad differ by what is under it (arXiv 2602.11088).

    Such rows are close to each other, which under other pads they are not. Of each set, the token
    of one row is the one to which all differences fit: x_j - x_i + e(t) has to be an entry of the
    dictionary for every j. Where tokens fit equally well it is BOS. That row gives the pad.
    """

    name: ClassVar[str] = "pad-reuse"
    control: ClassVar[str] = "../weakened/pad-reused.toml"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "layer 0 stays",
        "floats",
        "no public weights to compare with",
    )

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
    control: ClassVar[str] = "../weakened/pad-low-dimensional.toml"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "layer 0 stays",
        "floats",
        "no public weights to compare with",
        "the tokenizer puts no token in front",
    )

    def refuses(self, view: View) -> str | None:
        """No integers of the first layer crossed, or too few of a known token."""
        if refusal := super().refuses(view):
            return refusal
        known = len(_known_rows(view))
        count = f"only {known} rows" if known else "no row"
        return None if known >= 3 else f"{count} of a known token crossed"

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
    site = public.integers[0, "qkv_proj"]
    return torch.stack([site.quantise(public.entered(dtype))[0] for dtype in _DTYPES])


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
    most, found_I = 0, None
    for table_VI in tables_BVI:
        keys_V = (table_VI[:, columns].long() * weights_C).sum(-1)
        keys_M = (distinct_MI[:, columns].long() * weights_C).sum(-1)
        fits_V = torch.isin(keys_V[:, None] + keys_M, keys_V).sum(-1)
        work.compared += len(keys_V) * len(keys_M)
        # Where all rows are of one token every token fits.
        token = int(fits_V.argmax())
        if likely is not None and fits_V[likely] == fits_V[token]:
            token = likely
        if int(fits_V[token]) > most or (found_I is None and not len(keys_M)):
            most, found_I = int(fits_V[token]), table_VI[token]
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
        apart_RV = torch.stack([_bytes_apart(block_RC, table_VC) for table_VC in tables_BVC]).amin(
            0
        )
        work.compared += tables_BVC.shape[0] * apart_RV.numel()
        nearest += apart_RV.topk(min(TOP, apart_RV.shape[1]), largest=False).indices.tolist()
    found = zip(owners, nearest, strict=True)
    yield from view.readings(place_name(FIRST), ((*owner, tuple(ids)) for owner, ids in found))


def _bytes_apart(rows_RC: torch.Tensor, table_VC: torch.Tensor) -> torch.Tensor:
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
