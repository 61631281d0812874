"""What a mask may send, and must return: whatever breaks a rule is refused before it does harm.

A mask may be somebody's own file. What it sends decides how large the reply is, which the service
must not be blamed for; what it returns goes into the forward pass.
"""

from __future__ import annotations

import torch

from protocol.errors import MaskError
from protocol.tensors import short_name
from tee_side.masks.mask import Mask, Masked, MaskedProduct, RowMask
from tee_side.vocabulary import Operator

_MORE_ROWS = 4096


def most_rows(mask: Mask | None, rows: int) -> int:
    """Return how many rows may cross instead of `rows`: a row mask's twice as many, and 4096.

    Others send a row for a row. `tee_side.reply_size` bounds replies by the same number.
    """
    return 2 * rows + _MORE_ROWS if isinstance(mask, RowMask) else rows


class MaskRules:
    """The rules of one mask, None for none: what crosses in the clear is checked alike."""

    def __init__(self, mask: Mask | None) -> None:
        self._mask = mask
        self.services = 1 if mask is None else mask.services
        # For errors.
        self.name = f"mask {mask.name}" if mask is not None else "no mask"
        self.in_the_clear = mask is None

    def check_sent(self, operator: Operator, plain: torch.Tensor, masked: object) -> None:
        """Refuse what must not cross instead of `plain` [T, ...], before it is sent.

        Each service gets [rows, ...] of the same dtype. Raises MaskError.
        """
        if not isinstance(masked, Masked) or not isinstance(masked.sent, tuple):
            raise self._error(operator, type(masked).__name__, "Masked((tensor,), unmask)")
        if len(masked.sent) != self.services:
            got = f"{len(masked.sent)} tensors to send"
            raise self._error(operator, got, f"{self.services} tensors")
        rows = most_rows(self._mask, plain.shape[0])
        for sent in masked.sent:
            same = sent.dtype == plain.dtype and sent.dim() == plain.dim()
            if not same or sent.shape[1:] != plain.shape[1:] or sent.shape[0] > rows:
                shape = ", ".join(["rows", *map(str, plain.shape[1:])])
                raise self._error(
                    operator,
                    f"{short_name(sent.dtype)} {list(sent.shape)} to send",
                    f"{short_name(plain.dtype)} [{shape}], at most {rows} rows",
                )

    def check_product(
        self, operator: Operator, a_BMJ: torch.Tensor, b_BJN: torch.Tensor, masked: object
    ) -> None:
        """Refuse operands that must not cross, before they are sent.

        The product has as many batches, at most `most_rows`, and no more columns. Raises MaskError.
        """
        if not isinstance(masked, MaskedProduct):
            raise self._error(operator, type(masked).__name__, "MaskedProduct(a, b, unmask)")
        a, b = masked.a, masked.b
        rows, columns = most_rows(self._mask, a_BMJ.shape[1]), b_BJN.shape[2]
        fits = (
            (a.dtype, b.dtype) == (a_BMJ.dtype, b_BJN.dtype)
            and (a.dim(), b.dim()) == (3, 3)
            and a.shape[0] == b.shape[0] == a_BMJ.shape[0]
            and a.shape[2] == b.shape[1]
            and a.shape[1] <= rows
            and b.shape[2] <= columns
        )
        if not fits:
            raise self._error(
                operator,
                f"{short_name(a.dtype)} {list(a.shape)} and {short_name(b.dtype)} {list(b.shape)}"
                " to send",
                f"{short_name(a_BMJ.dtype)} [{a_BMJ.shape[0]}, rows, J] and"
                f" [{a_BMJ.shape[0]}, J, columns], at most {rows} rows and {columns} columns",
            )

    def check_unmasked(
        self,
        operator: Operator,
        y: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """Refuse a result that is not one. Raises MaskError."""
        if y is None or y.shape != shape or y.dtype != dtype:
            got = "nothing" if y is None else f"{short_name(y.dtype)} {list(y.shape)}"
            expected = f"{short_name(dtype)} {list(shape)}"
            raise self._error(operator, f"{got} from unmask", expected)

    def _error(self, operator: Operator, got: str, expected: str) -> MaskError:
        return MaskError(f"{self.name}: {operator}", got=got, expected=expected)
