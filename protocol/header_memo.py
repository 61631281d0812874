"""Headers that were read or written before: a forward pass repeats the same few hundred.

A message's template (`protocol.header_numbers`) depends on its method, layer, modules, dtypes and
shapes alone. Writing, it is looked up by those. Reading, the bytes lead to what a message with
*exactly these bytes* was found to say when it was decoded and checked in full; what the template
does not fix, the numbers and the frames, is checked in every message, and the fields are validated
once more. Nothing else is ever remembered, so a message that is refused in full is refused here.

Memory is bounded whatever a peer sends: so many entries, so long a template.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from protocol.messages import Message
from protocol.tensors import Buffer, WireTensor

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T", bound=Message)

# 126 layers of four operators in four shapes; at most some 10 MB in each memo.
MAX_ENTRIES = 4096


class HeaderMemo(Generic[K, V]):
    """At most `entries` values, of which those that were not used lately are forgotten first.

    Two generations instead of an order of use: finding a value writes nothing. Threads may share
    one; the worst that a race does is to forget.
    """

    def __init__(self, entries: int = MAX_ENTRIES) -> None:
        self._half = entries // 2
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def recall(self, key: K) -> V | None:
        """Return what was remembered under the key, or None."""
        value = self._young.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.remember(key, value)
        return value

    def remember(self, key: K, value: V) -> None:
        """Keep a value at least until half of `entries` others have been remembered."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value


class KnownTensor(NamedTuple):
    """A tensor field of a known message: everything about it but the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    frame: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class KnownMessage(Generic[T]):
    """What a template said when it was checked in full. `body`: its map, as it was decoded."""

    method: str
    body: Mapping[str, Any]
    validate: Callable[[dict[str, Any]], T]
    fields: Mapping[str, Any]
    tensors: tuple[KnownTensor, ...]

    def build(self, frames: Sequence[Buffer]) -> T | None:
        """Build the message of these frames; None if their number or a size is another."""
        if len(frames) != len(self.tensors) + 1:
            return None
        fields = dict(self.fields)
        for name, dtype, shape, frame, payload_bytes in self.tensors:
            data = frames[frame]
            size = data.nbytes if isinstance(data, memoryview) else len(data)
            if size != payload_bytes:
                return None
            fields[name] = WireTensor(dtype, shape, data)
        return self.validate(fields)


def known_message(method: str, body: Mapping[str, Any], message: T) -> KnownMessage[T] | None:
    """Describe a message that was read in full out of `body`, for the next one of its template.

    None for a message that is not flat fields and at least one tensor: an Init is not repeated.
    """
    fields: dict[str, Any] = {}
    tensors: list[KnownTensor] = []
    for name, described in body.items():
        value = getattr(message, name)
        if isinstance(value, WireTensor):
            size = value.payload_bytes
            tensors.append(KnownTensor(name, value.dtype, value.shape, described["frame"], size))
        elif isinstance(described, dict):
            return None
        else:
            fields[name] = value
    if not tensors:
        return None
    # The model's own checks, each time: they cost less than filling in a frozen model by hand.
    validate = type(message).__pydantic_validator__.validate_python
    return KnownMessage(method, MappingProxyType(body), validate, fields, tuple(tensors))
