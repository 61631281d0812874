"""What is measured of a machine, its file, and what a plan for it replaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_side.profiles import find_profile
from protocol.errors import SettingsError
from tsqp.lab.bench.model import PingPong
from tsqp.lab.plan.machine import Machine, Transport, fit_transports, read_machine

FITTED = Machine(
    kernels="avx2",
    spin_us=50.0,
    int8_gops=(100.0, 180.0, 250.0),
    gb_per_s=(10.0, 15.0, 16.0),
    transports={"unix": Transport(rtt_us=40.0, gb_per_s=2.0)},
)


def pong(transport: str, payload: int, us: float, kind: str = "ours") -> PingPong:
    return PingPong.model_validate(
        {
            "transport": transport,
            "payload_bytes": payload,
            "kind": kind,
            "p50_us": us,
            "p90_us": us,
            "round_trips": 9,
        }
    )


def test_a_file_says_what_was_measured_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    for gpu in (None, find_profile("l4")):
        fitted = FITTED.model_copy(update={"gpu": gpu})
        path.write_text(fitted.toml(), encoding="utf-8")
        assert read_machine(path) == fitted
    for text, fragment in (
        ("{", "got no TOML"),
        (FITTED.toml().replace("100.0", "-1.0"), "int8_gops"),
        (FITTED.toml().replace("40.0", "nan"), "rtt_us"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=fragment) as refused:
            read_machine(path)
        assert str(path) in str(refused.value)


def test_a_transport_is_a_line_through_its_round_trips() -> None:
    measured = [
        *(pong("unix", 1000, 50.0), pong("unix", 501_000, 150.0), pong("unix", 1000, 1.0, "raw")),
        *(pong("zeromq-tcp", 1000, 9.0), pong("tcp", 1000, 1.0, "raw")),
    ]
    found = fit_transports(measured)
    # One size tells no rate.
    assert list(found) == ["unix"]
    # 1,000,000 bytes more, both ways together, in 100 us.
    assert found["unix"].gb_per_s == pytest.approx(10)
    assert found["unix"].rtt_us == pytest.approx(50 - 0.2)
    assert found["unix"].us(2000) == pytest.approx(50)
    assert found["unix"].us(1_002_000) == pytest.approx(150)
