"""What is recorded is what crosses, byte for byte; no key is beside it, and files are sealed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_side.weights import load_weights
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, FeatureKeyError, PromptError, ServiceError
from protocol.messages import EmbeddingRequest, HealthRequest, LinearRequest, Request, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import CPU
from protocol.tensors import from_torch, to_torch
from tee_side.policy.placement import load_policy
from tests.kit.leaks import begun, recorded
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.adversaries import together
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import KEY, SERVED, PlaySettings, logits_of, play
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.leak.trace import Trace, TraceError
from tsqp.lab.research.feature_key import FeatureKey

IDS = EmbeddingRequest(input_ids=from_torch(torch.tensor([3, 5])), dtype="float32")
# Of 48 features, where o_proj takes 96.
NARROW = LinearRequest(
    layer_idx=1, module_names=("o_proj",), hidden_states=from_torch(torch.ones(3, 48))
)


@pytest.fixture
def channel(model: SavedModel) -> RecordingChannel:
    return RecordingChannel(load_weights(model.directory, device=CPU, dtype=torch.float32))


def sent(request: Request, number: int) -> tuple[bytes, ...]:
    """Return the frames that a socket would get, of a client's request of some number."""
    return tuple(map(bytes, encode_request(request, number, 60_000)))


def test_what_is_recorded_is_what_a_socket_gets(
    model: SavedModel, channel: RecordingChannel
) -> None:
    """Nothing but bytes, which stay when the sender's memory is used again."""
    wide = torch.zeros(3, 96)
    request = LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=from_torch(wide))
    expected = sent(IDS, 1), sent(request, 2)
    exchange = channel.call(IDS)
    channel.call(request)
    wide.fill_(7)
    assert channel.recorded == 2
    trace = channel.take()
    assert trace.messages == expected
    assert vars(trace).keys() == {"messages"}
    assert {type(frame) for message in trace.messages for frame in message} == {bytes}
    assert isinstance(exchange.response, TensorReply)
    weight = model.reference.get_input_embeddings().weight
    assert torch.equal(to_torch(exchange.response.output), weight[[3, 5]])
    # A trace begins where the last one ended.
    assert (channel.recorded, channel.take()) == (0, Trace(()))
    assert exchange.bytes_sent == sum(map(len, expected[0]))
    traffic = channel.traffic
    assert (traffic.round_trips, traffic.bytes_sent) == (2, sum(map(len, sum(expected, ()))))


def test_a_request_that_fails_is_recorded_and_the_channel_goes_on(
    channel: RecordingChannel,
) -> None:
    for number, wrong in enumerate((NARROW, NARROW.model_copy(update={"layer_idx": 9})), start=1):
        with pytest.raises(ServiceError) as caught:
            channel.call(wrong)
        assert caught.value.code == ErrorCode.INVALID_FIELD
        assert channel.take().messages == (sent(wrong, number),)
    with pytest.raises(KeyError):
        channel.call(HealthRequest())
    abandoned = channel.submit(IDS)
    channel.abandon(abandoned)
    with pytest.raises(KeyError):
        channel.wait(abandoned)
    assert channel.take().messages == (sent(HealthRequest(), 3), sent(IDS, 4))


# ------------------------------------------------------------------------------------- sessions


@each_row("name", ["cloak", "stip"])
def test_a_cloaks_service_gets_other_weights_and_no_key(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    """Nor is a key beside them while prompts run."""
    folder, beside = tmp_path / name, list[list[str]]()
    folder.mkdir()
    played = play(
        load_policy(name),
        begun(4, 3),
        PlaySettings(model.directory, folder, 2),
        lambda _done, _total: beside.append([path.name for path in folder.iterdir()]),
    )
    assert beside == [[SERVED], [SERVED]]
    assert played.served == folder / SERVED
    assert not [path for path in folder.rglob("*") if "key" in path.name.lower()]
    weight = "model.layers.0.self_attn.q_proj.weight"
    plain, served = (Checkpoint(d).rows(weight, 0, 4) for d in (model.directory, played.served))
    assert not torch.allclose(plain, served, atol=1e-2)


def test_no_key_is_left_where_logits_were_asked_for_or_it_was_refused(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, refused = tmp_path / "logits", tmp_path / "refused"
    for folder in (logits, refused):
        folder.mkdir()
    prompts = begun(5, 4)
    found = logits_of(load_policy("cloak"), prompts, PlaySettings(model.directory, logits, 2))
    for ids, logits_TV in zip(prompts, found, strict=True):
        assert torch.allclose(logits_TV, model.logits(ids), atol=2e-3)

    def refuse(*_: object) -> None:
        assert (refused / KEY).exists()
        raise FeatureKeyError("key", got="this one", expected="another")

    monkeypatch.setattr(FeatureKey, "check", refuse)
    with pytest.raises(FeatureKeyError):
        recorded(model, "cloak", refused, prompts)
    for folder in (logits, refused):
        assert [path.name for path in folder.iterdir()] == [SERVED]


def test_of_other_policies_the_service_has_the_model(model: SavedModel, tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("of another program")
    assert recorded(model, "tsqp", tmp_path, begun(3)).served == model.directory
    nothing = recorded(model, "tee-only", tmp_path, begun(3))
    with pytest.raises(PromptError, match="prompts: got none"):
        recorded(model, "tsqp", tmp_path, [])
    assert not nothing.observable
    assert (nothing.sessions[0].traces, nothing.sessions[0].truth.sent) == ((), ())
    assert (tmp_path / KEY).read_text() == "of another program"


# ------------------------------------------------------------------------ shares, files on disks


def test_shares_are_added_by_who_has_both(model: SavedModel, tmp_path: Path) -> None:
    played = recorded(model, "two-server", tmp_path / "two", begun(4))
    clear = recorded(model, "quantized-clear", tmp_path / "clear", begun(4))
    config = read_config(model.directory)
    (session,), (plain,) = played.sessions, clear.sessions
    (whole,) = together(played, config).sessions[0].traces
    first, second = session.traces
    assert [call.where for call in whole.calls] == [call.where for call in plain.traces[0].calls]
    for summed, one, two, bare in zip(
        whole.calls, first.calls, second.calls, plain.traces[0].calls, strict=True
    ):
        assert torch.equal(summed.rows, bare.rows)
        assert not torch.equal(one.rows, bare.rows)
        assert not torch.equal(two.rows, bare.rows)
    short = replace(session, traces=(Trace(first.messages[:-1]), second))
    with pytest.raises(TraceError, match="shares: got 1 requests to the second service alone"):
        together(replace(played, sessions=(short,)), config)


def test_a_sessions_file_is_what_the_service_keeps_and_differs_each_time(
    model: SavedModel, public: PublicModel, tmp_path: Path
) -> None:
    """Two layers of the model are two pieces, with a tag each."""
    one, other = (
        recorded(model, "clear-segment", tmp_path / name, begun(7, 5)) for name in ("one", "other")
    )
    K, C = public.config.heads[1:]
    for session, again in zip(one.sessions, other.sessions, strict=True):
        disk, sent_ids = session.disk, list(session.truth.sent)
        assert disk is not None
        assert again.disk is not None
        assert disk.clear == again.disk.clear
        assert disk.encrypted != again.disk.encrypted
        assert len(disk.encrypted) == len(disk.clear) + 2 * 16
        assert len(disk.clear) == 4 * 2 * 2 * K * C * len(sent_ids)
        # In front keys, then values of layer 0.
        linear = public.linear(0, "qkv_proj")
        values_TX = linear(public.dictionary_VD[sent_ids])[:, linear.rows["v_proj"]]
        numbers = torch.frombuffer(bytearray(disk.clear), dtype=torch.float32)
        half = K * len(sent_ids) * C
        found = numbers[half : 2 * half].view(K, -1, C).transpose(0, 1).flatten(1)
        assert torch.allclose(found, values_TX, atol=1e-4)
    assert list((tmp_path / "one").iterdir()) == []
    assert recorded(model, "attention-in-tee", tmp_path / "none", begun(3)).disks == []
