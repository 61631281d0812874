"""The runner: several generations in turns, what it loads, what it refuses before starting."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.curve import ClientKeys, HttpAccess
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import (
    KernelError,
    ModelError,
    ModelMismatchError,
    PadsExhaustedError,
    PolicyError,
    PromptError,
    SettingsError,
)
from tee_side import assembly
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import EngineSettings
from tee_side.engine.generation import GenerationResult, PadTotals
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.remote.services.plan import largest_reply
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import OPERATORS, Verify
from tests.kit.model import LoopbackChannel, Models, SavedModel, with_results
from tests.kit.rows import each_row

ONE, TWO = (ClientKeys(b"secret", public) for public in (b"one", b"two"))


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
    gpu, dealers = endpoints[:1], endpoints[1:]
    (held if held is not None else {}).update(dict.fromkeys(endpoints, model.directory))
    return RunnerSettings(
        model=model.directory,
        policy=chosen,
        gpu=gpu,
        dealers=dealers,
        masks=model.masks(chosen, **masks),
        dtype="float32",
        keys=(ONE, TWO) if chosen.services > 1 else (),
    )


def _generate(runner: Runner, new_tokens: int = 6) -> GenerationResult:
    generation = runner.generate([1, 5, 9, 13], max_new_tokens=new_tokens, with_text=False)
    list(generation)
    return generation.result()


def test_services_are_reached_as_the_settings_say_and_asked_all_or_none(
    saved_model: Models, loopback: dict[str, Path], opened: list[Connected]
) -> None:
    """A reply can be no larger than the largest that a step asks for, whoever sends it."""
    given = replace(
        _settings(saved_model("llama"), "dealt", loopback),
        request_timeout_s=7.0,
        max_message_bytes=2**24,
        heartbeat_timeout_s=0.75,
        spin_us=3.0,
        http={f"tcp://service-{n}:1": HttpAccess(f"{n}" * 32) for n in range(2)},
        engine=EngineSettings(step_tokens=40),
    )
    endpoints = [*given.gpu, *given.dealers]
    with Runner(given) as runner:
        assert len(_generate(runner).token_ids) == 6
        largest = largest_reply(given.policy, runner.config, 40, torch.float32)
    # The dealer's connection for pads that are made ahead is the maker's own.
    assert [channel.endpoint for channel in opened] == [*endpoints, *given.dealers]
    for channel, own in zip(opened, [*given.keys, given.keys[1]], strict=True):
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
    opened.clear()
    loopback[endpoints[1]] = saved_model("qwen3").directory
    with pytest.raises(ModelMismatchError, match=r"service-1:1"):
        Runner(given)
    assert [channel.closed for channel in opened] == [True, True]
    # Before the model is read, and so before a service is asked.
    with pytest.raises(SettingsError, match="got one key for"):
        Runner(replace(given, model=Path("none"), keys=(ONE, ONE)))
    # A policy that sends nothing has no use for them.
    stays = replace(given, policy=load_policy("tee-only"), masks=MaskSettings(), dealers=())
    with Runner(stays) as runner:
        assert _generate(runner).rpc.count == 0
        with pytest.raises(PromptError, match="stop strings"):
            runner.generate([1], max_new_tokens=1, stop=["x"], with_text=False)
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            runner.generate([1], max_new_tokens=1)
    assert len(opened) == 2


@each_row(
    ("policy", "masks", "said"),
    [
        ("tee-only", {"bank": BankPlace.at(Path("b"))}, "--bank: got b, .*: policy tee-only runs"),
        ("shielded", {"key": Path("k")}, "--key: got k, expected nothing: .* a feature mask"),
        ("stip", {}, "--key: got none"),
    ],
)
def test_files_are_those_that_the_policy_has_a_use_for(
    saved_model: Models, policy: str, masks: dict[str, Any], said: str
) -> None:
    settings = replace(_settings(saved_model("llama"), policy), masks=MaskSettings(**masks))
    with pytest.raises(SettingsError, match=said):
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
    # Integers need the weights, and so does verification.
    light = Path(shutil.copytree(model.directory, tmp_path / "light"))
    tensors = load_file(light / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "_proj" not in name}
    save_file(kept, light / "model.safetensors")
    known: dict[str, Verify] = {"dealt": "none", "shielded": "none", "published": "freivalds"}
    for name, verify in known.items():
        given = replace(_settings(model, name), model=light, policy=with_results(name, verify))
        with pytest.raises(ModelError, match=r"_proj\.weight: got no such tensor"):
            Runner(given)


def test_a_tee_whose_int8_products_saturate_is_refused(
    saved_model: Models, loopback: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch._int_mm

    def saturating(*operands: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        return exact(*operands, **out).clamp_(-(2**15), 2**15 - 1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    for policy in ("quantized-clear", "shielded", "dealt"):
        assembly._check_own_kernels.cache_clear()
        with pytest.raises(KernelError, match="int8 products on cpu: got wrong numbers"):
            Runner(_settings(saved_model("llama"), policy, loopback))


def test_idle_time_is_used_to_make_pads_and_a_run_without_any_is_told(
    saved_model: Models, loopback: dict[str, Path], opened: list[Connected]
) -> None:
    settings = _settings(saved_model("llama"), "shielded", loopback, when_out="fail")
    with Runner(settings) as runner:
        totals = runner.totals()
        assert (totals.pads_ready, totals.pads_waited, totals.pads_in_tee) == (0, 0, 0)
        with pytest.raises(PadsExhaustedError, match="0 left"):
            _generate(runner)
        while (runner.totals().pads_ready or 0) < 10:  # a batch at least each time
            with runner.filling():
                pass
        ready = runner.totals().pads_made
        # One a token behind the first, which comes out of prefill.
        assert _generate(runner).pads == PadTotals(available=ready - 5, waited=0, in_tee=0)
        assert (runner.totals().pads_used, runner.totals().services) == (5, 1)
    assert [channel.closed for channel in opened] == [True]
    with pytest.raises(RuntimeError, match="closed store"):
        _generate(runner)
