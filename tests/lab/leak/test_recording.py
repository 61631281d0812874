"""What is recorded is what crosses, byte for byte; no key is beside it, and files are sealed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_side.weights import load_weights
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, FeatureKeyError, ServiceError
from protocol.messages import EmbeddingRequest, LinearRequest, Request, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.weights import CPU
from protocol.tensors import from_torch, to_torch
from tee_side.policy.placement import load_policy
from tests.kit.leaks import begun, recorded
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.record_session import KEY, SERVED, PlaySettings, logits_of, play
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.leak.trace import Trace
from tsqp.lab.research.feature_key import FeatureKey


def linear(features: int) -> LinearRequest:
    rows = from_torch(torch.zeros(3, features))
    return LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=rows)


def sent(request: Request, number: int) -> tuple[bytes, ...]:
    """Return the frames that a socket would get, of a client's request of some number."""
    return tuple(map(bytes, encode_request(request, number, 60_000)))


def test_what_is_recorded_is_what_a_socket_gets(model: SavedModel) -> None:
    """Nothing but bytes, which stay when the sender's memory is used again."""
    channel = RecordingChannel(load_weights(model.directory, device=CPU, dtype=torch.float32))
    rows, ids = torch.zeros(3, 96), torch.tensor([3, 5])
    look_up = EmbeddingRequest(input_ids=from_torch(ids), dtype="float32")
    exchange = channel.call(look_up)
    expected = sent(look_up, 1), sent(linear(96), 2)
    channel.call(linear(96).model_copy(update={"hidden_states": from_torch(rows)}))
    rows.fill_(7)
    assert channel.recorded == 2
    trace = channel.take()
    assert trace.messages == expected
    assert vars(trace).keys() == {"messages"}
    assert {type(frame) for message in trace.messages for frame in message} == {bytes}
    assert isinstance(exchange.response, TensorReply)
    weight = model.reference.get_input_embeddings().weight
    assert torch.equal(to_torch(exchange.response.output), weight[ids])
    # A request that fails is recorded as well, in a trace that begins where the last one ended.
    with pytest.raises(ServiceError) as caught:
        channel.call(linear(48))
    assert caught.value.code == ErrorCode.INVALID_FIELD
    assert channel.take().messages == (sent(linear(48), 3),)
    assert channel.take() == Trace(())


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
    logits, refused, prompts = tmp_path / "logits", tmp_path / "refused", begun(5, 4)
    logits.mkdir()
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
