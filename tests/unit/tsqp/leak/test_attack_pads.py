"""Attacks on pads: planted leaks of known strength are read, fresh pads are not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from protocol.encoding import encode_request
from protocol.messages import LinearRequest, RingLinearRequest
from protocol.tensors import from_torch
from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel
from tsqp.cli.program import model_directory
from tsqp.lab.leak import weakened
from tsqp.lab.leak.attack import TOP, Attack, View, Work
from tsqp.lab.leak.attacks.pads import LowDimensionalPads, PadBasis, PadReuse
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.trace import Trace
from tsqp.lab.leak.weakened.reused_pad import ReusedPad
from tsqp.lab.leak.weakened.ten_pads import LowDimensionalPad

WEAKENED = Path(weakened.__path__[0])
QKV = ("q_proj", "k_proj", "v_proj")
SITE = (0, "qkv_proj")
BOS = 0
VOCABULARY, FEATURES = 320, 48


@pytest.fixture(scope="module")
def public(
    saved_model: Callable[..., SavedModel], tmp_path_factory: pytest.TempPathFactory
) -> PublicModel:
    """Return a small random model with the demo model's tokenizer, whose BOS is token 0."""
    saved, copy = saved_model(), tmp_path_factory.mktemp("pads") / "model"
    shutil.copytree(saved.directory, copy)
    shutil.copy(model_directory("demo") / "tokenizer.json", copy)
    return PublicModel(copy, saved.calibration)


def sessions(count: int, tokens: int) -> torch.Tensor:
    """Return token ids [sessions, tokens], random but for BOS in front."""
    ids = torch.randint(1, VOCABULARY, (count, tokens))
    ids[:, 0] = BOS
    return ids


def integers(public: PublicModel, ids: torch.Tensor) -> torch.Tensor:
    """Return what the TEE makes of tokens, before pads."""
    return public.encode(SITE, public.dictionary_VD)[ids]


def ring(*shape: int) -> torch.Tensor:
    """Return uniform ring elements."""
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def trace(rows_TI: torch.Tensor, prompt: int) -> Trace:
    """Return what a service gets of a session: a prompt's rows, then one by one."""
    parts = [rows_TI[:prompt], *rows_TI[prompt:].split(1)]
    requests: list[LinearRequest | RingLinearRequest]
    if rows_TI.is_floating_point():
        requests = [
            LinearRequest(
                layer_idx=0, module_names=QKV, hidden_states=from_torch(part.contiguous())
            )
            for part in parts
        ]
    else:
        requests = [
            RingLinearRequest(layer_idx=0, module_names=QKV, elements=from_torch(part.contiguous()))
            for part in parts
        ]
    return Trace(tuple(tuple(map(bytes, encode_request(r, 1, 60_000))) for r in requests))


def view(
    public: PublicModel, rows_STI: torch.Tensor, prompt: int = 4, policy: str = "shielded-prefill"
) -> View:
    """Return hand-made traces as an attack gets them."""
    traces = tuple(trace(rows_TI, prompt) for rows_TI in rows_STI)
    return View(traces, public, load_policy(policy), public.directory, 2, 60)


def read(attack: Attack, seen: View) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the guesses for each session and token that the attack says it read."""
    assert attack.refuses(seen) is None
    found = {}
    for reading in attack.read(seen, Work()):
        assert reading.where == "layer 0 qkv_proj"
        found |= {(reading.session, token): reading.guesses[token] for token in reading.tokens}
    return found


def share(
    found: dict[tuple[int, int], tuple[int, ...]],
    ids: torch.Tensor | Sequence[Sequence[int]],
    among: Iterable[tuple[int, int]] | None = None,
) -> float:
    """Return how much of what was read is right, of all or among some tokens."""
    asked = list(found if among is None else among)
    return sum(found[s, t][0] == int(ids[s][t]) for s, t in asked) / len(asked)


def everything(ids: torch.Tensor) -> set[tuple[int, int]]:
    """Return every session and token."""
    return {(s, t) for s in range(ids.shape[0]) for t in range(ids.shape[1])}


def test_one_pad_for_every_row_hides_no_row(public: PublicModel) -> None:
    ids = sessions(5, 20)
    found = read(PadReuse(), view(public, integers(public, ids) + ring(FEATURES)))
    assert found.keys() == everything(ids)
    assert share(found, ids) == 1


@pytest.mark.parametrize("part", [0.2, 0.5])
def test_of_rows_some_of_which_share_a_pad_those_are_read(public: PublicModel, part: float) -> None:
    ids = sessions(6, 30)
    shared = torch.rand(6, 30) < part
    mask = torch.where(shared[..., None], ring(FEATURES), ring(6, 30, FEATURES))
    found = read(PadReuse(), view(public, integers(public, ids) + mask))
    reused = {(s, t) for s, t in shared.nonzero().tolist()}
    assert share(found, ids, reused) == 1
    assert share(found, ids, everything(ids) - reused) < 0.05


def test_a_pad_bank_that_was_restored_gives_pairs_of_rows_which_are_read(
    public: PublicModel,
) -> None:
    # Decode alone, from another token each: nothing is known of any row.
    ids = torch.randint(1, VOCABULARY, (2, 40))
    rows = integers(public, ids) + ring(1, 40, FEATURES)
    found = read(PadReuse(), view(public, rows, prompt=1, policy="shielded"))
    differ = {(s, t) for s in range(2) for t in range(40) if ids[0, t] != ids[1, t]}
    assert len(differ) > 70
    assert share(found, ids, differ) == 1


def test_where_all_rows_of_a_pad_are_one_token_it_is_taken_for_bos(
    public: PublicModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublicModel, "first_id", 7)
    ids = sessions(3, 5)
    ids[:, 0] = 7
    # Only the first pad of each session is the same.
    mask = ring(3, 5, FEATURES)
    mask[:, 0] = mask[0, 0]
    found = read(PadReuse(), view(public, integers(public, ids) + mask))
    assert [found[session, 0][0] for session in range(3)] == [7, 7, 7]


def test_rows_under_one_of_two_pads_are_told_apart(public: PublicModel) -> None:
    ids = sessions(4, 20)
    mask = ring(2, FEATURES)[torch.randint(2, (4, 20))]
    assert share(read(PadReuse(), view(public, integers(public, ids) + mask)), ids) == 1


@pytest.mark.parametrize("attack", [PadReuse(), LowDimensionalPads()], ids=lambda a: a.name)
def test_fresh_pads_are_read_as_often_as_chance_has_it(public: PublicModel, attack: Attack) -> None:
    ids = sessions(30, 60)
    found = read(attack, view(public, ring(30, 60, FEATURES)))
    assert all(len(guess) == TOP for guess in found.values())
    assert len(found) >= 30 * 59
    # Chance is 1 of 320. Five standard errors of 1,770 tokens are 0.7 % more.
    assert share(found, ids) < 0.01
    first = [guess[0] for guess in found.values()]
    # No token is guessed for so many rows that its own frequency would count as a success.
    assert max(map(first.count, set(first))) < 0.03 * len(first)


@pytest.mark.parametrize("dimensions", range(1, 13))
def test_pads_of_few_dimensions_are_learnt_from_two_rows_more(
    public: PublicModel, dimensions: int
) -> None:
    ids, basis_KI = sessions(dimensions + 2, 12), ring(dimensions, FEATURES)
    mixed = (ring(dimensions + 2, 12, dimensions, 1) * basis_KI).sum(2).to(torch.int32)
    found = read(LowDimensionalPads(), view(public, integers(public, ids) + mixed))
    # The first token is assumed, and so is not said to be read.
    assert found.keys() == {(s, t) for s, t in everything(ids) if t}
    assert share(found, ids) == 1


def test_too_few_known_rows_give_no_basis(public: PublicModel) -> None:
    ids, basis_KI = sessions(10, 20), ring(10, FEATURES)
    mixed = (ring(10, 20, 10, 1) * basis_KI).sum(2).to(torch.int32)
    rows = integers(public, ids) + mixed
    assert not PadBasis.learn(rows[1:, 0] - rows[0, 0]).closed
    assert share(read(LowDimensionalPads(), view(public, rows)), ids) < 0.05


def test_a_basis_is_closed_when_a_row_adds_nothing() -> None:
    basis_KI, factors = ring(4, FEATURES), ring(6, 4, 1)
    pads_NI = (factors * basis_KI).sum(1).to(torch.int32)
    assert not PadBasis.learn(pads_NI[:4]).closed
    learnt = PadBasis.learn(pads_NI)
    assert learnt.closed
    assert len(learnt.pivots) == 4
    assert torch.equal(learnt.rows_KI[:, learnt.pivots], torch.eye(4, dtype=torch.int32))


def test_rows_that_differ_by_a_pad_are_equal_outside_of_the_basis() -> None:
    basis_KI = ring(3, FEATURES)
    learnt = PadBasis.learn((ring(8, 3, 1) * basis_KI).sum(1).to(torch.int32))
    plain, pad = ring(5, FEATURES), (ring(5, 3, 1) * basis_KI).sum(1).to(torch.int32)
    assert learnt.outside(plain).shape == (5, FEATURES - 3)
    assert torch.equal(learnt.outside(plain + pad), learnt.outside(plain))
    assert not torch.equal(learnt.outside(plain[:1]), learnt.outside(plain[1:2]))


def test_even_multiples_of_a_pad_give_the_pad_but_for_the_highest_bit() -> None:
    pad_I = ring(FEATURES) | 1
    learnt = PadBasis.learn(torch.stack([2 * pad_I, 4 * pad_I, 6 * pad_I]))
    assert (len(learnt.pivots), learnt.bits, learnt.closed) == (1, 31, True)
    assert not learnt.outside(5 * pad_I).any()


def test_what_has_no_pads_is_refused(public: PublicModel) -> None:
    ids = sessions(3, 6)
    floats = view(public, public.dictionary_VD[ids], policy="attention-in-tee")
    nothing = View((Trace(()),), public, load_policy("tee-only"), public.directory, 2, 60)
    for attack in (PadReuse(), LowDimensionalPads()):
        assert attack.refuses(floats) == "floats"
        assert attack.refuses(nothing) == "layer 0 stays"


def test_a_basis_needs_rows_of_a_known_token(public: PublicModel) -> None:
    rows = integers(public, sessions(3, 6))
    attack = LowDimensionalPads()
    assert attack.refuses(view(public, rows)) is None
    assert attack.refuses(view(public, rows[:2])) == "only 2 rows of a known token crossed"
    decode = view(public, rows, prompt=1, policy="shielded")
    assert attack.refuses(decode) == "no row of a known token crossed"
    assert PadReuse().refuses(decode) is None


def test_without_a_tokenizer_no_token_is_known(saved_model: Callable[..., SavedModel]) -> None:
    saved = saved_model()
    torch.manual_seed(0)  # what is drawn is the same whether it was there or not
    bare = PublicModel(saved.directory, saved.calibration)
    assert bare.first_id is None
    ids = sessions(4, 20)
    seen = view(bare, integers(bare, ids) + ring(FEATURES))
    assert LowDimensionalPads().refuses(seen) == "the tokenizer puts no token in front"
    assert share(read(PadReuse(), seen), ids) == 1


# ------------------------------------------------------------------------- the weakened policies


def test_the_weakened_masks_are_what_they_say() -> None:
    words = ring(7, 64)
    r_TI = ReusedPad().draw(words)
    assert torch.equal(r_TI, ReusedPad().draw(ring(1, 64)).expand(7, 64))
    mixed_TI = LowDimensionalPad(pads=3).draw(words)
    assert len(PadBasis.learn(mixed_TI).pivots) == 3
    assert torch.equal(mixed_TI[2:3], LowDimensionalPad(pads=3).draw(words[2:3]))
    assert not torch.equal(mixed_TI[0], mixed_TI[1])
    with pytest.raises(ValueError, match="got 65, expected at most 64"):
        LowDimensionalPad(pads=65).draw(words)
    assert ReusedPad.broken
    assert LowDimensionalPad.broken


def demo(policy: str, folder: Path, dtype: str = "float32") -> Recording:
    """Run beginnings of stories on the demo model."""
    model = model_directory("demo")
    stories = (model / "validation.txt").read_text(encoding="utf-8").split("<|begin_of_text|>")
    tokenizer = PublicModel(model).tokenizer
    prompts = [tokenizer.encode(story)[:12] for story in stories if story.strip()][:13]
    return play(load_policy(policy), prompts, PlaySettings(model, folder, 4, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attack", [PadReuse(), LowDimensionalPads()], ids=lambda a: a.name)
def test_the_demo_model_under_weakened_pads_is_read(
    attack: Attack, dtype: str, tmp_path: Path
) -> None:
    recording = demo(str(WEAKENED.parent / attack.control), tmp_path, dtype)
    traces = tuple(session.traces[0] for session in recording.sessions)
    public = PublicModel(model_directory("demo"))
    seen = View(traces, public, recording.policy, recording.served, 2, 60)
    sent = [session.truth.sent for session in recording.sessions]
    assert share(read(attack, seen), sent) >= attack.published


def test_weakened_pads_leave_the_answer_as_it_is(tmp_path: Path) -> None:
    answers = [
        [session.truth.answer for session in demo(policy, tmp_path).sessions]
        for policy in (
            "shielded-prefill",
            str(WEAKENED / "pad-reused.toml"),
            str(WEAKENED / "pad-low-dimensional.toml"),
        )
    ]
    assert answers[0] == answers[1] == answers[2]
