"""Carries requests to one server that proves what it is, and to no other."""

from __future__ import annotations

from threading import Lock

import httpx2

from tsqp.client.attested_tls import AttestedContext, NotAttestedError
from tsqp.client.connection import Address, prove


class AttestedTransport(httpx2.BaseTransport):
    """Sends requests over attested TLS; what would go elsewhere raises NotAttestedError.

    The server proves itself again where `again_s` of the context have passed, also to connections
    that are still open.
    """

    def __init__(self, address: Address, context: AttestedContext) -> None:
        self._address, self._context, self._guard = address, context, Lock()
        # A proxy of the environment would be spoken to in the clear.
        self._inner = httpx2.HTTPTransport(verify=context, trust_env=False)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request. Raises NotAttestedError, EndpointError, and what httpx2 raises."""
        url = request.url
        if (url.scheme, url.host, url.port or 443) != ("https", *self._address):
            got = "another scheme, host or port"
            raise NotAttestedError("URL", got, f"https://{self._address}", None)
        with self._guard:
            if self._context.stale:
                prove(self._address, self._context)
        return self._inner.handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()
