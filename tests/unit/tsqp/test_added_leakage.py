"""What adds to "lengths and timing" is off until it is asked for, and then named."""

from __future__ import annotations

import pytest

from tee_side.engine.engine import EngineSettings
from tee_side.policy.placement import load_policy, policy_names
from tsqp.cli.running import _added_leakage, hides

HIDING = {"shielded", "shielded-prefill", "two-server"}


@pytest.mark.parametrize("name", policy_names())
def test_what_adds_to_lengths_and_timing_is_named_under_policies_that_hide(name: str) -> None:
    policy = load_policy(name)
    assert hides(policy) == (name in HIDING)
    assert not list(_added_leakage(policy, EngineSettings()))
    for settings, said in (
        (EngineSettings(speculative_tokens=4), "how repetitive it is"),
        (EngineSettings(prefix_reuse=True), "how much of a prompt an earlier one"),
    ):
        lines = list(_added_leakage(policy, settings))
        assert len(lines) == (name in HIDING)
        assert all("adds to lengths and timing" in line and said in line for line in lines)
