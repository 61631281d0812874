"""Layouts name every site once, with the sizes of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.messages import FUSED_MODULES
from protocol.model.config import read_config
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape, site_number
from tee_side.words import PROJECTIONS, is_linear
from tests.kit.model import SavedModel


def test_numbers_follow_layer_and_operator() -> None:
    numbers = [site_number(layer, operator) for layer in range(3) for operator in PROJECTIONS]
    assert numbers == list(range(15))


def test_layout_of_a_model(saved_model: Callable[..., SavedModel]) -> None:
    config = read_config(saved_model().directory)
    layout = PadLayout.of(config)
    *layers, head = layout.sites
    last = config.num_hidden_layers - 1
    assert [site.number for site in layers] == [n for n in range(5 * last + 4) if n % 5 != 4]
    assert head == SiteShape(last, "lm_head", config.hidden_size, config.vocab_size)
    assert head.number == 5 * last + 4
    for site in layers:
        assert is_linear(site.operator)
        shapes = [config.module_shape(module) for module in FUSED_MODULES[site.operator]]
        assert site.out_features == sum(shape[0] for shape in shapes)
        assert {site.in_features} == {shape[1] for shape in shapes}
    assert layout.token_bytes == 4 * sum(site.out_features for site in layout.sites)


def test_layout_of_some_operators_in_any_order(saved_model: Callable[..., SavedModel]) -> None:
    layout = PadLayout.of(read_config(saved_model().directory), [(1, "down_proj"), (0, "o_proj")])
    assert [(site.layer, site.operator) for site in layout.sites] == [
        (0, "o_proj"),
        (1, "down_proj"),
    ]


def test_a_site_is_named_by_layer_and_operator() -> None:
    assert str(SiteShape(1, "gate_up_proj", 1, 1)) == "layer 1 gate_up_proj"


@pytest.mark.parametrize("site", [(-1, "qkv_proj", 4), (0, "embedding", 4), (0, "qkv_proj", 0)])
@pytest.mark.parametrize("large", [0, 2**31])
def test_impossible_sites_are_refused(site: tuple[int, Any, int], large: int) -> None:
    layer, operator, features = site
    sites = ((0, layer, operator, features, large or 4),)
    digests = {"model_digest": "0" * 64, "linear_digest": "0" * 64}
    with pytest.raises(ValidationError):
        Purpose(mask="pad", sites=sites, **digests)


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0)])
def test_sites_must_be_some_ascending_and_distinct(layers: tuple[int, ...]) -> None:
    sites = tuple(SiteShape(layer, "qkv_proj", 1, 1) for layer in layers)
    with pytest.raises(ValueError, match="ascending"):
        PadLayout(sites)
