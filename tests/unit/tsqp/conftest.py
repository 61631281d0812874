"""An appraisal policy, once for all tests of clients and of the key server."""

import pytest

from tee_side.attest.appraisal import AppraisalPolicy
from tests.kit.evidence import policy_text


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> AppraisalPolicy:
    """What `identity` of tests/kit/evidence.py passes."""
    path = tmp_path_factory.mktemp("policy") / "appraisal.toml"
    path.write_text(policy_text())
    return AppraisalPolicy.load(path)
