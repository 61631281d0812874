"""Appraises evidence by a policy: whether this is what its reader wants to talk to.

The result is a list of named steps, each of which passed or says what differs.

An appraisal policy says what a reader asks for, as data: a TOML file.

What it leaves out is at its strictest, or refused; what is not to be looked at says "any":

   mode = "production"
   max_age_s = 86400

   [snp]
   measurements = ["..."]      # 96 hexadecimal digits each
   host_data = "any"
   products = ["genoa", "turin"]
   [snp.minimum_tcb]
   genoa = { bootloader = 10, tee = 0, snp = 23, microcode = 84 }
   turin = { bootloader = 1, tee = 1, snp = 4, microcode = 81, fmc = 1 }

   [nvidia]                    # of GPUs of that machine; without it, none are accepted
   measurements = ["..."]      # 96 hexadecimal digits each: firmware and all that it measured
   driver = ["590.48.01"]
   vbios = "any"

   [claims]
   model = ["..."]             # what `tsqp manifest` prints
   policy = ["..."]
   settings = "any"
   version = ["0.1.0"]
   plugins = []
   services = "any"
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, ValidationError, model_validator

from protocol.errors import EvidenceError, SettingsError, describe
from protocol.validation import Strict, first_problem, refusal
from tee_side.attest.guests import (
    Product,
    SigningKey,
    Tcb,
    VerifiedSimulated,
    VerifiedSnp,
    VerifiedTdx,
    verify_simulated,
    verify_snp,
    verify_tdx,
)
from tee_side.attest.nvidia import verify_nvidia
from tee_side.attest.statement import Claims, Evidence, Purpose, Statement, gpu_nonce, report_data
from tee_side.plugins import FileCheck, accept_any

if TYPE_CHECKING:
    from protocol.curve import ClientKeys
    from tee_side.words import Attested

_CLOCKS_APART_S = 60

NotLookedAt: TypeAlias = Literal["any"]


def _digests(size: int) -> BeforeValidator:
    """Return what reads a list of digests of so many bytes, or "any"."""
    digest = f"[0-9a-fA-F]{{{2 * size}}}"

    def read(value: object) -> object:
        texts = value if isinstance(value, list) else [None]
        if value == "any":
            return value
        if all(isinstance(text, str) and re.fullmatch(digest, text) for text in texts):
            return tuple(map(bytes.fromhex, texts))
        expected = f'a list of texts of {2 * size} hexadecimal digits, or "any"'
        raise refusal(describe(value), expected)

    return BeforeValidator(read)


def _number(least: int, *others: str) -> BeforeValidator:
    """Return what reads a whole number of at least so much, or one of the others."""

    def read(value: object) -> object:
        if (type(value) is int and value >= least) or value in others:
            return value
        raise refusal(describe(value), " or ".join([f"a whole number from {least} on", *others]))

    return BeforeValidator(read)


Number: TypeAlias = Annotated[int, _number(0)]
Digests: TypeAlias = Annotated[tuple[bytes, ...] | NotLookedAt, _digests(32)]
Measurements: TypeAlias = Annotated[tuple[bytes, ...] | NotLookedAt, _digests(48)]


class MinimumTcb(Strict):
    """The oldest firmware of a product; `fmc`: of Turin, and of no other."""

    bootloader: Number
    tee: Number
    snp: Number
    microcode: Number
    fmc: Number | None = None


class SnpPolicy(Strict):
    """What a guest of SEV-SNP must be.

    Milan is accepted where it is named alone: its root of trust was extracted in software in 2026.
    `revocation`: whether AMD's list of revoked certificates has to come with the evidence.
    """

    measurements: Measurements
    host_data: Digests
    products: tuple[Product, ...]
    minimum_tcb: dict[Product, MinimumTcb] | NotLookedAt
    revocation: Literal["checked", "any"] = "checked"
    signing_key: SigningKey | NotLookedAt = "vcek"
    vmpl: Annotated[int | NotLookedAt, _number(0, "any")] = 0
    debug: Literal["off", "any"] = "off"
    migration_agent: Literal["off", "any"] = "off"
    alias_check: Literal["done", "any"] = "done"

    @model_validator(mode="after")
    def _each_product_has_a_minimum(self) -> SnpPolicy:
        if self.minimum_tcb != "any" and set(self.minimum_tcb) != set(self.products):
            raise ValueError("a minimum_tcb for each of the products, and no other")
        for product, least in () if self.minimum_tcb == "any" else self.minimum_tcb.items():
            if (least.fmc is None) == (product == "turin"):
                raise ValueError("fmc in the minimum_tcb of turin, and of no other")
        return self


class TdxPolicy(Strict):
    """What a guest of TDX must be; `rtmr`: by number, "0" to "3"; `config_id`: MRCONFIGID."""

    mrtd: Measurements
    rtmr: dict[Literal["0", "1", "2", "3"], Measurements] | NotLookedAt
    config_id: Measurements
    tcb_status: tuple[str, ...] | NotLookedAt = ("UpToDate",)

    @model_validator(mode="after")
    def _each_register(self) -> TdxPolicy:
        if self.rtmr != "any" and len(self.rtmr) < 4:
            raise ValueError('each of rtmr "0" to "3"')
        return self


class SimulatedPolicy(Strict):
    """What a simulated TEE must say of itself."""

    measurements: Measurements


class NvidiaPolicy(Strict):
    """What GPUs must be, each of them; `measurements`: see `VerifiedNvidia.digest`."""

    measurements: Measurements
    driver: tuple[str, ...] | NotLookedAt
    vbios: tuple[str, ...] | NotLookedAt


class ClaimsPolicy(Strict):
    """What must run in it; see Claims. `services`: CURVE keys of it or that it may speak to."""

    model: Digests
    policy: Digests
    settings: Digests
    plugins: Digests
    services: Digests
    version: tuple[str, ...] | NotLookedAt


class AppraisalPolicy(Strict):
    """A policy; a kind of TEE without a table is not accepted."""

    mode: Literal["development", "production", "gpu-confidential"]
    max_age_s: Annotated[int | NotLookedAt, _number(1, "any")]
    claims: ClaimsPolicy
    snp: SnpPolicy | None = None
    tdx: TdxPolicy | None = None
    simulated: SimulatedPolicy | None = None
    nvidia: NvidiaPolicy | None = None

    @model_validator(mode="after")
    def _simulated_in_development_alone(self) -> AppraisalPolicy:
        if self.simulated is not None and self.mode != "development":
            raise ValueError('no table [simulated] but where mode = "development"')
        return self

    @classmethod
    def development(cls) -> AppraisalPolicy:
        """Return what accepts any simulated TEE: it shows that parts fit, and proves nothing."""
        looked_at = dict.fromkeys(ClaimsPolicy.model_fields, "any")
        said = {"mode": "development", "max_age_s": "any", "simulated": {"measurements": "any"}}
        return cls.model_validate(said | {"claims": looked_at})

    @classmethod
    def load(cls, path: Path, check: FileCheck = accept_any) -> AppraisalPolicy:
        """Read a file. Raises SettingsError, and what `check` raises of its path and content."""
        with SettingsError.for_os(str(path), "an appraisal policy"):
            content = path.read_bytes()
        check(path, content)
        try:
            return cls.model_validate(tomllib.loads(content.decode()), strict=False)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            raise SettingsError(str(path), got="another content", expected="TOML") from None
        except ValidationError as error:
            problem = first_problem(error, cls.model_fields)
            where = f"{path}: {problem.field}" if problem.field else str(path)
            raise SettingsError(where, got=problem.got, expected=problem.expected) from None


Verified: TypeAlias = VerifiedSnp | VerifiedTdx | VerifiedSimulated


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
            steps += _platform_steps(evidence.kind, verified, policy)
            steps += _gpu_steps(evidence, found, gpu_nonce(stated.claims), policy, expected.now)
            steps += _claim_steps(found, policy, expected)
    except EvidenceError as error:
        steps.append(AppraisalStep(error.where, False, error.got, error.expected))
    return Appraisal(tuple(steps), claims)


def appraise_service(
    attested: Attested,
    policy: AppraisalPolicy,
    endpoint: str,
    keys: ClientKeys | None,
    statement: bytes,
    nonce: bytes,
    *,
    utc: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> None:
    """Appraise what a service states of itself for a nonce, before anything secret is sent to it.

    `attested`: by which evidence, as a policy says (`[service] attested`). Its claims name the key
    of the link that it comes by, and that link is encrypted with it: what else copies the evidence
    can neither read nor answer. `keys`: of that link. Raises EvidenceError.
    """
    from zmq.utils import z85  # of no use to who appraises no services

    where = f"service {endpoint}"
    EvidenceError.unless(statement, where, "none", f"{attested} evidence (gpu-service --attest)")
    stated = Statement.decode(statement)
    found = appraise(stated, policy, Expected(nonce, None, utc(), "service"))
    if not found.passed or found.claims is None:
        step = found.failure
        raise EvidenceError(f"{where}: {step.name}", step.got, step.expected)
    evidence = Evidence.decode(stated.evidence)
    given = f"{evidence.kind}{'+nvidia' if evidence.gpus else ''}"
    EvidenceError.unless(given == attested, f"{where}: evidence", given, attested)
    # Alone: what names others as well is the evidence of a runner.
    own = keys and {"service": z85.decode(keys.service)}
    alone = own is not None and found.claims.curve_keys == own
    EvidenceError.unless(alone, f"{where}: key", "another", "that of its link, alone")


def verify_evidence(evidence: Evidence, now: datetime) -> Verified:
    """Verify evidence of any kind by the roots that are pinned. Raises EvidenceError."""
    if evidence.kind == "snp":
        return verify_snp(evidence.report, evidence.certificates, now, evidence.collateral or None)
    if evidence.kind == "tdx":
        return verify_tdx(evidence.report, evidence.collateral, now)
    return verify_simulated(evidence.report)


def _platform_steps(
    kind: str, verified: Verified, policy: AppraisalPolicy
) -> Iterator[AppraisalStep]:
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
            kinds = [name for name in ("snp", "tdx", "simulated") if getattr(policy, name)]
            expected = " or ".join(kinds) or "none"
            yield AppraisalStep("kind of TEE", False, kind, f"{expected} (mode {policy.mode})")


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
        yield AppraisalStep("TCB", True, str(verified.tcb), "any")
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
    passed = allowed == "any" or got in among
    return AppraisalStep(name, passed, _words(got), " or ".join(map(_words, among)) or "none")


def _words(value: object) -> str:
    return (value.hex() if isinstance(value, bytes) else str(value)) or "none"
