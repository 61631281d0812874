"""Receipts of answers: a chain that signs them, what is signed of one answer, and how it travels.

`tee_side.attest.statement` has their form. Of a whole answer a receipt is a header, base64; of a
stream a comment behind the last event, before `[DONE]`:

    : tsqp-receipt BASE64

Clients of OpenAI's API read every event as a chunk, whatever its name, and fail at one that is
none. The standard of event streams has every client ignore a comment. It begins a line, which no
text of a model does: JSON has no line ends in its strings.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tee_side.attest.statement import NONE, RECEIPT_DOMAIN, Receipt

if TYPE_CHECKING:
    from tee_side.engine.request import Request


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
        signed = packed + self._key.sign(RECEIPT_DOMAIN + packed)
        self._sequence, self._previous = self._sequence + 1, hashlib.sha256(signed).digest()
        return signed


HEADER = "tsqp-receipt"


class AnswerReceipt:
    """Takes an answer's bytes as they are sent. `digest`: SHA-256 of the receipt, once signed."""

    def __init__(self, chain: ReceiptChain, body: bytes) -> None:
        self._chain = chain
        self._request, self._response = hashlib.sha256(body), hashlib.sha256()
        self.digest: bytes | None = None

    def add(self, content: bytes) -> None:
        """Take the next bytes."""
        self._response.update(content)

    def sign(self, requests: Sequence[Request], prompt_tokens: int, completion_tokens: int) -> str:
        """Return the receipt in base64, behind the last bytes; `requests` differ by prompt only.

        Of a `logit_bias`, the sampling parameters have the number of its tokens. They are empty
        where nothing is sampled.
        """
        first, sampling = requests[0], dict[str, int | float]()
        if most := max(request.max_new_tokens for request in requests):
            sampling = first.sampling.model_dump(exclude={"seed", "logit_bias"})
            biased = len(first.sampling.logit_bias)
            sampling |= {"n": first.samples, "max_tokens": most, "logit_bias": biased}
        signed = self._chain.sign(
            request=self._request.digest(),
            response=self._response.digest(),
            sampling=sampling,
            seed=first.sampling.seed,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        self.digest = hashlib.sha256(signed).digest()
        return base64.b64encode(signed).decode()
