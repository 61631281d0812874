"""Genuine evidence of hardware, which lies beside the repository where it is there at all."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

VECTORS = Path(__file__).parents[2] / "shared" / "vectors"

needs_vectors = pytest.mark.skipif(
    not VECTORS.is_dir(), reason="the vectors of attestation are not beside the repository"
)

_PEM = re.compile(r"-----BEGIN (?:CERTIFICATE|X509 CRL)-----(.*?)-----END", re.DOTALL)


def read_pem(path: str) -> list[bytes]:
    """Return what a file of PEM below VECTORS holds, in DER."""
    text = (VECTORS / path).read_text()
    return [base64.b64decode(content) for content in _PEM.findall(text)]


def read_bytes(path: str) -> bytes:
    """Return what a file below VECTORS holds."""
    return (VECTORS / path).read_bytes()
