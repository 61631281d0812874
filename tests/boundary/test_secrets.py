"""The search for what may not leave the runner finds it.

What is searched is the row `secrets` of the scorecard, whose short form is one of its tests.
"""

from __future__ import annotations

from itertools import product

import torch

from tests.kit.rows import each_row
from tests.soak.canaries import Canaries


@each_row(
    ("content", "kind"),
    [
        (b"the answer: qvxzkjwphm!", "prompt"),
        (b"x=" + b"qvxzkjwphm".hex().encode(), "prompt"),
        (b"tensor([ 9, 14, 15, 16,\n 17, 18, 19, 20])", "token ids"),
        (b"\0\0" + b"".join(n.to_bytes(8, "little") for n in range(11, 22)), "token ids"),
        (b"[0.5000, 1.2500,  -3.0000, 4.0000]", "activation"),
        (b"key " + b"\x00\x01\x02\x03" * 8, "key"),
        (b"it said \xc3\xa9]kR mq;w3", "answer"),
    ],
)
def test_the_search_finds(content: bytes, kind: str) -> None:
    canaries = Canaries()
    canaries.add_prompt(["qvxzkjwphm"], list(range(11, 23)))
    canaries.add_activation(torch.tensor([0.5, 1.25, -3.0, 4.0, 7.0]))
    canaries.add_secret(b"\x00\x01\x02\x03" * 8)
    canaries.add_answer("\u00e9]kR mq;w3", [31, 32])
    assert kind in canaries.found_in(content)
    assert not canaries.found_in(b"nothing of it 1, 2, 3, 0.5, 1.25")


@each_row(("before", "length"), product(range(9), (3, 4, 5, 11)))
def test_a_pattern_is_found_wherever_it_begins(before: int, length: int) -> None:
    pattern = b"qvxzkjwphma"[:length]
    canaries = Canaries()
    canaries.patterns += [("prompt", pattern), ("key", b"qvxzkjwphmb"), ("key", b"none of it")]
    assert canaries.found_in(b"-" * before + pattern) == ["prompt"]
    assert canaries.found_in(b"-" * before + pattern + b"qvxzqvxz") == ["prompt"]
    assert canaries.found_in(b"-" * before + pattern[:-1]) == []
    assert canaries.found_in(b"- " * before + b" \n".join(bytes([c]) for c in pattern)) == [
        "prompt"
    ]
