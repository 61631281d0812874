"""What a program claims is what runs, and evidence for one reader is none for another."""

import hashlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast
from unittest import mock

import httpx2
import pynvml
import pytest
import zmq
from click.testing import CliRunner
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from zmq.utils import z85

from protocol.curve import ClientKeys
from protocol.encoding import pack
from protocol.errors import EvidenceError, SettingsError
from tee_side.attest.appraisal import AppraisalPolicy, appraise_service
from tee_side.attest.guests import simulate, verify_simulated
from tee_side.attest.statement import (
    NONE,
    RECEIPT_DOMAIN,
    Claims,
    Evidence,
    Purpose,
    Receipt,
    Statement,
    report_data,
)
from tee_side.policy.placement import ServiceTerms, load_policy
from tee_side.serve.identity import Identity
from tee_side.serve.sealed import HpkeKey
from tests.kit.evidence import DIGESTS, body_of, policy_text, serving
from tests.kit.nvidia_chain import NvidiaGpu, make_blackwell, make_gpu, messages
from tests.kit.rows import each_row
from tsqp.cli.gpu_service import GpuServiceSettings, attested_service, held_layers
from tsqp.cli.main import command
from tsqp.client import NotAttestedError
from tsqp.client.attested_tls import Address, AttestedContext, prove
from tsqp.client.transports import ProvedTransport
from tsqp.key_files import new_key_pair, public_key_of
from tsqp.keyserver import KeyRelease
from tsqp.model_at_rest import make_manifest
from tsqp.run import attestation
from tsqp.run.attestation import ask_gpus, identify, release_key, settings_digest
from tsqp.run.load import Loaded, policy_digest
from tsqp.run.server import tls_files
from tsqp.run.server_settings import ServeSettings
from tsqp.run.settings import model_directory

USUAL = ServeSettings(model="demo", attest="simulated")


def identified(loaded: Loaded, **changes: Any) -> Identity:
    return identify(replace(USUAL, **changes), loaded.manifest, loaded.policy)


def claims(loaded: Loaded, **changes: Any) -> Claims:
    return Claims.decode(identified(loaded, **changes).state(b"").claims)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded(make_manifest(model_directory("demo")), load_policy("tee-only"), None)


def test_model_and_policy_are_those_that_were_loaded(loaded: Loaded) -> None:
    found = claims(loaded)
    assert loaded.manifest is not None
    assert found.model == hashlib.sha256(loaded.manifest.to_bytes()).digest()
    assert found.policy == policy_digest(loaded.policy)
    assert found.settings == settings_digest(USUAL)
    other = replace(loaded, policy=load_policy("shielded"))
    assert claims(other).policy == policy_digest(other.policy) != found.policy
    with pytest.raises(SettingsError, match="--manifest, which pins what is claimed"):
        claims(replace(loaded, manifest=None))


@each_row(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("prefix_reuse", True),
        ("allow_origin", ("*",)),
        ("api_keys", Path("keys.toml")),
        ("page", True),
        ("dealer_in_the_clear", True),
        ("prefix_reuse", False),
    ],
)
def test_an_option_that_matters_is_claimed_and_where_things_are_is_not(
    name: str, value: object
) -> None:
    assert getattr(USUAL, name) != value
    assert settings_digest(replace(USUAL, **{name: value})) != settings_digest(USUAL)
    # A key server is told of the options before MODEL opens.
    given = replace(USUAL, api_keys=Path("a"))
    elsewhere = replace(given, port=1, model="/nowhere")
    assert settings_digest(elsewhere) == settings_digest(given)
    assert settings_digest(replace(given, api_keys=Path("b"))) == settings_digest(given)


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


def test_keys_of_services_are_claimed_and_those_without_as_well(
    loaded: Loaded, tmp_path: Path
) -> None:
    shielded = replace(loaded, policy=load_policy("shielded"))
    gpu = ("tcp://a:1", "tcp://b:1")
    without = {"service 1": bytes(32), "service 2": bytes(32)}
    assert claims(shielded, gpu=gpu).curve_keys == without
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
    with pytest.raises(SettingsError, match=r"nowhere\.pem: got No such file"):
        claims(loaded, attest_certificate=(tmp_path / "nowhere.pem",))


def test_the_key_of_a_connection_is_not_on_a_disk(loaded: Loaded) -> None:
    made = identified(loaded)
    with tls_files(made) as names:
        for name in names:
            assert Path(name).resolve().name.startswith("memfd:")
        assert b"PRIVATE KEY" in Path(names[1]).read_bytes()
    for name in names:
        assert not Path(name).exists()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A key server that asks for no proof: it is called with what makes one."""
    made: mock.Mock = mock.create_autospec(attestation.key_of_server, return_value=b"the key")
    monkeypatch.setattr(attestation, "key_of_server", made)
    return made


def test_a_key_server_is_told_what_clients_are(
    loaded: Loaded, server: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    key, policy = HpkeKey(), loaded.policy
    settings = replace(USUAL, seal_key_server="http://a", dtype="float32")
    with pytest.raises(SettingsError, match="--seal-key-server: got no --attest"):
        release_key(replace(settings, attest=None), loaded.manifest, policy)
    with pytest.raises(SettingsError, match="--manifest, which pins what is claimed"):
        release_key(settings, None, policy)
    assert not server.called
    assert release_key(settings, loaded.manifest, policy) == b"the key"
    server.assert_called_once_with("http://a", mock.ANY)
    said = server.call_args.args[1](bytes(32), key)
    told, evidence = Claims.decode(said.claims), Evidence.decode(said.evidence)
    assert verify_simulated(evidence.report).report_data == report_data(said.claims)
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
def programs(loaded: Loaded, tmp_path: Path, server: mock.Mock) -> Programs:
    release_key(replace(USUAL, seal_key_server="http://a"), loaded.manifest, loaded.policy)
    public = tmp_path / "service.pub"
    given = GpuServiceSettings(model="demo", attest="simulated", public_key=public)
    service, identity = attested_service(given, held_layers(given)), identified(loaded)
    assert service is not None
    state: dict[Purpose, Callable[[bytes], Statement]] = {
        "serve": identity.state,
        "key": lambda nonce: server.call_args.args[1](nonce, HpkeKey()),
        "service": lambda nonce: Statement.decode(service[1](nonce, "ab" * 32)),
    }
    return Programs(identity, ClientKeys(service[0], public_key_of(public)), state)


# Reads what a program of `purpose` says of itself; returns or raises why it is not accepted.
Reader: TypeAlias = Callable[[Programs, Purpose, Path], str | None]
DEVELOPMENT = AppraisalPolicy.development()


def client(programs: Programs, purpose: Purpose, _: Path) -> None:
    with serving(programs.server, programs.state[purpose]) as server:
        prove(Address.of(server.url), AttestedContext(DEVELOPMENT))


def sealed_client(programs: Programs, purpose: Purpose, _: Path) -> None:
    def handle(request: httpx2.Request) -> httpx2.Response:
        stated = programs.state[purpose](bytes.fromhex(request.url.params["nonce"]))
        return httpx2.Response(200, content=body_of(stated))

    carrier = httpx2.MockTransport(handle)
    ProvedTransport("https://example.test", DEVELOPMENT, carrier, 60.0).prove()


def said_by(*arguments: object) -> str:
    words = [*map(str, arguments), "--mode", "development"]
    result = CliRunner().invoke(command, words)
    return result.stdout if result.exit_code else ""


def verify_of_a_file(programs: Programs, purpose: Purpose, folder: Path) -> str:
    file = folder / "attestation"
    file.write_bytes(body_of(programs.state[purpose](bytes(32))))
    return said_by("verify", file)


def receipt_verify(programs: Programs, purpose: Purpose, folder: Path) -> str:
    attested, receipt = folder / "attestation", folder / "receipt"
    attested.write_bytes(body_of(programs.state[purpose](bytes(32))))
    said: dict[str, Any] = {"request": NONE, "response": NONE, "sampling": {}, "seed": None}
    signed = programs.server.receipts.sign(**said, prompt_tokens=1, completion_tokens=1)
    receipt.write_bytes(b64encode(signed))
    return said_by("receipt", "verify", receipt, "--attestation", attested)


def key_server(programs: Programs, purpose: Purpose, _: Path) -> str:
    said = list[str]()
    release = KeyRelease(bytes(32), DEVELOPMENT, said.append)
    status, _body = release.answer(programs.state[purpose](release.nonce()).encode())
    return "" if status == 200 else said[0]


def runner(programs: Programs, purpose: Purpose, _: Path) -> None:
    stated = programs.state[purpose](bytes(32)).encode()
    appraise_service("simulated", DEVELOPMENT, "tcp://gpu:1", programs.service, stated, bytes(32))


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
        try:
            found = reader(programs, purpose, tmp_path) or ""
        except (NotAttestedError, EvidenceError) as error:
            found = str(error)
        refusal = f"purpose: got {purpose}, expected {wanted}"
        assert refusal in found if purpose != wanted else not found


def forged(key: bytes, claims: Claims) -> bytes:
    """Make a receipt that passes under a key of small order, for which there is no secret.

    The equation is S B = R + h A. With S = 0 and the neutral point as R, it holds for each hash h
    that the order of A divides: some times of one are tried.
    """
    said = {"model": claims.model, "policy": claims.policy}
    said |= dict.fromkeys(("previous", "request", "response"), NONE)
    counts = dict.fromkeys(("sequence", "prompt_tokens", "completion_tokens"), 1)
    signature = (1).to_bytes(32, "little") + bytes(32)
    for time in range(200):
        fields = {**said, **counts, "time": time, "sampling": {}, "seed": None}
        packed = Receipt.model_validate(fields).encode()
        with suppress(InvalidSignature):
            Ed25519PublicKey.from_public_bytes(key).verify(signature, RECEIPT_DOMAIN + packed)
            return packed + signature
    raise AssertionError("the library refuses this key")


@each_row("purpose", ["key", "service"])
def test_evidence_that_goes_in_the_clear_makes_no_receipt(
    programs: Programs, tmp_path: Path, purpose: Purpose
) -> None:
    """A reader on the way forges a receipt that has all of its claims, under the key of zeros."""
    seen = programs.state[purpose](bytes(32))
    claims = Claims.decode(seen.claims)
    policy, attested, file = (tmp_path / name for name in ("policy.toml", "attestation", "receipt"))
    pinned: dict[str, Any] = {name: [getattr(claims, name).hex()] for name in DIGESTS}
    pinned |= {"version": [claims.version], "plugins": []}
    pinned |= {"services": [key.hex() for key in claims.curve_keys.values()]}
    measured = verify_simulated(Evidence.decode(seen.evidence).report).measurement
    policy.write_text(policy_text([measured.hex()], **pinned))
    file.write_bytes(b64encode(forged(bytes(32), claims)))

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
        attested.write_bytes(body_of(one))
        given = ["--attestation", str(attested), "--policy", str(policy)]
        result = CliRunner().invoke(command, ["receipt", "verify", str(file), *given])
        failed = [line for line in result.stdout.splitlines() if not line.startswith("pass  ")]
        assert result.exit_code == 1
        for line, refusal in zip(failed, refusals, strict=True):
            assert line.startswith(f"FAIL  {refusal}")
        assert str(file) not in result.stdout


NONCE = bytes(range(32))


def certificates(gpu: NvidiaGpu) -> Any:
    chain = map(x509.load_der_x509_certificate, gpu.certificates)
    pem = b"".join(one.public_bytes(Encoding.PEM) for one in chain)
    return SimpleNamespace(attestationCertChainSize=len(pem), attestationCertChain=pem + bytes(9))


def report(gpu: NvidiaGpu, nonce: bytes) -> Any:
    signed = gpu.sign(messages(nonce))
    return SimpleNamespace(attestationReportSize=len(signed), attestationReport=signed + bytes(9))


def test_a_service_with_gpus_is_what_a_runner_accepts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = [make_gpu(), make_blackwell()]
    for name, call in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": gpus.__getitem__,
        "nvmlDeviceGetConfComputeGpuCertificate": certificates,
        "nvmlDeviceGetConfComputeGpuAttestationReport": report,
    }.items():
        monkeypatch.setattr(pynvml, name, call)
    public = tmp_path / "service.pub"
    settings = GpuServiceSettings(
        model="demo", device="cuda", attest="simulated", attest_gpus=True, public_key=public
    )
    made = attested_service(settings, held_layers(settings))
    assert made is not None
    keys = ClientKeys(made[0], public_key_of(public))
    said = AppraisalPolicy.development().model_dump(exclude={"nvidia"})
    any_gpu = dict.fromkeys(("measurements", "driver", "vbios"), "any")
    policy = AppraisalPolicy.model_validate(said | {"nvidia": any_gpu}, strict=False)
    weights, with_gpus = "ab" * 32, cast("Any", "simulated+nvidia")
    stated = made[1](NONCE, weights)
    with ExitStack() as stack:
        for gpu in gpus:
            stack.enter_context(gpu.pinned())
        appraise_service(with_gpus, policy, "tcp://gpu:1", keys, stated, NONCE)
        with pytest.raises(EvidenceError, match="nonce"):
            appraise_service(with_gpus, policy, "tcp://gpu:1", keys, stated, bytes(32))
        without = AppraisalPolicy.model_validate(said, strict=False)
        with pytest.raises(EvidenceError, match="GPUs: got 0, 1, expected"):
            appraise_service("simulated", without, "tcp://gpu:1", keys, stated, NONCE)
    found = Claims.decode(Statement.decode(stated).claims)
    # As versions with parts of columns claimed it: digests that operators have written down hold.
    claimed = (
        '{"arithmetic": "both", "columns": [0, 1], "device": "cuda", "dtype": null, "layers": null,'
        ' "tensor_parallel": 1}'
    )
    digest = hashlib.sha256(claimed.encode()).digest()
    assert (found.model.hex(), found.settings) == (weights, digest)
    gpus.clear()
    with pytest.raises(EvidenceError, match="evidence of GPUs: got no GPU, expected GPUs of"):
        ask_gpus(NONCE)
