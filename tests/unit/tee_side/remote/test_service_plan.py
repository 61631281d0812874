"""`--gpu`: what may be written, what goes together, and on which links; how large replies are."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import zmq

from gpu_side.encoding import encode_reply
from gpu_side.handler import RequestHandler
from gpu_side.weights import load_weights
from protocol.curve import ClientKeys
from protocol.errors import SettingsError
from protocol.messages import InitReply, InitRequest, Timing
from protocol.model.config import read_config
from protocol.tensors import from_torch
from tee_side.policy.placement import load_policy
from tee_side.protect.masking import MaskRules
from tee_side.remote.services.plan import (
    ReplicaGroup,
    ServiceSpec,
    assign_shares,
    check_links,
    init_reply_bytes,
    largest_reply,
    plan_services,
)
from tee_side.words import LayerRange
from tests.kit.model import CLEAR, Models, policy_of
from tests.kit.rows import each_row

A, B, C, D = (f"tcp://{name}:1" for name in "abcd")
TWO = load_policy("two-server")


def _plan(policy: str, layers: int, *texts: str) -> list[ReplicaGroup]:
    specs = [ServiceSpec.parse(text) for text in texts]
    return list(plan_services(specs, load_policy(policy), layers))


@each_row(
    ("text", "spec"),
    [
        (A, ServiceSpec(A)),
        (f"{A}=8-", ServiceSpec(A, LayerRange(8, None))),
        ("tcp://[::1]:5=0-1", ServiceSpec("tcp://[::1]:5", LayerRange(0, 1))),
        ("ivshmem:///m,2:5=0-1,share=2", ServiceSpec("ivshmem:///m,2:5", LayerRange(0, 1), 2)),
        # A path may hold what looks like the rest.
        ("unix:///run/a=b,c/s", ServiceSpec("unix:///run/a=b,c/s")),
        ("unix:///c/columns=1/s,share=1", ServiceSpec("unix:///c/columns=1/s", share=1)),
    ],
)
def test_what_may_be_written(text: str, spec: ServiceSpec) -> None:
    assert ServiceSpec.parse(text) == spec
    assert str(spec) == text


@each_row(
    "text",
    [
        *(f"{A}{rest}" for rest in ("=", "=a", "=-3", "=1-2-3", "=5-3", "=99999", ",x=1")),
        *(f"{A},share={rest}" for rest in ("3", "0", "", "1=0-7")),
        *(f"{A},columns={rest}" for rest in ("0/2", "0/2,share=1", "")),
        *("unix:///s,share", "unix:///s,share=1,share=1"),
        *("unix:///s,columns=0/2", "unix:///s=0-7,columns=0/2"),
        *("https://a=b", "https://a/b,c", "http://a:1=x", "http://a,share=3"),
    ],
)
def test_what_may_not(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ServiceSpec.parse(text)
    assert (caught.value.where, caught.value.got) == ("--gpu", repr(text))
    assert ("--tensor-parallel N" in caught.value.expected) == ("columns" in text)


@each_row(
    ("policy", "texts", "groups"),
    [
        ("tee-only", "a", ""),
        # The same layers stand in for each other, however they are written.
        ("shielded", "a=0-3 b c=0-,share=1", "layers 0-3: a b c"),
        ("published", "a=2- b=0-1 c=2-3 d=0-1", "layers 0-1: b d; layers 2-3: a c"),
        # Shares of two go by position, within the same layers, and of more are said.
        ("two-server", "a=0- b=0-3", "layers 0-3, share 1 of 2: a; layers 0-3, share 2 of 2: b"),
        (
            *("two-server", "d,share=2 a,share=1 c,share=1 b,share=2"),
            "layers 0-3, share 1 of 2: a c; layers 0-3, share 2 of 2: d b",
        ),
        # The layers of a share may be spread otherwise than those of the other.
        (
            *("two-server", "a=0-1,share=1 b=2-,share=1 c,share=2"),
            "layers 0-1, share 1 of 2: a; layers 2-3, share 1 of 2: b; layers 0-3, share 2 of 2: c",
        ),
    ],
)
def test_services_are_grouped_by_share_and_layers(policy: str, texts: str, groups: str) -> None:
    found = _plan(policy, 4, *(f"tcp://{text[0]}:1{text[1:]}" for text in texts.split()))
    said = [f"{one}: {' '.join(endpoint[6] for endpoint in one.endpoints)}" for one in found]
    assert "; ".join(said) == groups
    assert all(group.shares == load_policy(policy).services for group in found)


@each_row(
    ("policy", "texts", "got", "expected"),
    [
        ("published", "", "no endpoint", "1, because policy published uses a gpu-service"),
        ("two-server", "a", "one endpoint", "2, because policy two-server uses 2"),
        ("published", "a a", "a twice", "each service once"),
        ("published", "a=0-7 a=8-", "a=0-7 and a=8-, one and the", "each service once"),
        ("two-server", "a a", "a twice", "two that do not collude"),
        ("two-server", "a,share=1 a,share=2", "a,share=1 and a,share=2", "collude"),
        ("two-server", "a,share=1 b", "a,share=1 and b", "share= for all of them"),
        ("two-server", "a,share=1 b,share=1", "no service for share 2 bes", "2, because"),
        # By position the owner of a and b would get both shares.
        ("two-server", "a b c d", "a and b and c and d without share=", "share=1 or"),
        ("two-server", "tcp://a:1 tcp://A:2", "a and tcp://A:2 on one host, with", "for each"),
        ("published", "a,share=2", "a,share=2", "no share: policy published uses one"),
        ("published", "a=0-16", "a=0-16", "layers within 0-15"),
        ("published", "a=0-8 b=8-", "a=0-8 and b=8-, which overlap", "none in common"),
        ("published", "a=0-6 b=8-", "no service for layers 7, between a=0-6 and b", "0-15"),
        (
            *("two-server", "a=0-7,share=1 b=8-,share=1 c=0-7,share=2"),
            *("no service for layers 8-15, between c=0-7,share=2 and the model's", "each share"),
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_naming_both(
    policy: str, texts: str, got: str, expected: str
) -> None:
    endpoints = [
        text if "://" in text else f"tcp://{text[0]}:1{text[1:]}" for text in texts.split()
    ]
    with pytest.raises(SettingsError) as caught:
        _plan(policy, 16, *endpoints)
    assert caught.value.where == "--gpu"
    assert re.sub(r"tcp://(\w):1", r"\1", caught.value.got).startswith(got)
    assert expected in caught.value.expected


ONE, OTHER = (ClientKeys(*reversed(zmq.curve_keypair())) for _ in range(2))
HOSTS = [f"{A},share=1", f"{B},share=2"]
LOCAL = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@each_row(
    ("gpu", "keys", "in_the_clear", "said"),
    [
        # All links are encrypted: by keys, or by verified TLS.
        (HOSTS, [ONE, OTHER], False, True),
        (["https://one.example", "https://two.example/x"], None, False, True),
        # One host may stand for two owners where the operator says so.
        ([f"{A},share=1", f"{A}2,share=2"], [ONE, OTHER], False, True),
        # In the clear on one machine, where the operator allows it.
        (LOCAL, None, True, False),
        (["tcp://127.0.0.1:1", "unix:///s"], None, True, False),
        (LOCAL, None, False, "got http://127.0.0.1:1 without keys"),
        (HOSTS, [ONE, None], True, f"got {B} without keys"),
        (["tcp://127.0.0.1:1", "vsock://2:5"], None, True, "got vsock://2:5 without keys"),
        (["unix:///s", "ivshmem:///m,2:5"], None, True, "got ivshmem:///m,2:5 without keys"),
        (["https://one.example", "http://127.0.0.1:1"], None, False, "got http://127.0.0.1:1 with"),
        # One party could read both.
        (HOSTS, [ONE, ONE], False, "--service-key: got one key for"),
        (["https://x/a,share=1", "https://x/b,share=2"], None, False, "behind one end of TLS"),
        (["https://x,share=1", "https://X:443/b,share=2"], None, False, "behind one end of TLS"),
        (["https://one.example:1", "https://one.example:2"], None, False, "on one host, with a sh"),
        (["https://one.example/a", "tcp://one.example:5"], None, False, "on one host, with a sha"),
    ],
)
def test_no_one_party_reads_two_shares(
    gpu: list[str], keys: Sequence[ClientKeys | None] | None, in_the_clear: bool, said: str | bool
) -> None:
    def checked() -> bool:
        specs = assign_shares([ServiceSpec.parse(text) for text in gpu], TWO)
        own = keys or [None] * len(specs)
        return check_links(specs, own, TWO, shares_in_the_clear=in_the_clear)

    if isinstance(said, bool):
        assert checked() == said
        return
    with pytest.raises(SettingsError) as caught:
        checked()
    assert said in str(caught.value)


@pytest.fixture
def directory(saved_model: Models) -> Path:
    return saved_model("llama").directory


@each_row(
    ("policy", "elements", "itemsize"),
    [
        ("quantized-clear", 2 * 96, 4),  # gate and up side by side
        ("attention-in-tee", 2 * 96, 2),
        ("published", 6 * 256, 2),  # scores: heads times positions
    ],
)
def test_the_largest_reply_follows_from_policy_and_model(
    directory: Path, policy: str, elements: int, itemsize: int
) -> None:
    config = read_config(directory)
    size = largest_reply(load_policy(policy), config, 100, torch.bfloat16)
    assert size == max(100 * elements * itemsize, init_reply_bytes(config)) + 16 * 1024
    # No service is blamed for a reply that our own mask asked for.
    mixed = policy_of({"down_proj": CLEAR | {"mask": "row-mix"}})
    rows = MaskRules(mixed.masks[0]).most_rows(100)
    assert largest_reply(mixed, config, 100, torch.float32) >= rows * 192


def test_an_init_reply_of_many_layers_fits(directory: Path) -> None:
    """The framed reply itself, all frames, of a model with more norms than anything else."""
    weights = load_weights(directory, device=torch.device("cpu"), dtype=torch.float32)
    reply = RequestHandler(weights, 2**29).apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    norm = reply.norm_weights["final_norm"].model_copy(
        update={"weight": from_torch(torch.ones(1024))}
    )
    kinds = ("input_layernorm", "post_attention_layernorm")
    norms = {f"layer_{n}_{kind}": norm for n in range(400) for kind in kinds}
    large = reply.model_copy(update={"norm_weights": norms | {"final_norm": norm}})
    frames = encode_reply("framed", 1, "Init", large, Timing(queue_us=1, compute_us=1))
    sizes = {"num_hidden_layers": 400, "hidden_size": 1024}
    bound = init_reply_bytes(read_config(directory).model_copy(update=sizes))
    assert sum(len(frame) for frame in frames) < bound + 16 * 1024
