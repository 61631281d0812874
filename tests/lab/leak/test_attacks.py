"""Each attack reads what its mask leaves, to the last token, and claims nothing of uniform rows."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tsqp.lab.leak
from protocol.errors import PluginError
from tee_side.policy.placement import Policy, load_policy
from tests.kit.leaks import (
    FIRST_PLACE,
    VOCABULARY,
    begun,
    embedding,
    first_view,
    leak_of,
    linear,
    lm_head,
    recorded,
    run_of,
    scores_of,
    sending,
    uniform,
    view_of,
)
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import AttackError, Trace, View, Work
from tsqp.lab.leak.attacks import ATTACKS, find_attacks
from tsqp.lab.leak.attacks.vocabulary import Logits
from tsqp.lab.leak.laboratory import weakened_policies
from tsqp.lab.leak.matching import FIRST
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.recording import Recording

# Tokens of two prompts, and of two answers but for the one that is sampled last.
PROMPTS, ANSWERS = 9 + 6, 3 + 3
PLACES = [
    f"layer {layer} {operator}"
    for layer in (0, 1)
    for operator in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
]
# What is read of prompts and of answers, by place.
Read = Mapping[str, tuple[int, int]]
ALL: Read = dict.fromkeys(PLACES, (PROMPTS, ANSWERS))
ROWS: Read = {FIRST_PLACE: (PROMPTS, ANSWERS)}
SEGMENT: Read = {"layer 0 segment": (PROMPTS, ANSWERS)}
# Rows in no order are a set in the first layer; a row alone is not.
SETS: Read = {**ALL, FIRST_PLACE: (0, ANSWERS)}
SET_OF_SEGMENT: Read = {"layer 0 segment": (0, ANSWERS)}
# Tokens that were sampled, the last one of each answer included.
SAMPLED: Read = {"lm_head": (0, ANSWERS + 2)}
KEYS: Read = {"layer 0 attn_scores": (PROMPTS, ANSWERS)}
DISK: Read = {"cache on disk": (PROMPTS, ANSWERS)}

LEAKS: list[tuple[str, str, Read]] = [
    ("token-ids", "published", {"embedding": (PROMPTS, ANSWERS)}),
    ("logits", "published", SAMPLED),
    ("logits", "stip-segment", SAMPLED),
    ("nearest-embedding", "attention-in-tee", ROWS),
    ("nearest-embedding", "row-mix", ROWS),
    ("nearest-embedding", "quantized-clear", ROWS),
    ("nearest-embedding", "clear-segment", SEGMENT),
    ("vocabulary", "attention-in-tee", ALL),
    ("vocabulary", "quantized-clear", ALL),
    ("vocabulary-rows", "published-permuted", SETS),
    ("vocabulary-features", "stip", ALL),
    ("vocabulary-features", "stip-segment", SEGMENT),
    ("vocabulary-both", "published-permuted", SETS),
    ("vocabulary-both", "stip", SETS),
    ("subspace", "row-rotation", SETS),
    ("subspace", "clear-segment", SET_OF_SEGMENT),
    ("noise-averaging", "float-noise", {**ROWS, "all places": (PROMPTS, ANSWERS)}),
    ("attention-keys", "published", KEYS),
    ("attention-keys", "published-permuted", KEYS),
    ("norms", "cloak", ALL),
    ("norms", "stip-segment", SEGMENT),
    ("gram", "attention-in-tee", ROWS),
    ("gram", "cloak", ROWS),
    ("gram", "cloak-segment", SEGMENT),
    ("column-matching", "stip", ALL),
    ("column-matching", "stip-segment", SEGMENT),
    ("eigenvectors", "cloak", ALL),
    ("eigenvectors", "cloak-segment", SEGMENT),
    ("cache-at-rest", "clear-segment", DISK),
    ("cache-at-rest", "stip-segment", DISK),
    ("pad-reuse", "pad-reused", ROWS),
    # The first token of each session is not read but assumed.
    ("pad-basis", "pad-low-dimensional", {FIRST_PLACE: (13 * 3, 13 * 3)}),
]
# What an attack does not know hides its tokens from it.
HIDDEN = [
    ("token-ids", "published-permuted"),
    ("nearest-embedding", "cloak"),
    ("nearest-embedding", "stip-segment"),
    ("vocabulary-rows", "cloak"),
    ("vocabulary-features", "cloak-segment"),
    ("vocabulary-both", "shielded-prefill"),
    ("vocabulary", "dealt"),
    ("gram", "row-rotation"),
    ("pad-reuse", "shielded-prefill"),
    ("pad-reuse", "dealt"),
]


Recorded = Callable[[str], Recording]


@pytest.fixture(scope="module")
def recording(model: SavedModel, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recordings")
    weakened = {Path(path).stem: path for path in weakened_policies()}
    made: dict[str, Recording] = {}

    def record(policy: str) -> Recording:
        if policy not in made:
            # A basis of ten pads is learnt from twelve rows of the token in front.
            prompts = begun(*[4] * 13) if policy == "pad-low-dimensional" else begun(9, 6)
            path = weakened.get(policy, policy)
            made[policy] = recorded(model, path, folder / policy, prompts)
        return made[policy]

    return record


def read(attack: str, view: View, played: Recording) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return hits and tries of prompts and answers by place, and whether that is above chance."""
    truths = [session.truth for session in played.sessions]
    found = scores_of(ATTACKS.builtin[attack](), view, truths)
    made = leak_of(run_of(attack, *found.values()), blind=1 / view.public.config.vocab_size)
    counts = {
        where: (one.prompt.hits, one.prompt.n, one.answer.hits, one.answer.n)
        for where, one in found.items()
    }
    return counts, made.above_chance


@each_row(("attack", "policy", "expected"), LEAKS, ids=lambda row: f"{row[0]} on {row[1]}")
def test_a_leak_is_read_to_the_last_token(
    public: PublicModel, recording: Recorded, attack: str, policy: str, expected: Read
) -> None:
    played = recording(policy)
    counts, above_chance = read(attack, first_view(public, played), played)
    assert counts == {place: (p, p, a, a) for place, (p, a) in expected.items()}
    assert above_chance


@each_row(
    ("attack", "policy", "rows"),
    [
        *((*row, "uniform") for row in {row[0]: row[1] for row in LEAKS}.items()),
        *((*row, "masked") for row in HIDDEN),
    ],
    ids=" ".join,
)
def test_nothing_is_claimed_of_uniform_rows_or_of_a_mask_that_an_attack_does_not_know(
    public: PublicModel, recording: Recorded, attack: str, policy: str, rows: str
) -> None:
    """What is read elsewhere is read from the rows, and from nothing else that the attack gets."""
    played = recording(policy)
    view = first_view(public, played)
    if rows == "uniform":
        files = tuple(disk.encrypted for disk in played.disks)
        view = replace(view, traces=tuple(map(uniform, view.traces)), disks=files)
    counts, above_chance = read(attack, view, played)
    assert counts
    assert not above_chance, counts


EMPTY: dict[str, tuple[Policy | str, Trace]] = {
    "nothing": ("clear-segment", Trace(())),
    "nothing of a cloak": ("cloak", Trace(())),
    "deeper": ("attention-in-tee", Trace((linear((1, "o_proj"), torch.ones(1, 96)),))),
    "decode": (sending("qkv_proj", phase="decode"), Trace((linear(FIRST, torch.ones(1, 48)),))),
}
# `lacks`: what the attacker does not have, of linear weights and of a token in front of prompts.
REFUSED: list[tuple[str, str, str | None, str]] = [
    ("token-ids", "attention-in-tee", None, "embedding stays"),
    ("nearest-embedding", "deeper", None, "layer 0 stays"),
    ("vocabulary", "nothing", None, "no activations crossed"),
    ("subspace", "stip-segment", None, "the hidden axis is transformed"),
    ("norms", "quantized-clear", None, "integers"),
    ("gram", "decode", None, "no session's beginning crossed"),
    ("gram", "cloak", "first_id", "no token that every prompt begins with"),
    ("noise-averaging", "row-rotation", None, "neither clear nor under noise"),
    ("attention-keys", "attention-in-tee", None, "no keys of layer 0 crossed"),
    ("column-matching", "attention-in-tee", None, "weights are not cloaked"),
    ("eigenvectors", "nothing of a cloak", None, "no activations crossed"),
    ("cache-at-rest", "attention-in-tee", None, "no cache is at the service"),
    ("pad-reuse", "attention-in-tee", None, "floats"),
    ("pad-basis", "shielded-prefill", None, "only 2 rows of a known token crossed"),
    ("pad-basis", "shielded", None, "no row of a known token crossed"),
    ("pad-basis", "pad-reused", "first_id", "the tokenizer puts no token in front"),
]


@each_row(("attack", "policy", "lacks", "reason"), REFUSED, ids=lambda row: f"{row[0]} on {row[1]}")
def test_where_there_is_nothing_to_read_an_attack_says_why(
    public: PublicModel,
    recording: Recorded,
    attack: str,
    policy: str,
    lacks: str | None,
    reason: str,
) -> None:
    if policy in EMPTY:
        placed, trace = EMPTY[policy]
        view = view_of(public, trace, policy=placed)
    else:
        view = first_view(public, recording(policy))
    with pytest.MonkeyPatch.context() as patch:
        if lacks is not None:
            patch.setattr(PublicModel, lacks, None)
        assert ATTACKS.builtin[attack]().refuses(view) == reason


@each_row(("policy", "factor"), [("published", 0.01), ("row-mix", -3.0)])
def test_logits_name_the_next_token_of_steps_that_have_some(
    public: PublicModel, policy: str, factor: float
) -> None:
    """Scaled, and of either sign where a mask changes it; of several rows the surest counts."""
    own_V = (public.lm_head_VD @ public.lm_head_VD.T).argmax(-1)
    tops = (own_V == torch.arange(VOCABULARY)).nonzero()[:2, 0].tolist()
    rows = factor * torch.cat([0.05 * torch.randn(2, 48), public.lm_head_VD[tops]])
    messages = [embedding(begun(6)[0]), lm_head(rows[:3]), embedding([1]), embedding([2])]
    view = view_of(public, Trace((*messages, lm_head(rows[3:]))), policy=policy)
    (reading,) = Logits().read(view, Work())
    assert reading.tokens == range(6, 9)
    assert {index: guess[0] for index, guess in reading.guesses.items()} == {6: tops[0], 8: tops[1]}


HERE = Path(inspect.getfile(tsqp.lab.leak)).parent / "attacks"
SAID = {"name": "'mine'", "control": "'published'", "published": "1"}
HEAD = "from tsqp.lab.leak.attack import Attack\n"
IMPORTED = "from tsqp.lab.leak.attacks.vocabulary import Logits\n"


def attack(**changed: str) -> str:
    said = [f"    {name} = {value}" for name, value in {**SAID, **changed}.items() if value]
    return "\n".join(["class Mine(Attack):", *said, ""])


def test_every_attack_in_the_folder_is_found_by_its_name_and_has_controls_that_load() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("*.py"))
    assert {attack for attack, _, _ in LEAKS} == set(ATTACKS.builtin)
    assert len(ATTACKS.builtin) == text.count("\n    name: ClassVar[str] = ")
    for name in ATTACKS.names():
        (found,) = find_attacks(name)
        assert (found.name, inspect.isabstract(found)) == (name, False)
        for control in filter(None, (found.control, found.integer_control)):
            policy = load_policy(str(HERE / control) if control.endswith(".toml") else control)
            assert policy.services
            assert (policy.arithmetic == "int8") or control != found.integer_control
    with pytest.raises(AttackError, match=r"'Logits', expected one of .*logits.*, or a path"):
        find_attacks("Logits")


@each_row(
    ("text", "got"),
    [
        (IMPORTED, "no attack"),
        ("1 +", None),
        *((HEAD + attack(**{lacking: ""}), f"no {lacking}") for lacking in list(SAID)[1:]),
        # Of 0 every control would work.
        (HEAD + attack(published="0"), "published = 0"),
        (HEAD + attack(published="1.01"), "published = 1.01"),
    ],
)
def test_a_file_without_a_whole_attack_is_refused_in_one_line(
    tmp_path: Path, text: str, got: str | None
) -> None:
    # A file is read once: each has a name of its own.
    path = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((AttackError, PluginError)) as caught:
        find_attacks(str(path))
    assert got in (None, caught.value.got)
    assert "\n" not in str(caught.value)
