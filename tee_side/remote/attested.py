"""Has services prove what they are, before anything secret is sent to them.

A policy says by which evidence (`[service] attested`), an appraisal policy what it must say. The
evidence is new, of a nonce of ours. Its claims name the key of the link that it comes by, and that
link is encrypted with it: what else copies the evidence can neither read nor answer.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from zmq.utils import z85

from protocol.curve import ClientKeys
from protocol.errors import EvidenceError
from tee_side.attest.appraisal import AppraisalPolicy, Expected, appraise
from tee_side.attest.statement import Evidence, Statement
from tee_side.words import Attested


class ServiceAppraisal:
    """Appraises services. `attested`: by which evidence; `policy`: what it must say."""

    def __init__(
        self,
        attested: Attested,
        policy: AppraisalPolicy,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._attested, self._policy, self._utc = attested, policy, utc

    def __call__(
        self, endpoint: str, keys: ClientKeys | None, statement: bytes, nonce: bytes
    ) -> None:
        """Appraise what a service states of itself for a nonce.

        `keys`: of the link that it came by. Raises EvidenceError.
        """
        where = f"service {endpoint}"
        expected = f"{self._attested} evidence (gpu-service --attest)"
        EvidenceError.unless(statement, where, "none", expected)
        stated = Statement.decode(statement)
        found = appraise(stated, self._policy, Expected(nonce, None, self._utc(), "service"))
        if not found.passed or found.claims is None:
            step = found.failure
            raise EvidenceError(f"{where}: {step.name}", step.got, step.expected)
        evidence = Evidence.decode(stated.evidence)
        given = f"{evidence.kind}{'+nvidia' if evidence.gpus else ''}"
        EvidenceError.unless(given == self._attested, f"{where}: evidence", given, self._attested)
        # Alone: what names others as well is the evidence of a runner.
        own = keys and {"service": z85.decode(keys.service)}
        alone = own is not None and found.claims.curve_keys == own
        EvidenceError.unless(alone, f"{where}: key", "another", "that of its link, alone")
