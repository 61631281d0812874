"""`GET /v1/attestation?nonce=`: evidence of this server, of now.

No API key is needed: a client asks before it sends its key. The hardware takes its time for each
statement, and refuses many; nothing is kept from one nonce to the next.
"""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64encode
from collections.abc import Callable

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protocol.errors import EvidenceError
from protocol.messages import NONCE_BYTES
from tee_side.serve.errors import ApiError
from tee_side.serve.identity import Identity

_NONCE = re.compile(f"[0-9a-fA-F]{{{2 * NONCE_BYTES}}}")
_AT_ONCE, _A_SECOND, _MOST_WAITING = 32, 8, 16


class Attestation:
    """Answers with statements, one at a time; `clock`: monotonic seconds.

    32 may be asked for at once, and then 8 a second; while 16 wait, none. Others get a 429.
    """

    def __init__(self, identity: Identity, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity, self._clock = identity, clock
        self._left, self._since_s = float(_AT_ONCE), clock()
        self._turn, self._waiting = asyncio.Lock(), 0

    def route(self) -> APIRoute:
        """Return the path."""
        return APIRoute("/v1/attestation", self.answer, methods=["GET"], response_model=None)

    async def answer(self, request: Request) -> Response:
        """Answer a request. Raises ApiError."""
        nonce = request.query_params.get("nonce", "")
        if not _NONCE.fullmatch(nonce):
            raise ApiError(
                400,
                f"nonce: {NONCE_BYTES} random bytes, as hexadecimal digits",
                param="query.nonce",
                code="invalid_nonce",
            )
        self._take()
        self._waiting += 1
        try:
            async with self._turn:
                stated = await asyncio.to_thread(self._identity.state, bytes.fromhex(nonce))
        except EvidenceError:
            raise ApiError(503, "the hardware gives no evidence", code="no_evidence") from None
        finally:
            self._waiting -= 1
        fields = {name: b64encode(value).decode() for name, value in stated.model_dump().items()}
        return JSONResponse(fields, headers={"cache-control": "no-store"})

    def _take(self) -> None:
        now_s = self._clock()
        self._left = min(_AT_ONCE, self._left + (now_s - self._since_s) * _A_SECOND)
        self._since_s = now_s
        if self._left < 1 or self._waiting >= _MOST_WAITING:
            again = {"retry-after": "1"}
            raise ApiError(429, "too many ask for evidence", code="rate_limited", headers=again)
        self._left -= 1
