"""The table [snp] of an appraisal policy, for clients of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from protocol.errors import SettingsError
from tee_side.attest.appraisal_policy import MinimumTcb
from tee_side.attest.snp_report import Product

_PARTS = ("bootloader", "tee", "snp", "microcode", "fmc")


def read_minimum(texts: Sequence[str]) -> dict[str, MinimumTcb]:
    """Read PRODUCT=BOOTLOADER,TEE,SNP,MICROCODE[,FMC], each product once. Raises SettingsError."""
    found: dict[str, MinimumTcb] = {}
    for text in texts:
        product, _, numbers = text.partition("=")
        parts = numbers.split(",")
        wanted = len(_PARTS) if product == "turin" else len(_PARTS) - 1
        well_formed = len(parts) == wanted and all(p.isascii() and p.isdigit() for p in parts)
        if product in found or product not in get_args(Product) or not well_formed:
            expected = "each product once, such as genoa=10,0,23,84 or turin=1,1,4,81,1"
            raise SettingsError("--minimum-tcb", got=text, expected=expected)
        values = dict(zip(_PARTS, map(int, parts), strict=False))
        found[product] = MinimumTcb.model_validate(values)
    return found


def snp_table(measurement: bytes, host_data: bytes, minimum: Mapping[str, MinimumTcb]) -> str:
    """Return the table, as TOML: this measurement and host data, firmware from `minimum` on."""
    products = ", ".join(f'"{product}"' for product in minimum)
    lines = [
        "[snp]",
        f'measurements = ["{measurement.hex()}"]',
        f'host_data = ["{host_data.hex()}"]',
        f"products = [{products}]",
        "[snp.minimum_tcb]",
    ]
    for product, least in minimum.items():
        said = least.model_dump(exclude_none=True)
        values = ", ".join(f"{name} = {value}" for name, value in said.items())
        lines.append(f"{product} = {{ {values} }}")
    return "\n".join(lines) + "\n"
