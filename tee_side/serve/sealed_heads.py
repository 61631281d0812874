"""Heads: what stands before a sealed body, so that a proxy does not read it.

A map of msgpack, in one chunk. A request's has every header, an API key among them; a response's
has the status.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import pack, unpack
from protocol.validation import validate
from tee_side.serve.sealed_bodies import CHUNK_BYTES

_MAX_HEADERS = 128

Read = TypeVar("Read", bound="Head")
Name: TypeAlias = Annotated[str, Field(strict=True, pattern=r"\A[!-9;-~]{1,64}\z")]
RawHeaders: TypeAlias = list[tuple[bytes, bytes]]


class Head(BaseModel):
    """What both have: headers, by names in small letters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    headers: dict[Name, Annotated[bytes, Field(strict=True)]]

    def raw(self) -> RawHeaders:
        """Return the headers as pairs."""
        return [(name.encode(), value) for name, value in self.headers.items()]

    def encode(self) -> bytes:
        """Return it as bytes; what is more than a chunk can have is refused where it is opened."""
        return pack(self.model_dump())

    @classmethod
    def decode(cls: type[Read], chunk: bytes) -> Read:
        """Read what the other side sent. Raises ProtocolError."""
        where = "sealed head"
        most = {"max_bytes": CHUNK_BYTES, "max_containers": _MAX_HEADERS}
        return validate(cls, unpack(chunk, where=where, **most), where)


class RequestHead(Head):
    """The head of a request. `time`: seconds since 1970, by the client's clock."""

    time: Annotated[int, Field(strict=True, ge=0, lt=2**53)]
    method: Annotated[str, Field(strict=True, pattern=r"\A[A-Z]{1,16}\z")]


class ResponseHead(Head):
    """The head of a response."""

    status: Annotated[int, Field(strict=True, ge=200, le=599)]


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, bytes]:
    """Return pairs as a head has them; those of one name are one, with commas (RFC 9110, 5.3)."""
    found: dict[str, bytes] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        found[name] = found[name] + b", " + value if name in found else value
    return found


def target_of(path: bytes, query: bytes) -> bytes:
    """Return the target that a request is sealed to: path and query as they are sent."""
    return path + b"?" + query if query else path
