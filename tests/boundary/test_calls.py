"""A linear RPC only becomes shorter: its Python calls are counted in both programs."""

from __future__ import annotations

import pytest

from tests.kit.calls import measure
from tests.kit.core_size import RECORDED


@pytest.mark.slow  # two minutes of a busy machine, under sys.setprofile
def test_an_rpc_takes_no_more_calls_than_are_recorded() -> None:
    found = measure()
    assert found.keys() == RECORDED["calls"].keys()
    for side, calls in found.items():
        assert calls <= RECORDED["calls"][side], f"{side}: python -m tests.kit.calls"
