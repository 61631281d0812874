"""The runner: several generations in turns, what it loads, what it refuses before starting."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.curve import ClientKeys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import (
    AbsentError,
    CalibrationError,
    KernelError,
    ModelError,
    ModelMismatchError,
    PadsExhaustedError,
    PolicyError,
    PromptError,
    SettingsError,
)
from protocol.http_access import HttpAccess
from tee_side import assembly
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import EngineSettings
from tee_side.engine.generation import GenerationResult, PadTotals
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.remote.reply_size import largest_reply
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import OPERATORS
from tests.kit.model import LoopbackChannel, SavedModel, with_results
from tests.kit.rows import each_row
from tsqp.operator_table import OperatorTable

Models = Callable[..., SavedModel]

ONE, TWO = (ClientKeys(b"secret", public) for public in (b"one", b"two"))
PROMPTS = ([1, 5, 9, 13], [2, 7, 11, 200, 3, 8, 250])


class Connected(LoopbackChannel):
    """A connection that a runner has opened, and what it said of it."""

    def __init__(self, directory: Path, endpoint: str, settings: dict[str, object]) -> None:
        super().__init__(directory)
        self.endpoint = endpoint
        self.settings = settings
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened() -> list[Connected]:
    """Every connection that runners have opened."""
    return []


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, opened: list[Connected]) -> dict[str, Path]:
    """Connect runners to services in this process; the key is what the endpoint names."""
    held: dict[str, Path] = {}

    def connect(endpoint: str, **settings: object) -> Connected:
        opened.append(Connected(held[endpoint], endpoint, settings))
        return opened[-1]

    monkeypatch.setattr("tee_side.runner.open_channel", connect)
    return held


def _settings(
    model: SavedModel, policy: str, held: dict[str, Path] | None = None, **masks: Any
) -> RunnerSettings:
    chosen = load_policy(policy)
    endpoints = tuple(f"tcp://service-{number}:1" for number in range(chosen.services))
    (held if held is not None else {}).update(dict.fromkeys(endpoints, model.directory))
    return RunnerSettings(
        model=model.directory,
        policy=chosen,
        gpu=endpoints,
        masks=model.masks(chosen, **masks),
        dtype="float32",
        keys=(ONE, TWO) if chosen.services > 1 else (),
    )


def _generate(runner: Runner, new_tokens: int = 6) -> GenerationResult:
    generation = runner.generate(PROMPTS[0], max_new_tokens=new_tokens, with_text=False)
    list(generation)
    return generation.result()


def _without(model: SavedModel, folder: Path, part: str) -> Path:
    """Return the model's directory without the weights that are named so."""
    shutil.copytree(model.directory, folder)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if part not in name}, weights)
    return folder


def test_generations_iterated_in_turns_each_get_their_own_tokens(saved_model: Models) -> None:
    model, told = saved_model("llama"), list[tuple[str, int, int]]()
    with Runner(_settings(model, "tee-only"), on_load=lambda *said: told.append(said)) as runner:
        generations = [
            runner.generate(prompt, max_new_tokens=12, with_text=False) for prompt in PROMPTS
        ]
        # In turns: what one of them steps must not be lost to the other.
        for _ in zip(*(generation.steps() for generation in generations), strict=True):
            pass
        results = [generation.result() for generation in generations]
        with pytest.raises(PromptError, match="stop strings"):
            runner.generate([1], max_new_tokens=1, stop=["x"], with_text=False)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            runner.generate([1], max_new_tokens=1)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == model.greedy(prompt, 12)
        assert (result.usage.total_tokens, result.text) == (len(prompt) + 12, None)
    # What is loaded is told matrix by matrix.
    count = len(told)
    assert count >= 4 * model.reference.config.num_hidden_layers
    what = "weights that stay in the TEE"
    assert told == [(what, done, count) for done in range(1, count + 1)]


def test_linear_weights_are_needed_only_where_the_policy_runs_them(
    saved_model: Models, tmp_path: Path
) -> None:
    model = saved_model("llama")
    light = _without(model, tmp_path / "light", "_proj")
    with pytest.raises(ModelError, match=r"_proj\.weight: got no such tensor"):
        Runner(replace(_settings(model, "tee-only"), model=light))
    # Everything that attention-in-tee needs is there: it gets as far as asking a service.
    offloading = replace(
        _settings(model, "attention-in-tee"),
        model=light,
        gpu=(f"ipc://{tmp_path}/nobody",),
        connect_timeout_s=0.05,
    )
    with pytest.raises(AbsentError, match="nobody: got nothing that listens while Init"):
        Runner(offloading)


# ------------------------------------------------------------------------------------- services


@pytest.mark.parametrize("policy", ["shielded", "two-server"])
def test_services_are_reached_as_the_settings_say_and_bounded_by_what_is_asked_for(
    saved_model: Models, loopback: dict[str, Path], opened: list[Connected], policy: str
) -> None:
    """A reply can be no larger than the largest that a step asks for, whoever sends it."""
    given = replace(
        _settings(saved_model("llama"), policy, loopback),
        keys=(ONE, TWO)[: load_policy(policy).services],
        request_timeout_s=7.0,
        max_message_bytes=2**24,
        heartbeat_timeout_s=0.75,
        spin_us=3.0,
        http={f"tcp://service-{n}:1": HttpAccess(f"{n}" * 32) for n in range(2)},
        engine=EngineSettings(step_tokens=24),
    )
    with Runner(given) as runner:
        assert len(_generate(runner).token_ids) == 6
        largest = largest_reply(given.policy, runner.config, 24, torch.float32)
    assert [channel.endpoint for channel in opened] == list(given.gpu)
    for channel, own in zip(opened, given.keys, strict=True):
        assert channel.settings == {
            "timeout_s": 7.0,
            "max_message_bytes": 2**24,
            "spin_us": 3.0,
            "keys": own,
            "heartbeat_timeout_s": 0.75,
            "http": given.http[channel.endpoint],
        }
        assert channel.max_reply_bytes == largest < 2**24
        # What the service says of itself.
        assert channel.max_message_bytes == DEFAULT_MAX_MESSAGE_BYTES
        assert channel.one_connection
        assert channel.closed


def test_services_are_asked_and_let_go_of_all_or_none(
    saved_model: Models, loopback: dict[str, Path], opened: list[Connected]
) -> None:
    given = _settings(saved_model("llama"), "two-server", loopback)
    loopback[given.gpu[1]] = saved_model("qwen3").directory
    with pytest.raises(ModelMismatchError, match=r"service-1:1"):
        Runner(given)
    assert [channel.closed for channel in opened] == [True, True]
    # A policy that sends nothing has no use for them.
    stays = replace(given, policy=load_policy("tee-only"), masks=MaskSettings())
    with Runner(stays) as runner:
        assert _generate(runner).rpc.count == 0
    assert len(opened) == 2


def test_who_gets_what_is_said_and_seen(saved_model: Models, loopback: dict[str, Path]) -> None:
    model, table = saved_model("llama"), OperatorTable()
    settings = _settings(model, "two-server", loopback)
    last = model.reference.config.num_hidden_layers - 1
    with Runner(settings, table) as runner:
        assert runner.assignments == (
            f"tcp://service-0:1: layers 0-{last}, share 1 of 2, key one",
            f"tcp://service-1:1: layers 0-{last}, share 2 of 2, key two",
        )
        assert "their links are encrypted" in (runner.leakage_summary or "")
        result = _generate(runner)
    trips = {name: totals.round_trips for name, totals in table.totals.items()}
    assert sum(trips.values()) == result.rpc.count
    # Three layers, six steps, two services.
    assert trips["o_proj"] == 2 * table.totals["o_proj"].calls == 2 * 3 * 6
    assert trips["embedding"] == trips["attn_scores"] == trips["lm_head"] == 0
    local = tuple(f"tcp://127.0.0.1:{number}" for number in (1, 2))
    loopback.update(dict.fromkeys(local, model.directory))
    with Runner(replace(settings, gpu=local, keys=(), shares_in_the_clear=True)) as runner:
        assert runner.assignments[1] == f"{local[1]}: layers 0-{last}, share 2 of 2, no key"
        assert "NOT encrypted, reads prompt and answer" in (runner.leakage_summary or "")


_BOTH = "one key for tcp://a:1 and tcp://b:1, which get a share each"
_A, _B = "tcp://a:1", "tcp://b:1"
# Policy, services, keys, whether shares may cross in the clear; of what is refused the option, what
# it got, and a pattern of what it should be. None: the next thing that is looked at is the model.
_Links = tuple[str, tuple[str, ...], tuple[ClientKeys, ...], bool, tuple[str, str, str] | None]
LINKS: list[_Links] = [
    ("shielded", (), (), False, ("--gpu", "no endpoint", "policy shielded uses a gpu-service")),
    ("two-server", (), (), False, ("--gpu", "no endpoint", "2, because policy two-server uses 2")),
    ("two-server", (_A,), (), False, ("--gpu", "one endpoint", "2, because policy two-server")),
    ("two-server", (_A, _A), (), False, ("--gpu", f"{_A} twice", "do not collude")),
    ("two-server", (_A, _A, _B), (), False, ("--gpu", f"{_A} twice", "do not collude")),
    ("two-server", (_A, _B), (ONE,), False, ("--service-key", _BOTH, "")),
    ("two-server", (_A, _B), (ONE, ONE), False, ("--service-key", _BOTH, "")),
    (
        "two-server",
        (f"{_A},share=1", "tcp://c:1,share=1", f"{_B},share=2"),
        (ONE, TWO, ONE),
        False,
        ("--service-key", _BOTH, ""),
    ),
    # Services with the same share may have one key.
    ("two-server", (_A, _B), (ONE, TWO), False, None),
    ("two-server", ("ipc:///a", "tcp://127.0.0.1:1"), (ONE, TWO), False, None),
    (
        "two-server",
        tuple(f"tcp://{name}:1,share={share}" for name, share in zip("abcd", "1212", strict=True)),
        (ONE, TWO, ONE, TWO),
        False,
        None,
    ),
    ("shielded", (_A, _B), (ONE,), False, None),
    ("shielded", (f"{_A},share=1", _B), (ONE,), False, None),
]
# On one machine shares may cross without keys where it is asked for: adding the frames of both
# links gave every token of a prompt.
for _gpu in (
    ("tcp://127.0.0.1:1", "tcp://localhost:2"),
    ("tcp://[::1]:1", "tcp://127.8.0.1:1"),
    ("ipc:///a", "ipc:///b"),
    ("unix:///a", "unix:///b"),
    ("unix:///a", "tcp://127.0.0.1:1"),
):
    _refused = ("--gpu", f"{_gpu[0]} without keys", "--shares-in-the-clear")
    LINKS += [("two-server", _gpu, (), False, _refused), ("two-server", _gpu, (), True, None)]
# Never over a network. A vsock is a link to the host, which sees it.
for _gpu, _which in (
    ((_A, _B), 0),
    (("unix:///a", _B), 1),
    (("tcp://127.0.0.1:1", "vsock://2:1"), 1),
    (("vsock://2:1", "vsock://2:2"), 0),
    (("ivshmem:///m,2:1", "ivshmem:///n,2:2"), 0),
):
    _refused = ("--gpu", f"{_gpu[_which]} without keys", "^(?!.*--shares-in-the-clear)")
    LINKS.append(("two-server", _gpu, (), True, _refused))


@each_row(("policy", "gpu", "keys", "clear", "refused"), LINKS)
def test_links_that_shares_may_not_cross_are_refused_before_the_model_is_read(
    tmp_path: Path,
    policy: str,
    gpu: tuple[str, ...],
    keys: tuple[ClientKeys, ...],
    clear: bool,
    refused: tuple[str, str, str] | None,
) -> None:
    settings = RunnerSettings(
        tmp_path / "no-model", load_policy(policy), gpu, keys=keys, shares_in_the_clear=clear
    )
    if refused is None:
        with pytest.raises(ModelError):
            Runner(settings)
        return
    where, got, expected = refused
    with pytest.raises(SettingsError) as caught:
        Runner(settings)
    assert (caught.value.where, caught.value.got) == (where, got)
    assert re.search(expected, caught.value.expected)


# ---------------------------------------------------------------------------------------- refused


@each_row(
    ("policy", "masks", "said"),
    [
        ("tee-only", {"bank": BankPlace.at(Path("b"))}, "--bank: got b, .*: policy tee-only runs"),
        ("two-server", {"bank": BankPlace.at(Path("b"))}, "--bank: got b, .*: policy two-server"),
        ("shielded", {"key": Path("k")}, "--key: got k, expected nothing: .* a feature mask"),
        ("tsqp", {"calibration": Path("c")}, "--calibration: got c, expected nothing: .* int8"),
        ("shielded", {}, "tsqp calibrate"),
        ("stip", {}, "--key: got none"),
    ],
)
def test_files_are_those_that_the_policy_has_a_use_for(
    saved_model: Models, policy: str, masks: dict[str, Any], said: str
) -> None:
    settings = _settings(saved_model("llama"), policy)
    if masks or policy in ("shielded", "stip"):
        settings = replace(settings, masks=MaskSettings(**masks))
    with pytest.raises((SettingsError, CalibrationError), match=said):
        Runner(settings)


def test_a_policy_that_does_not_fit_the_model_is_refused_before_a_service_is_asked(
    saved_model: Models, loopback: dict[str, Path], tmp_path: Path
) -> None:
    model = saved_model("llama")
    settings = _settings(model, "quantized-clear")
    gap = {"place": "gpu", "layers": "0-1", "mask": "none", "verify": "none"}
    policy = settings.policy.model_dump() | {"name": "gap"}
    policy["operators"] = {**dict.fromkeys(OPERATORS, "tee"), "o_proj": gap}
    with pytest.raises(PolicyError, match="policy gap: o_proj: layer 2"):
        Runner(replace(settings, policy=Policy.model_validate(policy)))
    # Pads need a bank or the weights, and so does verification.
    given = _settings(model, "shielded-prefill")
    light = _without(model, tmp_path / "light", "_proj")
    for chosen, where, got in (
        (given.policy, 'verify = "freivalds"', "no model.layers.0.self_attn.q_proj.weight and "),
        (with_results(given.policy, "none"), "mask pad", "no --bank, and not all linear weights"),
    ):
        with pytest.raises(PolicyError) as caught:
            Runner(replace(given, model=light, policy=chosen))
        assert caught.value.where == f"policy shielded-prefill: {where}"
        assert caught.value.got.startswith(got)


def test_a_tee_whose_int8_products_saturate_is_refused(
    saved_model: Models, loopback: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch._int_mm

    def saturating(*operands: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        return exact(*operands, **out).clamp_(-(2**15), 2**15 - 1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    for policy in ("quantized-clear", "shielded", "two-server"):
        assembly._check_own_kernels.cache_clear()
        with pytest.raises(KernelError, match="int8 products on cpu: got wrong numbers"):
            Runner(_settings(saved_model("llama"), policy, loopback))


# ------------------------------------------------------------------------------------------- pads


def test_idle_time_is_used_to_make_pads_and_a_run_without_any_is_told(
    saved_model: Models, loopback: dict[str, Path], opened: list[Connected]
) -> None:
    settings = _settings(saved_model("llama"), "shielded", loopback, when_out="fail")
    runner = Runner(settings)
    assert runner.pads == PadTotals(available=0, waited=0, in_tee=0)
    with pytest.raises(PadsExhaustedError, match="0 left"):
        _generate(runner)
    while runner.pads is not None and runner.pads.available < 10:  # a batch at least, each time
        with runner.filling():
            pass
    ready = runner.totals().pads_made
    # One a token behind the first, which comes out of prefill.
    assert _generate(runner).pads == PadTotals(available=ready - 5, waited=0, in_tee=0)
    assert (runner.totals().pads_used, runner.totals().services) == (5, 1)
    runner.close()
    assert [channel.closed for channel in opened] == [True]
    with pytest.raises(RuntimeError, match="closed store"):
        _generate(runner)


def test_a_generation_counts_its_own_waits_and_steps_without_pads(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    model, told = saved_model("llama"), list[int]()
    with Runner(_settings(model, "shielded", loopback)) as runner:
        runner.on_wait = told.append
        first = _generate(runner, 6)
        assert told == [1]
        runner.on_wait = None  # nobody has to listen
        second = _generate(runner, 2)
    # Eight were made for the first; five of them were used, and the second took one more.
    assert first.pads == PadTotals(available=3, waited=1, in_tee=0)
    assert second.pads == PadTotals(available=2, waited=0, in_tee=0)
    with Runner(_settings(model, "shielded", loopback, when_out="tee")) as runner:
        result = _generate(runner)
    assert result.pads == PadTotals(available=0, waited=0, in_tee=5)
    assert (result.rpc.count, result.token_ids) == (0, first.token_ids)
    with Runner(_settings(model, "quantized-clear", loopback)) as runner:
        with runner.filling():  # there are none to make
            pass
        assert runner.pads is None
        assert _generate(runner).token_ids == first.token_ids
