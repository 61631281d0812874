"""`--gpu`: what a person may write, and what two of them must not say together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import Form, encode_reply
from gpu_side.handler import RequestHandler
from gpu_side.weights import load_weights
from protocol.errors import EndpointError, SettingsError
from protocol.messages import FUSED_MODULES, InitReply, InitRequest, Timing
from protocol.model.config import read_config
from tee_side.policy.layer_range import LayerRange
from tee_side.policy.placement import load_policy
from tee_side.protect.masking import most_rows
from tee_side.remote.reply_size import init_reply_bytes, largest_reply
from tee_side.remote.services.plan import ReplicaGroup, ServiceSpec, assign_shares, plan_services
from tests.kit.model import SavedModel
from tests.kit.rows import each_row

A, B, C, D = (f"tcp://{name}:1" for name in "abcd")


def _specs(*texts: str) -> list[ServiceSpec]:
    return [ServiceSpec.parse(text) for text in texts]


def _plan(policy: str, layers: int, *texts: str) -> tuple[ReplicaGroup, ...]:
    return plan_services(_specs(*texts), load_policy(policy), layers)


@each_row(
    ("text", "spec"),
    [
        (A, ServiceSpec(A)),
        (f"{A}=0-7", ServiceSpec(A, LayerRange(0, 7))),
        (f"{A}=8-", ServiceSpec(A, LayerRange(8, None))),
        (f"{A}=3", ServiceSpec(A, LayerRange(3, 3))),
        (f"{A},share=2", ServiceSpec(A, None, 2)),
        (f"{A}=8-15,share=1", ServiceSpec(A, LayerRange(8, 15), 1)),
        ("tcp://[::1]:5=0-1", ServiceSpec("tcp://[::1]:5", LayerRange(0, 1))),
        ("vsock://2:5=0-1", ServiceSpec("vsock://2:5", LayerRange(0, 1))),
        ("ivshmem:///m,2:5=0-1,share=2", ServiceSpec("ivshmem:///m,2:5", LayerRange(0, 1), 2)),
        ("ivshmem:///m=0,/s=3", ServiceSpec("ivshmem:///m=0,/s", LayerRange(3, 3))),
        # A path may hold what looks like the rest.
        ("unix:///run/a=b,c/s", ServiceSpec("unix:///run/a=b,c/s")),
        ("unix:///run/a=1/s=2-3", ServiceSpec("unix:///run/a=1/s", LayerRange(2, 3))),
        ("ipc://name=0-,share=1", ServiceSpec("ipc://name", LayerRange(0, None), 1)),
        (f"{A},columns=0/2", ServiceSpec(A, columns=(0, 2))),
        (f"{A}=8-,share=2,columns=63/64", ServiceSpec(A, LayerRange(8, None), 2, (63, 64))),
        (
            "unix:///c/columns=1/s,columns=1/3",
            ServiceSpec("unix:///c/columns=1/s", None, None, (1, 3)),
        ),
    ],
)
def test_what_may_be_written(text: str, spec: ServiceSpec) -> None:
    assert ServiceSpec.parse(text) == spec
    assert str(spec) == text


@each_row(
    "text",
    [
        f"{A}=",
        f"{A}=a",
        f"{A}=-3",
        f"{A}=1-2-3",
        f"{A}=5-3",
        f"{A}=99999",
        f"{A},share=3",
        f"{A},share=0",
        f"{A},share=",
        f"{A},share=1=0-7",
        "unix:///s,share",
        f"{A},x=1",
        "unix:///s,share=3",
        "unix:///s=5-3",
        f"{A},columns=2/2",
        f"{A},columns=0/1",
        f"{A},columns=0/65",
        f"{A},columns=-1/2",
        f"{A},columns=1",
        f"{A},columns=",
        "unix:///s,columns=0/2,columns=0/2",
        "unix:///s,columns=0/2,columns=1/2",
        "unix:///s,share=1,share=1",
        "unix:///s,columns=0/2=0-7",
    ],
)
def test_what_may_not(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ServiceSpec.parse(text)
    assert caught.value.where == "--gpu"
    assert caught.value.got == repr(text)


@pytest.mark.parametrize("text", ["", "host:1", "ftp://a:1", "tcp://a", "=0-7", "tcp://a:0"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(EndpointError):
        ServiceSpec.parse(text)


def test_share_and_columns_come_in_either_order() -> None:
    either = (f"{A}=1-2,share=2,columns=1/2", f"{A}=1-2,columns=1/2,share=2")
    assert len(set(_specs(*either))) == 1


def test_the_same_layers_stand_in_for_each_other() -> None:
    assert _plan("shielded", 4, A, B) == (ReplicaGroup(1, 0, 3, (A, B)),)
    # However they are written.
    assert _plan("shielded", 4, f"{A}=0-3", B, f"{C}=0-,share=1") == (
        ReplicaGroup(1, 0, 3, (A, B, C)),
    )


def test_layers_are_spread_in_order() -> None:
    assert _plan("tsqp", 16, f"{A}=8-", f"{B}=0-7", f"{C}=8-15", f"{D}=0-7") == (
        ReplicaGroup(1, 0, 7, (B, D)),
        ReplicaGroup(1, 8, 15, (A, C)),
    )


def test_shares_of_two_go_by_position_and_of_more_are_said() -> None:
    assert _plan("two-server", 4, A, B) == (
        ReplicaGroup(1, 0, 3, (A,), 2),
        ReplicaGroup(2, 0, 3, (B,), 2),
    )
    assert _plan("two-server", 4, f"{A}=0-", f"{B}=0-3") == _plan("two-server", 4, A, B)
    said = [f"{D},share=2", f"{A},share=1", f"{C},share=1", f"{B},share=2"]
    assert _plan("two-server", 4, *said) == (
        ReplicaGroup(1, 0, 3, (A, C), 2),
        ReplicaGroup(2, 0, 3, (D, B), 2),
    )
    # Within the same layers; and a share may be spread otherwise than the other.
    assert _plan("two-server", 4, f"{A}=0-1", f"{B}=2-", f"{C}=0-1", f"{D}=2-") == (
        ReplicaGroup(1, 0, 1, (A,), 2),
        ReplicaGroup(1, 2, 3, (B,), 2),
        ReplicaGroup(2, 0, 1, (C,), 2),
        ReplicaGroup(2, 2, 3, (D,), 2),
    )
    assert _plan("two-server", 4, f"{A}=0-1,share=1", f"{B}=2-,share=1", f"{C},share=2") == (
        ReplicaGroup(1, 0, 1, (A,), 2),
        ReplicaGroup(1, 2, 3, (B,), 2),
        ReplicaGroup(2, 0, 3, (C,), 2),
    )


def test_columns_are_parted_as_layers_and_shares_are() -> None:
    assert _plan("shielded", 4, f"{B},columns=1/2", f"{A},columns=0/2", f"{C}=0-,columns=1/2") == (
        ReplicaGroup(1, 0, 3, (A,), 1, (0, 2)),
        ReplicaGroup(1, 0, 3, (B, C), 1, (1, 2)),
    )
    # Each range of layers in its own way, and each share.
    said = [f"{A}=0-1,columns=0/2", f"{B}=0-1,columns=1/2", f"{C}=2-"]
    assert _plan("tsqp", 4, *said) == (
        ReplicaGroup(1, 0, 1, (A,), 1, (0, 2)),
        ReplicaGroup(1, 0, 1, (B,), 1, (1, 2)),
        ReplicaGroup(1, 2, 3, (C,)),
    )
    said = [f"{A},share=1,columns=0/2", f"{B},share=1,columns=1/2", f"{C},share=2"]
    assert _plan("two-server", 4, *said) == (
        ReplicaGroup(1, 0, 3, (A,), 2, (0, 2)),
        ReplicaGroup(1, 0, 3, (B,), 2, (1, 2)),
        ReplicaGroup(2, 0, 3, (C,), 2),
    )


def test_a_line_says_what_each_is_asked_for() -> None:
    assert str(ReplicaGroup(2, 0, 3, (A,), 2, (1, 2))) == "layers 0-3, columns 1/2, share 2 of 2"
    assert str(ReplicaGroup(1, 4, 4, (A,))) == "layers 4"


def test_a_policy_of_which_nothing_leaves_uses_none() -> None:
    assert _plan("tee-only", 4, A) == ()


@each_row(
    ("policy", "texts", "got", "expected"),
    [
        ("tsqp", [], "no endpoint", "1, because policy tsqp uses a gpu-service"),
        ("two-server", [A], "one endpoint", "2, because policy two-server uses 2"),
        ("tsqp", [A, A], f"{A} twice", "each service once"),
        ("tsqp", [f"{A}=0-7", f"{A}=8-"], f"{A}=0-7 and {A}=8-, one and the", "each service once"),
        ("two-server", [A, A], f"{A} twice", "two that do not collude"),
        ("two-server", [f"{A},share=1", f"{A},share=2"], f"{A},share=1 and {A},share=2", "collude"),
        ("two-server", [f"{A},share=1", B], f"{A},share=1 and {B}", "share= for all of them"),
        (
            "two-server",
            [f"{A},share=1", f"{B},share=1"],
            "no service for share 2 beside",
            "2, because",
        ),
        # By position the owner of A and B would get both shares.
        ("two-server", [A, B, C, D], f"{A} and {B} and {C} and {D} without share=", "share=1 or"),
        ("two-server", [A, B, C], f"{A} and {B} and {C} without share=", "share=1 or share=2"),
        (
            "two-server",
            [f"{A}=0-7", f"{B}=0-7", f"{C}=8-", f"{D}=8-", "tcp://e:1=9-"],
            f"{C}=8- and {D}=8- and tcp://e:1=9- without share=",
            "share=1 or share=2 for each",
        ),
        ("two-server", [A, B, f"{C}=0-15", f"{D}=0-15"], f"{A} and {B} and {C}=0-15", "share=1"),
        (
            "two-server",
            ["tcp://a:1", "tcp://A:2"],
            "tcp://a:1 and tcp://A:2 on one host, with a share each",
            "share= for each",
        ),
        (
            "two-server",
            ["tcp://a:1=0-7", "tcp://b:1=0-7", "tcp://b:2=8-", "tcp://a:2=8-"],
            "tcp://b:1 and tcp://b:2 on one host, with a share each",
            "share= for each",
        ),
        ("tsqp", [f"{A},share=2"], f"{A},share=2", "no share: policy tsqp uses one"),
        ("tsqp", [f"{A}=0-16"], f"{A}=0-16", "layers within 0-15"),
        ("tsqp", [f"{A}=16-"], f"{A}=16-", "layers within 0-15"),
        ("tsqp", [f"{A}=0-8", f"{B}=8-"], f"{A}=0-8 and {B}=8-, which overlap", "none in common"),
        ("tsqp", [A, f"{B}=3"], f"{A} and {B}=3, which overlap", "the same layers"),
        (
            "tsqp",
            [f"{A}=0-6", f"{B}=8-"],
            f"no service for layers 7, between {A}=0-6 and {B}=8-",
            "each of the layers 0-15",
        ),
        (
            "tsqp",
            [f"{A}=2-"],
            f"no service for layers 0-1, between the model's first layer and {A}",
            "",
        ),
        (
            "tsqp",
            [f"{A}=0-9"],
            f"no service for layers 10-15, between {A}=0-9 and the model's end",
            "",
        ),
        (
            "two-server",
            [f"{A}=0-7,share=1", f"{B}=8-,share=1", f"{C}=0-7,share=2"],
            f"no service for layers 8-15, between {C}=0-7,share=2 and the model's end",
            "for each share",
        ),
        (
            "tsqp",
            [f"{A},columns=0/3", f"{B},columns=2/3"],
            f"no service for columns 1/3 beside {A},columns=0/3",
            "each of the parts 0 to 2",
        ),
        (
            "tsqp",
            [f"{A},columns=0/2", f"{B},columns=1/3"],
            f"{A},columns=0/2 and {B},columns=1/3",
            "one N for all with the same layers",
        ),
        ("tsqp", [A, f"{B},columns=0/2"], f"{A} and {B},columns=0/2", "or for none"),
        (
            "clear-segment",
            [f"{A},columns=0/2", f"{B},columns=1/2"],
            f"{A},columns=0/2",
            "whole columns: policy clear-segment has segments",
        ),
        (
            "tsqp",
            [f"{A}=0-7,columns=0/2", f"{B},columns=1/2"],
            f"{A}=0-7,columns=0/2 and {B},columns=1/2, which overlap",
            "none in common",
        ),
        # The owner of two parts sees all rows of both: only share= tells who that is.
        (
            "two-server",
            [f"{A},columns=0/2", f"{B},columns=1/2", f"{C},columns=0/2", f"{D},columns=1/2"],
            f"{A},columns=0/2 and {B},columns=1/2 and",
            "share=1 or share=2 for each",
        ),
        (
            "two-server",
            [f"{A},share=1,columns=0/2", f"{B},share=2,columns=1/2"],
            f"no service for columns 1/2 beside {A},share=1,columns=0/2",
            "each of the parts",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_naming_both(
    policy: str, texts: list[str], got: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        _plan(policy, 16, *texts)
    assert caught.value.where == "--gpu"
    assert caught.value.got.startswith(got)
    assert expected in caught.value.expected


def test_shares_are_known_before_the_model_is() -> None:
    two_server = load_policy("two-server")
    specs = assign_shares(_specs(f"{A}=0-3", f"{C}=4-", f"{B}=0-3", f"{D}=4-"), two_server)
    assert [spec.share for spec in specs] == [1, 1, 2, 2]
    # One host may stand for two owners where the operator says so, and loopback always does.
    gateway = [f"{A},share=1", f"{A.replace(':1', ':2')},share=2"]
    for texts in (gateway, ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]):
        assert [one.share for one in assign_shares(_specs(*texts), two_server)] == [1, 2]


# ---------------------------------------------------------------------------- size of replies


@pytest.fixture
def model_directory(saved_model: Callable[..., SavedModel]) -> Path:
    return saved_model("llama").directory


@pytest.mark.parametrize(
    ("policy", "elements", "itemsize"),
    [
        ("quantized-clear", 2 * 96, 4),  # gate and up side by side
        ("attention-in-tee", 2 * 96, 2),
        ("tsqp", 6 * 256, 2),  # scores: heads times positions
    ],
)
def test_the_largest_reply_follows_from_policy_and_model(
    model_directory: Path, policy: str, elements: int, itemsize: int
) -> None:
    config = read_config(model_directory)
    size = largest_reply(load_policy(policy), config, 100, torch.bfloat16)
    assert size == max(100 * elements * itemsize, init_reply_bytes(config)) + 16 * 1024


@pytest.mark.parametrize("policy", ["tsqp", "tsqp-permuted", "row-mix", "quantized-clear"])
def test_a_reply_has_room_for_all_rows_that_a_mask_may_send(
    model_directory: Path, policy: str
) -> None:
    """One rule for both: no service is blamed for a reply that our own mask asked for."""
    chosen, config = load_policy(policy), read_config(model_directory)
    size = largest_reply(chosen, config, 100, torch.float32)
    for operator, placement in chosen.leaving():
        if operator in FUSED_MODULES:
            modules = FUSED_MODULES[operator]
            outputs = sum(config.module_shape(module)[0] for module in modules)
            assert size >= most_rows(placement.mask, 100) * outputs * 4


def test_an_init_reply_of_many_layers_fits(model_directory: Path) -> None:
    """The framed reply itself, all frames, of a model with more norms than anything else."""
    layers = 400
    config = read_config(model_directory)
    weights = load_weights(model_directory, device=torch.device("cpu"), dtype=torch.float32)
    reply = RequestHandler(weights, 2**29).apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    norms = {
        f"layer_{n}_{kind}": reply.norm_weights["final_norm"]
        for n in range(layers)
        for kind in ("input_layernorm", "post_attention_layernorm")
    }
    large = reply.model_copy(update={"norm_weights": norms | reply.norm_weights})
    frames = encode_reply(Form.FRAMED, 1, "Init", large, Timing(queue_us=1, compute_us=1))
    size = sum(len(frame) for frame in frames)
    assert (
        size < init_reply_bytes(config.model_copy(update={"num_hidden_layers": layers})) + 16 * 1024
    )
