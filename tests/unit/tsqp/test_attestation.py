"""Tests of what a server claims: each claim is of what runs."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import httpx2
import pytest
import zmq
from click.testing import CliRunner
from zmq.utils import z85

from protocol.codec import pack
from protocol.curve import ClientKeys
from protocol.errors import EvidenceError, SettingsError
from protocol.model.manifest import Manifest
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.claims import NONE, Claims, Purpose, report_data
from tee_side.attest.evidence import Evidence
from tee_side.attest.receipts import Receipt
from tee_side.attest.simulated import simulate, verify_simulated
from tee_side.attest.statement import Statement
from tee_side.policy.placement import ServiceTerms, load_policy
from tee_side.remote.attested import ServiceAppraisal
from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.identity import Identity
from tests.kit.evidence import serving
from tests.kit.rows import each_row
from tests.unit.tee_side.attest.test_receipts import forged
from tsqp import attestation
from tsqp.attestation import _NOT_CLAIMED, identify, release_key, tls_files
from tsqp.cli.main import command
from tsqp.cli.program import model_directory
from tsqp.cli.running import Loaded, policy_digest
from tsqp.cli.serve import serve
from tsqp.client import NotAttestedError
from tsqp.client.attested_tls import AttestedContext
from tsqp.client.connection import Address, prove
from tsqp.client.sealed_connection import ProvedTransport
from tsqp.key_files import new_key_pair, public_key_of
from tsqp.keyserver import KeyRelease
from tsqp.manifest import make_manifest
from tsqp.seal_keys import State
from tsqp.service_attestation import attested_service

MASK = """
from tee_side.protect.masks.mask import RowMask


class Mine(RowMask):
    '''{}'''

    name = "mine"
"""


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Of the demo model."""
    return make_manifest(model_directory("demo"))


def usual() -> dict[str, Any]:
    """Return the options of `tee-runner serve demo`, as click gives them."""
    context = serve.make_context("serve", ["demo", "--attest", "simulated"])
    return dict(context.params)


def claims(loaded: Loaded, **changes: Any) -> Claims:
    return Claims.decode(identify(usual() | changes, loaded).state(b"").claims)


def test_an_emulated_guest_repeats_what_its_host_computed(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "raw"
    said.write_text(bytes(range(48)).hex())
    monkeypatch.setattr(attestation, "_EMULATED", said)
    evidence = Evidence.decode(identify(usual(), loaded).state(b"").evidence)
    assert verify_simulated(evidence.report).measurement == bytes(range(48))
    said.unlink()
    evidence = Evidence.decode(identify(usual(), loaded).state(b"").evidence)
    assert verify_simulated(evidence.report).measurement != bytes(range(48))


@pytest.fixture
def loaded(manifest: Manifest) -> Loaded:
    """Under tee-only."""
    return Loaded(manifest, load_policy("tee-only"), None)


def test_model_and_policy_are_those_that_were_loaded(loaded: Loaded, manifest: Manifest) -> None:
    found = claims(loaded)
    assert found.model == hashlib.sha256(manifest.to_bytes()).digest()
    assert found.policy.hex() == policy_digest(loaded.policy)
    other = replace(loaded, policy=load_policy("shielded"))
    assert claims(other).policy.hex() == policy_digest(other.policy) != found.policy.hex()


def test_without_a_manifest_nothing_is_claimed(loaded: Loaded) -> None:
    with pytest.raises(SettingsError, match="--manifest, which pins what is claimed"):
        claims(replace(loaded, manifest=None))


@each_row(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("when_out", "tee"),
        ("speculative", "ngram"),
        ("prefix_reuse", True),
        ("fixed_tempo_ms", 5.0),
        ("round_usage", 16),
        ("default_max_tokens", 7),
        ("allow_origin", ("*",)),
        ("bank_key_beside_bank", True),
        ("bank", Path("a.bank")),
        ("api_keys", Path("keys.toml")),
        ("page", True),
        ("shares_in_the_clear", True),
        ("link_rtt_us", 5.0),
        ("prefix_reuse", False),
    ],
)
def test_an_option_that_matters_is_claimed(loaded: Loaded, name: str, value: object) -> None:
    assert usual()[name] != value
    assert claims(loaded, **{name: value}).settings != claims(loaded).settings


def test_what_services_have_to_prove_is_claimed(loaded: Loaded, tmp_path: Path) -> None:
    digests = {claims(loaded).policy}
    for attested in ("snp", "snp+nvidia"):
        terms = ServiceTerms(attested=attested)
        policy = loaded.policy.model_copy(update={"service": terms})
        found = claims(replace(loaded, policy=policy))
        assert found.attested_services == attested
        digests.add(found.policy)
    assert len(digests) == 3
    path = tmp_path / "service.toml"
    path.write_text("a policy")
    found = claims(loaded, service_appraisal=path)
    assert found.plugins == {"service appraisal": hashlib.sha256(b"a policy").digest()}


def test_where_a_file_is_does_not_matter(loaded: Loaded) -> None:
    one, other = (claims(loaded, api_keys=Path(name)).settings for name in ("a.toml", "b.toml"))
    assert one == other
    assert claims(loaded, port=1).settings == claims(loaded, port=2).settings


def test_each_option_is_claimed_or_known_not_to_be() -> None:
    assert usual().keys() >= _NOT_CLAIMED


def test_nothing_of_the_model_is_read(loaded: Loaded) -> None:
    """A key server is told before it opens; the manifest pins the calibration as well."""
    shielded = replace(loaded, policy=load_policy("shielded"))
    path = Path("/nowhere/calibration.safetensors")
    elsewhere = claims(shielded, model="/nowhere", calibration=path)
    assert elsewhere.settings == claims(shielded).settings


def test_a_key_server_is_told_what_clients_are(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def server(url: str, state: State) -> bytes:
        said[url] = state(bytes(32), key)
        return b"the key"

    said: dict[str, Statement] = {}
    key, policy = HpkeKey(), loaded.policy
    monkeypatch.setattr(attestation, "key_of_server", server)
    settings = usual() | {"seal_key_server": "http://a", "dtype": "float32"}
    assert release_key(settings, loaded.manifest, policy, "http://a") == b"the key"
    told = Claims.decode(said["http://a"].claims)
    evidence = Evidence.decode(said["http://a"].evidence)
    assert verify_simulated(evidence.report).report_data == report_data(said["http://a"].claims)
    assert (told.nonce, told.hpke_suite, told.hpke_key) == (bytes(32), key.suite, key.public)
    assert (told.purpose, told.tls_key, told.receipt_key) == ("key", NONE, None)
    own = {"purpose", "nonce", "time", "tls_key", "receipt_key", "hpke_suite", "hpke_key"}
    theirs = claims(loaded, dtype="float32")
    assert told.model_dump(exclude=own) == theirs.model_dump(exclude=own)
    shown = capsys.readouterr().err
    assert all(one.hex() in shown for one in (told.model, told.policy, told.settings))


class Programs(NamedTuple):
    """Programs that prove what they are. `state`: what each says for a nonce, by its purpose."""

    server: Identity
    service: ClientKeys
    state: Mapping[Purpose, Callable[[bytes], Statement]]


@pytest.fixture
def programs(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """One of each purpose, of a simulated TEE."""

    def server(url: str, state: State) -> bytes:
        asking.append(state)
        return b"the key"

    asking = list[State]()
    monkeypatch.setattr(attestation, "key_of_server", server)
    release_key(usual(), loaded.manifest, loaded.policy, "http://a")
    public = tmp_path / "service.pub"
    given = {name: usual()[name] for name in ("attest", "attest_certificate", "attest_collateral")}
    given |= {"attest_gpus": False, "public_key": public}
    service, identity = attested_service(given, {"device": "cpu"}), identify(usual(), loaded)
    assert service is not None
    state: dict[Purpose, Callable[[bytes], Statement]] = {
        "serve": identity.state,
        "key": lambda nonce: asking[0](nonce, HpkeKey()),
        "service": lambda nonce: Statement.decode(service.attest(nonce, "ab" * 32)),
    }
    return Programs(identity, ClientKeys(service.secret, public_key_of(public)), state)


def answer(stated: Statement) -> bytes:
    """Return the answer of `/v1/attestation`."""
    fields = {name: b64encode(value).decode() for name, value in stated.model_dump().items()}
    return json.dumps(fields).encode()


# Reads what a program of `purpose` says of itself; returns "" where it is accepted.
Reader: TypeAlias = Callable[[Programs, Purpose, Path], str]


def client(programs: Programs, purpose: Purpose, _: Path) -> str:
    context = AttestedContext(AppraisalPolicy.development())
    with serving(programs.server, programs.state[purpose]) as server:
        try:
            prove(Address.of(server.url), context)
        except NotAttestedError as error:
            return str(error)
    return ""


def sealed_client(programs: Programs, purpose: Purpose, _: Path) -> str:
    def handle(request: httpx2.Request) -> httpx2.Response:
        stated = programs.state[purpose](bytes.fromhex(request.url.params["nonce"]))
        return httpx2.Response(200, content=answer(stated))

    carrier, policy = httpx2.MockTransport(handle), AppraisalPolicy.development()
    try:
        ProvedTransport("https://example.test", policy, carrier, 60.0).prove()
    except NotAttestedError as error:
        return str(error)
    return ""


def verify_of_a_file(programs: Programs, purpose: Purpose, folder: Path) -> str:
    file = folder / "attestation"
    file.write_bytes(answer(programs.state[purpose](bytes(32))))
    result = CliRunner().invoke(command, ["verify", str(file), "--mode", "development"])
    return result.stdout if result.exit_code else ""


def receipt_verify(programs: Programs, purpose: Purpose, folder: Path) -> str:
    attested, receipt = folder / "attestation", folder / "receipt"
    attested.write_bytes(answer(programs.state[purpose](bytes(32))))
    said: dict[str, Any] = {"request": NONE, "response": NONE, "sampling": {}, "seed": None}
    signed = programs.server.receipts().sign(**said, prompt_tokens=1, completion_tokens=1)
    receipt.write_bytes(b64encode(signed))
    given = ["--attestation", str(attested), "--mode", "development"]
    result = CliRunner().invoke(command, ["receipt", "verify", str(receipt), *given])
    return result.stdout if result.exit_code else ""


def key_server(programs: Programs, purpose: Purpose, _: Path) -> str:
    said = list[str]()
    release = KeyRelease(bytes(32), AppraisalPolicy.development(), said.append)
    status, _body = release.answer(programs.state[purpose](release.nonce()).encode())
    return "" if status == 200 else said[0]


def runner(programs: Programs, purpose: Purpose, _: Path) -> str:
    appraise = ServiceAppraisal("simulated", AppraisalPolicy.development())
    stated = programs.state[purpose](bytes(32)).encode()
    try:
        appraise("tcp://gpu:1", programs.service, stated, bytes(32))
    except EvidenceError as error:
        return str(error)
    return ""


READERS: Mapping[Reader, Purpose] = {
    **dict.fromkeys((client, sealed_client, verify_of_a_file, receipt_verify), "serve"),
    key_server: "key",
    runner: "service",
}


@each_row(("reader", "wanted"), READERS.items(), ids=lambda row: row[0].__name__)
def test_evidence_for_one_reader_is_none_for_another(
    programs: Programs, tmp_path: Path, reader: Reader, wanted: Purpose
) -> None:
    for purpose in programs.state:
        found = reader(programs, purpose, tmp_path)
        if purpose == wanted:
            assert not found
        else:
            assert f"purpose: got {purpose}, expected {wanted}" in found


@each_row("purpose", ["key", "service"])
def test_evidence_that_goes_in_the_clear_makes_no_receipt(
    programs: Programs, tmp_path: Path, purpose: Purpose
) -> None:
    """A reader on the way forges a receipt that has all of its claims, under the key of zeros."""
    seen = programs.state[purpose](bytes(32))
    claims = Claims.decode(seen.claims)
    policy, attested, file = (tmp_path / name for name in ("policy.toml", "attestation", "receipt"))
    pinned = {name: [getattr(claims, name).hex()] for name in ("model", "policy", "settings")}
    pinned |= {"version": [claims.version], "plugins": []}
    pinned |= {"services": [key.hex() for key in claims.curve_keys.values()]}
    measured = verify_simulated(Evidence.decode(seen.evidence).report).measurement
    lines = [f"{name} = {json.dumps(value)}" for name, value in pinned.items()]
    lines = [f'[simulated]\nmeasurements = ["{measured.hex()}"]\n[claims]', *lines]
    policy.write_text("\n".join(['mode = "development"\nmax_age_s = 60', *lines]))
    signed = forged(bytes(32), model=claims.model, policy=claims.policy)
    file.write_bytes(b64encode(signed))
    assert Receipt.decode(signed[:-64]).model == claims.model

    def stated(**fields: Any) -> Statement:
        said = pack(dict(sorted(fields.items())))
        return Statement(claims=said, evidence=simulate(report_data(said), measured).encode())

    # As evidence was before, with zeros for no key; then as a server would have it.
    before = claims.model_dump(exclude={"purpose"}) | {"receipt_key": bytes(32)}
    for one, refusals in (
        (seen, [f"purpose: got {purpose}, expected serve", "receipt key: got none"]),
        (stated(**before), ["claims.purpose: got nothing", "receipt key: got none"]),
        (stated(**before, purpose="serve"), ["claims.receipt_key: got", "receipt key: got none"]),
    ):
        attested.write_bytes(answer(one))
        given = ["--attestation", str(attested), "--policy", str(policy)]
        result = CliRunner().invoke(command, ["receipt", "verify", str(file), *given])
        failed = [line for line in result.stdout.splitlines() if not line.startswith("pass  ")]
        assert result.exit_code == 1
        for line, refusal in zip(failed, refusals, strict=True):
            assert line.startswith(f"FAIL  {refusal}")
        assert str(file) not in result.stdout


def test_without_attest_or_a_manifest_no_key_server_is_asked(loaded: Loaded) -> None:
    with pytest.raises(SettingsError, match="--seal-key-server: got no --attest"):
        release_key(usual() | {"attest": None}, loaded.manifest, loaded.policy, "http://a")
    with pytest.raises(SettingsError, match="--manifest, which pins what is claimed"):
        release_key(usual(), None, loaded.policy, "http://a")


def test_keys_of_services_are_claimed_and_those_without_as_well(
    loaded: Loaded, tmp_path: Path
) -> None:
    shielded = replace(loaded, policy=load_policy("shielded"))
    gpu = ("tcp://a:1", "tcp://b:1")
    assert claims(shielded, gpu=gpu).curve_keys == {
        "service 1": bytes(32),
        "service 2": bytes(32),
    }
    secret, _, public = new_key_pair(tmp_path / "runner")
    service, _ = zmq.curve_keypair()
    keyed = {"identity": secret, "service_key": (service.decode(),)}
    assert claims(shielded, gpu=gpu, **keyed).curve_keys == {
        "runner": z85.decode(public.encode()),
        "service 1": z85.decode(service),
        "service 2": z85.decode(service),
    }
    # Nothing leaves under tee-only, whatever is named.
    assert "service 1" not in claims(loaded, gpu=gpu).curve_keys


def test_the_key_of_a_connection_is_not_on_a_disk(loaded: Loaded) -> None:
    made = identify(usual(), loaded)
    with tls_files(made) as names:
        for name in names:
            assert Path(name).resolve().name.startswith("memfd:")
        assert b"PRIVATE KEY" in Path(names[1]).read_bytes()
    for name in names:
        assert not Path(name).exists()


def test_certificates_are_read_in_both_forms(loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.pem: got No such file"):
        claims(loaded, attest_certificate=(tmp_path / "nowhere.pem",))
