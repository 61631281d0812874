"""`--gpu`, `--dealer`: what may be written, what goes together, on which links; reply sizes."""

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
    check_links,
    dealer_names,
    init_reply_bytes,
    largest_reply,
    plan_services,
    read_services,
)
from tee_side.words import LayerRange
from tests.kit.model import CLEAR, Models, policy_of
from tests.kit.rows import each_row

A, B, C, D = (f"tcp://{name}:1" for name in "abcd")
DEALT = load_policy("dealt")


def _plan(policy: str, layers: int, *texts: str) -> list[ReplicaGroup]:
    """Plan services, and dealers, which have a + in front."""
    named = {
        dealt: tuple(t[dealt:] for t in texts if t.startswith("+") == dealt) for dealt in (0, 1)
    }
    return list(plan_services(read_services(named[0], named[1], load_policy(policy)), layers))


@each_row(
    ("text", "spec"),
    [
        (A, ServiceSpec(A)),
        (f"{A}=8-", ServiceSpec(A, LayerRange(8, None))),
        ("tcp://[::1]:5=0-1", ServiceSpec("tcp://[::1]:5", LayerRange(0, 1))),
        ("ivshmem:///m,2:5=0-1", ServiceSpec("ivshmem:///m,2:5", LayerRange(0, 1))),
        # A path may hold what looks like the rest.
        ("unix:///run/a=b,c/s", ServiceSpec("unix:///run/a=b,c/s")),
        ("unix:///c/columns=1/s", ServiceSpec("unix:///c/columns=1/s")),
    ],
)
def test_what_may_be_written(text: str, spec: ServiceSpec) -> None:
    assert ServiceSpec.parse(text) == spec
    assert str(spec) == text


@each_row(
    "text",
    [
        *(f"{A}{rest}" for rest in ("=", "=a", "=-3", "=1-2-3", "=5-3", "=99999", ",x=1")),
        *(f"{A},share={rest}" for rest in ("1", "", "1=0-7")),
        *(f"{A},columns={rest}" for rest in ("0/2", "0/2,share=1", "")),
        *("unix:///s,share=1", "unix:///s,columns=0/2", "unix:///s=0-7,columns=0/2"),
        *("https://a=b", "https://a/b,c", "http://a:1=x"),
    ],
)
def test_what_may_not(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ServiceSpec.parse(text, "--dealer")
    assert (caught.value.where, caught.value.got) == ("--dealer", repr(text))
    assert ("--tensor-parallel N" in caught.value.expected) == ("columns" in text)
    of_before = "share" in text and "columns" not in text
    assert ("--dealer who multiplies" in caught.value.expected) == of_before


@each_row(
    ("policy", "texts", "groups"),
    [
        ("tee-only", "a", ""),
        # The same layers stand in for each other, however they are written.
        ("shielded", "a=0-3 b c=0-", "layers 0-3: a b c"),
        ("published", "a=2- b=0-1 c=2-3 d=0-1", "layers 0-1: b d; layers 2-3: a c"),
        # Dealers of the same layers add up.
        ("dealt", "a=0- c +b=0-3", "layers 0-3: a c; layers 0-3, pads of dealer 1: b"),
        (
            *("dealt", "a +b +c"),
            "layers 0-3: a; layers 0-3, pads of dealer 1: b; layers 0-3, pads of dealer 2: c",
        ),
        (
            "dealt",
            "a +b=0-1 +c +d=2-",
            "layers 0-3: a; layers 0-1, pads of dealer 1: b; layers 2-3,"
            " pads of dealer 1: d; layers 0-3, pads of dealer 2: c",
        ),
        # The layers of a dealer may be spread otherwise than those of the service.
        (
            *("dealt", "a=0-1 b=2- +c=0-2 +d=3"),
            "layers 0-1: a; layers 2-3: b; layers 0-2, pads of dealer 1: c; layers 3, pads of"
            " dealer 1: d",
        ),
    ],
)
def test_services_are_grouped_by_owner_and_layers(policy: str, texts: str, groups: str) -> None:
    found = _plan(policy, 4, *(_written(text) for text in texts.split()))
    said = [f"{one}: {' '.join(endpoint[6] for endpoint in one.endpoints)}" for one in found]
    assert "; ".join(said) == groups


def _written(text: str) -> str:
    name, dealt = text.lstrip("+"), "+" * text.startswith("+")
    return dealt + (name if "://" in name else f"tcp://{name[0]}:1{name[1:]}")


@each_row(
    ("policy", "texts", "got", "expected"),
    [
        ("published", "", "--gpu: no endpoint", "a gpu-service, which policy published uses"),
        ("dealt", "a", "--dealer: no endpoint", "of another owner, which multiplies pads for"),
        ("dealt", "+a", "--gpu: no endpoint", "a gpu-service, which policy dealt uses"),
        ("shielded", "a +b", "--dealer: b", "no dealer, under policy shielded"),
        ("published", "a a", "--gpu: a twice", "each service once"),
        ("published", "a=0-7 a=8-", "--gpu: a=0-7 and a=8-, one and the", "each service once"),
        ("dealt", "a +a", "--dealer: a twice", "two owners, who do not collude"),
        ("dealt", "a +b +b", "--dealer: b twice", "two owners, who do not collude"),
        ("dealt", "a +tcp://A:2", "--dealer: a and tcp://A:2 on one host", "of two owners"),
        ("dealt", "a +b +tcp://b:2", "--dealer: b and tcp://b:2 on one host", "of two owners"),
        ("published", "a=0-16", "--gpu: a=0-16", "layers within 0-15"),
        ("published", "a=0-8 b=8-", "--gpu: a=0-8 and b=8-, which overlap", "none in common"),
        ("published", "a=0-6 b=8-", "--gpu: no service for layers 7, between a=0-6 and b", "0-15"),
        (
            *("dealt", "a +c=0-7", "--dealer: no service for layers 8-15, between c=0-7 and the"),
            "of each owner",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_naming_both(
    policy: str, texts: str, got: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        _plan(policy, 16, *map(_written, texts.split()))
    said = f"{caught.value.where}: {caught.value.got}"
    assert re.sub(r"tcp://(\w):1", r"\1", said).startswith(got)
    assert expected in caught.value.expected


ONE, OTHER = (ClientKeys(*reversed(zmq.curve_keypair())) for _ in range(2))
HOSTS = [A, B]
LOCAL = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@each_row(
    ("named", "keys", "in_the_clear", "said"),
    [
        # All links are encrypted: by keys, or by verified TLS.
        (HOSTS, [ONE, OTHER], False, True),
        (["https://one.example", "https://two.example/x"], None, False, True),
        # In the clear on one machine, where the operator allows it.
        (LOCAL, None, True, False),
        (["tcp://127.0.0.1:1", "unix:///s"], None, True, False),
        (LOCAL, None, False, "--gpu: got http://127.0.0.1:1 without keys"),
        (HOSTS, [ONE, None], True, f"--dealer: got {B} without keys"),
        (["tcp://127.0.0.1:1", "vsock://2:5"], None, True, "got vsock://2:5 without keys"),
        (["unix:///s", "ivshmem:///m,2:5"], None, True, "got ivshmem:///m,2:5 without keys"),
        (["https://one.example", "http://127.0.0.1:1"], None, False, "got http://127.0.0.1:1 with"),
        # One party could read both.
        (HOSTS, [ONE, ONE], False, "--service-key: got one key for"),
        (["https://127.0.0.1/a", "https://127.0.0.1/b"], None, False, "behind one end of TLS"),
        (["https://x/a", "https://X:443/b"], None, False, "on one host"),
        (["https://one.example:1", "https://one.example:2"], None, False, "on one host"),
        (["https://one.example/a", "tcp://one.example:5"], None, False, "on one host"),
    ],
)
def test_no_one_party_gets_a_pad_and_what_it_hides(
    named: list[str], keys: Sequence[ClientKeys | None] | None, in_the_clear: bool, said: str | bool
) -> None:
    def checked() -> bool:
        specs = read_services(named[:1], named[1:], DEALT)
        own = keys or [None] * len(specs)
        return check_links(specs, own, DEALT, dealer_in_the_clear=in_the_clear)

    if isinstance(said, bool):
        assert checked() == said
        return
    with pytest.raises(SettingsError) as caught:
        checked()
    assert said in str(caught.value)


def test_a_dealers_name_is_no_other_owners() -> None:
    specs = read_services([A], [f"{B}=0-7", f"{C}=8-", D], DEALT)
    assert dealer_names(specs, [None] * 4) == (f"{B}=0-7 {C}=8-", D)
    key = ONE.service.decode()
    assert dealer_names(specs, [OTHER, ONE, ONE, None]) == (f"{key}=0-7 {key}=8-", D)


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
