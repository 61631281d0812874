"""Tests of requests that are sealed to a key whose owner has proved what it is."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import httpx2
import pytest

from protocol.errors import EndpointError
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.serve.identity import Identity
from tee_side.serve.sealed_bodies import CONTENT_TYPE, open_secret
from tests.kit.evidence import identity, policy_text
from tsqp.client import NotAttestedError, connect
from tsqp.client.sealed_connection import ProvedTransport
from tsqp.client.sealing import UnsealedError

URL = "https://example.test"


class Carrier(httpx2.BaseTransport):
    """Answers with statements; what else comes is kept, and answered by a proxy's word."""

    def __init__(self, by: Identity) -> None:
        self.by, self.asked, self.kept = by, 0, list[httpx2.Request]()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer."""
        if request.url.path != "/v1/attestation":
            self.kept.append(request)
            return httpx2.Response(400, content=b"no")
        self.asked += 1
        stated = self.by.state(bytes.fromhex(request.url.params["nonce"])).model_dump()
        fields = {name: b64encode(value).decode() for name, value in stated.items()}
        return httpx2.Response(200, content=json.dumps(fields).encode())


@pytest.fixture
def policy(tmp_path: Path) -> AppraisalPolicy:
    """What `identity` passes."""
    path = tmp_path / "appraisal.toml"
    path.write_text(policy_text())
    return AppraisalPolicy.load(path)


def _post(transport: ProvedTransport) -> httpx2.Response:
    with httpx2.Client(transport=transport) as client:
        return client.post(f"{URL}/v1/completions", content=b"a canary")


def test_what_goes_out_is_sealed_to_the_key_that_was_proved(policy: AppraisalPolicy) -> None:
    carrier = Carrier(identity())
    with pytest.raises(UnsealedError):
        _post(ProvedTransport(URL, policy, carrier, 60.0))
    (sent,) = carrier.kept
    assert sent.headers["content-type"] == CONTENT_TYPE
    body = sent.read()
    assert b"canary" not in body
    key = carrier.by.hpke_key
    assert open_secret(key, body[: key.sealed_bytes], b"/v1/completions")


def test_another_server_gets_nothing(policy: AppraisalPolicy) -> None:
    carrier = Carrier(identity(model=bytes(32)))
    with pytest.raises(NotAttestedError, match="new evidence: model"):
        _post(ProvedTransport(URL, policy, carrier, 60.0))
    assert not carrier.kept


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"x" * 300_000])
def test_an_answer_that_proves_nothing_ends_it(policy: AppraisalPolicy, answer: bytes) -> None:
    carried: list[httpx2.Request] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        carried.append(request)
        return httpx2.Response(200, content=answer)

    with pytest.raises(NotAttestedError):
        _post(ProvedTransport(URL, policy, httpx2.MockTransport(handle), 60.0))
    assert [one.url.path for one in carried] == ["/v1/attestation"]


def test_it_is_asked_again_after_a_while_and_after_an_answer_in_the_clear(
    policy: AppraisalPolicy,
) -> None:
    now_s = 0.0
    carrier = Carrier(identity())
    transport = ProvedTransport(URL, policy, carrier, 60.0, lambda: now_s)
    transport.prove()
    assert carrier.asked == 1
    for now_s, asked in ((59.0, 1), (59.5, 2), (130.0, 3)):  # noqa: B007
        with pytest.raises(UnsealedError):
            _post(transport)
        assert carrier.asked == asked


def test_a_proxy_that_is_not_there_is_told(policy: AppraisalPolicy) -> None:
    with pytest.raises(EndpointError, match="a proxy with a certificate that is trusted"):
        connect("https://127.0.0.1:1", policy, sealed=True)
