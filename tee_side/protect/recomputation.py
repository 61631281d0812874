"""Computes refused products once more, block by block, to find out which answers are wrong.

It takes as long as the products do in the TEE: a run imports it when a result was refused.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from protocol.integer import digits_below, ring_product
from protocol.keystream import expanded
from protocol.messages import (
    WHOLE,
    Columns,
    ModuleName,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
    part_of,
)
from protocol.model.checkpoint import Checkpoint, module_name
from protocol.model.weights import quantize_rows, weight_rows
from protocol.tensors import to_torch
from tee_side.protect.sites import Weights
from tee_side.words import Site

# Blocks of a weight, and the columns of a product that each makes.
Blocks: TypeAlias = Iterator[tuple[slice, torch.Tensor]]
# Hands blocks on while there is time to multiply so many rows by each.
InTime: TypeAlias = Callable[[Blocks, int], Blocks]


class Claim(NamedTuple):
    """What a service was asked, and what it says that the whole output is.

    `columns`: the part of the output that is checked: the columns of one rank, or all of them.
    """

    request: Request
    output: torch.Tensor
    columns: Columns = WHOLE


def rows_of_part(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], part: Columns, start: int = 0
) -> Blocks:
    """Yield a part of a tensor's rows in blocks, whose columns count from `start`."""
    mine = part_of(shape[0], *part)
    for rows, block in checkpoint.blocks(name, shape):
        first, last = max(rows.start, mine.start), min(rows.stop, mine.stop)
        if first < last:
            yield slice(start + first, start + last), block[first - rows.start : last - rows.start]


def weight_blocks(
    weights: Weights, site: Site, modules: Sequence[ModuleName], part: Columns, *, integers: bool
) -> Blocks:
    """Yield the weights of some modules side by side, [n, I], and their columns.

    `modules`: of the site's operator; none for the LM head. `part`: of each module's columns.
    `integers`: int8, and never all of them at once where they are not held; otherwise floats, as
    services hold them. Raises ModelError, ManifestError.
    """
    config, (layer, operator) = weights.config, site
    _, in_features = config.row_layout(operator)[1]
    kept = weights.integers if integers else None
    held = None if kept is None else kept.held.get(site)
    tensors = weight_rows(config, layer, operator)
    wanted = [f"{module_name(layer, module)}.weight" for module in modules]
    start = 0
    for name in wanted or tensors:
        rows = tensors[name]
        size = rows.stop - rows.start
        if held is not None:
            mine = part_of(size, *part)
            yield slice(start + mine.start, start + mine.stop), held.weight[rows][mine]
        else:
            shape = size, in_features
            for columns, block in rows_of_part(weights.checkpoint, name, shape, part, start):
                yield (
                    columns,
                    quantize_rows(block, name)[0] if integers else block.to(weights.dtype),
                )
        start += size


def wrong_integers(
    weights: Weights, site: Site, claims: Sequence[Claim], in_time: InTime
) -> Sequence[int]:
    """Return which claims about products of integers are wrong, as `ResultCheck.wrong` does."""
    # Shares of one product meet each block together: it is read once for all of them.
    products: dict[
        tuple[tuple[ModuleName, ...], Columns], dict[int, tuple[torch.Tensor, torch.Tensor]]
    ] = {}
    for index, (request, y, part) in enumerate(claims):
        whole = expanded(request)
        if not isinstance(whole, RingLinearRequest | RingLMHeadRequest):
            raise LookupError(f"an answer to {request.method} of a product of integers")
        modules = whole.module_names if isinstance(whole, RingLinearRequest) else ()
        products.setdefault((modules, part), {})[index] = to_torch(whole.elements), y
    # Whose elements, int32 [T, I], times the blocks are not its output, int32 [T, O].
    wrong: set[int] = set()
    for (modules, part), pairs in products.items():
        rows = max(len(x) for x, _ in pairs.values())
        # What was sent in the clear is small; of what a mask hides, all digits count.
        most = max(float(x.double().abs().amax()) for x, _ in pairs.values())
        blocks = weight_blocks(weights, site, modules, part, integers=True)
        for columns, weight_nI in in_time(blocks, rows):
            for index in pairs.keys() - wrong:
                x_TI, y_TO = pairs[index]
                if not torch.equal(
                    ring_product(x_TI, weight_nI, digits_below(most)), y_TO[:, columns]
                ):
                    wrong.add(index)
            if pairs.keys() <= wrong:  # the rest says nothing more
                break
    return sorted(wrong)
