"""Holds a mask to the rules, and does what pads need in two passes.

A mask may be a user's own file. What it sends decides how large the reply is, for which the service
must not be blamed; what it returns goes into the forward pass. So both are checked in every call.

Under pads a site has two passes (`PaddedSite`): compiled, where a mask and a check would take a
pass each. What crosses, and what comes of it, is bit for bit what the site, `Pad` and `ExactCheck`
give one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import torch

from protocol.errors import MaskError
from protocol.messages import SEED_BYTES
from protocol.tensors import short_name
from tee_side.native import kernels as compiled
from tee_side.protect.masks.mask import Mask, Masked, Seed
from tee_side.protect.pads.source import DrawsPads
from tee_side.protect.sites import IntegerSite
from tee_side.protect.verification import ExactCheck
from tee_side.words import Operator, is_projection

_MORE_ROWS = 4096


class MaskRules:
    """The rules of one mask, None for none: what crosses in the clear is checked alike.

    `dealers`: how many are sent a seed beside what the service is sent.
    """

    def __init__(self, mask: Mask | None, dealers: int = 0) -> None:
        self.mask = mask
        self.parties = 1 + dealers
        # For errors.
        self.name = f"mask {mask.name}" if mask is not None else "no mask"

    def most_rows(self, rows: int) -> int:
        """Return how many rows may cross instead of `rows`: a row mask's twice as many, and 4096.

        Others send a row for a row. `tee_side.remote.services.plan` bounds replies by this number.
        """
        mixes = self.mask is not None and self.mask.kind == "row"
        return 2 * rows + _MORE_ROWS if mixes else rows

    def check_sent(self, operator: Operator, plain: torch.Tensor, masked: object) -> None:
        """Refuse what must not cross instead of `plain` [T, ...], before it is sent.

        The service gets [rows, ...] of the same dtype and size, at most `most_rows`, and a dealer
        a seed of as many. Raises MaskError.
        """
        if not isinstance(masked, Masked) or not isinstance(masked.sent, tuple):
            self.refuse(operator, type(masked).__name__, "Masked((tensor,), unmask)")
        if len(masked.sent) != self.parties:
            self.refuse(operator, f"{len(masked.sent)} tensors to send", f"{self.parties} tensors")
        wanted, dtype, first = plain.shape[1:], plain.dtype, masked.sent[0].shape
        most_rows = self.most_rows(len(plain))
        for sent in masked.sent:
            shape: tuple[Any, ...] = sent.shape
            if shape != first or shape[1:] != wanted or sent.dtype != dtype or shape[0] > most_rows:
                sizes = ", ".join(["rows", *map(str, wanted)])
                self.refuse(
                    operator,
                    f"{short_name(sent.dtype)} {list(shape)} to send",
                    f"{short_name(dtype)} [{sizes}], at most {most_rows} rows",
                )
            if isinstance(sent, Seed) and len(sent.key) != SEED_BYTES:
                self.refuse(operator, f"a seed of {len(sent.key)} bytes", f"{SEED_BYTES}")
            if isinstance(sent, Seed) and not (is_projection(operator) and len(shape) == 2):
                self.refuse(operator, "a seed", "one of rows of a linear operator or LM head only")

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
            self.refuse(operator, f"{got} from unmask", expected)

    def refuse(self, operator: Operator, got: str, expected: str) -> NoReturn:
        """Raise MaskError."""
        raise MaskError(f"{self.name}: {operator}", got, expected)


class Padded(NamedTuple):
    """One input under its pad. `sent`: what crosses, to the service and to each dealer.

    `u_TO`: r W, to take away, None where dealers reply with it; `scale_T`: of the rows;
    `expected_Tk`: what the check of the product must give, None without a check.
    """

    of: PaddedSite
    sent: tuple[torch.Tensor | Seed, ...]
    u_TO: torch.Tensor | None
    scale_T: torch.Tensor
    expected_Tk: torch.Tensor | None

    def __repr__(self) -> str:
        # Neither in a traceback nor in a log: u gives the result away to the observer of a link.
        return "Padded()"

    def reveal(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Take the pad away, check, scale back and add the bias; None for a wrong product."""
        site, check = self.of.site, self.of.check
        y_TO, *dealt = outputs
        u_TO = self.u_TO
        if u_TO is None:
            u_TO = reduce(torch.add, dealt)
        vectors_kO = None if check is None else check.vectors_kO
        return compiled.decode(
            *(y_TO, u_TO, self.scale_T, site.factor_O, site.bias_O, site.dtype),
            *(vectors_kO, self.expected_Tk),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PaddedSite:
    """A site's input and output under pads; `number`: the site's, in the pads' layout.

    `check`: of the products, None for none.
    """

    site: IntegerSite
    number: int
    pads: DrawsPads
    check: ExactCheck | None

    def hide(self, x_TI: torch.Tensor) -> Padded:
        """Quantise x and add its pad.

        GPU sees: uniform ring elements; a dealer: a fresh seed. Raises ActivationRangeError, and as
        `PadLane.words`.
        """
        pad, u_TO, seeds = self.pads.words(self.number, x_TI.shape[0])
        site, check = self.site, self.check
        products = None if check is None else (check.low_kI, check.high_kI)
        sent_TI, is_finite, scale_T, expected_Tk = compiled.encode(
            x_TI, site.largest, pad, products
        )
        if not is_finite:
            site.refuse()
        return Padded(self, (sent_TI, *seeds), u_TO, scale_T, expected_Tk)
