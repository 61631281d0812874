"""The bytes that docs/wire.md shows are messages, of the lengths and contents that it says."""

from __future__ import annotations

import re
from pathlib import Path

import msgpack

from gpu_side.encoding import open_request, read_request
from protocol.encoding import encode_request
from protocol.messages import EmbeddingRequest, LinearRequest
from protocol.tensors import WireTensor

PAGE = (Path(__file__).parents[3] / "docs" / "wire.md").read_text(encoding="utf-8")
_DUMP_LINE = re.compile(r"    +((?:[0-9a-f]{2})+(?: +(?:[0-9a-f]{2})+)*)(?:  .*)?")


def _dumps() -> list[bytes]:
    """Return the hex dumps of the page: indented lines of whole bytes, with a comment behind."""
    dumps: list[bytes] = []
    text = ""
    for line in [*PAGE.splitlines(), ""]:
        found = _DUMP_LINE.fullmatch(line)
        if found:
            text += found[1]
        elif text:
            dumps.append(bytes.fromhex(text))
            text = ""
    return dumps


def test_each_dump_is_the_request_that_the_page_says() -> None:
    embedding, linear, data = _dumps()
    for claim in (f"one frame of {len(embedding)} bytes", f"Frame 0, {len(linear)} bytes"):
        assert claim in PAGE
    ids = WireTensor("int64", (1, 3), b"".join(n.to_bytes(8, "little") for n in (1, 2, 3)))
    expected = EmbeddingRequest(input_ids=ids, dtype="float32")
    assert read_request(open_request([embedding], 2**20)) == expected
    request = read_request(open_request([linear, data], 2**20))
    assert request == LinearRequest(
        layer_idx=0,
        module_names=("q_proj", "k_proj", "v_proj"),
        hidden_states=WireTensor("float32", (1, 2), bytes.fromhex("0000803f00000040")),
    )
    # Ours is in another order, with numbers of another width: the page has the shortest spelling.
    header, sent = encode_request(request, 1, 60000)
    shown = msgpack.unpackb(linear)
    shown["request"]["bias"] = True
    assert msgpack.unpackb(header) == shown
    assert sent == data
