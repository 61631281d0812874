"""Tests of the appraisal: each step has a value that passes and one that fails, with both told."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EvidenceError, SettingsError
from tee_side.attest import appraisal
from tee_side.attest.appraisal import Appraisal, Expected, Verified, appraise
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.claims import Claims, gpu_nonce, report_data
from tee_side.attest.evidence import Evidence, GpuEvidence, Kind
from tee_side.attest.nvidia import VerifiedNvidia
from tee_side.attest.snp import VerifiedSnp
from tee_side.attest.snp_report import SnpReport, Tcb
from tee_side.attest.statement import Statement
from tee_side.attest.tdx import VerifiedTdx
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


def load(folder: Path, text: str) -> AppraisalPolicy:
    """Read a policy as a person's file."""
    path = folder / "appraisal.toml"
    path.write_text(text)
    return AppraisalPolicy.load(path)


def snp(claims: Claims, tcb: Tcb = TCB, *, revocation: bool = True, **changes: Any) -> Verified:
    """Return a report of these claims, as it was verified."""
    report = replace(REPORT, **({"report_data": report_data(claims.encode())} | changes))
    return VerifiedSnp(report, report.product or "genoa", tcb, revocation)


def look(
    policy: AppraisalPolicy,
    verified: Verified,
    claims: Claims = CLAIMS,
    expected: Expected | None = None,
    gpus: Mapping[str, VerifiedNvidia] | None = None,
) -> Appraisal:
    """Appraise what stands for verified evidence."""
    usual = expected or Expected(NONCE, CLAIMS.tls_key, NOW, "serve")
    gpus = gpus or {}
    named = {name: sha256(b"leaf").digest() for name in gpus}
    claims = claims.model_copy(update={"gpus": named})
    if gpus:
        verified = bound_to(verified, claims)

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
        return appraise(stated(claims, gpus), policy, usual)


def bound_to(verified: Verified, claims: Claims) -> Verified:
    """Return what was verified, as evidence of these claims."""
    assert isinstance(verified, VerifiedSnp)
    report = replace(verified.report, report_data=report_data(claims.encode()))
    return verified._replace(report=report)


def stated(claims: Claims, gpus: Iterable[str] = (), kind: Kind = "snp") -> Statement:
    """Return a statement with evidence that would not pass any verification."""
    given = {name: GpuEvidence(report=name.encode(), certificates=(b"leaf",)) for name in gpus}
    evidence = Evidence(kind=kind, report=b"", certificates=(), collateral=b"", gpus=given)
    return Statement(claims=claims.encode(), evidence=evidence.encode())


def failed(found: Appraisal) -> list[str]:
    """Name the steps that failed."""
    return [step.name for step in found.steps if not step.passed]


def test_what_is_asked_for_passes_every_step(tmp_path: Path) -> None:
    found = look(load(tmp_path, POLICY), snp(CLAIMS))
    assert not failed(found)
    assert found.passed
    assert found.claims == CLAIMS
    assert [step.name for step in found.steps] == [
        *("evidence", "claims", "product", "measurement", "host data", "debug", "migration agent"),
        *("VMPL", "signing key", "revocation", "alias check"),
        *("TCB: bootloader", "TCB: tee", "TCB: snp"),
        *("TCB: microcode", "TCB: fmc", "launch TCB: bootloader", "launch TCB: tee"),
        *("launch TCB: snp", "launch TCB: microcode", "launch TCB: fmc", "purpose"),
        *("nonce", "TLS key", "age", "model", "policy", "settings"),
        *("version", "plug-in Mine", "key of service 1", "attested services"),
    ]


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
def test_what_a_guest_of_snp_must_be(
    tmp_path: Path, changes: dict[str, Any], step: str, got: str
) -> None:
    found = look(load(tmp_path, POLICY), snp(CLAIMS, **changes))
    assert failed(found) == [step]
    assert not found.passed
    assert next(one.got for one in found.steps if one.name == step) == got
    assert f"FAIL  {step}: got {got}, expected " in "\n".join(map(str, found.steps))


@each_row(
    ("changes", "step"),
    [
        ({"mrtd": bytes(48)}, "MRTD"),
        ({"rtmr": (bytes(48),) * 4}, "RTMR1"),
        ({"config_id": bytes(48)}, "MRCONFIGID"),
        ({"status": "OutOfDate"}, "TCB status"),
    ],
)
def test_what_a_guest_of_tdx_must_be(tmp_path: Path, changes: dict[str, Any], step: str) -> None:
    policy = load(tmp_path, POLICY)
    assert look(policy, TDX).passed
    assert failed(look(policy, TDX._replace(**changes))) == [step]


@each_row(
    ("changes", "step"),
    [
        ({"nonce": bytes(32)}, "nonce"),
        ({"nonce": b""}, "nonce"),
        ({"tls_key": bytes(32)}, "TLS key"),
        ({"time": CLAIMS.time - 56}, "age"),
        ({"time": CLAIMS.time + 66}, "age"),
        ({"model": bytes(32)}, "model"),
        ({"policy": bytes(32)}, "policy"),
        ({"settings": bytes(32)}, "settings"),
        ({"version": "1.1"}, "version"),
        ({"plugins": {"Mine": bytes(32)}}, "plug-in Mine"),
        ({"plugins": CLAIMS.plugins | {"More": bytes(32)}}, "plug-in More"),
        ({"curve_keys": {"service 1": bytes(32)}}, "key of service 1"),
    ],
)
def test_what_it_must_claim(tmp_path: Path, changes: dict[str, Any], step: str) -> None:
    claims = CLAIMS.model_copy(update=changes)
    assert failed(look(load(tmp_path, POLICY), snp(claims), claims)) == [step]


def test_a_certificate_is_as_old_as_its_server(tmp_path: Path) -> None:
    claims = CLAIMS.model_copy(update={"nonce": b"", "time": 0})
    certified = Expected(b"", CLAIMS.tls_key, NOW, "serve")
    found = look(load(tmp_path, POLICY), snp(claims), claims, certified)
    assert found.passed
    assert "age" not in {step.name for step in found.steps}


def test_a_service_without_a_key_is_seen(tmp_path: Path) -> None:
    claims = CLAIMS.model_copy(update={"curve_keys": {"service 1": bytes(32)}})
    assert failed(look(load(tmp_path, POLICY), snp(claims), claims)) == ["key of service 1"]


def test_clocks_may_be_a_minute_apart(tmp_path: Path) -> None:
    claims = CLAIMS.model_copy(update={"time": round(NOW.timestamp()) + 60})
    assert look(load(tmp_path, POLICY), snp(claims), claims).passed


def test_a_runner_key_is_no_service(tmp_path: Path) -> None:
    policy = load(tmp_path, POLICY.replace(f'["{"73" * 32}"]', "[]"))
    claims = CLAIMS.model_copy(update={"curve_keys": {"runner": bytes(32)}})
    assert look(policy, snp(claims), claims).passed


def test_a_file_has_no_nonce_and_no_connection(tmp_path: Path) -> None:
    found = look(load(tmp_path, POLICY), snp(CLAIMS), expected=Expected(None, None, NOW, "serve"))
    assert found.passed
    assert not {"nonce", "TLS key"} & {step.name for step in found.steps}


def test_gpu_confidential_asks_for_attested_services(tmp_path: Path) -> None:
    policy = load(tmp_path, POLICY.replace("production", "gpu-confidential"))
    assert look(policy, snp(CLAIMS)).passed
    for other in ("none", "snp", "simulated+nvidia"):
        claims = CLAIMS.model_copy(update={"attested_services": other})
        assert failed(look(policy, snp(claims), claims)) == ["attested services"]


def test_services_that_prove_nothing_are_none_outside_development(tmp_path: Path) -> None:
    claims = CLAIMS.model_copy(update={"attested_services": "simulated"})
    policy = load(tmp_path, POLICY)
    assert failed(look(policy, snp(claims), claims)) == ["attested services"]
    for other in ("none", "snp", "tdx", "tdx+nvidia"):
        claims = CLAIMS.model_copy(update={"attested_services": other})
        assert look(policy, snp(claims), claims).passed


GPU = VerifiedNvidia(b"f" * 48, (bytes(48),) * 64, "590.12", "96.00.A5.00.01")
WITH_GPUS = f"""{POLICY}
[nvidia]
measurements = ["{GPU.digest.hex()}"]
driver = ["590.12"]
vbios = ["96.00.A5.00.01"]
"""


@each_row(
    ("changes", "step"),
    [
        ({"firmware": bytes(48)}, "GPU 1"),
        ({"measurements": (b"\x01" * 48,) * 64}, "GPU 1"),
        ({"driver": "535.1"}, "GPU 1: driver"),
        ({"vbios": "96"}, "GPU 1: VBIOS"),
    ],
)
def test_what_each_gpu_must_be(tmp_path: Path, changes: dict[str, Any], step: str) -> None:
    policy = load(tmp_path, WITH_GPUS)
    assert look(policy, snp(CLAIMS), gpus={"0": GPU, "1": GPU}).passed
    other = GPU._replace(**changes)
    assert failed(look(policy, snp(CLAIMS), gpus={"0": GPU, "1": other})) == [step]


def test_gpus_are_there_where_they_are_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    assert failed(look(load(tmp_path, WITH_GPUS), snp(CLAIMS))) == ["GPUs"]
    assert failed(look(load(tmp_path, POLICY), snp(CLAIMS), gpus={"0": GPU})) == ["GPUs"]


def test_a_gpu_whose_report_is_not_genuine_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = CLAIMS.model_copy(update={"gpus": {"0": sha256(b"leaf").digest()}})
    monkeypatch.setattr(appraisal, "verify_evidence", lambda _evidence, _now: snp(claims))
    expected = Expected(None, None, NOW, "serve")
    found = appraise(stated(claims, ["0"]), load(tmp_path, WITH_GPUS), expected)
    assert failed(found) == ["NVIDIA certificates"]
    assert not found.passed


def test_claims_that_the_report_is_not_of_are_not_read(tmp_path: Path) -> None:
    other = CLAIMS.model_copy(update={"version": "9"})
    found = look(load(tmp_path, POLICY), snp(other))
    assert failed(found) == ["claims"]
    assert found.claims is None
    assert not found.passed


def test_evidence_that_is_not_genuine_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(_evidence: Evidence, _now: datetime) -> Verified:
        raise EvidenceError("SNP report: signature", got="a wrong one", expected="its own")

    monkeypatch.setattr(appraisal, "verify_evidence", verify)
    found = appraise(stated(CLAIMS), load(tmp_path, POLICY), Expected(None, None, NOW, "serve"))
    assert [tuple(step) for step in found.steps] == [
        ("SNP report: signature", False, "a wrong one", "its own")
    ]
    assert not found.passed


def test_evidence_is_verified_by_its_kind(tmp_path: Path) -> None:
    policy, expected = load(tmp_path, POLICY), Expected(None, None, NOW, "serve")
    for kind, where in (("snp", "SNP report"), ("tdx", "TDX"), ("simulated", "simulated report")):
        (step,) = appraise(stated(CLAIMS, kind=kind), policy, expected).steps  # type: ignore[arg-type]
        assert step.name.startswith(where)


def test_a_kind_without_a_table_is_refused(tmp_path: Path) -> None:
    table = tomllib.loads(POLICY)
    for kind, verified in (("snp", snp(CLAIMS)), ("tdx", TDX)):
        policy = AppraisalPolicy.model_validate(
            {name: value for name, value in table.items() if name != kind}, strict=False
        )
        found = look(policy, verified)
        assert failed(found) == ["kind of TEE"]


ANY = {
    f'measurements = ["{bytes(48).hex()}", "{MEASUREMENT.hex()}"]': 'measurements = "any"',
    f'host_data = ["{HOST_DATA.hex()}"]': 'host_data = "any"\nvmpl = "any"\ndebug = "any"\n'
    'migration_agent = "any"\nsigning_key = "any"\nalias_check = "any"\nrevocation = "any"',
    "minimum_tcb = { genoa = { bootloader = 10, tee = 0, snp = 23, microcode = 84 } }": (
        'minimum_tcb = "any"'
    ),
    "max_age_s = 60": 'max_age_s = "any"',
}


def test_what_is_not_looked_at_says_any(tmp_path: Path) -> None:
    text = POLICY
    for strict, loose in ANY.items():
        assert strict in text
        text = text.replace(strict, loose)
    claims = CLAIMS.model_copy(update={"time": 0})
    odd = {"measurement": bytes(48), "vmpl": 3, "signing_key": "vlek", "alias_check": False}
    odd |= {"debug": True, "migration_agent": True, "host_data": bytes(32), "tcb": Tcb(0, 0, 0, 0)}
    odd |= {"revocation": False, "launch_tcb": bytes(8)}
    found = look(load(tmp_path, text), snp(claims, **odd), claims)
    assert not failed(found)


without = partial(str.replace, POLICY)


@each_row(
    ("text", "where"),
    [
        (without('host_data = ["' + HOST_DATA.hex() + '"]', ""), "snp.host_data"),
        (without('products = ["genoa"]', ""), "snp.products"),
        (without('products = ["genoa"]', 'products = ["rome"]'), "snp.products.0"),
        (without("genoa = {", "turin = {"), "snp"),
        (without('products = ["genoa"]', 'products = ["genoa", "milan"]'), "snp"),
        (without('version = ["1.0"]', ""), "claims.version"),
        (without("max_age_s = 60", ""), "max_age_s"),
        (without("max_age_s = 60", "max_age = 60"), "max_age"),
        (without("max_age_s = 60", "max_age_s = 0"), "max_age_s"),
        (without("max_age_s = 60", "max_age_s = true"), "max_age_s"),
        (without("[snp]", "[snp]\nvmpl = true"), "snp.vmpl"),
        (without("microcode = 84", "microcode = 84, fmc = 1"), "snp"),
        (without("genoa", "turin"), "snp"),
        (without('2 = "any", 3', "3"), "tdx"),
        (without(f'config_id = ["{"22" * 48}"]', ""), "tdx.config_id"),
        (without('mode = "production"', 'mode = "lax"'), "mode"),
        (without(CLAIMS.model.hex(), "12"), "claims.model"),
        (without(CLAIMS.model.hex(), "no hex"), "claims.model"),
        (without("[tdx]", "[simulated]\nmeasurements = 'any'\n[tdx]"), ""),
        (without("[claims]", "claims"), ""),
    ],
)
def test_a_policy_that_leaves_out_or_adds_is_refused(tmp_path: Path, text: str, where: str) -> None:
    assert text != POLICY
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text)
    assert refused.value.where.startswith(str(tmp_path / "appraisal.toml"))
    assert where in refused.value.where
    assert "function" not in str(refused.value)  # pydantic's own names of types


def test_a_missing_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml: got No such file"):
        AppraisalPolicy.load(tmp_path / "nowhere.toml")


def test_development_accepts_a_simulated_tee_alone(tmp_path: Path) -> None:
    policy = AppraisalPolicy.development()
    assert policy.mode == "development"
    assert policy.snp is None
    assert failed(look(policy, snp(CLAIMS))) == ["kind of TEE"]


def test_age_is_of_the_claims_not_of_the_hardware(tmp_path: Path) -> None:
    late = Expected(NONCE, CLAIMS.tls_key, NOW + timedelta(seconds=56), "serve")
    assert failed(look(load(tmp_path, POLICY), snp(CLAIMS), expected=late)) == ["age"]
