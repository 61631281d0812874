"""Verifies quotes of Intel TDX, versions 4 and 5, by the package `dcap-qvl`, without a network.

Collateral is what Intel signs about platforms, as the JSON that `dcap-qvl` writes: the newest
firmware, which certificates are revoked. It comes from the other side and expires after 30 days, so
that it may hide what Intel has found for as long.

Bytes that dcap-qvl 0.7.0 does not look at change nothing of the result. In a quote: the type of its
outer certification data, low bits of two lengths, line breaks and texts between certificates, the
copy of Intel's root certificate, all behind that. In collateral: `pck_crl_issuer_chain`, and in
other chains line breaks and the copy of the root.

Source: Intel, "Intel TDX DCAP: Quote Generation Library and Quote Verification Library", appendix A
(quotes), and "Intel Trust Domain Extensions Module Base Architecture Specification" (ATTRIBUTES).
"""

from __future__ import annotations

import json
from datetime import datetime
from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple

from protocol.errors import EvidenceError, SettingsError

_FIELDS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3", "report_data", "mr_config_id")
_MIGRATABLE = 1 << 29
# Parts of the library's messages, which are not repeated: they may quote what it was given.
_REASONS = {
    "xpired": "collateral or certificates that have expired",
    "in the future": "collateral that is not valid yet",
    "NotValidYet": "certificates that are not valid yet",
    "Revoked": "a certificate that is revoked",
    "Debug mode": "a guest that its host may debug",
    "No matching TCB level": "firmware older than any that Intel lists",
    "Fmspc": "collateral of another platform",
    "parse JSON": "collateral of another form",
}


class VerifiedTdx(NamedTuple):
    """A quote that Intel's key signed; `status`: of the platform's firmware, by Intel's list.

    `mrtd`, `rtmr`, `config_id`: 48 bytes each. `advisories`: Intel's names of what is known of such
    firmware.
    """

    mrtd: bytes
    rtmr: tuple[bytes, bytes, bytes, bytes]
    report_data: bytes
    config_id: bytes
    status: str
    advisories: tuple[str, ...] = ()
    kind: Literal["tdx"] = "tdx"


def verify_tdx(quote: bytes, collateral: bytes, now: datetime) -> VerifiedTdx:
    """Verify a quote by collateral; `now`: when, with a time zone.

    Firmware that is out of date is the `status`, for a policy to judge. Raises EvidenceError, and
    SettingsError where `dcap-qvl` is not installed.
    """
    library = _dcap_qvl()
    try:
        given = library.QuoteCollateralV3.from_json(collateral.decode())
        found = json.loads(library.verify(quote, given, int(now.timestamp())).to_json())
    except ValueError as error:
        text = str(error)
        got = next((_REASONS[part] for part in _REASONS if part in text), "another")
        raise _refused("quote", got, "one that Intel's keys signed") from None
    match found["report"]:
        case {"TD10": dict(body)}:
            migrates = False
        case {"TD15": {"base": dict(body), "mr_service_td": str(service)}}:
            migrates = any(bytes.fromhex(service))
        case _:
            raise _refused("kind of TEE", "another", "TDX 1.0 or 1.5")
    mrtd, *rtmr, data, config_id = (bytes.fromhex(body[name]) for name in _FIELDS)
    attributes = int.from_bytes(bytes.fromhex(body["td_attributes"]), "little")
    if migrates or attributes & _MIGRATABLE:
        raise _refused("attributes", "a guest that may be migrated", "one that may not")
    # The library refuses it as well. No bit of this byte is one of a guest that is left alone.
    if attributes & 0xFF:
        raise _refused("attributes", "a guest that its host may debug", "one that it may not")
    if found["status"] == "Revoked":
        raise _refused("TCB status", "Revoked", "firmware that Intel has not revoked")
    return VerifiedTdx(
        mrtd,
        (rtmr[0], rtmr[1], rtmr[2], rtmr[3]),
        data,
        config_id,
        found["status"],
        tuple(found["advisory_ids"]),
    )


def _dcap_qvl() -> ModuleType:
    try:
        return import_module("dcap_qvl")
    except ImportError as error:
        expected = "the extra attest: pip install '.[attest]'"
        raise SettingsError("quotes of TDX", got=str(error), expected=expected) from None


def _refused(what: str, got: str, expected: str) -> EvidenceError:
    return EvidenceError(f"TDX: {what}", got=got, expected=expected)
