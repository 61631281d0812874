"""What the demo shows fits a narrow terminal, and says what was measured."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType
from rich.text import Text

from tsqp.demo.costs import Cost
from tsqp.demo.feed import Feed
from tsqp.demo.intercepting_proxy import Seen
from tsqp.demo.matching import Reading
from tsqp.demo.rendering import act_panel, acts_table, checks_table, operators_table
from tsqp.demo.verdict import Check

NAMES = ("embedding", "qkv_proj", "attn_scores", "attn_values", "o_proj", "gate_up_proj")
STORY = Text("Once upon a time there was a lamp. " * 12)


def shown(what: RenderableType, width: int = 80) -> str:
    output = StringIO()
    Console(file=output, width=width, highlight=False).print(what)
    text = output.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    return text


def report(policy: str = "attention-in-tee", **overrides: Any) -> dict[str, Any]:
    row = {
        "place": "gpu",
        "calls": 2560,
        "round_trips": 24064,
        "bytes_sent": 54_321_000,
        "bytes_received": 65_432_000,
        "tee_s": 1.25,
        "wire_s": 2.0,
        "queue_s": 0.5,
        "gpu_s": 0.75,
    }
    return {
        "policy": policy,
        "operators": dict.fromkeys(NAMES, row),
        "timing": {"total_s": 30.0, "tpot_s": 0.0123},
        "rpc": {"count": 24064, "bytes_sent": 54_321_000, "bytes_received": 65_432_000},
    } | overrides


def feed_of(*tensors: torch.Tensor, what: str = "q_proj k_proj v_proj") -> Feed:
    feed = Feed(kept=2)
    for number, tensor in enumerate(tensors):
        feed.add(Seen(what, number, (tensor,)))
    return feed


@pytest.mark.parametrize("width", [80, 120, 200])
def test_floats_are_shown_as_they_are(width: int) -> None:
    feed = feed_of(*(torch.full((512, 192), -10.5 + n) for n in range(3)))
    text = shown(act_panel("1 of 3  p", STORY, feed, width=width, subtitle="9 tokens"), width)
    assert "what the GPU received: float32" in text
    assert "first 2 of 3 requests" in text
    assert text.count("-10.500") == (4 if width == 80 else 8)
    assert "-9.500" in text
    assert "-8.500" not in text
    assert "q_proj k_proj v_proj  512x192" in text
    assert "uneven: there is a pattern" in text
    assert "9 tokens" in text


def test_while_an_act_runs_the_last_requests_are_shown() -> None:
    feed = feed_of(*(torch.full((1, 4), float(n)) for n in range(3)))
    text = shown(act_panel("p", STORY, feed, width=80))
    assert "last 2 of 3 requests" in text
    assert "+2.000" in text
    assert "+0.000" not in text


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([-1, 2**31 - 1, -(2**31), 16], "ffffffff 7fffffff 80000000 00000010"),
        ([-127, 0, 64, 3], "    -127        0       64        3"),
    ],
)
def test_ring_elements_are_words_and_small_integers_are_not(
    numbers: list[int], expected: str
) -> None:
    feed = feed_of(torch.tensor([numbers], dtype=torch.int32))
    assert expected in shown(act_panel("p", STORY, feed, width=80, subtitle=""))


def test_bars_follow_the_counts() -> None:
    raw = torch.tensor([0] * 70 + [4] * 35 + [255] * 7, dtype=torch.uint8)
    feed = feed_of(raw.view(torch.int32))
    bars = shown(act_panel("p", STORY, feed, width=80)).split("00 to ff ")[1]
    assert bars[:64] == "█▄" + " " * 61 + "▁"
    bars = shown(act_panel("p", STORY, feed, width=80, ascii_only=True)).split("00 to ff ")[1]
    assert bars[:64] == "#=" + " " * 61 + "."


def test_even_bytes_are_called_so() -> None:
    raw = torch.arange(256).repeat(400).to(torch.uint8)
    text = shown(act_panel("p", STORY, feed_of(raw.view(torch.int32)), width=80, subtitle=""))
    assert "each 0.39% to 0.39% of all, entropy 8.000 of 8" in text
    assert "as even as chance makes them" in " ".join(text.replace("│", " ").split())


def test_nothing_is_called_nothing() -> None:
    text = shown(act_panel("p", STORY, Feed(kept=2), width=80, subtitle=""))
    assert "nothing: no request, not one byte" in text
    assert "nothing so far" in shown(act_panel("p", STORY, Feed(kept=2), width=80))


@pytest.mark.parametrize(("right", "count"), [(3, "3 of 9 tokens recovered"), (None, "9 rows")])
def test_a_reading_is_shown(right: int | None, count: str) -> None:
    feed, reading = feed_of(torch.ones(1, 4)), Reading("lamp " * 100, 9, right)
    panel = act_panel("p", STORY, feed, width=80, subtitle="", reading=reading, services=2)
    text = shown(panel)
    assert count in text
    assert "lamp ..." in text
    assert "stronger" not in text
    assert "the first of two services" in text
    panel = act_panel("p", STORY, feed, width=80, subtitle="", reading=reading, broken=True)
    assert "stronger attacks are known" in " ".join(shown(panel).replace("│", " ").split())


def test_costs_fit_and_add_up() -> None:
    text = shown(operators_table(Cost(report())))
    # 6 x 1.25 s in operators, and what is left of 30 s: 6 x 4.5 s are accounted for.
    assert next(line for line in text.splitlines() if "else" in line).split() == [
        "everything",
        "else",
        "tee",
        "3,000",
    ]
    total = ["total", "24064", "54.3", "MB", "65.4", "MB", "10,500", "15,000", "4,500"]
    assert text.split()[-9:] == total
    side = shown(acts_table([Cost(report("shielded-prefill")), Cost(report())]))
    assert "shielded-prefill" in side
    assert side.splitlines()[-1].split()[-3:] == ["10,500", "15,000", "4,500"]
    assert "12.3" in side


def test_a_single_token_has_no_time_per_token() -> None:
    single = report(timing={"total_s": 30.0, "tpot_s": None})
    assert "24064" in shown(acts_table([Cost(single)]))


def test_a_verdict_says_which_policy_failed() -> None:
    lines = shown(
        checks_table([Check("good", True, "same", "by the way"), Check("bad", False, "other")])
    ).splitlines()
    assert any(line.split()[:3] == ["ok", "good", "same"] for line in lines)
    assert any(line.split()[:3] == ["FAIL", "bad", "other"] for line in lines)
    assert any("by the way" in line for line in lines)
