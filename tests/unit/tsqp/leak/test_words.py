"""What keeps a policy from passing is named, whatever it is."""

from __future__ import annotations

from tests.unit.tsqp.leak.reports import policy, refused, report, run, score
from tsqp.lab.leak.model import AttackRun
from tsqp.lab.leak.words import above


def reason(*runs: AttackRun, untried: tuple[str, ...] = ()) -> str:
    """Return what is said of a policy where 1 % above chance may be read."""
    made = policy("mine", *runs).model_copy(update={"untried": untried})
    (said,) = above(report(made), 0.01)
    assert said.startswith("policy mine: got ")
    assert said.endswith(", expected at most 0.01 above chance")
    return said.removeprefix("policy mine: got ").partition(", expected at most")[0]


def test_what_passes_is_not_named() -> None:
    assert above(report(policy("mine", run("a", score(0, n=4000)))), 0.01) == []
    assert (
        above(report(policy("mine").model_copy(update={"nothing": "nothing leaves"})), 0.01) == []
    )


def test_what_is_read_is_named_with_its_n() -> None:
    said = reason(run("weak", score(0, n=4000)), run("strong", score(400, n=4000, where="there")))
    assert said.startswith("400 of 4,000 tokens read by strong at there, an interval that ends 0.1")


def test_whatever_says_nothing_is_named() -> None:
    assert reason(refused("a")) == "no attack that applies"
    failed = reason(run("fails", score(0, n=4000), worked=False), run("b", score(0, n=4000)))
    assert failed == "attacks that did not work on their control (fails)"
    assert reason(run("b", score(0, n=4000)), untried=("layer 1 o_proj (mine)",)) == (
        "places that no attack tried (layer 1 o_proj (mine))"
    )
    lost = score(0, n=192).model_copy(update={"guessed": 6})
    assert reason(run("a", lost)) == "searches that all gave up"
    both = reason(run("fails", score(0, n=4000), worked=False), untried=("x (y)",))
    assert both.count(" and ") == 1
