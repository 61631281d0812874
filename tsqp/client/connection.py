"""Connects clients of OpenAI's API to a server that proves what it is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from protocol.errors import EndpointError, SettingsError
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tsqp.client.attested_tls import AGAIN_S, AttestedContext, Proved

if TYPE_CHECKING:
    import httpx2

_CONNECT_S = 30.0
_WHOLE_S = 600.0


class Connection(NamedTuple):
    """What `openai.OpenAI` takes: `OpenAI(base_url=..., http_client=..., api_key=...)`.

    `proved`: what the server proved when it was connected to.
    """

    base_url: str
    http_client: httpx2.Client
    proved: Proved


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
    except OSError as error:  # an ssl.SSLError is one
        got = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise EndpointError(str(address), got=got, expected="a server with TLS 1.3") from None
    if context.proved is None:
        raise EndpointError(str(address), got="no proof", expected="one")
    return context.proved


def connect(
    url: str, appraisal: AppraisalPolicy | Path | str, again_s: float = AGAIN_S
) -> Connection:
    """Have a server prove itself, and return what reaches it and nothing else.

    `appraisal`: a policy, or the path of its file. A new connection after `again_s` seconds asks
    for new evidence; a server with another certificate is appraised anew. Where it fails, the
    request does, and nothing of it was sent. Raises NotAttestedError, EndpointError, SettingsError.
    """
    import httpx2

    policy = appraisal
    if not isinstance(policy, AppraisalPolicy):
        policy = AppraisalPolicy.load(Path(policy))
    address, context = Address.of(url), AttestedContext(policy, again_s)
    proved = prove(address, context)
    timeout = httpx2.Timeout(_WHOLE_S, connect=_CONNECT_S)
    # A proxy of the environment would be spoken to in the clear.
    client = httpx2.Client(verify=context, timeout=timeout, trust_env=False)
    return Connection(f"https://{address}/v1", client, proved)
