"""Options of a program that proves what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tsqp.cli.settings import PATH


def attest_options(to_whom: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--attest`, `--attest-certificate` and `--attest-collateral`."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        attest = click.option(
            "--attest",
            type=click.Choice(["snp", "tdx", "simulated"]),
            help=f"Prove to {to_whom} what runs here, by evidence of this hardware.",
        )
        certificate = click.option(
            "--attest-certificate",
            type=PATH,
            multiple=True,
            metavar="FILE",
            help="Of AMD's, in DER or PEM, where the host gives none; repeatable.",
        )
        collateral = click.option(
            "--attest-collateral",
            type=PATH,
            metavar="FILE",
            help="TDX: Intel's; SEV-SNP: AMD's CRL.",
        )
        return attest(certificate(collateral(command)))

    return give
