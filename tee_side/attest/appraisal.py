"""Appraises evidence by a policy: whether this is what its reader wants to talk to.

The result is a list of named steps, each of which passed or says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias

from protocol.errors import EvidenceError
from tee_side.attest.appraisal_policy import AppraisalPolicy, SimulatedPolicy, SnpPolicy, TdxPolicy
from tee_side.attest.claims import Claims, report_data
from tee_side.attest.evidence import Evidence
from tee_side.attest.simulated import VerifiedSimulated, verify_simulated
from tee_side.attest.snp import VerifiedSnp, verify_snp
from tee_side.attest.snp_report import Tcb
from tee_side.attest.tdx import VerifiedTdx, verify_tdx

Verified: TypeAlias = VerifiedSnp | VerifiedTdx | VerifiedSimulated

_CLOCKS_APART_S = 60
_ANY = "any"
# It is as old as its server, and new evidence over the same connection follows.
_OF_A_CERTIFICATE = b""


class Step(NamedTuple):
    """One thing that was looked at, and what was found; `expected`: what its reader asked for."""

    name: str
    passed: bool
    got: str
    expected: str

    def __str__(self) -> str:
        """Return a line for people."""
        if self.passed:
            return f"pass  {self.name}: {self.got}"
        return f"FAIL  {self.name}: got {self.got}, expected {self.expected}"


class Appraisal(NamedTuple):
    """What came of it. `claims`: None unless the evidence is genuine, and of these claims."""

    steps: tuple[Step, ...]
    claims: Claims | None

    @property
    def passed(self) -> bool:
        """Whether every step did."""
        return self.claims is not None and all(step.passed for step in self.steps)


class Expected(NamedTuple):
    """What the reader knows by itself.

    `nonce`: its own, empty for a certificate; `tls_key`: of the connection, SHA-256 of the public
    key. None: of a file, whose reader has neither. `now`: with a time zone.
    """

    nonce: bytes | None
    tls_key: bytes | None
    now: datetime


def appraise(
    evidence: Evidence,
    claims: bytes,
    policy: AppraisalPolicy,
    expected: Expected,
    verify: Callable[[Evidence, datetime], Verified] | None = None,
) -> Appraisal:
    """Verify evidence, and compare it and its claims with a policy; for neither is an error raised.

    What is not genuine is not looked at any further. `verify`: see `verify_evidence`.
    """
    try:
        verified = (verify or verify_evidence)(evidence, expected.now)
        found = Claims.decode(claims)
    except EvidenceError as error:
        return Appraisal((Step(error.where, False, error.got, error.expected),), None)
    steps = [Step("evidence", True, f"{evidence.kind}, genuine", "genuine")]
    bound = verified.report_data == report_data(claims)
    steps.append(Step("claims", bound, "bound" if bound else "others", "what the report is of"))
    if not bound:
        return Appraisal(tuple(steps), None)
    steps += _platform_steps(verified, policy)
    steps += _claim_steps(found, policy, expected)
    return Appraisal(tuple(steps), found)


def verify_evidence(evidence: Evidence, now: datetime) -> Verified:
    """Verify evidence of any kind by the roots that are pinned. Raises EvidenceError."""
    if evidence.kind == "snp":
        return verify_snp(evidence.report, evidence.certificates, now, evidence.collateral or None)
    if evidence.kind == "tdx":
        return verify_tdx(evidence.report, evidence.collateral, now)
    return verify_simulated(evidence.report)


def _platform_steps(verified: Verified, policy: AppraisalPolicy) -> Iterator[Step]:
    match verified, policy:
        case VerifiedSnp(), AppraisalPolicy(snp=SnpPolicy() as table):
            yield from _snp_steps(verified, table)
        case VerifiedTdx(), AppraisalPolicy(tdx=TdxPolicy() as table):
            yield from _tdx_steps(verified, table)
        case VerifiedSimulated(), AppraisalPolicy(simulated=SimulatedPolicy() as table):
            yield _among("measurement", verified.measurement, table.measurements)
        case _:
            kinds = [kind for kind in ("snp", "tdx", "simulated") if getattr(policy, kind)]
            expected = " or ".join(kinds) or "none"
            yield Step("kind of TEE", False, verified.kind, f"{expected} (mode {policy.mode})")


def _snp_steps(verified: VerifiedSnp, table: SnpPolicy) -> Iterator[Step]:
    report = verified.report
    yield _among("product", verified.product, table.products)
    yield _among("measurement", report.measurement, table.measurements)
    yield _among("host data", report.host_data, table.host_data)
    yield _equal("debug", "on" if report.policy.debug else "off", table.debug)
    agent = "allowed" if report.policy.migration_agent else "off"
    yield _equal("migration agent", agent, table.migration_agent)
    yield _equal("VMPL", report.vmpl, table.vmpl)
    yield _equal("signing key", report.signing_key, table.signing_key)
    checked = "checked" if verified.revocation_checked else "not checked"
    passed = verified.revocation_checked or table.revocation == _ANY
    yield Step("revocation", passed, checked, table.revocation)
    yield _equal("alias check", "done" if report.alias_check else "not done", table.alias_check)
    if isinstance(table.minimum_tcb, str):
        yield Step("TCB", True, str(verified.tcb), _ANY)
    elif (least := table.minimum_tcb.get(verified.product)) is not None:
        # Firmware may be made newer under a guest; what it was launched by counts as well.
        launched = Tcb.parse(report.launch_tcb, verified.product)
        for what, tcb in ("TCB", verified.tcb), ("launch TCB", launched):
            for name, number in tcb._asdict().items():
                wanted = getattr(least, name) or 0
                yield Step(f"{what}: {name}", number >= wanted, str(number), f"{wanted} or more")


def _tdx_steps(verified: VerifiedTdx, table: TdxPolicy) -> Iterator[Step]:
    yield _among("MRTD", verified.mrtd, table.mrtd)
    for number, allowed in () if isinstance(table.rtmr, str) else table.rtmr.items():
        yield _among(f"RTMR{number}", verified.rtmr[int(number)], allowed)
    yield _among("MRCONFIGID", verified.config_id, table.config_id)
    yield _among("TCB status", verified.status, table.tcb_status)


def _claim_steps(claims: Claims, policy: AppraisalPolicy, expected: Expected) -> Iterator[Step]:
    table = policy.claims
    if expected.nonce is not None:
        same = claims.nonce == expected.nonce
        own = "the one that was sent" if expected.nonce else "none, as in a certificate"
        yield Step("nonce", same, own if same else "another", own)
    if expected.tls_key is not None:
        same = claims.tls_key == expected.tls_key
        yield Step("TLS key", same, "of the connection" if same else "another", "of the connection")
    if expected.nonce != _OF_A_CERTIFICATE:
        age_s = round(expected.now.timestamp()) - claims.time
        most = math.inf if isinstance(policy.max_age_s, str) else policy.max_age_s
        fresh = -_CLOCKS_APART_S <= age_s <= most
        yield Step("age", fresh, f"{age_s} s", f"{most} s at most")
    yield _among("model", claims.model, table.model)
    yield _among("policy", claims.policy, table.policy)
    yield _among("settings", claims.settings, table.settings)
    yield _among("version", claims.version, table.version)
    yield _each_among("plug-in", claims.plugins.values(), table.plugins)
    services = [key for owner, key in claims.curve_keys.items() if owner != "runner"]
    yield _each_among("service key", services, table.services)
    if policy.mode == "gpu-confidential":
        got = claims.attested_services
        yield Step("attested services", got != "none", got, "services that are attested")


def _equal(name: str, got: object, wanted: object) -> Step:
    return Step(name, wanted in (_ANY, got), str(got), str(wanted))


def _among(name: str, got: bytes | str, allowed: Collection[bytes | str] | Literal["any"]) -> Step:
    if isinstance(allowed, str):
        return Step(name, True, _words(got), _ANY)
    return Step(name, got in allowed, _words(got), " or ".join(map(_words, allowed)) or "none")


def _each_among(
    name: str, found: Collection[bytes], allowed: Collection[bytes] | Literal["any"]
) -> Step:
    """Compare several at once: the step names the first that is not allowed."""
    others = [one for one in found if not isinstance(allowed, str) and one not in allowed]
    if others:
        return _among(name, others[0], allowed)
    return Step(name, True, ", ".join(map(_words, found)) or "none", _ANY)


def _words(value: bytes | str) -> str:
    return value.hex() if isinstance(value, bytes) else value
