"""Genuine evidence with one thing changed: nothing of it is accepted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from protocol.errors import EvidenceError
from tee_side.attest.snp import verify_snp
from tee_side.attest.snp_report import REPORT_BYTES
from tests.kit import snp_chain
from tests.kit.evidence import SNP_VECTORS, SnpVector, needs_vectors

pytestmark = [pytest.mark.more, needs_vectors]

_MUTATIONS = 2000
# Where the fields of a report begin, reserved ones as well; the last are r, s and what nothing
# signs.
_FIELDS = (
    *(0x00, 0x04, 0x08, 0x10, 0x20, 0x30, 0x34, 0x38, 0x40, 0x48, 0x4C, 0x50, 0x90, 0xC0, 0xE0),
    *(0x110, 0x140, 0x160, 0x180, 0x188, 0x18B, 0x1A0, 0x1A8, 0x1E0, 0x1E8, 0x1EC, 0x1F0, 0x1F8),
    *(0x200, 0x208, 0x2A0, 0x2D0, 0x2E8, 0x318, 0x330, 0x400),
)
# Two leaves of one processor at one TCB: each is right for the reports of both.
_ONE_PROCESSOR = {"live genoa", "live genoa evidence"}
_REPORT = 0


class _Mutation(NamedTuple):
    """Report, leaf, intermediate and root, and what was done to one of them."""

    vector: SnpVector
    what: str
    parts: Sequence[bytes]


def _parts(vector: SnpVector) -> list[bytes]:
    return [vector.report, *vector.chain]


def _regions(which: int, data: bytes) -> list[tuple[int, int]]:
    """Return where things lie: of a report by its layout, of a certificate by its elements."""
    if which == _REPORT:
        return list(zip(_FIELDS, (*_FIELDS[1:], REPORT_BYTES), strict=True))
    return _elements(data, 0)


def _elements(data: bytes, at: int) -> list[tuple[int, int]]:
    """Return headers of elements that hold others, and whole elements that do not."""
    begin, end = snp_chain.span(data, at)
    inside = snp_chain.children(data, at)
    found = [(at, begin if inside else end)]
    for child in inside:
        found += _elements(data, child)
    return found


def _changed(
    choose: random.Random, data: bytes, begin: int, end: int, other: bytes
) -> tuple[str, bytes]:
    """Change one region in a way that is drawn. `other`: the same part of another vector."""
    at = choose.randrange(begin, end)
    region = data[begin:end]
    flipped = bytes((data[at] ^ 1 << choose.randrange(8),))
    return choose.choice(
        (
            (f"bit of {at:#x}", data[:at] + flipped + data[at + 1 :]),
            ("all bits", data[:begin] + bytes(255 - byte for byte in region) + data[end:]),
            ("zeros", data[:begin] + bytes(end - begin) + data[end:]),
            ("cut out", data[:begin] + data[end:]),
            ("twice", data[:end] + data[begin:]),
            ("cut off", data[:begin]),
            ("longer", data + region),
            ("a byte less", data[:at] + data[at + 1 :]),
            ("of another", data[:begin] + other[begin:end] + data[end:]),
        )
    )


def _mutations(choose: random.Random) -> Iterator[_Mutation]:
    """Change each region of each part of each vector, and swap the parts."""
    everything = [(vector, _parts(vector)) for vector in SNP_VECTORS]
    for vector, parts in everything:
        for which, data in enumerate(parts):
            for begin, end in _regions(which, data):
                _, others = choose.choice(everything)
                what, changed = _changed(choose, data, begin, end, others[which])
                made = [*parts[:which], changed, *parts[which + 1 :]]
                if changed != data:
                    yield _Mutation(vector, f"part {which}, {begin:#x}: {what}", made)
            for other, others in everything:
                made = [*parts[:which], others[which], *parts[which + 1 :]]
                if made != parts and {vector.name, other.name} != _ONE_PROCESSOR:
                    yield _Mutation(vector, f"part {which} of {other.name}", made)


def _accepted(vector: SnpVector, parts: Sequence[bytes]) -> bool:
    report, *chain = parts
    try:
        verify_snp(report, chain, vector.now)
    except EvidenceError:
        return False
    return True


def test_nothing_that_was_changed_is_accepted() -> None:
    assert all(_accepted(vector, _parts(vector)) for vector in SNP_VECTORS)
    mutations = list(_mutations(random.Random(19)))
    assert len(mutations) >= _MUTATIONS
    assert [one[:2] for one in mutations if _accepted(one.vector, one.parts)] == []


@pytest.mark.parametrize("vector", SNP_VECTORS, ids=lambda vector: vector.name)
def test_every_byte_of_report_and_certificates_counts(vector: SnpVector) -> None:
    """No byte may change: none of the report, signed or not, and none of any certificate."""
    choose = random.Random(384)
    original = _parts(vector)
    free = []
    for which, data in enumerate(original):
        for at, byte in enumerate(data):
            other = bytes((byte ^ choose.randrange(1, 256),))
            parts = list(original)
            parts[which] = data[:at] + other + data[at + 1 :]
            if _accepted(vector, parts):
                free.append((which, at))
    assert free == []
