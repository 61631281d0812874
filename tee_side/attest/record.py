"""Records: what is signed, hashed or sent in attestation, each one map of msgpack.

Every field is written, and a map has one encoding: names in order, numbers and lengths at their
shortest.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import pack, unpack
from protocol.errors import EvidenceError, ProtocolError
from protocol.validation import validate

# Of maps and arrays, and of keys in a map.
_MAX_CONTAINERS = 256

# SHA-256, or a public key of as many bytes.
Digest: TypeAlias = Annotated[bytes, Field(min_length=32, max_length=32)]
# Shown to people as it is.
Name: TypeAlias = Annotated[str, Field(max_length=256, pattern=r"\A[ -~]*\z")]


class Record(BaseModel):
    """A record. `max_bytes`: what a longer one is refused by; `what`: its name in errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    what: ClassVar[str]
    max_bytes: ClassVar[int]

    def encode(self) -> bytes:
        """Return it as bytes."""
        return pack(_in_order(self.model_dump()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what a peer sent; nothing of it is quoted. Raises EvidenceError."""
        most = {"max_bytes": cls.max_bytes, "max_containers": _MAX_CONTAINERS}
        try:
            found = validate(cls, unpack(data, where=cls.what, **most), cls.what)
        except ProtocolError as error:
            # Behind the name of a field come keys that the peer chose.
            field = ".".join(error.where.split(".")[:2])
            raise EvidenceError(field, got=error.got, expected=error.expected) from None
        if found.encode() != data:
            raise EvidenceError(cls.what, got="another encoding", expected="names in order")
        return found


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a map and those in it with their names in order."""
    pairs = sorted(fields.items())
    return {name: _in_order(item) if isinstance(item, dict) else item for name, item in pairs}
