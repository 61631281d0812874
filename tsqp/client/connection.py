"""Connects clients of OpenAI's API to a server that proves what it is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from protocol.errors import EndpointError, SettingsError
from tee_side.attest.appraisal import Appraisal
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tsqp.client.attested_tls import AGAIN_S, AttestedContext, Proved
from tsqp.extras import require

if TYPE_CHECKING:
    import httpx2

_CONNECT_S = 30.0
_WHOLE_S = 600.0


class Connection(NamedTuple):
    """What `openai.OpenAI` takes: `OpenAI(base_url=..., http_client=..., api_key=...)`.

    `appraisal`: what the server proved when it was connected to, step by step.
    """

    base_url: str
    http_client: httpx2.Client
    appraisal: Appraisal


class Address(NamedTuple):
    """Where a server is."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        """Read `https://HOST[:PORT]`, with or without a path. Raises SettingsError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 443
        except ValueError:
            host = None
        if host is None or parts.scheme != "https":
            expected = "https://HOST[:PORT], which tee-runner serve --attest prints"
            raise SettingsError("URL", got=repr(url), expected=expected)
        return cls(host, port)

    def __str__(self) -> str:
        """Return it as a URL has it."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def prove(address: Address, context: AttestedContext) -> Proved:
    """Connect once, and return what the server proved.

    Raises NotAttestedError, and EndpointError where none answers.
    """
    try:
        with socket.create_connection((address.host, address.port), _CONNECT_S) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except (OSError, UnicodeError) as error:  # an ssl.SSLError is an OSError
        got = getattr(error, "reason", None) or getattr(error, "strerror", None)
        got = got or type(error).__name__
        raise EndpointError(str(address), got=got, expected="a server with TLS 1.3") from None
    if context.proved is None:
        raise EndpointError(str(address), got="no proof", expected="one")
    return context.proved


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

    policy = appraisal
    if not isinstance(policy, AppraisalPolicy):
        policy = AppraisalPolicy.load(Path(policy))
    address, timeout = Address.of(url), httpx2.Timeout(_WHOLE_S, connect=_CONNECT_S)
    base = f"https://{address}"
    if sealed:
        from tsqp.client.sealed_connection import ProvedTransport

        carried = ProvedTransport(base, policy, httpx2.HTTPTransport(), again_s)
        try:
            found = carried.prove()
        except httpx2.TransportError as error:
            expected = "a proxy with a certificate that is trusted here"
            raise EndpointError(str(address), got=type(error).__name__, expected=expected) from None
        client = httpx2.Client(transport=carried, timeout=timeout)
        return Connection(f"{base}/v1", client, found)
    from tsqp.client.attested_transport import AttestedTransport

    context = AttestedContext(policy, again_s)
    found = prove(address, context).fresh
    client = httpx2.Client(transport=AttestedTransport(address, context), timeout=timeout)
    return Connection(f"{base}/v1", client, found)
