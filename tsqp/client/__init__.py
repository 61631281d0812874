"""Reaches a server that proves what it is, before anything secret is sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from protocol.errors import EndpointError
from tee_side.attest.appraisal import Appraisal, AppraisalPolicy
from tsqp.client.attested_tls import (
    AGAIN_S,
    CONNECT_S,
    Address,
    AttestedContext,
    NotAttestedError,
    Proved,
    prove,
)
from tsqp.extras import require

if TYPE_CHECKING:
    import httpx2

__all__ = [
    "AppraisalPolicy",
    "AttestedContext",
    "Connection",
    "NotAttestedError",
    "Proved",
    "connect",
]

# For a whole answer, which a model may take minutes for.
_WHOLE_S = 600.0


class Connection(NamedTuple):
    """What `openai.OpenAI` takes: `OpenAI(base_url=..., http_client=..., api_key=...)`.

    `appraisal`: what the server proved when it was connected to, step by step.
    """

    base_url: str
    http_client: httpx2.Client
    appraisal: Appraisal


def connect(
    url: str,
    appraisal: AppraisalPolicy | Path | str,
    again_s: float = AGAIN_S,
    *,
    sealed: bool = False,
) -> Connection:
    """Have a server prove itself, and return what reaches it and nothing else.

    `appraisal`: a policy, or the path of its file. After `again_s` seconds, and for another
    certificate, it has to prove itself again. Where it fails, the request does, and nothing of it
    was sent. `sealed`: for a server behind a proxy that ends TLS: `url` is the proxy's, whose
    certificate is that of an authority, and bodies and headers are sealed to the server's key.
    Raises NotAttestedError, EndpointError, SettingsError.
    """
    require("httpx2", "tsqp.client.connect", "the extra attest: pip install '.[attest]'")
    import httpx2

    policy = (
        appraisal
        if isinstance(appraisal, AppraisalPolicy)
        else AppraisalPolicy.load(Path(appraisal))
    )
    address, timeout = Address.of(url), httpx2.Timeout(_WHOLE_S, connect=CONNECT_S)
    from tsqp.client.transports import AttestedTransport, ProvedTransport

    base = f"https://{address}"
    if sealed:
        carried = ProvedTransport(base, policy, httpx2.HTTPTransport(), again_s)
        try:
            found, _ = carried.prove()
        except httpx2.TransportError as error:
            raise EndpointError(
                str(address),
                got=type(error).__name__,
                expected="a proxy with a certificate that is trusted here",
            ) from None
        client = httpx2.Client(transport=carried, timeout=timeout)
        return Connection(f"{base}/v1", client, found)
    context = AttestedContext(policy, again_s)
    found = prove(address, context).fresh
    client = httpx2.Client(transport=AttestedTransport(address, context), timeout=timeout)
    return Connection(f"{base}/v1", client, found)
