"""The receipt of one answer: what is signed of it, and how it travels.

Of a whole answer it is a header, base64; of a stream a comment behind the last event, before
`[DONE]`:

    : tsqp-receipt BASE64

Clients of OpenAI's API read every event as a chunk, whatever its name, and fail at one that is
none. The standard of event streams has every client ignore a comment. It begins a line, which no
text of a model does: JSON has no line ends in its strings.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from tee_side.engine.request import Request
from tee_side.serve.receipt_chain import ReceiptChain
from tee_side.serve.serving import Counts

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

    def sign(self, requests: Sequence[Request], counts: Counts) -> str:
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
            prompt_tokens=counts.prompt,
            completion_tokens=counts.completion,
        )
        self.digest = hashlib.sha256(signed).digest()
        return base64.b64encode(signed).decode()
