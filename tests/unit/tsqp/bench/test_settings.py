"""What a run's settings say of its services and its link."""

from __future__ import annotations

import pytest

from tsqp.lab.bench.settings import BenchSettings


@pytest.mark.parametrize(
    ("device", "endpoints", "computes"),
    [
        ("null", (), False),
        ("model:h100", (), False),
        ("cpu", (), True),
        ("cuda:1", (), True),
        ("null", ("tcp://h:1",), True),
    ],
)
def test_services_that_were_given_compute(
    device: str, endpoints: tuple[str, ...], computes: bool
) -> None:
    settings = BenchSettings("c", (), device=device, endpoints=endpoints)
    assert settings.computes is computes


@pytest.mark.parametrize(
    ("gbps", "rtt_us", "text"),
    [
        (None, 0.0, None),
        (10.0, 0.0, "10 Gbit/s, 0 us round trip"),
        (None, 50.0, "unbounded rate, 50 us round trip"),
    ],
)
def test_a_link_for_people(gbps: float | None, rtt_us: float, text: str | None) -> None:
    assert BenchSettings("c", (), link_gbps=gbps, link_rtt_us=rtt_us).link == text
