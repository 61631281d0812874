"""Services prove what they are before they are asked for anything, or are asked for nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from zmq.utils import z85

from protocol.curve import ClientKeys
from protocol.errors import EvidenceError, PolicyError, SettingsError, TsqpError
from protocol.model.config import read_config
from tee_side.attest.appraisal_policy import AppraisalPolicy
from tee_side.attest.claims import NONE, Claims, gpu_nonce, report_data
from tee_side.attest.evidence import GpuEvidence
from tee_side.attest.simulated import simulate
from tee_side.attest.statement import Statement
from tee_side.policy.placement import Policy
from tee_side.remote.attested import ServiceAppraisal
from tee_side.remote.reply_size import largest_reply
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup, ServiceSpec, check_links
from tee_side.runner import Runner, RunnerSettings
from tests.kit.fakes import World
from tests.kit.nvidia_chain import NvidiaGpu, make_gpu, messages
from tests.kit.rows import each_row
from tests.unit.tee_side.policy_texts import CLEAR, policy_of
from tsqp.cli.program import model_directory

NOW = datetime(2026, 11, 26, tzinfo=UTC)
NONCE, MEASUREMENT = bytes(range(32)), bytes(range(48))
PUBLIC, SECRET = zmq.curve_keypair()
KEYS = ClientKeys(SECRET, PUBLIC)
WHERE = "tcp://gpu:1"
ATTESTED: dict[str, Any] = {**CLEAR, "place": "attested"}


def claims(**changes: Any) -> Claims:
    """Return what a service claims."""
    usual: dict[str, Any] = dict.fromkeys(("tls_key", "model", "policy", "settings"), NONE)
    usual |= {"purpose": "service", "receipt_key": None}
    usual |= {"nonce": NONCE, "time": round(NOW.timestamp()), "hpke_suite": "x25519"}
    usual |= {
        "hpke_key": b"",
        "plugins": {},
        "gpus": {},
        "attested_services": "none",
        "version": "1",
    }
    return Claims(**(usual | {"curve_keys": {"service": z85.decode(PUBLIC)}} | changes))


def statement(
    said: Claims | None = None, measurement: bytes = MEASUREMENT, gpu: GpuEvidence | None = None
) -> bytes:
    """Return what a simulated service states."""
    stated = (said or claims()).encode()
    evidence = simulate(report_data(stated), measurement)
    if gpu is not None:
        evidence = evidence.model_copy(update={"gpus": {"0": gpu}})
    return Statement(claims=stated, evidence=evidence.encode()).encode()


def asking(attested: Any = "simulated", **tables: Any) -> ServiceAppraisal:
    """Return what appraises a simulated service of one measurement."""
    policy = AppraisalPolicy.development().model_dump() | tables
    policy["simulated"] = {"measurements": [MEASUREMENT.hex()]}
    return ServiceAppraisal(
        attested, AppraisalPolicy.model_validate(policy, strict=False), lambda: NOW
    )


def test_a_service_that_proves_what_it_is_is_accepted() -> None:
    asking()(WHERE, KEYS, statement(), NONCE)


OTHER = z85.decode(zmq.curve_keypair()[0])


@each_row(
    ("stated", "text"),
    [
        (b"", r": got none, expected simulated evidence \(gpu-service --attest\)"),
        (b"no", "statement: got undecodable msgpack"),
        (statement(measurement=bytes(48)), ": measurement: got 00"),
        (statement(claims(nonce=b"")), ": nonce: got "),
        (statement(claims(nonce=secrets.token_bytes(32))), ": nonce: got "),
        (statement(claims(curve_keys={"service": OTHER})), ": key: got another"),
        (statement(claims(curve_keys={})), ": key: got another"),
        # What a runner claims: the key of a service that it speaks to.
        (statement(claims(curve_keys={"service 1": z85.decode(PUBLIC)})), ": key: got another"),
        (
            statement(claims(curve_keys={"service": z85.decode(PUBLIC), "runner": OTHER})),
            ": key: got another",
        ),
    ],
)
def test_another_service_is_refused(stated: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=text):
        asking()(WHERE, KEYS, stated, NONCE)


def test_without_a_key_no_link_is_bound() -> None:
    with pytest.raises(EvidenceError, match="key: got another, expected that of its link"):
        asking()(WHERE, None, statement(), NONCE)


@each_row("attested", ["snp", "snp+nvidia", "tdx"])
def test_another_kind_of_evidence_is_refused(attested: str) -> None:
    with pytest.raises(EvidenceError) as refused:
        asking(attested)(WHERE, KEYS, statement(), NONCE)
    assert (refused.value.where, refused.value.got) == (f"service {WHERE}: evidence", "simulated")
    assert refused.value.expected == attested


@pytest.fixture
def gpu() -> Iterator[NvidiaGpu]:
    """A GPU whose root is pinned."""
    gpu = make_gpu()
    with gpu.pinned():
        yield gpu


def test_evidence_of_gpus_is_of_the_claims(gpu: NvidiaGpu) -> None:
    table = {"measurements": "any", "driver": "any", "vbios": "any"}

    said = claims(gpus={"0": sha256(gpu.certificates[0]).digest()})

    def ask(nonce: bytes, said: Claims) -> None:
        shown = GpuEvidence(report=gpu.sign(messages(nonce)), certificates=tuple(gpu.certificates))
        # The word that stands for it in development; a policy has none for simulated ones.
        asking("simulated+nvidia", nvidia=table)(WHERE, KEYS, statement(said, gpu=shown), NONCE)

    ask(gpu_nonce(said.encode()), said)
    for other in (NONCE, gpu_nonce(claims(version="2").encode())):
        with pytest.raises(EvidenceError, match="NVIDIA report: nonce: got another"):
            ask(other, said)
    # A GPU of another machine, whose report has the right nonce: the claims do not name it.
    for named in ({}, {"0": bytes(32)}, {"1": said.gpus["0"]}, said.gpus | {"1": bytes(32)}):
        other_claims = claims(gpus=named)
        with pytest.raises(EvidenceError, match=r"GPUs: got 0, expected .*those of the claims"):
            ask(gpu_nonce(other_claims.encode()), other_claims)
    with pytest.raises(EvidenceError, match="GPUs: got none"):
        asking("simulated+nvidia", nvidia=table)(WHERE, KEYS, statement(), NONCE)


def policy(attested: str = "simulated", **operators: Any) -> Policy:
    """Return a policy of attested services; the operators that leave, most of them none."""
    return policy_of(operators or {"o_proj": ATTESTED}, service={"attested": attested})


def test_a_placement_that_relies_on_it_needs_services_that_prove_it() -> None:
    with pytest.raises(PolicyError, match=r"o_proj: got place = .attested., expected attested in"):
        policy_of({"o_proj": ATTESTED})
    with pytest.raises(PolicyError, match=r"o_proj: got place"):
        policy("none", o_proj=ATTESTED)
    with pytest.raises(PolicyError, match=r"mask: got nothing"):
        policy(o_proj={"place": "attested", "verify": "none"})
    found = policy(o_proj=ATTESTED, lm_head=CLEAR)
    assert [operator for operator, _ in found.leaving()] == ["o_proj", "lm_head"]
    assert found.services == 1


@each_row("attested", ["nvidia", "snp+tdx", "", 1])
def test_evidence_that_there_is_not_is_refused(attested: Any) -> None:
    with pytest.raises(PolicyError, match="service: attested: got"):
        policy(attested)


def test_a_term_that_there_is_not_is_refused() -> None:
    with pytest.raises(PolicyError, match="service: nonce"):
        policy_of({"o_proj": ATTESTED}, service={"attested": "snp", "nonce": "none"})


def test_what_services_prove_is_said() -> None:
    before = policy_of({"o_proj": CLEAR}).leakage_summary()
    assert policy("snp+nvidia").leakage_summary() == (
        f"{before}; by snp+nvidia evidence each service proves, before anything is sent, what sees"
        " it"
    )
    assert "simulated evidence, which proves nothing" in (policy().leakage_summary() or "")


@each_row("endpoint", ["tcp://127.0.0.1:1", "unix:///gpu", "shm:///gpu"])
def test_a_link_without_a_key_is_refused(endpoint: str) -> None:
    specs = [ServiceSpec.parse(endpoint)]
    check_links(specs, [None], policy_of({"o_proj": CLEAR}), shares_in_the_clear=False)
    with pytest.raises(SettingsError, match="without keys, expected --identity"):
        check_links(specs, [None], policy(), shares_in_the_clear=False)


def test_a_key_is_of_one_service() -> None:
    specs = [ServiceSpec.parse(text) for text in ("tcp://a:1=0-1", "tcp://b:1=2-")]
    other = ClientKeys(SECRET, zmq.curve_keypair()[0])
    check_links(specs, [KEYS, other], policy(), shares_in_the_clear=False)
    with pytest.raises(SettingsError, match="got one for several services"):
        check_links(specs, [KEYS, KEYS], policy(), shares_in_the_clear=False)


def test_a_statement_is_no_larger_than_what_is_taken() -> None:
    config = read_config(model_directory("demo"))
    sizes = [
        largest_reply(chosen, config, 1, torch.float32)
        for chosen in (policy_of({"o_proj": CLEAR}), policy())
    ]
    assert sizes[1] - sizes[0] >= Statement.max_bytes


def test_a_run_needs_to_know_what_services_must_be(tmp_path: Path) -> None:
    settings = RunnerSettings(tmp_path, policy(), (WHERE,), keys=(KEYS,))
    with pytest.raises(SettingsError, match="--service-appraisal: got none"):
        Runner(settings)
    # The next thing that is looked at is the model.
    with pytest.raises(TsqpError, match="config"):
        Runner(replace(settings, appraise_service=asking()))


def test_each_connection_is_appraised_and_one_that_failed_is_asked_no_more() -> None:
    world = World()
    (service,) = world.add(WHERE)
    group, seen = ReplicaGroup(1, 0, 0, (WHERE,)), list[tuple[str, bytes, bytes]]()
    refuses = False

    def appraise(endpoint: str, stated: bytes, nonce: bytes) -> None:
        seen.append((endpoint, stated, nonce))
        if refuses:
            raise EvidenceError("service", got="another", expected="one")

    options = ConnectOptions(world.open, world.verify, timeout_s=5.0, appraise=appraise)
    for _ in range(2):
        services = Services([group], 1, options)
        services.connect(1.0)
        services.close()
    assert [nonce for _, _, nonce in seen] == service.nonces
    assert len(set(service.nonces)) == 2
    assert {len(nonce) for nonce in service.nonces} == {32}
    assert {said[:2] for said in seen} == {(WHERE, b"stated")}
    refuses = True
    services = Services([group], 1, options)
    with pytest.raises(EvidenceError):
        services.connect(1.0)
    assert len(seen) == 3
    assert not service.got


def test_no_evidence_is_asked_for_where_none_is_needed() -> None:
    world = World()
    (service,) = world.add(WHERE)
    world.replicas(WHERE)
    assert service.nonces == [b""]
