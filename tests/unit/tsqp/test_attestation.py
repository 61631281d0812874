"""Tests of what a server claims: each claim is of what runs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from protocol.errors import SettingsError
from protocol.model.manifest import Manifest
from tee_side.attest.claims import NONE, Claims, report_data
from tee_side.attest.evidence import Evidence
from tee_side.attest.simulated import verify_simulated
from tee_side.attest.statement import Statement
from tee_side.policy.placement import ServiceTerms, load_policy
from tee_side.serve.hpke_key import HpkeKey
from tests.kit.rows import each_row
from tsqp import attestation
from tsqp.attestation import _NOT_CLAIMED, identify, release_key, tls_files
from tsqp.cli.program import model_directory
from tsqp.cli.running import Loaded, policy_digest
from tsqp.cli.serve import serve
from tsqp.key_files import new_key_pair
from tsqp.manifest import make_manifest
from tsqp.seal_keys import State

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
    assert told.tls_key == told.receipt_key == NONE
    own = {"nonce", "time", "tls_key", "receipt_key", "hpke_suite", "hpke_key"}
    theirs = claims(loaded, dtype="float32")
    assert told.model_dump(exclude=own) == theirs.model_dump(exclude=own)
    shown = capsys.readouterr().err
    assert all(one.hex() in shown for one in (told.model, told.policy, told.settings))


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
