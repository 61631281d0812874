"""Appraises evidence by a policy: whether this is what its reader wants to talk to.

The result is a list of named steps, each of which passed or says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from hashlib import sha256
from itertools import starmap
from typing import NamedTuple, TypeAlias

from protocol.errors import EvidenceError
from tee_side.attest.appraisal_policy import AppraisalPolicy, SimulatedPolicy, SnpPolicy, TdxPolicy
from tee_side.attest.attesters import VerifiedSimulated, verify_simulated
from tee_side.attest.nvidia import verify_nvidia
from tee_side.attest.snp import Tcb, VerifiedSnp, verify_snp
from tee_side.attest.statement import Claims, Evidence, Purpose, Statement, gpu_nonce, report_data
from tee_side.attest.tdx import VerifiedTdx, verify_tdx

Verified: TypeAlias = VerifiedSnp | VerifiedTdx | VerifiedSimulated

_CLOCKS_APART_S = 60
_ANY = "any"


class AppraisalStep(NamedTuple):
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

    steps: tuple[AppraisalStep, ...]
    claims: Claims | None

    @property
    def passed(self) -> bool:
        """Whether every step did."""
        return self.claims is not None and all(step.passed for step in self.steps)

    @property
    def failure(self) -> AppraisalStep:
        """The first step that failed; of one that passed there is none (StopIteration)."""
        return next(step for step in self.steps if not step.passed)


class Expected(NamedTuple):
    """What the reader knows by itself.

    `nonce`: its own, empty for a certificate; `tls_key`: of the connection, SHA-256 of the public
    key. None: of a file, whose reader has neither. `now`: with a time zone. `purpose`: for which
    it reads evidence.
    """

    nonce: bytes | None
    tls_key: bytes | None
    now: datetime
    purpose: Purpose


def appraise(stated: Statement, policy: AppraisalPolicy, expected: Expected) -> Appraisal:
    """Verify evidence, and compare it and its claims with a policy; for neither is an error raised.

    What is not genuine is not looked at any further.
    """
    steps, claims = list[AppraisalStep](), None
    try:
        evidence = Evidence.decode(stated.evidence)
        verified = verify_evidence(evidence, expected.now)
        found = Claims.decode(stated.claims)
        steps.append(AppraisalStep("evidence", True, f"{evidence.kind}, genuine", "genuine"))
        bound = verified.report_data == report_data(stated.claims)
        steps.append(
            AppraisalStep("claims", bound, "bound" if bound else "others", "what the report is of")
        )
        if bound:
            claims = found
            steps += _platform_steps(verified, policy)
            steps += _gpu_steps(evidence, found, gpu_nonce(stated.claims), policy, expected.now)
            steps += _claim_steps(found, policy, expected)
    except EvidenceError as error:
        steps.append(AppraisalStep(error.where, False, error.got, error.expected))
    return Appraisal(tuple(steps), claims)


def verify_evidence(evidence: Evidence, now: datetime) -> Verified:
    """Verify evidence of any kind by the roots that are pinned. Raises EvidenceError."""
    if evidence.kind == "snp":
        return verify_snp(evidence.report, evidence.certificates, now, evidence.collateral or None)
    if evidence.kind == "tdx":
        return verify_tdx(evidence.report, evidence.collateral, now)
    return verify_simulated(evidence.report)


def _platform_steps(verified: Verified, policy: AppraisalPolicy) -> Iterator[AppraisalStep]:
    match verified, policy:
        case VerifiedSnp(), AppraisalPolicy(snp=SnpPolicy() as table):
            yield from _snp_steps(verified, table)
        case VerifiedTdx(), AppraisalPolicy(tdx=TdxPolicy() as table):
            registers = () if isinstance(table.rtmr, str) else table.rtmr.items()
            yield from _steps(
                ("MRTD", verified.mrtd, table.mrtd),
                *((f"RTMR{n}", verified.rtmr[int(n)], allowed) for n, allowed in registers),
                ("MRCONFIGID", verified.config_id, table.config_id),
                ("TCB status", verified.status, table.tcb_status),
            )
        case VerifiedSimulated(), AppraisalPolicy(simulated=SimulatedPolicy() as table):
            yield _step("measurement", verified.measurement, table.measurements)
        case _:
            kinds = [kind for kind in ("snp", "tdx", "simulated") if getattr(policy, kind)]
            expected = " or ".join(kinds) or "none"
            yield AppraisalStep(
                "kind of TEE", False, verified.kind, f"{expected} (mode {policy.mode})"
            )


def _snp_steps(verified: VerifiedSnp, table: SnpPolicy) -> Iterator[AppraisalStep]:
    report = verified.report
    agent = "allowed" if report.migration_agent else "off"
    checked = "checked" if verified.revocation_checked else "not checked"
    yield from _steps(
        ("product", verified.product, table.products),
        ("measurement", report.measurement, table.measurements),
        ("host data", report.host_data, table.host_data),
        ("debug", "on" if report.debug else "off", table.debug),
        ("migration agent", agent, table.migration_agent),
        ("VMPL", report.vmpl, table.vmpl),
        ("signing key", report.signing_key, table.signing_key),
        ("revocation", checked, table.revocation),
        ("alias check", "done" if report.alias_check else "not done", table.alias_check),
    )
    if isinstance(table.minimum_tcb, str):
        yield AppraisalStep("TCB", True, str(verified.tcb), _ANY)
    elif (least := table.minimum_tcb.get(verified.product)) is not None:
        # Firmware may be made newer under a guest; what it was launched by counts as well.
        launched = Tcb.parse(report.launch_tcb, verified.product)
        for what, tcb in ("TCB", verified.tcb), ("launch TCB", launched):
            for name, number in tcb._asdict().items():
                wanted = getattr(least, name) or 0
                yield AppraisalStep(
                    f"{what}: {name}", number >= wanted, str(number), f"{wanted} or more"
                )


def _gpu_steps(
    evidence: Evidence, claims: Claims, nonce: bytes, policy: AppraisalPolicy, now: datetime
) -> Iterator[AppraisalStep]:
    table = policy.nvidia
    leaves = {name: sha256(gpu.certificates[0]).digest() for name, gpu in evidence.gpus.items()}
    if bool(leaves) != (table is not None) or leaves != claims.gpus:
        wanted = ", ".join(claims.gpus) or ("none" if table is None else "some")
        yield AppraisalStep(
            "GPUs", False, ", ".join(leaves) or "none", f"{wanted}, those of the claims"
        )
    elif table is not None:
        for name, gpu in evidence.gpus.items():
            found = verify_nvidia(gpu.report, gpu.certificates, nonce, now)
            yield from _steps(
                (f"GPU {name}", found.digest, table.measurements),
                (f"GPU {name}: driver", found.driver, table.driver),
                (f"GPU {name}: VBIOS", found.vbios, table.vbios),
            )


def _claim_steps(
    claims: Claims, policy: AppraisalPolicy, expected: Expected
) -> Iterator[AppraisalStep]:
    table = policy.claims
    yield _step("purpose", claims.purpose, expected.purpose)
    if expected.nonce is not None:
        yield _step("nonce", claims.nonce, expected.nonce)
    if expected.tls_key is not None:
        yield _step("TLS key", claims.tls_key, expected.tls_key)
    # A certificate is as old as its server, and new evidence over the same connection follows.
    if expected.nonce != b"":
        age_s = round(expected.now.timestamp()) - claims.time
        most = math.inf if isinstance(policy.max_age_s, str) else policy.max_age_s
        fresh = -_CLOCKS_APART_S <= age_s <= most
        yield AppraisalStep("age", fresh, f"{age_s} s", f"{most} s at most")
    names, keys = ("model", "policy", "settings", "version"), claims.curve_keys.items()
    yield from _steps(
        *((name, getattr(claims, name), getattr(table, name)) for name in names),
        *((f"plug-in {name}", digest, table.plugins) for name, digest in claims.plugins.items()),
        *((f"key of {owner}", key, table.services) for owner, key in keys if owner != "runner"),
    )
    if policy.mode != "development":
        confidential = ("snp+nvidia", "tdx+nvidia")
        others = () if policy.mode == "gpu-confidential" else ("none", "snp", "tdx")
        yield _step("attested services", claims.attested_services, (*confidential, *others))


def _steps(*rows: tuple[str, object, object]) -> Iterator[AppraisalStep]:
    """Compare what is named with what is allowed, row by row."""
    return starmap(_step, rows)


def _step(name: str, got: object, allowed: object) -> AppraisalStep:
    """Compare with one value, with several, or with none of them ("any")."""
    among = allowed if isinstance(allowed, tuple) else (allowed,)
    passed = allowed == _ANY or got in among
    return AppraisalStep(name, passed, _words(got), " or ".join(map(_words, among)) or "none")


def _words(value: object) -> str:
    return (value.hex() if isinstance(value, bytes) else str(value)) or "none"
