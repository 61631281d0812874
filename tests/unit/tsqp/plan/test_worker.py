"""What of a section's work is for masks, and for weights that stay; how many pads a run needs."""

from __future__ import annotations

from typing import Any

import pytest

from tee_side.words import Place
from tsqp.lab.bench.model import OperatorCost, Stages
from tsqp.lab.plan import worker
from tsqp.lab.plan.model import Lane

from .sample_costs import rpc, section


def cost(operator: Any, layer: int | None, place: Place = "tee", **stages: float) -> OperatorCost:
    return OperatorCost(
        operator=operator,
        layer=layer,
        place=place,
        calls=1,
        rpcs=0,
        bytes_sent=0,
        bytes_received=0,
        stages=Stages(**stages),
    )


def test_shares_are_of_the_work_of_the_tee() -> None:
    shares = worker._shares(
        (
            cost("embedding", None, tee_us=5),
            # Messages, the link and the service are not the TEE's work between two requests.
            cost(
                *("qkv_proj", 0, "gpu"),
                mask_us=10,
                unmask_us=6,
                verify_us=4,
                tee_us=20,
                encode_us=900,
                wire_us=900,
                gpu_us=900,
                queue_us=9,
                decode_us=9,
            ),
            cost("o_proj", 0, tee_us=30),
            cost("down_proj", 1, tee_us=70),
            cost("rms_norm", 1, tee_us=60),
            cost("rms_norm", None, tee_us=20),
            cost("lm_head", None, tee_us=60),
        )
    )
    assert shares == {
        "head": (0, 0),
        # Of 200 in all layers together: products that stay are o_proj and down_proj.
        "layer": (pytest.approx(20 / 200), pytest.approx(100 / 200)),
        "tail": (0, pytest.approx(60 / 80)),
    }


def test_a_section_that_did_nothing_has_no_shares() -> None:
    assert worker._shares((cost("embedding", None, "gpu"),)) == {}


def test_shares_are_noted_where_they_belong() -> None:
    lane = Lane(head=section(1.0), layers=(section(2.0, rpc()),) * 2, tail=section(3.0))
    noted = worker._shared(lane, {"layer": (0.25, 0.5), "tail": (0.0, 0.75)})
    assert [(one.mask_share, one.product_share) for one in (noted.head, *noted.layers)] == [
        (0, 0),
        (0.25, 0.5),
        (0.25, 0.5),
    ]
    assert noted.tail.product_share == 0.75
    assert noted.layers[0].work_us == 2.0


def test_pads_are_enough_for_every_run() -> None:
    runs = worker._PROMPTS + 2  # the first, and the observed one
    decoded = 3 * 4 * worker.DECODED
    assert worker.pads_needed((), prompt_tokens=100, batch=4) < 100
    spare = worker.pads_needed((), prompt_tokens=100, batch=4)
    # In all lanes and in one; the prompts' last tokens of three starts.
    prompts = 2 * runs * 100 + 3 * 4
    assert worker.pads_needed(["prefill"], prompt_tokens=100, batch=4) == spare + prompts
    assert worker.pads_needed(["decode"], prompt_tokens=100, batch=4) == spare + decoded
    both = worker.pads_needed(["prefill", "decode"], prompt_tokens=100, batch=4)
    assert both == spare + prompts + decoded
