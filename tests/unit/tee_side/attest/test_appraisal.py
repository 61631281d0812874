"""Tests of the appraisal: each step has a value that passes and one that fails, with both told."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from tee_side.attest import appraisal
from tee_side.attest.appraisal import Appraisal, AppraisalPolicy, Expected, Verified, appraise
from tee_side.attest.guests import SnpReport, Tcb, VerifiedSnp, VerifiedTdx
from tee_side.attest.nvidia import VerifiedNvidia
from tee_side.attest.statement import (
    Claims,
    Evidence,
    GpuEvidence,
    Kind,
    Statement,
    gpu_nonce,
    report_data,
)
from tests.kit.rows import each_row

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
NONCE = bytes(range(32))
MEASUREMENT, HOST_DATA = bytes(range(48)), bytes(range(1, 33))
CLAIMS = Claims(
    purpose="serve",
    nonce=NONCE,
    time=round(NOW.timestamp()) - 5,
    hpke_suite="x25519",
    hpke_key=bytes(32),
    version="1.0",
    curve_keys={"runner": bytes(32), "service 1": b"s" * 32},
    plugins={"Mine": b"p" * 32},
    gpus={},
    attested_services="snp+nvidia",
    **{name: sha256(name.encode()).digest() for name in ("tls_key", "receipt_key", "model")},
    **{name: sha256(name.encode()).digest() for name in ("policy", "settings")},
)
REPORT = SnpReport(
    debug=False,
    migration_agent=False,
    vmpl=0,
    alias_check=True,
    signing_key="vcek",
    report_data=b"",
    measurement=MEASUREMENT,
    host_data=HOST_DATA,
    reported_tcb=bytes(8),
    launch_tcb=bytes([10, 0, 0, 0, 0, 0, 23, 84]),
    product="genoa",
    chip_id=bytes(64),
)
POLICY = f"""
mode = "production"
max_age_s = 60
[snp]
measurements = ["{bytes(48).hex()}", "{MEASUREMENT.hex()}"]
host_data = ["{HOST_DATA.hex()}"]
products = ["genoa"]
minimum_tcb = {{ genoa = {{ bootloader = 10, tee = 0, snp = 23, microcode = 84 }} }}
[tdx]
mrtd = ["{MEASUREMENT.hex()}"]
rtmr = {{ 0 = "any", 1 = ["{"11" * 48}"], 2 = "any", 3 = "any" }}
config_id = ["{"22" * 48}"]
[claims]
model = ["{CLAIMS.model.hex()}"]
policy = ["{CLAIMS.policy.hex()}"]
settings = ["{CLAIMS.settings.hex()}"]
plugins = ["{"70" * 32}"]
services = ["{"73" * 32}"]
version = ["1.0"]
"""
TCB = Tcb(10, 0, 23, 84)
TDX = VerifiedTdx(
    mrtd=MEASUREMENT,
    rtmr=(bytes(48), b"\x11" * 48, bytes(48), bytes(48)),
    report_data=report_data(CLAIMS.encode()),
    config_id=b"\x22" * 48,
    status="UpToDate",
)


def policy_of(text: str = POLICY) -> AppraisalPolicy:
    return AppraisalPolicy.model_validate(tomllib.loads(text), strict=False)


def snp(claims: Claims, tcb: Tcb = TCB, *, revocation: bool = True, **changes: Any) -> VerifiedSnp:
    report = replace(REPORT, **({"report_data": report_data(claims.encode())} | changes))
    return VerifiedSnp(report, report.product or "genoa", tcb, revocation, report.report_data)


def look(
    verified: Verified,
    claims: Claims = CLAIMS,
    expected: Expected | None = None,
    gpus: Mapping[str, VerifiedNvidia] | None = None,
    text: str = POLICY,
) -> Appraisal:
    usual = expected or Expected(NONCE, CLAIMS.tls_key, NOW, "serve")
    gpus = gpus or {}
    named = {name: sha256(b"leaf").digest() for name in gpus}
    claims = claims.model_copy(update={"gpus": named})
    if gpus:
        verified = snp(claims)

    def verify(_evidence: Evidence, now: datetime) -> Verified:
        assert now == usual.now
        return verified

    def verify_gpu(
        report: bytes, certificates: tuple[bytes, ...], nonce: bytes, now: datetime
    ) -> VerifiedNvidia:
        assert (certificates, nonce, now) == ((b"leaf",), gpu_nonce(claims.encode()), usual.now)
        return gpus[report.decode()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(appraisal, "verify_evidence", verify)
        patch.setattr(appraisal, "verify_nvidia", verify_gpu)
        return appraise(stated(claims, gpus), policy_of(text), usual)


def stated(claims: Claims, gpus: Iterable[str] = (), kind: Kind = "snp") -> Statement:
    """Return a statement with evidence that would not pass any verification."""
    given = {name: GpuEvidence(report=name.encode(), certificates=(b"leaf",)) for name in gpus}
    evidence = Evidence(kind=kind, report=b"", certificates=(), collateral=b"", gpus=given)
    return Statement(claims=claims.encode(), evidence=evidence.encode())


def failed(found: Appraisal) -> list[str]:
    return [step.name for step in found.steps if not step.passed]


def test_what_is_asked_for_passes_every_step() -> None:
    found = look(snp(CLAIMS))
    assert not failed(found)
    assert (found.passed, found.claims) == (True, CLAIMS)
    assert look(TDX).passed
    for changes, step in (
        ({"mrtd": bytes(48)}, "MRTD"),
        ({"rtmr": (bytes(48),) * 4}, "RTMR1"),
        ({"config_id": bytes(48)}, "MRCONFIGID"),
        ({"status": "OutOfDate"}, "TCB status"),
    ):
        assert failed(look(TDX._replace(**changes))) == [step]


@each_row(
    ("changes", "step", "got"),
    [
        ({"measurement": b"\x01" * 48}, "measurement", "01" * 48),
        ({"host_data": bytes(32)}, "host data", "00" * 32),
        ({"product": "milan"}, "product", "milan"),
        ({"debug": True}, "debug", "on"),
        ({"migration_agent": True}, "migration agent", "allowed"),
        ({"vmpl": 1}, "VMPL", "1"),
        ({"signing_key": "vlek"}, "signing key", "vlek"),
        ({"alias_check": False}, "alias check", "not done"),
        ({"revocation": False}, "revocation", "not checked"),
        ({"tcb": TCB._replace(bootloader=9)}, "TCB: bootloader", "9"),
        ({"tcb": TCB._replace(snp=22)}, "TCB: snp", "22"),
        ({"tcb": TCB._replace(microcode=83)}, "TCB: microcode", "83"),
        ({"launch_tcb": bytes([9, 0, 0, 0, 0, 0, 23, 84])}, "launch TCB: bootloader", "9"),
    ],
)
def test_what_a_guest_of_snp_must_be(changes: dict[str, Any], step: str, got: str) -> None:
    found = look(snp(CLAIMS, **changes))
    assert failed(found) == [step]
    assert not found.passed
    assert f"FAIL  {step}: got {got}, expected " in "\n".join(map(str, found.steps))


_CONFIDENTIAL = POLICY.replace("production", "gpu-confidential")
_NO_SERVICES = POLICY.replace(f'["{"73" * 32}"]', "[]")
_CERTIFICATE = Expected(b"", CLAIMS.tls_key, NOW, "serve")
_FILE = Expected(None, None, NOW, "serve")
_LATE = Expected(NONCE, CLAIMS.tls_key, NOW + timedelta(seconds=56), "serve")


@each_row(
    ("changes", "steps", "text", "expected"),
    [
        ({"purpose": "key"}, ["purpose"], POLICY, None),
        ({"nonce": b""}, ["nonce"], POLICY, None),
        ({"tls_key": bytes(32)}, ["TLS key"], POLICY, None),
        ({"time": CLAIMS.time - 56}, ["age"], POLICY, None),
        ({}, ["age"], POLICY, _LATE),
        # Clocks may be a minute apart.
        ({"time": CLAIMS.time + 66}, ["age"], POLICY, None),
        ({"time": CLAIMS.time + 65}, [], POLICY, None),
        ({"model": bytes(32)}, ["model"], POLICY, None),
        ({"policy": bytes(32)}, ["policy"], POLICY, None),
        ({"settings": bytes(32)}, ["settings"], POLICY, None),
        ({"version": "1.1"}, ["version"], POLICY, None),
        ({"plugins": CLAIMS.plugins | {"More": bytes(32)}}, ["plug-in More"], POLICY, None),
        ({"curve_keys": {"service 1": bytes(32)}}, ["key of service 1"], POLICY, None),
        # A runner's key is no service's.
        ({"curve_keys": {"runner": bytes(32)}}, [], _NO_SERVICES, None),
        # A certificate is as old as its server; a file has no nonce, and no connection.
        ({"nonce": b"", "time": 0}, [], POLICY, _CERTIFICATE),
        ({}, [], POLICY, _FILE),
        # Services that prove nothing are none outside of development.
        *(({"attested_services": one}, [], POLICY, None) for one in ("none", "snp", "tdx+nvidia")),
        ({"attested_services": "simulated"}, ["attested services"], POLICY, None),
        ({}, [], _CONFIDENTIAL, None),
        *(
            ({"attested_services": one}, ["attested services"], _CONFIDENTIAL, None)
            for one in ("none", "snp", "simulated+nvidia")
        ),
    ],
)
def test_what_it_must_claim(
    changes: dict[str, Any], steps: list[str], text: str, expected: Expected | None
) -> None:
    claims = CLAIMS.model_copy(update=changes)
    found = look(snp(claims), claims, expected, text=text)
    assert (failed(found), found.passed) == (steps, not steps)
    names = {step.name for step in found.steps}
    assert ("age" in names, "nonce" in names) == (expected != _CERTIFICATE, expected != _FILE)


GPU = VerifiedNvidia(b"f" * 48, (bytes(48),) * 64, "590.12", "96.00.A5.00.01")
WITH_GPUS = f"""{POLICY}
[nvidia]
measurements = ["{GPU.digest.hex()}"]
driver = ["590.12"]
vbios = ["96.00.A5.00.01"]
"""


def test_gpus_are_genuine_and_there_where_they_are_asked_for_and_nowhere_else() -> None:
    for changes, steps in (
        ({}, []),
        ({"firmware": bytes(48)}, ["GPU 1"]),
        ({"driver": "535.1"}, ["GPU 1: driver"]),
        ({"vbios": "96"}, ["GPU 1: VBIOS"]),
    ):
        gpus = {"0": GPU, "1": GPU._replace(**changes)}
        assert failed(look(snp(CLAIMS), gpus=gpus, text=WITH_GPUS)) == steps
    assert failed(look(snp(CLAIMS), text=WITH_GPUS)) == ["GPUs"]
    assert failed(look(snp(CLAIMS), gpus={"0": GPU})) == ["GPUs"]
    for leaf, step in ((b"leaf", "NVIDIA certificates"), (b"another", "GPUs")):
        claims = CLAIMS.model_copy(update={"gpus": {"0": sha256(leaf).digest()}})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(appraisal, "verify_evidence", lambda *_, of=claims: snp(of))
            found = appraise(stated(claims, ["0"]), policy_of(WITH_GPUS), _FILE)
        assert (failed(found), found.passed) == ([step], False)


def test_what_is_not_genuine_and_claims_of_another_report_are_not_looked_at() -> None:
    found = look(snp(CLAIMS.model_copy(update={"version": "9"})))
    assert (failed(found), found.claims, found.passed) == (["claims"], None, False)
    for kind, where in (("snp", "SNP report"), ("tdx", "TDX"), ("simulated", "simulated report")):
        found = appraise(stated(CLAIMS, kind=kind), policy_of(), _FILE)  # type: ignore[arg-type]
        (step,) = found.steps
        assert step.name.startswith(where)
        assert (found.failure, found.passed) == (step, False)


def test_a_kind_without_a_table_is_refused() -> None:
    for kind, verified in (("snp", snp(CLAIMS)), ("tdx", TDX)):
        parts = [part for part in re.split(r"\n(?=\[)", POLICY) if f"[{kind}]" not in part]
        assert failed(look(verified, text="\n".join(parts))) == ["kind of TEE"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(appraisal, "verify_evidence", lambda *_: snp(CLAIMS))
        found = appraise(stated(CLAIMS), AppraisalPolicy.development(), _FILE)
    assert failed(found) == ["kind of TEE"]


without = partial(str.replace, POLICY)


@each_row(
    ("text", "where"),
    [
        (without('host_data = ["' + HOST_DATA.hex() + '"]', ""), "snp.host_data"),
        (without("genoa = {", "turin = {"), "snp"),
        (without("max_age_s = 60", "max_age = 60"), "max_age"),
        (without("[snp]", "[snp]\nvmpl = true"), "snp.vmpl"),
        (without("microcode = 84", "microcode = 84, fmc = 1"), "snp"),
        (without('2 = "any", 3', "3"), "tdx"),
        (without(CLAIMS.model.hex(), "no hex"), "claims.model"),
        (without("[tdx]", "[simulated]\nmeasurements = 'any'\n[tdx]"), ""),
    ],
)
def test_a_policy_that_leaves_out_or_adds_is_refused(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "appraisal.toml"
    assert text != POLICY
    path.write_text(text)
    with pytest.raises(SettingsError) as refused:
        AppraisalPolicy.load(path)
    assert where in refused.value.where.removeprefix(str(path))


def test_what_is_not_looked_at_says_any() -> None:
    text = re.sub(r"max_age_s = .*", 'max_age_s = "any"', POLICY)
    for name in ("measurements", "host_data", "minimum_tcb"):
        text = re.sub(f"\n{name} = .*", f'\n{name} = "any"', text)
    others = ("vmpl", "debug", "migration_agent", "signing_key", "alias_check", "revocation")
    text = text.replace("[tdx]", "\n".join(f'{name} = "any"' for name in others) + "\n[tdx]")
    odd = {"measurement": bytes(48), "vmpl": 3, "signing_key": "vlek", "alias_check": False}
    odd |= {"debug": True, "migration_agent": True, "host_data": bytes(32), "launch_tcb": bytes(8)}
    claims = CLAIMS.model_copy(update={"time": 0})
    verified = snp(claims, Tcb(0, 0, 0, 0), revocation=False, **odd)
    assert not failed(look(verified, claims, text=text))
