"""A service that holds another model, or proves nothing, is noticed before it is asked."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from zmq.utils import z85

from protocol.curve import ClientKeys
from protocol.errors import EvidenceError, ModelMismatchError, ReplyError, SettingsError, TsqpError
from protocol.messages import InitReply, InitRequest, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.tensors import from_torch
from tee_side.attest.appraisal import AppraisalPolicy, appraise_service
from tee_side.attest.guests import simulate
from tee_side.attest.statement import NONE, Claims, Statement, report_data
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions, ServiceCheck
from tee_side.remote.services.plan import ReplicaGroup, ServiceSpec, check_links
from tee_side.runner import Runner, RunnerSettings
from tests.kit.fakes import World
from tests.kit.model import CLEAR, LoopbackChannel, Models, policy_of
from tests.kit.rows import each_row


def _check(directory: Path, **settings: Any) -> ServiceCheck:
    return ServiceCheck(read_config(directory), Checkpoint(directory), **settings)


def _said(directory: Path) -> InitReply:
    reply = LoopbackChannel(directory).answer(InitRequest())
    assert isinstance(reply, InitReply)
    return reply


@pytest.fixture(scope="module")
def ours(saved_model: Models) -> Path:
    return saved_model("llama").directory


@pytest.fixture(scope="module")
def good(ours: Path) -> InitReply:
    return _said(ours)


@pytest.fixture(scope="module")
def check(ours: Path, good: InitReply) -> ServiceCheck:
    return _check(ours, linear=good.linear_digest)


YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}}


@each_row(("kind", "overrides"), [("qwen2", {}), ("qwen3", {}), ("llama", YARN)])
def test_a_service_with_the_same_model_is_accepted(
    saved_model: Models, kind: str, overrides: dict[str, Any]
) -> None:
    directory = saved_model(kind, **overrides).directory
    reply, check = _said(directory), _check(directory)
    with pytest.MonkeyPatch.context() as patch:
        # Digests are computed once, for all connections.
        patch.setattr("tee_side.remote.services.member.model_digest", None)
        for _ in range(2):
            assert check.verify("there", reply) is reply


Change = Callable[[InitReply], dict[str, Any]]


def _of(field: str, **changes: Any) -> Change:
    return lambda good: {field: getattr(good, field).model_copy(update=changes)}


@each_row(
    ("change", "field"),
    [
        (_of("config", num_layers=2), "num_layers"),
        (_of("config", hidden_size=36), "hidden_size"),
        (_of("config", num_heads=4), "num_heads"),
        (_of("config", num_kv_heads=3), "num_kv_heads"),
        (_of("config", head_dim=8), "head_dim"),
        (lambda _: {"model_digest": "0" * 64}, "model_digest"),
        (lambda _: {"linear_digest": "0" * 64}, "linear_digest"),
        (lambda _: {"provision_id": "0" * 64}, "provision_id"),
        (lambda _: {"arithmetic": ("int8",)}, "arithmetic"),
    ],
)
def test_a_service_that_says_something_else_is_refused_by_field(
    ours: Path, check: ServiceCheck, good: InitReply, change: Change, field: str
) -> None:
    check.verify("there", good)
    reply = good.model_copy(update=change(good))
    with pytest.raises(ModelMismatchError) as caught:
        check.verify("there", reply)
    assert caught.value.where == f"model at there: {field}"
    assert caught.value.got != caught.value.expected
    if field == "linear_digest":  # a TEE without linear weights has none to compare
        assert _check(ours).verify("there", reply) is reply


def test_another_message_is_no_init_reply(check: ServiceCheck) -> None:
    with pytest.raises(ReplyError, match="Init reply from there: got TensorReply"):
        check.verify("there", TensorReply(output=from_torch(torch.ones(1))))


@each_row("overrides", [YARN, {"rms_norm_eps": 1e-3}, {"rope_theta": 5e5}])
def test_what_only_a_digest_covers_is_noticed(
    saved_model: Models, check: ServiceCheck, overrides: dict[str, Any]
) -> None:
    other = _said(saved_model("llama", **overrides).directory)
    with pytest.raises(ModelMismatchError, match="model at there: model_digest: got "):
        check.verify("there", other)


@each_row(
    ("changes", "layers", "said"),
    [
        ({}, (1, 1), None),
        ({"layers": (1, 2)}, (1, 2), None),
        ({"layers": (1, 2)}, None, "layers: got 1-2, expected 0-2, which"),
        ({"layers": (1, 1)}, (1, 2), "layers: got 1-1, expected 1-2, which"),
        ({"layers": (0, 1)}, (0, 2), "layers: got 0-1, expected 0-2, which"),
    ],
)
def test_a_service_must_hold_the_layers_that_it_is_asked_for(
    check: ServiceCheck,
    good: InitReply,
    changes: dict[str, Any],
    layers: Any,
    said: str | None,
) -> None:
    reply = good.model_copy(update=changes)
    if said is None:
        assert check.verify("there", reply, layers) is reply
        return
    with pytest.raises(ModelMismatchError, match=f"model at there: {said}"):
        check.verify("there", reply, layers)


def test_a_service_of_several_ranks_is_not_asked_for_whole_layers(
    ours: Path, check: ServiceCheck, good: InitReply
) -> None:
    reply = good.model_copy(update={"ranks": 2})
    assert check.verify("there", reply) is reply
    whole = _check(ours, whole_layers=True)
    assert whole.verify("there", good) is good
    with pytest.raises(ModelMismatchError, match="model at there: ranks: got 2, expected 1: the"):
        whole.verify("there", reply)


NOW = datetime(2026, 11, 26, tzinfo=UTC)
NONCE, MEASUREMENT = bytes(range(32)), bytes(range(48))
PUBLIC, SECRET = zmq.curve_keypair()
KEYS, SERVICE, OTHER = ClientKeys(SECRET, PUBLIC), z85.decode(PUBLIC), bytes(range(32))
WHERE = "tcp://gpu:1"


def claims(**changes: Any) -> Claims:
    usual: dict[str, Any] = dict.fromkeys(("tls_key", "model", "policy", "settings"), NONE) | {
        "purpose": "service",
        "receipt_key": None,
        "nonce": NONCE,
        "time": round(NOW.timestamp()),
        "hpke_suite": "x25519",
        "hpke_key": b"",
        "plugins": {},
        "gpus": {},
        "attested_services": "none",
        "version": "1",
        "curve_keys": {"service": SERVICE},
    }
    return Claims(**(usual | changes))


def statement(measurement: bytes = MEASUREMENT, **said: Any) -> bytes:
    stated = claims(**said).encode()
    evidence = simulate(report_data(stated), measurement).encode()
    return Statement(claims=stated, evidence=evidence).encode()


def asking(attested: Any = "simulated") -> Any:
    policy = AppraisalPolicy.development().model_dump()
    policy["simulated"] = {"measurements": [MEASUREMENT.hex()]}
    made = AppraisalPolicy.model_validate(policy, strict=False)
    return partial(appraise_service, attested, made, utc=lambda: NOW)


@each_row(
    ("stated", "attested", "text"),
    [
        (b"", "simulated", r": got none, expected simulated evidence \(gpu-service --attest\)"),
        (b"no", "simulated", "statement: got undecodable msgpack"),
        (statement(bytes(48)), "simulated", ": measurement: got 00"),
        (statement(nonce=b""), "simulated", ": nonce: got "),
        (statement(nonce=secrets.token_bytes(32)), "simulated", ": nonce: got "),
        (statement(curve_keys={"service": OTHER}), "simulated", ": key: got another"),
        (statement(curve_keys={}), "simulated", ": key: got another"),
        # What a runner claims: the key of a service that it speaks to.
        (statement(curve_keys={"service 1": SERVICE}), "simulated", ": key: got another"),
        (
            statement(curve_keys={"service": SERVICE, "runner": OTHER}),
            *("simulated", ": key: got another"),
        ),
        *(
            (statement(), kind, ": evidence: got simulated, expected " + kind.replace("+", r"\+"))
            for kind in ("snp", "snp+nvidia", "tdx")
        ),
    ],
)
def test_a_service_that_does_not_prove_what_it_is_is_refused(
    stated: bytes, attested: str, text: str
) -> None:
    asking()(WHERE, KEYS, statement(), NONCE)
    with pytest.raises(EvidenceError, match=text):
        asking(attested)(WHERE, KEYS, stated, NONCE)
    with pytest.raises(EvidenceError, match="key: got another, expected that of its link"):
        asking()(WHERE, None, statement(), NONCE)


POLICY = policy_of({"o_proj": CLEAR | {"place": "attested"}}, service={"attested": "simulated"})


def test_links_of_attested_services_have_a_key_each() -> None:
    for endpoint in ("tcp://127.0.0.1:1", "unix:///gpu", "shm:///gpu"):
        specs = [ServiceSpec.parse(endpoint)]
        check_links(specs, [None], policy_of({"o_proj": CLEAR}), dealer_in_the_clear=False)
        with pytest.raises(SettingsError, match="without keys, expected --identity"):
            check_links(specs, [None], POLICY, dealer_in_the_clear=False)
    specs = [ServiceSpec.parse(text) for text in ("tcp://a:1=0-1", "tcp://b:1=2-")]
    other = ClientKeys(SECRET, zmq.curve_keypair()[0])
    check_links(specs, [KEYS, other], POLICY, dealer_in_the_clear=False)
    with pytest.raises(SettingsError, match="got one for several services"):
        check_links(specs, [KEYS, KEYS], POLICY, dealer_in_the_clear=False)


def test_a_run_needs_to_know_what_services_must_be(tmp_path: Path) -> None:
    settings = RunnerSettings(tmp_path, POLICY, (WHERE,), keys=(KEYS,))
    with pytest.raises(SettingsError, match="--service-appraisal: got none"):
        Runner(settings)
    # The next thing that is looked at is the model.
    with pytest.raises(TsqpError, match="config"):
        Runner(replace(settings, appraise_service=asking()))


def test_each_connection_is_appraised_and_one_that_failed_is_asked_no_more() -> None:
    world = World()
    (service,) = world.add(WHERE)
    group, seen = ReplicaGroup(0, 0, 0, (WHERE,)), list[tuple[str, bytes, bytes]]()
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
    assert (len(set(service.nonces)), {len(nonce) for nonce in service.nonces}) == (2, {32})
    assert {said[:2] for said in seen} == {(WHERE, b"stated")}
    refuses = True
    with pytest.raises(EvidenceError):
        Services([group], 1, options).connect(1.0)
    assert len(seen) == 3
    assert not service.got
    # No evidence is asked for where none is needed.
    world.replicas(WHERE)
    assert service.nonces[3:] == [b""]
