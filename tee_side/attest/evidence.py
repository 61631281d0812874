"""Evidence: what hardware says of what runs, with the certificates that prove it.

One map of msgpack, of which every field is written. A verifier needs nothing else, and no network.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import pack, unpack
from protocol.errors import EvidenceError, ProtocolError
from protocol.validation import validate

Kind: TypeAlias = Literal["snp", "tdx", "simulated"]

MAX_EVIDENCE_BYTES = 64 * 1024
# Of maps and arrays, and of keys in a map.
_MAX_CONTAINERS = 256
REPORT_DATA_BYTES = 64

Map = TypeVar("Map", bound=BaseModel)
Bytes: TypeAlias = Annotated[bytes, Field(strict=True)]


class Evidence(BaseModel):
    """Evidence of one kind.

    `report`: a report of SEV-SNP, a quote of TDX, or what `simulated` writes. `certificates`: in
    DER, of SEV-SNP: leaf, intermediate, root. `collateral`: of SEV-SNP a list of revoked
    certificates (DER) or nothing, of TDX what Intel says of the platform (JSON).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    report: Bytes
    certificates: tuple[Bytes, ...]
    collateral: Bytes

    def encode(self) -> bytes:
        """Return it as bytes."""
        return pack(self.model_dump())

    @classmethod
    def decode(cls, data: bytes) -> Evidence:
        """Read what the other side sent. Raises EvidenceError."""
        return read_map(cls, data, "evidence", MAX_EVIDENCE_BYTES)


def read_map(model: type[Map], data: bytes, where: str, most: int) -> Map:
    """Read a map of msgpack that a peer sent; nothing of it is quoted. Raises EvidenceError."""
    try:
        fields = unpack(data, where=where, max_bytes=most, max_containers=_MAX_CONTAINERS)
        return validate(model, fields, where)
    except ProtocolError as error:
        # Behind the name of a field come keys that the peer chose.
        field = ".".join(error.where.split(".")[:2])
        raise EvidenceError(field, got=error.got, expected=error.expected) from None
