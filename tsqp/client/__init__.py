"""Reaches a server that proves what it is, before anything secret is sent."""

from tee_side.attest.appraisal_policy import AppraisalPolicy
from tsqp.client.attested_tls import AttestedContext, NotAttestedError, Proved
from tsqp.client.connection import Connection, connect

__all__ = [
    "AppraisalPolicy",
    "AttestedContext",
    "Connection",
    "NotAttestedError",
    "Proved",
    "connect",
]
