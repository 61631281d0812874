"""The attack on noise: read as far as the noise is small, and as it is known how large it is."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from protocol.encoding import encode_request
from protocol.messages import FUSED_MODULES, LinearOperator, LinearRequest, RingLinearRequest
from protocol.tensors import from_torch
from tee_side.policy.placement import Policy, load_policy
from tests.kit.model import SavedModel
from tsqp.cli.program import model_directory
from tsqp.lab.leak.attack import View, Work
from tsqp.lab.leak.attacks import noise
from tsqp.lab.leak.attacks.noise import NoiseAveraging
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, play
from tsqp.lab.leak.trace import Trace

TOKENS, PROMPT = 24, 8
FIRST, ALL = "layer 0 qkv_proj", "all places"
NOISY: dict[LinearOperator, float] = dict.fromkeys(FUSED_MODULES, 1.0)


@pytest.fixture(scope="module")
def public(
    saved_model: Callable[..., SavedModel], tmp_path_factory: pytest.TempPathFactory
) -> PublicModel:
    """Return a small random model with the demo model's tokenizer, whose BOS is token 0."""
    saved, copy = saved_model(), tmp_path_factory.mktemp("noise") / "model"
    shutil.copytree(saved.directory, copy)
    shutil.copy(model_directory("demo") / "tokenizer.json", copy)
    return PublicModel(copy, saved.calibration)


def policy_text(sigmas: Mapping[LinearOperator, float]) -> str:
    """Return a policy with noise of a size for each operator; the others stay."""
    placed = [
        f'{operator} = {{ place = "gpu", mask = {{ name = "float-noise", sigma = {sigma} }},'
        ' verify = "none" }'
        for operator, sigma in sigmas.items()
    ]
    stays = [
        f'{name} = "tee"'
        for name in ("embedding", "attn_scores", "attn_values", "lm_head", *FUSED_MODULES)
        if name not in sigmas
    ]
    return "\n".join(['name = "noise"', 'summary = "noise"', "[operators]", *placed, *stays])


def policy(folder: Path, sigmas: Mapping[LinearOperator, float]) -> Policy:
    """Load such a policy."""
    (folder / "noise.toml").write_text(policy_text(sigmas), encoding="utf-8")
    return load_policy(str(folder / "noise.toml"))


def session(
    public: PublicModel, ids: list[int], sigmas: Mapping[LinearOperator, float], times: int = 1
) -> Trace:
    """Return what a service gets of a session: what the model computes, and noise on it.

    `times`: how often each row is sent, every time with other noise and as another module.
    """
    prefix = public.nothing()
    rows: dict[tuple[int | None, str], list[torch.Tensor]] = defaultdict(list)
    for token_id in ids:
        for where, x_1I in public.states(prefix, [token_id]).inputs.items():
            rows[where].append(x_1I)
        prefix = public.extend(prefix, token_id)
    messages = []
    for start, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, len(ids)))]:
        for (layer, operator), found in rows.items():
            for name, modules in FUSED_MODULES.items():
                for copy in range(times if name == operator and name in sigmas else 0):
                    x_TI = torch.cat(found[start:end])
                    request = LinearRequest(
                        layer_idx=layer or 0,
                        module_names=modules if times == 1 else modules[copy : copy + 1],
                        hidden_states=from_torch(x_TI + sigmas[name] * torch.randn_like(x_TI)),
                    )
                    messages.append(tuple(map(bytes, encode_request(request, 1, 60_000))))
    return Trace(tuple(messages))


def said(public: PublicModel) -> list[int]:
    """Return tokens that the model says by itself, behind BOS."""
    prefix = public.extend(public.nothing(), 0)
    while prefix.tokens < TOKENS:
        assert prefix.logits_V is not None
        token_id = int(prefix.logits_V.softmax(-1).multinomial(1))
        prefix = public.extend(prefix, token_id)
    return list(prefix.token_ids)


def shares(view: View, truth: list[list[int]]) -> dict[str, float]:
    """Return which share of the tokens the attack reads right, by reading."""
    assert NoiseAveraging().refuses(view) is None
    right: dict[str, list[bool]] = defaultdict(list)
    for reading in NoiseAveraging().read(view, Work()):
        for token in reading.tokens:
            right[reading.where].append(reading.guesses[token][0] == truth[reading.session][token])
    return {where: sum(found) / len(found) for where, found in right.items()}


def attacked(
    public: PublicModel,
    folder: Path,
    sigmas: Mapping[LinearOperator, float],
    *,
    known: Mapping[LinearOperator, float] | None = None,
    times: int = 1,
) -> dict[str, float]:
    """Plant noise, under a policy that says so (or something else: `known`), and read."""
    truth = [said(public) for _ in range(3)]
    traces = tuple(session(public, ids, sigmas, times) for ids in truth)
    placed = policy(folder, sigmas if known is None else known)
    return shares(View(traces, public, placed, public.directory, 3, TOKENS), truth)


def all_of(sigma: float) -> dict[LinearOperator, float]:
    """Return the same noise everywhere."""
    return dict.fromkeys(FUSED_MODULES, sigma)


def test_little_noise_hides_nothing(public: PublicModel, tmp_path: Path) -> None:
    assert attacked(public, tmp_path, all_of(0.3)) == {FIRST: 1, ALL: 1}


@pytest.mark.parametrize("sigma", [3.0, 4.0])
def test_what_one_row_does_not_tell_all_places_together_do(
    public: PublicModel, tmp_path: Path, sigma: float
) -> None:
    read = attacked(public, tmp_path, all_of(sigma))
    assert read[ALL] >= 0.97
    assert read[FIRST] < 0.4


def test_large_noise_hides_all_but_the_token_that_is_known(
    public: PublicModel, tmp_path: Path
) -> None:
    read = attacked(public, tmp_path, all_of(1000.0))
    assert read[ALL] <= 0.1
    assert read[FIRST] <= 0.05


def test_places_count_by_how_little_noise_they_have(public: PublicModel, tmp_path: Path) -> None:
    sigmas: dict[LinearOperator, float] = {**all_of(40.0), "gate_up_proj": 0.8}
    assert attacked(public, tmp_path, sigmas)[ALL] >= 0.97
    # As if they all had the same.
    assert attacked(public, tmp_path, sigmas, known=all_of(40.0))[ALL] < 0.5


def test_a_row_that_is_sent_three_times_counts_three_times(
    public: PublicModel, tmp_path: Path
) -> None:
    sigmas: dict[LinearOperator, float] = {"qkv_proj": 4.0}
    once = attacked(public, tmp_path, sigmas)[ALL]
    assert attacked(public, tmp_path, sigmas, times=3)[ALL] > once + 0.2


def test_a_path_that_was_misread_is_left_again(
    public: PublicModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = attacked(public, tmp_path, all_of(8.0))[ALL]
    monkeypatch.setattr(noise, "_KEPT", 1)
    torch.manual_seed(0)
    assert several > attacked(public, tmp_path, all_of(8.0))[ALL]


def test_rows_in_the_clear_are_read_as_well(public: PublicModel) -> None:
    truth = [said(public)]
    traces = (session(public, truth[0], all_of(0.0)),)
    view = View(traces, public, load_policy("attention-in-tee"), public.directory, 1, TOKENS)
    assert shares(view, truth) == {FIRST: 1, ALL: 1}


def test_a_search_goes_as_far_as_it_is_told(public: PublicModel, tmp_path: Path) -> None:
    """Four times as far as one at a single place, since it goes through all places at once."""
    traces = tuple(session(public, said(public), NOISY) for _ in range(6))
    view = View(traces, public, policy(tmp_path, NOISY), public.directory, 1, 11)
    found = list(NoiseAveraging().read(view, Work()))
    assert [(r.where, r.session, len(r.tokens)) for r in found] == [
        *((FIRST, number, TOKENS) for number in range(6)),
        *((ALL, number, 11) for number in range(4)),
    ]


def test_behind_a_prompt_that_stayed_there_is_nothing_to_read_on_from(
    public: PublicModel, tmp_path: Path
) -> None:
    text = policy_text(NOISY)
    for operator in NOISY:
        decode = f'{operator} = [{{ phase = "prefill", place = "tee" }}, {{ phase = "decode", '
        text = text.replace(f"{operator} = {{ ", decode)
    text = "\n".join(f"{line}]" if "= [" in line else line for line in text.splitlines())
    (tmp_path / "decode.toml").write_text(text, encoding="utf-8")
    trace = session(public, said(public), NOISY)
    decoded = Trace(trace.messages[len(trace.steps[0].calls) :])
    placed = load_policy(str(tmp_path / "decode.toml"))
    view = View((decoded,), public, placed, public.directory, 1, TOKENS)
    found = list(NoiseAveraging().read(view, Work()))
    assert [(r.where, len(r.tokens)) for r in found] == [(FIRST, TOKENS - PROMPT)]


def test_without_linear_weights_only_the_first_layer_is_read(
    public: PublicModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = (session(public, said(public), NOISY),)
    monkeypatch.setattr(PublicModel, "has_layers", False)
    view = View(traces, public, policy(tmp_path, NOISY), public.directory, 1, TOKENS)
    assert {reading.where for reading in NoiseAveraging().read(view, Work())} == {FIRST}


def test_what_is_no_noise_is_refused(public: PublicModel) -> None:
    def refused(name: str, trace: Trace) -> str | None:
        view = View((trace,), public, load_policy(name), public.directory, 1, TOKENS)
        return NoiseAveraging().refuses(view)

    def one(request: LinearRequest | RingLinearRequest) -> Trace:
        return Trace((tuple(map(bytes, encode_request(request, 1, 60_000))),))

    modules = FUSED_MODULES["qkv_proj"]
    row = torch.ones(1, 48)
    floats = one(LinearRequest(layer_idx=0, module_names=modules, hidden_states=from_torch(row)))
    ring = one(RingLinearRequest(layer_idx=0, module_names=modules, elements=from_torch(row.int())))
    assert refused("tee-only", Trace(())) == "no activations crossed"
    assert refused("shielded-prefill", ring) == "integers"
    assert refused("row-rotation", floats) == "neither clear nor under noise"
    assert refused("float-noise", floats) is None


@pytest.fixture
def stories() -> list[list[int]]:
    """Return beginnings of two stories as token ids."""
    model = model_directory("demo")
    text = (model / "validation.txt").read_text(encoding="utf-8").split("<|begin_of_text|>")
    tokenizer = PublicModel(model).tokenizer
    return [tokenizer.encode(story)[:16] for story in text if story.strip()][:2]


@pytest.mark.usefixtures("same_draws")
def test_the_demo_model_under_noise_is_read(stories: list[list[int]], tmp_path: Path) -> None:
    model = model_directory("demo")
    recording = play(policy(tmp_path, all_of(4.0)), stories, PlaySettings(model, tmp_path, 5))
    traces = tuple(one.traces[0] for one in recording.sessions)
    view = View(traces, PublicModel(model), recording.policy, recording.served, 2, 60)
    read = shares(view, [list(one.truth.sent) for one in recording.sessions])
    assert read[ALL] >= NoiseAveraging.published
    assert read[FIRST] < 0.3
