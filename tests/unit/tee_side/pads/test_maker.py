"""Layouts have the sites of the model; what the maker puts into a store undoes the mask exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protocol.errors import CalibrationError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.quantized import QuantizedLinear, load_quantized
from tee_side.assembly import Assembly
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads import maker as maker_module
from tee_side.protect.pads.layout import PadLayout
from tee_side.protect.pads.maker import PadMaker, read_weights
from tee_side.protect.pads.store import MemoryStore
from tee_side.protect.sites import IntegerSites
from tee_side.words import Site
from tests.kit.model import SavedModel
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]


# More rows than a block of digits, and fewer.
@each_row("count", [1, 40])
def test_factors_are_the_exact_products_of_the_services_own_integers(
    saved_model: Models, count: int
) -> None:
    directory = saved_model("qwen2").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    store = MemoryStore(PadLayout.of(config), 64)
    told, checked = list[tuple[int, int]](), list[Site]()

    def check(site: Site, weights: QuantizedLinear) -> None:
        checked.append(site)
        assert torch.equal(weights.weight, load_quantized(checkpoint, config, *site).weight)

    maker = PadMaker(Pad(), read_weights(checkpoint, config, "int8", check))
    maker.fill(store, count, lambda *done: told.append(done))
    maker.fill(store, 1)
    assert checked == [site.site for site in store.layout.sites]
    assert told == [(done, 13) for done in range(1, 14)]
    assert store.available == count + 1
    indices = store.take(count)
    for site in store.layout.sites:
        r, u = store.factors(indices, site.number)
        exact = r.long() @ load_quantized(checkpoint, config, *site.site).weight.long().t()
        assert torch.equal(u, exact.to(torch.int32)), str(site)
        # Guards the test: these products do wrap.
        assert (exact.abs() >= 2**31).any()


def test_what_makes_no_pads_leaves_no_batch_behind(saved_model: Models) -> None:
    """A store without room, and weights that fail their check."""
    directory = saved_model("llama").directory
    config, checkpoint = read_config(directory), Checkpoint(directory)
    store = MemoryStore(PadLayout.of(config), 4)

    def check(site: Site, weights: QuantizedLinear) -> None:
        if site == (1, "down_proj"):
            raise CalibrationError("down_proj in layer 1", got="others", expected="the same")

    def refused(error: type[Exception], match: str, tokens: int, *more: Any) -> None:
        maker = PadMaker(Pad(), read_weights(checkpoint, config, "int8", *more))
        for _ in range(2):  # however often they are asked for
            with pytest.raises(error, match=match):
                maker.fill(store, tokens)
        assert (store.available, store.room) == (0, 4)

    refused(ValueError, "got 5 to fill", 5)
    refused(CalibrationError, "down_proj in layer 1", 2, check)


def _fill(assembly: Assembly) -> None:
    for pads in assembly.pads.values():
        assert pads._maker is not None
        pads._maker.fill(pads._store, 1)


def test_pads_are_made_from_the_weights_that_stay_or_else_from_the_directory(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way, a calibration of other weights is noticed: when they are loaded, or made from."""
    read: list[Site] = []

    def noted(checkpoint: Any, config: Any, *site: Any) -> QuantizedLinear:
        read.append(site)
        return load_quantized(checkpoint, config, *site)

    monkeypatch.setattr(maker_module, "load_quantized", noted)
    # Under the default policy prefill is in the TEE, which holds all of them.
    assembly = saved_model("llama").tee("shielded").assembly
    _fill(assembly)
    assert read == []
    _fill(saved_model("llama").tee("shielded-prefill").assembly)
    assert len(read) == len(set(read)) == 3 * 4 + 1

    def other(self: IntegerSites, site: Site, weights: QuantizedLinear) -> None:
        raise CalibrationError(str(site), got="others", expected="the same")

    monkeypatch.setattr(IntegerSites, "check_weights", other)
    for policy in ("shielded", "shielded-prefill"):
        with pytest.raises(CalibrationError, match="qkv_proj"):
            _fill(saved_model("llama").tee(policy).assembly)
