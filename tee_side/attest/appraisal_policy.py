"""What a reader of evidence asks for, as data: a TOML file.

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

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from protocol.errors import SettingsError, describe
from protocol.validation import first_problem, refusal
from tee_side.attest.snp import Product, SigningKey
from tee_side.plugins import FileCheck, accept_any

Rtmr: TypeAlias = Literal["0", "1", "2", "3"]
Mode: TypeAlias = Literal["development", "production", "gpu-confidential"]
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


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MinimumTcb(_Table):
    """The oldest firmware of a product; `fmc`: of Turin, and of no other."""

    bootloader: Number
    tee: Number
    snp: Number
    microcode: Number
    fmc: Number | None = None


class SnpPolicy(_Table):
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


class TdxPolicy(_Table):
    """What a guest of TDX must be; `rtmr`: by number, "0" to "3"; `config_id`: MRCONFIGID."""

    mrtd: Measurements
    rtmr: dict[Rtmr, Measurements] | NotLookedAt
    config_id: Measurements
    tcb_status: tuple[str, ...] | NotLookedAt = ("UpToDate",)

    @model_validator(mode="after")
    def _each_register(self) -> TdxPolicy:
        if self.rtmr != "any" and len(self.rtmr) < 4:
            raise ValueError('each of rtmr "0" to "3"')
        return self


class SimulatedPolicy(_Table):
    """What a simulated TEE must say of itself."""

    measurements: Measurements


class NvidiaPolicy(_Table):
    """What GPUs must be, each of them; `measurements`: see `VerifiedNvidia.digest`."""

    measurements: Measurements
    driver: tuple[str, ...] | NotLookedAt
    vbios: tuple[str, ...] | NotLookedAt


class ClaimsPolicy(_Table):
    """What must run in it; see Claims. `services`: CURVE keys of it or that it may speak to."""

    model: Digests
    policy: Digests
    settings: Digests
    plugins: Digests
    services: Digests
    version: tuple[str, ...] | NotLookedAt


class AppraisalPolicy(_Table):
    """A policy; a kind of TEE without a table is not accepted."""

    mode: Mode
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
        simulated = {"measurements": "any"}
        said = {"mode": "development", "max_age_s": "any", "simulated": simulated}
        return cls.model_validate(said | {"claims": looked_at})

    @classmethod
    def load(cls, path: Path, check: FileCheck = accept_any) -> AppraisalPolicy:
        """Read a file. Raises SettingsError, and what `check` raises of its path and content."""
        try:
            content = path.read_bytes()
            check(path, content)
            return cls.model_validate(tomllib.loads(content.decode()), strict=False)
        except OSError as error:
            got = error.strerror or type(error).__name__
            raise SettingsError(str(path), got=got, expected="an appraisal policy") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            raise SettingsError(str(path), got="another content", expected="TOML") from None
        except ValidationError as error:
            problem = first_problem(error, cls.model_fields)
            where = f"{path}: {problem.field}" if problem.field else str(path)
            raise SettingsError(where, got=problem.got, expected=problem.expected) from None
