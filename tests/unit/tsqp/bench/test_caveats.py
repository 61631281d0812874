"""What must be known before any figure is read."""

from __future__ import annotations

import pytest

from tsqp.lab.bench.caveats import caveats, uses_pads

from .sample_report import of_device, policy_run, sample_report


def test_what_must_be_known_first() -> None:
    first, second = caveats(of_device("null"))
    assert first.startswith("With device null nothing is computed at the service: tokens/s are an")
    assert second.startswith("shielded: pads are made ahead, and making them is not counted")
    assert "factors of these pads are zeros" in second
    assert "tokens/s are modelled" in caveats(of_device("model:h100"))[0]
    (pads,) = caveats(of_device("cpu"))
    assert "zeros" not in pads
    assert caveats(sample_report(("tee-only",), layers=1)) == []
    assert len(caveats(sample_report(("tsqp",), layers=1))) == 1


@pytest.mark.parametrize(
    ("said", "pads"),
    [
        ("the GPU sees uniform random numbers, lengths and timing", True),
        ("each GPU service sees uniform random numbers, as long as the two do not collude", False),
        ("the GPU sees hidden states in the clear - bad; activations under pad", True),
        ("the GPU sees activations under row-mix, pad, not known to be broken", True),
        ("the GPU sees activations under float-noise, which is broken; padding", False),
    ],
)
def test_pads_are_known_by_what_they_disclose(said: str, pads: bool) -> None:
    run = policy_run("p", layers=1).model_copy(update={"leakage_summary": f"policy p: {said}"})
    assert uses_pads(run) == pads
    # Without a round trip none is used.
    kept = policy_run("tee-only", layers=1).model_copy(
        update={"leakage_summary": run.leakage_summary}
    )
    assert not uses_pads(kept)
