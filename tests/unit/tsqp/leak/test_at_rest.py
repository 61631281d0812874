"""A session's file is what the service writes of it; without the key it is read by nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_side import spill
from tee_side.policy.layer_range import LayerRange
from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel, token_ids
from tests.kit.rows import each_row
from tests.unit.tsqp.leak.leaks import first_view, planted, view_of
from tests.unit.tsqp.leak.runs import only, run
from tsqp.lab.leak.attack import View, Work
from tsqp.lab.leak.attacks.at_rest import CacheAtRest
from tsqp.lab.leak.model import Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.score import score

NAMES = ("clear-segment", "attested-segment", "stip-segment", "cloak-segment")
PROMPTS = [token_ids(9, seed) for seed in range(3)]
TOKENS = 9 + 5


def played(
    model: SavedModel, name: str, folder: Path, dtype: str | None = None
) -> tuple[Recording, View]:
    folder.mkdir()
    settings = PlaySettings(model.directory, folder, new_tokens=6, dtype=dtype)
    recording = play(load_policy(name), PROMPTS, settings)
    return recording, first_view(PublicModel(model.directory), recording)


def read(recording: Recording, view: View, *disks: bytes) -> Score:
    view = replace(view, disks=disks)
    assert CacheAtRest().refuses(view) is None
    truths = [session.truth for session in recording.sessions]
    (found,) = score(CacheAtRest().read(view, Work()), truths)
    assert (found.where, found.top1.n) == ("cache on disk", 3 * TOKENS)
    return found


@each_row("name", NAMES)
def test_a_file_is_read_without_its_encryption_alone(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    """Whatever the mask: the service computes plain values, or shuffles them within heads."""
    recording, view = played(model, name, tmp_path / name)
    clear = read(recording, view, *(disk.clear for disk in recording.disks))
    assert clear.top1.hits == clear.top1.n
    found = read(recording, view, *(disk.encrypted for disk in recording.disks))
    # With a guess for every token, each as good as one at random.
    assert (found.guessed, found.top1.hits <= 2) == (found.top1.n, True)


@each_row("dtype", ["bfloat16", "float16"])
def test_files_of_short_numbers_are_read_as_well(
    model: SavedModel, tmp_path: Path, dtype: str
) -> None:
    recording, view = played(model, "clear-segment", tmp_path / dtype, dtype)
    found = read(recording, view, *(disk.clear for disk in recording.disks))
    assert found.top1.hits >= 0.95 * found.top1.n
    sealed = read(recording, view, *(disk.encrypted for disk in recording.disks))
    assert sealed.top1.hits <= 2


def test_a_file_is_as_long_as_what_it_encrypts_and_differs_each_time(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of the model are two pieces, with a tag each; all of it is written."""
    written: list[int] = []
    original = spill.SpilledSession._write

    def counted(self: spill.SpilledSession, piece: memoryview) -> None:
        written.append(len(piece))
        original(self, piece)

    monkeypatch.setattr(spill.SpilledSession, "_write", counted)
    recording, view = played(model, "clear-segment", tmp_path / "one")
    again, _ = played(model, "clear-segment", tmp_path / "two")
    for one, other in zip(recording.disks, again.disks, strict=True):
        assert one.clear == other.clear
        assert one.encrypted != other.encrypted
        assert len(one.encrypted) == len(one.clear) + 2 * 16
    assert sum(written) == sum(len(disk.clear) for disk in (*recording.disks, *again.disks))
    assert list((tmp_path / "one").iterdir()) == []
    # In front keys, then values of layer 0: those that the last request's rows were computed with.
    linear = view.public.linear(0, "qkv_proj")
    truth = recording.sessions[0].truth.sent
    values_TX = linear(view.public.dictionary_VD[list(truth)])[:, linear.rows["v_proj"]]
    K, C = view.public.config.heads[1:]
    layer = torch.frombuffer(bytearray(recording.disks[0].clear), dtype=torch.float32)
    found = layer[K * TOKENS * C : 2 * K * TOKENS * C].view(K, TOKENS, C)
    assert torch.allclose(found.transpose(0, 1).flatten(1), values_TX, atol=1e-4)


def test_where_no_cache_of_layer_0_is_kept_there_is_nothing_to_read(model: SavedModel) -> None:
    public = PublicModel(model.directory)
    nothing = view_of(public, planted(public, token_ids(3), 2))
    assert CacheAtRest().refuses(nothing) == "no cache is at the service"
    later = load_policy("clear-segment")
    (placed,) = later.operators["segment"]
    moved = placed.model_copy(update={"layers": LayerRange(1, None)})
    later = later.model_copy(update={"operators": {**later.operators, "segment": (moved,)}})
    view = replace(view_of(public, policy=later), disks=(b"",))
    assert CacheAtRest().refuses(view) == "layer 0 stays"


def test_the_control_is_the_file_in_the_clear(model: SavedModel, tmp_path: Path) -> None:
    found = only(run(model.directory, tmp_path, ["cloak-segment"], [CacheAtRest]))
    (one,) = found.runs
    assert one.control is not None
    assert (one.control.policy, one.control.worked) == ("clear-segment", True)
    assert one.control.rate.hits == one.control.rate.n == 30
    assert one.scores[0].top1.hits <= 2
    assert not found.above_chance
