"""Norms and inner products name tokens under rotations, planted and real."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tee_side.policy.placement import Policy, load_policy
from tests.kit.model import make_model, token_ids
from tsqp.cli.program import model_directory
from tsqp.lab.leak.attack import Attack, View, Work
from tsqp.lab.leak.attacks import rotations
from tsqp.lab.leak.attacks.rotations import (
    GramDictionary,
    ModuleNorms,
    NormDictionary,
    Products,
    follow,
)
from tsqp.lab.leak.attacks.static_cloak import Weights
from tsqp.lab.leak.model import Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.score import score
from tsqp.lab.leak.trace import Where
from tsqp.lab.research.feature_rotation import FeatureRotation

DEMO = model_directory("demo")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PublicModel:
    """A random model with a tokenizer that begins every prompt with token 0."""
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory, vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, directory / name)
    return PublicModel(directory)


def view_of(public: PublicModel, played: Recording) -> View:
    """What the first service saw; every token is to be searched."""
    traces = tuple(session.traces[0] for session in played.sessions)
    return View(traces, public, played.policy, played.served, len(traces), 1000)


def run(
    public: PublicModel, attack: Attack, policy: Policy | str, folder: Path, tokens: int = 12
) -> dict[str, Score]:
    """Prompts of BOS and random tokens, and what an attack reads in them, by place."""
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    prompts = [[0, *token_ids(tokens - 1, seed, public.vocab_size)] for seed in range(2)]
    return run_prompts(public, attack, chosen, folder, prompts)


def run_prompts(
    public: PublicModel, attack: Attack, policy: Policy, folder: Path, prompts: list[list[int]]
) -> dict[str, Score]:
    """Play, attack, score."""
    folder.mkdir(exist_ok=True)
    played = play(policy, prompts, PlaySettings(public.directory, folder, new_tokens=6))
    view = view_of(public, played)
    assert attack.refuses(view) is None
    truths = [session.truth for session in played.sessions]
    return {one.where: one for one in score(attack.read(view, Work()), truths)}


def noisy(sigma: float) -> Policy:
    """The policy cloak with noise."""
    policy, mask = load_policy("cloak"), FeatureRotation(sigma=sigma)
    operators = {
        operator: tuple(p.model_copy(update={"mask": mask if p.mask else None}) for p in placements)
        for operator, placements in policy.operators.items()
    }
    return policy.model_copy(update={"operators": operators})


def random_rows(count: int, size: int, seed: int) -> torch.Tensor:
    """Rows of one length, as behind an RMSNorm whose gain was folded."""
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1) * size**0.5


def rotated(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Rows times a random orthogonal matrix."""
    square = torch.randn(
        rows.shape[1], rows.shape[1], generator=torch.Generator().manual_seed(seed)
    )
    return rows @ torch.linalg.qr(square)[0]


# ---------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("place", [(0, "qkv_proj"), (1, "down_proj")])
def test_norms_are_those_of_the_public_model(
    tiny: PublicModel, tmp_path: Path, place: Where
) -> None:
    """With the service's weights on what crossed, and the public ones on the plain row."""
    prompt = [0, 5, 9]
    settings = PlaySettings(tiny.directory, tmp_path, 1)
    played = play(load_policy("cloak"), [prompt], settings)
    view = view_of(tiny, played)
    matcher = ModuleNorms(Weights(view))
    call = view.traces[0].steps[0].at(place)
    assert call is not None
    plain_1I = tiny.states(tiny.nothing(), [0]).inputs[place]
    ours, theirs = matcher.of_candidates(place, plain_1I), matcher.of_observed(place, call.rows[:1])
    # q, k and v; down's output and its input, which no RMSNorm has made as long as all others.
    assert ours.shape == (1, 3 if place[1] == "qkv_proj" else 2)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(plain_1I, call.rows[:1], atol=0.1)


@pytest.mark.parametrize("policy", ["attention-in-tee", "cloak", "stip"])
def test_norms_read_every_place(tiny: PublicModel, tmp_path: Path, policy: str) -> None:
    """In the first layer all, deeper nearly: a token's part in what attention returns is small."""
    scores = run(tiny, NormDictionary(), policy, tmp_path)
    assert len(scores) == 12
    assert scores["layer 0 qkv_proj"].top1.hits == scores["layer 0 qkv_proj"].top1.n == 34
    others = [one.top1 for where, one in scores.items() if not where.endswith("o_proj")]
    assert all(one.hits >= 0.9 * one.n for one in others)


def test_norms_are_lost_in_noise(tiny: PublicModel, tmp_path: Path) -> None:
    """What was read before is not what anybody would guess."""
    first = run(tiny, NormDictionary(), noisy(64), tmp_path)["layer 0 qkv_proj"]
    assert first.top1.hits <= 0.2 * first.top1.n


# --------------------------------------------------------------------------------------- angles


def test_inner_products_of_rotated_rows_give_the_tokens() -> None:
    """Tokens that come twice, too."""
    table_VI = random_rows(200, 32, 0)
    ids = [3, 77, 5, 77, 3, 199, 0]
    found = follow(rotated(table_VI[ids], 1), table_VI, 3, Work())
    assert list(found.token_ids) == ids
    assert [guesses[0] for guesses in found.guesses] == ids
    assert all(len(set(guesses)) == 5 for guesses in found.guesses[1:])


def test_a_second_token_that_fits_as_well_is_given_up_later() -> None:
    """Two candidates have the same product with the first row; only the third row tells."""
    table_VI = random_rows(50, 16, 0)
    # Mirrored at the first token's row: its product with that row stays.
    first_I = table_VI[0] / table_VI[0].norm()
    table_VI[4] = 2 * (table_VI[9] @ first_I) * first_I - table_VI[9]
    for second in (4, 9):
        found = follow(rotated(table_VI[[0, second, 20]], 1), table_VI, 0, Work())
        assert found.token_ids == (0, second, 20)


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_a_beginning_is_what_all_products_together_give(
    monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    """The table's products with itself, whatever of them is remembered.

    Under much noise tokens are mistaken for others, of which some were read and forgotten.
    """
    size = 6
    monkeypatch.setattr(rotations, "_REFERENCES", 5)
    table = random_rows(200, size, seed=1)
    gram = table @ table.t() / size
    ids = [7, *token_ids(15, 2, 200), *token_ids(15, 2, 200)]
    rows = rotated(table[ids], seed=3) + noise * random_rows(len(ids), size, seed=4)
    observed = rows @ rows.t() / size
    beam: list[tuple[float, list[int]]] = [(0.0, [7])]
    for row in range(1, len(ids)):
        back = range(max(0, row - 5), row)
        grown = []
        for error, read in beam:
            away = gram[[read[at] for at in back]] - observed[row, back, None]
            errors = (gram.diagonal() - observed[row, row]).square() + away.square().sum(0)
            best = errors.topk(16, largest=False)
            for more, one in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown.append((error + more, [*read, one]))
        beam = sorted(grown, key=lambda one: one[0])[: 16 if row < 12 else 2]
    found = follow(rows, table, 7, Work())
    assert list(found.token_ids) == beam[0][1]
    assert found.error == pytest.approx(beam[0][0], rel=1e-3)
    assert (beam[0][1] == ids) == (noise < 0.1)


def test_a_row_costs_a_product_for_each_new_beginning() -> None:
    """Not one for each of the rows before it."""
    vocabulary, size = 600, 16
    table = random_rows(vocabulary, size, seed=1)
    ids = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(2))[:160]
    rows = rotated(table[ids], seed=3)

    def products(count: int) -> float:
        with FlopCounterMode(display=False) as counter:
            follow(rows[:count], table, int(ids[0]), Work())
        between_rows = 2 * size * count**2
        return (counter.get_total_flops() - between_rows) / (2 * size * vocabulary)

    begun = products(12)
    assert 0 < begun <= 11 * 16
    for more in (30, 60, 148):
        assert 0 < products(12 + more) - begun <= 2 * more + 14


def test_products_are_forgotten_with_their_tokens() -> None:
    """And what is kept holds no memory of what is not."""
    table = random_rows(50, 8, seed=1)
    products = Products(table)
    products.need([4, 9, 4])
    kept = products.known[9]
    products.need([30, 9])
    assert list(products.known) == [9, 30]
    assert products.known[9] is kept
    held = [known.untyped_storage().nbytes() for known in products.known.values()]
    assert held == [50 * 4, 50 * 4]
    assert torch.allclose(products.of([30, 9, 30]), table[[30, 9, 30]] @ table.t(), atol=1e-5)
    products.of([9]).zero_()
    assert products.known[9].any()


@pytest.mark.parametrize("policy", ["attention-in-tee", "cloak", "stip"])
def test_inner_products_read_the_first_layer(
    tiny: PublicModel, tmp_path: Path, policy: str
) -> None:
    """Whether or not the mask has folded the gain."""
    (first,) = run(tiny, GramDictionary(), policy, tmp_path).values()
    assert (first.where, first.top1.hits, first.top1.n) == ("layer 0 qkv_proj", 34, 34)


def test_inner_products_are_lost_in_noise(tiny: PublicModel, tmp_path: Path) -> None:
    """But for the first token, which every prompt begins with."""
    (first,) = run(tiny, GramDictionary(), noisy(64), tmp_path).values()
    assert first.top1.hits <= 0.2 * first.top1.n


# ------------------------------------------------------------------------------------- refusals


def test_integers_are_refused(tmp_path: Path) -> None:
    """Their weights are others than those of the public model."""
    public = PublicModel(DEMO)
    played = play(load_policy("quantized-clear"), [[0, 5]], PlaySettings(DEMO, tmp_path, 1))
    for attack in (NormDictionary(), GramDictionary()):
        assert attack.refuses(view_of(public, played)) == "integers"


def test_prompts_without_a_known_beginning_are_refused(
    tiny: PublicModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token is found by its angle to the first one, which has to be known."""
    settings = PlaySettings(tiny.directory, tmp_path, 1)
    view = view_of(tiny, play(load_policy("cloak"), [[0, 5]], settings))
    monkeypatch.setattr(type(tiny.tokenizer), "encode", lambda *_, **__: [])
    assert GramDictionary().refuses(view) == "no token that every prompt begins with"


@pytest.mark.parametrize("attack", [NormDictionary(), GramDictionary()])
def test_the_control_is_read(tmp_path: Path, attack: Attack) -> None:
    """The demo model under the policy that the attack must break."""
    public = PublicModel(DEMO)
    text = (DEMO / "validation.txt").read_text(encoding="utf-8")
    stories = [story for story in text.split("<|begin_of_text|>") if story.strip()]
    prompts = [public.tokenizer.encode(story)[:24] for story in stories[:2]]
    scores = run_prompts(public, attack, load_policy(attack.control), tmp_path, prompts)
    assert scores
    assert all(one.top1.hits >= attack.published * one.top1.n for one in scores.values())
