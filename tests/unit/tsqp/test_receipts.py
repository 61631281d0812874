"""`tsqp receipt`: who signed an answer, which bytes it had, and what is missing between two."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import SettingsError
from tee_side.attest.guests import simulate
from tee_side.attest.statement import Claims, Statement, report_data
from tee_side.serve.app import create_app
from tee_side.serve.identity import ReceiptChain
from tests.kit.evidence import body_of, identity
from tests.kit.serve import Reply, call, serving
from tsqp.cli.main import command

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
MODEL, POLICY = b"m" * 32, b"p" * 32
BODY = b'{"prompt": "Hello", "seed": 3}'
STREAM = b'{"prompt": "Hello", "stream": true}'


class Saved:
    """Files of answers of one server, as curl saves them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.app = create_app(serving(receipts=ReceiptChain(KEY, MODEL, POLICY)))

    def write(self, name: str, content: bytes) -> str:
        path = self.directory / name
        path.write_bytes(content)
        return str(path)

    def ask(self, body: bytes) -> Reply:
        kind = {"content-type": "application/json"}
        return call(self.app, "POST", "/v1/completions", body, kind)

    def whole(self, name: str = "whole") -> list[str]:
        reply = self.ask(BODY)
        lines = [f"{name}: {value}\r\n" for name, value in reply.headers.items()]
        headers = f"HTTP/1.1 200 OK\r\n{''.join(lines)}\r\n".encode()
        contents = {"headers": headers, "request": BODY, "response": b"".join(reply.writes)}
        return [self.write(f"{name}.{kind}", content) for kind, content in contents.items()]

    def stream(self) -> tuple[str, str]:
        content = b"".join(self.ask(STREAM).writes)
        return self.write("request", STREAM), self.write("response", content)


def verify(*arguments: str, key: str = PUBLIC) -> Result:
    given = [*arguments, "--key", key] if key else arguments
    return CliRunner().invoke(command, ["receipt", "verify", *given])


def lines_of(result: Result, word: str) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith(word)]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path)


def test_a_whole_answer_as_curl_saves_it(saved: Saved) -> None:
    headers, request, response = saved.whole()
    result = verify(headers, "--request", request, "--response", response)
    assert (result.exit_code, len(lines_of(result, "pass")), lines_of(result, "FAIL")) == (0, 3, [])
    assert f"says  model: {MODEL.hex()}" in result.stdout
    for file, passed in ((response, True), (request, False)):
        result = verify(headers, "--response", file, "--json")
        report: dict[str, Any] = json.loads(result.stdout)
        assert (report["passed"], result.exit_code) == (passed, 0 if passed else 1)
        assert [step["passed"] for step in report["steps"]] == [True, passed]


def test_a_stream_as_curl_saves_it_or_without_its_receipt(saved: Saved) -> None:
    request, response = saved.stream()
    content = Path(response).read_bytes()
    answer = content.partition(b": tsqp-receipt ")[0]
    before, cut = saved.write("before", answer), content.removesuffix(b"data: [DONE]\n\n")
    for file in (response, before, saved.write("cut", cut)):
        result = verify(response, "--request", request, "--response", file)
        assert (result.exit_code, len(lines_of(result, "pass"))) == (0, 3)
    for other in (content + b"data: more\n\n", answer[:-1], content.replace(b"text", b"tent", 1)):
        result = verify(response, "--response", saved.write("other", other))
        assert result.exit_code == 1
        [line] = lines_of(result, "FAIL")
        assert line.startswith("FAIL  response: got ")


def test_a_receipt_alone_another_key_and_what_is_none(saved: Saved) -> None:
    text = saved.ask(BODY).headers["tsqp-receipt"].encode()
    alone = saved.write("alone", text + b"\n")
    assert verify(alone).exit_code == 0
    for content in (b"", b"no receipt", text[:-4], base64.b64encode(bytes(200))):
        result = verify(saved.write("none", content))
        assert (result.exit_code, len(lines_of(result, "FAIL"))) == (1, 1)
        assert not lines_of(result, "says")
    result = verify(alone, key="00" * 32)
    assert (result.exit_code, lines_of(result, "pass")) == (1, [])
    assert lines_of(result, "FAIL  receipt key: got none, expected a public key of Ed25519")
    for key in (PUBLIC[:-1], f"0x{PUBLIC}", "ü" * 64):
        assert isinstance(verify(alone, key=key).exception, SettingsError)


def test_a_piece_of_the_chain(saved: Saved) -> None:
    files = [saved.whole(str(at))[0] for at in range(4)]
    whole = verify(*files[1:])
    assert (whole.exit_code, len(lines_of(whole, "pass  chain"))) == (0, 2)
    for given, said in (([0, 2], "got 2 behind 0"), ([1, 0], "got 0 behind 1"), ([3, 3], "got 3")):
        result = verify(*(files[at] for at in given))
        [line] = lines_of(result, "FAIL")
        assert (result.exit_code, said in line) == (1, True)


def attestation(saved: Saved, evidence_of: bytes = b"", **changes: Any) -> str:
    """Save what a server with a simulated TEE says of itself."""
    stated = identity(model=MODEL, policy=POLICY).state(b"")
    usual = {"receipt_key": bytes.fromhex(PUBLIC)}
    claims = Claims.decode(stated.claims).model_copy(update=usual | changes).encode()
    evidence = simulate(report_data(evidence_of or claims), bytes(48)).encode()
    return saved.write("attestation", body_of(Statement(claims=claims, evidence=evidence)))


def test_by_an_attestation(saved: Saved) -> None:
    headers, *_ = saved.whole()
    simulated = ("--mode", "development", "--attestation")
    result = verify(headers, *simulated, attestation(saved), key="")
    assert result.exit_code == 0
    shown = [line.split(":")[0] for line in lines_of(result, "pass")]
    assert shown[:2] == ["pass  evidence", "pass  claims"]
    assert shown[-3:] == [f"pass  {headers}", "pass  model", "pass  policy"]
    assert "Nothing is proved" in result.stderr
    none = verify(headers, "--attestation", attestation(saved), key="")
    assert "--policy: got none" in str(none.exception)
    for name, wrong in (("model", "model"), ("policy", "policy"), ("receipt_key", "receipt")):
        result = verify(headers, *simulated, attestation(saved, **{name: b"o" * 32}), key="")
        assert result.exit_code == 1
        [line] = lines_of(result, "FAIL")
        assert line.startswith(f"FAIL  {wrong}: got ")
    others = (b"{}", b"[1]", b'{"claims": 1}')
    files = [saved.write(str(at), content) for at, content in enumerate(others)]
    for file in (attestation(saved, b"other claims"), headers, *files):
        result = verify(headers, *simulated, file, key="")
        assert result.exit_code == 1
        assert lines_of(result, "FAIL")
        assert not any(headers in line for line in lines_of(result, "pass"))
