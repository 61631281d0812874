"""Signs receipts in a chain; `tee_side.attest.receipts` has their form."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tee_side.attest.claims import NONE
from tee_side.attest.receipts import DOMAIN, Receipt


class ReceiptChain:
    """Signs the receipts of one server, of one thread. `clock`: seconds since 1970.

    The first receipt of a key has `NONE` in the place of the one before it.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        model: bytes,
        policy: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key, self._model, self._policy, self._clock = key, model, policy, clock
        self._sequence, self._previous = 0, NONE

    def sign(self, **said: object) -> bytes:
        """Return the next receipt, signed. `said`: the fields that this chain does not know."""
        known = {"sequence": self._sequence, "previous": self._previous, "time": int(self._clock())}
        known |= {"model": self._model, "policy": self._policy}
        packed = Receipt.model_validate(known | said).encode()
        signed = packed + self._key.sign(DOMAIN + packed)
        self._sequence, self._previous = self._sequence + 1, hashlib.sha256(signed).digest()
        return signed
