"""The bytes that docs/wire.md shows are messages, of the lengths and contents that it says."""

from __future__ import annotations

import re
from pathlib import Path

import msgpack
import pytest

from gpu_side.encoding import open_request, read_request
from protocol.encoding import encode_request
from protocol.messages import EmbeddingRequest, LinearRequest, Request
from protocol.seed import expand
from protocol.tensors import WireTensor

PAGE = Path(__file__).parents[3] / "docs" / "wire.md"
_DUMP_LINE = re.compile(r"    +((?:[0-9a-f]{2})+(?: +(?:[0-9a-f]{2})+)*)(?:  .*)?")


def _dumps() -> list[bytes]:
    """Return the hex dumps of the page: indented lines of whole bytes, with a comment behind."""
    dumps: list[bytes] = []
    text = ""
    for line in [*PAGE.read_text(encoding="utf-8").splitlines(), ""]:
        found = _DUMP_LINE.fullmatch(line)
        if found:
            text += found[1]
        elif text:
            dumps.append(bytes.fromhex(text))
            text = ""
    return dumps


def test_every_dump_is_found() -> None:
    assert [len(dump) for dump in _dumps()] == [98, 150, 8]
    page = PAGE.read_text(encoding="utf-8")
    for claim in ("one frame of 98 bytes", "Frame 0, 150 bytes"):
        assert claim in page


def _tensor(dtype: str, shape: tuple[int, ...], dump: bytes) -> WireTensor:
    return WireTensor(dtype, shape, dump)


EMBEDDING, LINEAR, LINEAR_DATA = _dumps()


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (
            [EMBEDDING],
            EmbeddingRequest(
                input_ids=_tensor(
                    "int64", (1, 3), b"".join(n.to_bytes(8, "little") for n in (1, 2, 3))
                ),
                dtype="float32",
            ),
        ),
        (
            [LINEAR, LINEAR_DATA],
            LinearRequest(
                layer_idx=0,
                module_names=("q_proj", "k_proj", "v_proj"),
                hidden_states=_tensor("float32", (1, 2), bytes.fromhex("0000803f00000040")),
            ),
        ),
    ],
)
def test_dump_is_the_request(frames: list[bytes], expected: Request) -> None:
    opened = open_request(frames, 2**20)
    assert read_request(opened) == expected


def test_the_page_says_how_a_seed_begins() -> None:
    found = re.search(r"a seed of zeros begins `([0-9a-f]{16})`", PAGE.read_text(encoding="utf-8"))
    assert found
    assert expand(bytes(32), 2).hex() == found[1]


def test_our_own_client_sends_the_linear_of_the_page() -> None:
    request = read_request(open_request([LINEAR, LINEAR_DATA], 2**20))
    header, data = encode_request(request, 1, 60000)
    # In another order, and with numbers of another width: the page shows the shortest spelling.
    shown = msgpack.unpackb(LINEAR)
    shown["request"]["bias"] = True
    assert msgpack.unpackb(header) == shown
    assert data == LINEAR_DATA
