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
import re
from datetime import datetime
from importlib import import_module
from typing import NamedTuple

from protocol.errors import EvidenceError, SettingsError

_FIELDS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3", "report_data", "mr_config_id")
# In the first byte no bit is one of a guest that is left alone; then: a guest that may be migrated.
_OPEN = 0xFF | 1 << 29
# Parts of the library's messages; the rest is not repeated: it may quote what it was given.
_REASONS = "[Ee]xpired|in the future|NotValidYet|Revoked|Debug mode|No matching TCB|Fmspc|JSON"


class VerifiedTdx(NamedTuple):
    """A quote that Intel's key signed; `status`: of the platform's firmware, by Intel's list.

    `mrtd`, `rtmr` 0 to 3, `config_id`: 48 bytes each.
    """

    mrtd: bytes
    rtmr: tuple[bytes, ...]
    report_data: bytes
    config_id: bytes
    status: str


def verify_tdx(quote: bytes, collateral: bytes, now: datetime) -> VerifiedTdx:
    """Verify a quote by collateral; `now`: when, with a time zone.

    Firmware that is out of date is the `status`, for a policy to judge. Raises EvidenceError, and
    SettingsError where `dcap-qvl` is not installed.
    """
    try:
        library = import_module("dcap_qvl")
        given = library.QuoteCollateralV3.from_json(collateral.decode())
        found = json.loads(library.verify(quote, given, int(now.timestamp())).to_json())
    except ImportError:
        raise SettingsError("TDX", got="no dcap-qvl", expected="pip install '.[attest]'") from None
    except ValueError as error:
        reason = re.search(_REASONS, str(error))
        got = reason[0] if reason else "another"
        raise EvidenceError("TDX: quote", got=got, expected="what dcap-qvl verifies") from None
    match found["report"]:
        case {"TD10": dict(body)}:
            service = ""
        case {"TD15": {"base": dict(body), "mr_service_td": str(service)}}:
            pass
        case _:
            raise EvidenceError("TDX: kind of TEE", got="another", expected="TDX 1.0 or 1.5")
    mrtd, *rtmr, data, config_id = (bytes.fromhex(body[name]) for name in _FIELDS)
    attributes = int.from_bytes(bytes.fromhex(body["td_attributes"]), "little")
    # The library refuses debugging as well. A service TD is what migrates a guest.
    EvidenceError.unless(
        not attributes & _OPEN and not service.strip("0"),
        "TDX: attributes",
        "debugging or migration",
        "neither",
    )
    EvidenceError.unless(found["status"] != "Revoked", "TDX: TCB status", "Revoked", "any but that")
    return VerifiedTdx(mrtd, tuple(rtmr), data, config_id, found["status"])
