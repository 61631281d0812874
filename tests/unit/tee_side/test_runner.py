"""The runner: several generations in turns, what it loads, what it refuses before starting."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol import native
from protocol.channel import Exchange
from protocol.curve import ClientKeys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import (
    AbsentError,
    CalibrationError,
    DeadlineExceededError,
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
from tee_side import runner as runner_module
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import EngineSettings
from tee_side.engine.generation import GenerationResult, PadTotals
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.remote.reply_size import largest_reply
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import OPERATORS
from tests.kit.model import LoopbackChannel, SavedModel, make_model, token_ids, with_results
from tsqp.operator_table import OperatorTable

Models = Callable[..., SavedModel]

ONE, TWO, THREE = (ClientKeys(b"secret", public) for public in (b"one", b"two", b"three"))
PROMPTS = ([1, 5, 9, 13], [2, 7, 11, 200, 3, 8, 250])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("model")
    return directory, make_model(directory)


def settings(directory: Path, policy: str = "tee-only") -> RunnerSettings:
    return RunnerSettings(model=directory, policy=load_policy(policy), dtype="float32")


def test_generations_iterated_in_turns_each_get_their_own_tokens(model: tuple[Path, Any]) -> None:
    directory, reference = model
    with Runner(settings(directory)) as runner:
        generations = [
            runner.generate(prompt, max_new_tokens=12, with_text=False) for prompt in PROMPTS
        ]
        # In turns: what one of them steps must not be lost to the other.
        for _ in zip(*(generation.steps() for generation in generations), strict=True):
            pass
        results = [generation.result() for generation in generations]
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = torch.tensor([prompt])
        want = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert result.token_ids == want[0, len(prompt) :].tolist()
        assert result.usage.total_tokens == len(prompt) + 12
        assert result.text is None


def test_what_is_loaded_is_told_matrix_by_matrix(model: tuple[Path, Any]) -> None:
    told: list[tuple[str, int, int]] = []
    with Runner(settings(model[0]), on_load=lambda *said: told.append(said)) as runner:
        count = len(told)
        assert count >= 4 * runner.config.num_hidden_layers
    what = "weights that stay in the TEE"
    assert told == [(what, done, count) for done in range(1, count + 1)]


def test_timing_has_no_time_per_token_for_a_single_token(model: tuple[Path, Any]) -> None:
    with Runner(settings(model[0])) as runner:
        generation = runner.generate([1, 2], max_new_tokens=1, with_text=False)
        assert list(generation) == []
        result = generation.result()
    assert result.timing.tpot_s is None
    assert result.timing.total_s >= result.timing.ttft_s > 0
    assert (result.rpc.count, result.rpc.bytes_sent, result.rpc.bytes_received) == (0, 0, 0)


def test_a_closed_generation_is_not_worked_on(model: tuple[Path, Any]) -> None:
    with Runner(settings(model[0])) as runner:
        given_up = runner.generate([1, 2], max_new_tokens=9, with_text=False)
        next(given_up.steps())
        given_up.close()
        other = runner.generate([3, 4], max_new_tokens=3, with_text=False)
        list(other.steps())
        assert given_up.token_count == 1
        assert len(other.result().token_ids) == 3


def test_linear_weights_are_needed_only_where_the_policy_runs_them(
    model: tuple[Path, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model[0] / "model.safetensors")
    light = {name: t for name, t in tensors.items() if "_proj" not in name}
    save_file(light, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model[0] / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"_proj\.weight: got no such tensor"):
        Runner(settings(tmp_path))
    # Everything that attention-in-tee needs is there: it gets as far as asking a service.
    offloading = replace(
        settings(tmp_path, "attention-in-tee"),
        gpu=(f"ipc://{tmp_path}/nobody",),
        connect_timeout_s=0.05,
    )
    with pytest.raises(AbsentError, match="nobody: got nothing that listens while Init"):
        Runner(offloading)


def test_a_policy_that_offloads_needs_an_endpoint(model: tuple[Path, Any]) -> None:
    with pytest.raises(SettingsError, match="--gpu"):
        Runner(settings(model[0], "attention-in-tee"))


def test_stop_strings_need_a_tokenizer(model: tuple[Path, Any]) -> None:
    with Runner(settings(model[0])) as runner, pytest.raises(PromptError, match="stop strings"):
        runner.generate([1], max_new_tokens=1, stop=["x"], with_text=False)
    with Runner(settings(model[0])) as runner, pytest.raises(ModelError, match=r"tokenizer\.json"):
        runner.generate([1], max_new_tokens=1)


# -------------------------------------------------------------------- services and pads


class Connected(LoopbackChannel):
    """A connection that a runner has opened, and what it said of it."""

    def __init__(self, directory: Path, endpoint: str, settings: dict[str, object]) -> None:
        super().__init__(directory)
        self.endpoint = endpoint
        self.settings = settings


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


def _offloading(
    model: SavedModel, policy: str, held: dict[str, Path], **masks: Any
) -> RunnerSettings:
    chosen = load_policy(policy)
    directory = model.directory
    if chosen.feature_mask is not None:
        directory = model.provisioned(chosen.feature_mask)[0]
    endpoints = tuple(f"tcp://service-{number}:1" for number in range(chosen.services))
    held.update(dict.fromkeys(endpoints, directory))
    proves = chosen.service.attested != "none"
    return RunnerSettings(
        model=model.directory,
        policy=chosen,
        gpu=endpoints,
        masks=model.masks(chosen, **masks),
        dtype="float32",
        keys=(ONE, TWO)[: chosen.services] if chosen.services > 1 or proves else (),
        appraise_service=(lambda *_: None) if proves else None,
    )


def _generate(runner: Runner, new_tokens: int = 6) -> GenerationResult:
    generation = runner.generate(PROMPTS[0], max_new_tokens=new_tokens, with_text=False)
    list(generation)
    return generation.result()


@pytest.mark.parametrize("policy", builtin_policies())
def test_every_builtin_policy_generates(
    saved_model: Models, loopback: dict[str, Path], policy: str
) -> None:
    model = saved_model("llama")
    with Runner(_offloading(model, policy, loopback)) as runner:
        result = _generate(runner)
    chosen = load_policy(policy)
    assert len(result.token_ids) == 6
    assert (result.policy, result.rpc.count > 0) == (policy, chosen.services > 0)
    padded = any(mask.name in ("pad", "float-noise") for mask in chosen.masks)
    assert (result.pads is not None) == padded
    if chosen.arithmetic == "float":
        assert result.token_ids == model.greedy(PROMPTS[0], 6)


def test_round_trips_of_two_services_are_added_up(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    model, counts = saved_model("llama"), {}
    for policy in ("quantized-clear", "two-server"):
        with Runner(_offloading(model, policy, loopback)) as runner:
            result = _generate(runner)
        counts[policy] = result.rpc
    assert counts["two-server"].count == 2 * counts["quantized-clear"].count
    # A seed, and headers of as many bytes as before, give or take a few.
    more = counts["two-server"].bytes_sent - counts["quantized-clear"].bytes_sent
    requests = counts["quantized-clear"].count
    assert 32 * requests < more < 256 * requests


@pytest.mark.parametrize("policy", ["shielded", "two-server"])
def test_services_are_reached_as_the_settings_say_and_bounded_by_what_is_asked_for(
    saved_model: Models, loopback: dict[str, Path], opened: list[Connected], policy: str
) -> None:
    """A reply can be no larger than the largest that a step asks for, whoever sends it."""
    keys = tuple(ClientKeys(b"secret", name) for name in (b"one", b"two"))
    given = replace(
        _offloading(saved_model("llama"), policy, loopback),
        keys=keys[: load_policy(policy).services],
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


def test_endpoints_that_the_policy_has_no_use_for_are_not_connected_to(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    settings = _offloading(saved_model("llama"), "quantized-clear", loopback)
    tee_only = load_policy("tee-only")
    stays = replace(settings, policy=tee_only, gpu=("tcp://nobody:1",), masks=MaskSettings())
    with Runner(stays) as runner:
        assert _generate(runner).rpc.count == 0


@pytest.mark.parametrize(
    ("policy", "endpoints", "got", "expected"),
    [
        ("shielded", (), "no endpoint", "1, because policy shielded uses a gpu-service"),
        ("two-server", (), "no endpoint", "2, because policy two-server uses 2"),
        ("two-server", ("tcp://a:1",), "one endpoint", "2, because policy two-server uses 2"),
        ("two-server", ("tcp://a:1", "tcp://a:1"), "tcp://a:1 twice", "do not collude"),
        (
            "two-server",
            ("tcp://a:1", "tcp://a:1", "tcp://b:1"),
            "tcp://a:1 twice",
            "do not collude",
        ),
    ],
)
def test_too_few_services_or_one_twice_are_refused_before_the_model_is_read(
    tmp_path: Path, policy: str, endpoints: tuple[str, ...], got: str, expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Runner(RunnerSettings(tmp_path / "no-model", load_policy(policy), endpoints))
    assert (caught.value.where, caught.value.got) == ("--gpu", got)
    assert expected in caught.value.expected


def test_a_policy_that_does_not_fit_the_model_is_refused_before_a_service_is_asked(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    model = saved_model("llama")
    settings = _offloading(model, "quantized-clear", loopback)
    gap = {"place": "gpu", "layers": "0-1", "mask": "none", "verify": "none"}
    policy = settings.policy.model_dump() | {"name": "gap"}
    policy["operators"] = {**dict.fromkeys(OPERATORS, "tee"), "o_proj": gap}
    loopback.clear()
    with pytest.raises(PolicyError, match="policy gap: o_proj: layer 2"):
        Runner(replace(settings, policy=Policy.model_validate(policy)))
    with pytest.raises(CalibrationError, match="tsqp calibrate"):
        Runner(replace(settings, masks=MaskSettings()))
    stip = replace(settings, policy=load_policy("stip"), masks=MaskSettings())
    with pytest.raises(SettingsError, match=r"--key: got none"):
        Runner(stip)


def test_idle_time_is_used_to_make_pads(saved_model: Models, loopback: dict[str, Path]) -> None:
    model = saved_model("llama")
    with Runner(_offloading(model, "shielded", loopback, when_out="fail")) as runner:
        assert runner.pads == PadTotals(available=0, waited=0, in_tee=0)
        while runner.pads.available < 10:  # a batch at least, each time
            with runner.filling():
                pass
        ready = runner.pads.available
        result = _generate(runner)
        # One a token behind the first, which comes out of prefill.
        assert result.pads == PadTotals(available=ready - 5, waited=0, in_tee=0)


def test_without_pads_to_make_idle_does_nothing(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    with Runner(_offloading(saved_model("llama"), "quantized-clear", loopback)) as runner:
        with runner.filling():
            pass
        assert runner.pads is None


def test_waiting_for_pads_is_said(saved_model: Models, loopback: dict[str, Path]) -> None:
    told: list[int] = []
    with Runner(_offloading(saved_model("llama"), "shielded", loopback)) as runner:
        runner.on_wait = told.append
        result = _generate(runner)
        assert told == [1]
        assert result.pads is not None
        assert result.pads.waited == 1
        # Nobody has to listen.
        runner.on_wait = None
        _generate(runner, 80)


def test_operators_that_are_replaced_after_a_failed_step_keep_no_pads(
    saved_model: Models, loopback: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _offloading(saved_model("llama"), "shielded-prefill", loopback)
    # A lone service is waited for until the deadline of what it was asked.
    with Runner(replace(settings, micro_batches=2, request_timeout_s=0.2)) as runner:
        generation = runner.generate(token_ids(40), max_new_tokens=1, with_text=False)

        def lose(*_: object) -> Exchange:
            raise DeadlineExceededError("loopback", got="no reply", expected="one")

        monkeypatch.setattr(LoopbackChannel, "wait", lose)
        with pytest.raises(DeadlineExceededError):
            list(generation.steps())
        runner.observe(None)
        (pads,) = runner._assembly.pads.values()
        assert pads._store.available + pads._store.room == pads._store.capacity


def test_steps_without_pads_run_in_the_tee_and_are_counted(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    settings = _offloading(saved_model("llama"), "shielded", loopback, when_out="tee")
    with Runner(settings) as runner:
        result = _generate(runner)
    assert result.pads == PadTotals(available=0, waited=0, in_tee=5)
    assert result.rpc.count == 0


def test_a_run_out_of_pads_is_told_so_and_can_go_on_when_there_are_some(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    model = saved_model("llama")
    with Runner(_offloading(model, "shielded", loopback, when_out="fail")) as runner:
        generation = runner.generate(PROMPTS[0], max_new_tokens=6, with_text=False)
        with pytest.raises(PadsExhaustedError, match="0 left"):
            list(generation.steps())
        while runner.pads is not None and runner.pads.available < 10:
            with runner.filling():
                pass
        after = _generate(runner)
    with Runner(_offloading(model, "quantized-clear", loopback)) as runner:
        assert after.token_ids == _generate(runner).token_ids


def test_an_observer_sees_operators_and_exchanges_of_both_services(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    table = OperatorTable()
    with Runner(_offloading(saved_model("llama"), "two-server", loopback), table) as runner:
        result = _generate(runner)
    trips = {name: totals.round_trips for name, totals in table.totals.items()}
    assert sum(trips.values()) == result.rpc.count
    # Three layers, six steps, two services.
    assert trips["o_proj"] == 2 * table.totals["o_proj"].calls == 2 * 3 * 6
    assert trips["embedding"] == trips["attn_scores"] == trips["lm_head"] == 0


@pytest.mark.parametrize("policy", ["two-server", "shielded-prefill"])
def test_micro_batches_are_another_way_to_the_same_tokens(
    saved_model: Models, loopback: dict[str, Path], policy: str
) -> None:
    one = _offloading(saved_model("llama"), policy, loopback)
    results = []
    for settings_ in (one, replace(one, micro_batches=2)):
        with Runner(settings_) as runner:
            prompt = [1 + number % 7 for number in range(20)]
            generation = runner.generate(prompt, max_new_tokens=4, with_text=False)
            list(generation)
            results.append(generation.result())
    assert results[0].token_ids == results[1].token_ids
    # The prompt twice as often; a single token is not cut.
    trips = [result.rpc.count for result in results]
    assert trips[1] == trips[0] + 4 * 3 * (2 if policy == "two-server" else 1)


def test_closing_lets_go_of_services_and_pads(
    saved_model: Models, loopback: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(LoopbackChannel, "close", lambda self: closed.append(self.endpoint))
    runner = Runner(_offloading(saved_model("llama"), "shielded", loopback))
    runner.close()
    assert closed == ["tcp://service-0:1"]
    generation = runner.generate(PROMPTS[0], max_new_tokens=3, with_text=False)
    with pytest.raises(RuntimeError, match="closed store"):
        list(generation)


def test_a_service_that_is_refused_lets_go_of_the_other_and_of_pads(
    saved_model: Models, loopback: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(LoopbackChannel, "close", lambda self: closed.append(self.endpoint))
    settings = _offloading(saved_model("llama"), "two-server", loopback)
    loopback[settings.gpu[1]] = saved_model("qwen3").directory
    with pytest.raises(ModelMismatchError, match=r"service-1:1"):
        Runner(settings)
    assert sorted(closed) == sorted(settings.gpu)


def test_one_service_under_two_names_is_refused(
    saved_model: Models, loopback: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_side.handler.secrets.token_hex", lambda size: "ab" * size)
    with pytest.raises(SettingsError) as caught:
        Runner(_offloading(saved_model("llama"), "two-server", loopback))
    assert caught.value.got == "tcp://service-0:1 and tcp://service-1:1, one and the same"


@pytest.mark.parametrize(
    ("gpu", "keys"),
    [
        (("tcp://a:1", "tcp://b:1"), (ONE,)),
        (("tcp://a:1", "tcp://b:1"), (ONE, ONE)),
        (("tcp://a:1,share=1", "tcp://c:1,share=1", "tcp://b:1,share=2"), (ONE, TWO, ONE)),
    ],
)
def test_one_key_for_both_shares_is_refused_before_the_model_is_read(
    tmp_path: Path, gpu: tuple[str, ...], keys: tuple[ClientKeys, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        Runner(RunnerSettings(tmp_path / "no-model", load_policy("two-server"), gpu, keys=keys))
    assert caught.value.where == "--service-key"
    assert caught.value.got == "one key for tcp://a:1 and tcp://b:1, which get a share each"


@pytest.mark.parametrize(
    ("policy", "gpu", "keys"),
    [
        ("two-server", ("tcp://a:1", "tcp://b:1"), (ONE, TWO)),
        (
            "two-server",
            tuple(
                f"tcp://{name}:1,share={share}" for name, share in zip("abcd", "1212", strict=True)
            ),
            (ONE, TWO, ONE, TWO),
        ),
        ("shielded", ("tcp://a:1", "tcp://b:1"), (ONE,)),
        ("shielded", ("tcp://a:1,share=1", "tcp://b:1"), (ONE,)),
    ],
)
def test_keys_may_be_shared_by_services_with_the_same_share(
    tmp_path: Path, policy: str, gpu: tuple[str, ...], keys: tuple[ClientKeys, ...]
) -> None:
    with pytest.raises(ModelError):  # the next thing that is looked at
        Runner(RunnerSettings(tmp_path / "no-model", load_policy(policy), gpu, keys=keys))


TWO_LOCAL = [
    ("tcp://127.0.0.1:1", "tcp://localhost:2"),
    ("tcp://[::1]:1", "tcp://127.8.0.1:1"),
    ("ipc:///a", "ipc:///b"),
    ("unix:///a", "unix:///b"),
    ("unix:///a", "tcp://127.0.0.1:1"),
]


def _two(tmp_path: Path, gpu: tuple[str, ...], **more: Any) -> RunnerSettings:
    return RunnerSettings(tmp_path / "no-model", load_policy("two-server"), gpu, **more)


@pytest.mark.parametrize("gpu", TWO_LOCAL)
def test_shares_over_links_without_keys_need_to_be_asked_for_on_one_machine(
    tmp_path: Path, gpu: tuple[str, ...]
) -> None:
    """Adding the frames of both links gave every token of a prompt."""
    with pytest.raises(SettingsError) as caught:
        Runner(_two(tmp_path, gpu))
    assert caught.value.got == f"{gpu[0]} without keys"
    assert "--shares-in-the-clear" in caught.value.expected
    with pytest.raises(ModelError):  # the next thing that is looked at
        Runner(_two(tmp_path, gpu, shares_in_the_clear=True))


@pytest.mark.parametrize(
    ("gpu", "refused"),
    [
        (("tcp://a:1", "tcp://b:1"), "tcp://a:1"),
        (("unix:///a", "tcp://b:1"), "tcp://b:1"),
        (("tcp://127.0.0.1:1", "vsock://2:1"), "vsock://2:1"),
        (("vsock://2:1", "vsock://2:2"), "vsock://2:1"),
        (("ivshmem:///m,2:1", "ivshmem:///n,2:2"), "ivshmem:///m,2:1"),
    ],
)
def test_shares_never_cross_a_network_without_keys(
    tmp_path: Path, gpu: tuple[str, ...], refused: str
) -> None:
    """A vsock is a link to the host, which sees it."""
    with pytest.raises(SettingsError) as caught:
        Runner(_two(tmp_path, gpu, shares_in_the_clear=True))
    assert caught.value.got == f"{refused} without keys"
    assert "--shares-in-the-clear" not in caught.value.expected


@pytest.mark.parametrize("gpu", [("tcp://a:1", "tcp://b:1"), ("ipc:///a", "tcp://127.0.0.1:1")])
def test_shares_over_links_with_keys_need_no_more(tmp_path: Path, gpu: tuple[str, ...]) -> None:
    with pytest.raises(ModelError):
        Runner(_two(tmp_path, gpu, keys=(ONE, TWO)))


def test_who_gets_what_is_said(saved_model: Models, loopback: dict[str, Path]) -> None:
    model = saved_model("llama")
    settings = _offloading(model, "two-server", loopback)
    last = model.reference.config.num_hidden_layers - 1
    with Runner(settings) as runner:
        assert runner.assignments == (
            f"tcp://service-0:1: layers 0-{last}, share 1 of 2, key one",
            f"tcp://service-1:1: layers 0-{last}, share 2 of 2, key two",
        )
        assert "their links are encrypted" in (runner.leakage_summary or "")
    local = tuple(f"tcp://127.0.0.1:{number}" for number in (1, 2))
    loopback.update(dict.fromkeys(local, model.directory))
    with Runner(replace(settings, gpu=local, keys=(), shares_in_the_clear=True)) as runner:
        assert runner.assignments[1] == f"{local[1]}: layers 0-{last}, share 2 of 2, no key"
        assert "NOT encrypted, reads prompt and answer" in (runner.leakage_summary or "")


@pytest.mark.parametrize(
    ("policy", "masks", "said"),
    [
        (
            "tee-only",
            {"bank": BankPlace.at(Path("b"))},
            "--bank: got b, expected nothing: policy tee-only runs",
        ),
        (
            "two-server",
            {"bank": BankPlace.at(Path("b"))},
            "--bank: got b, expected nothing: policy two-server",
        ),
        ("shielded", {"key": Path("k")}, "--key: got k, expected nothing: .* a feature mask"),
        ("tsqp", {"calibration": Path("c")}, "--calibration: got c, expected nothing: .* int8"),
    ],
)
def test_a_file_that_the_policy_has_no_use_for_is_refused(
    saved_model: Models, policy: str, masks: dict[str, Any], said: str
) -> None:
    chosen = load_policy(policy)
    given = RunnerSettings(
        saved_model("llama").directory,
        chosen,
        ("tcp://a:1", "tcp://b:1"),
        masks=MaskSettings(**masks),
        keys=(ONE, TWO),
    )
    with pytest.raises(SettingsError, match=said):
        Runner(given)


@pytest.mark.parametrize("policy", ["quantized-clear", "shielded", "two-server"])
def test_a_tee_whose_int8_products_saturate_is_refused(
    saved_model: Models,
    loopback: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    given = _offloading(saved_model("llama"), policy, loopback)
    exact = torch._int_mm

    def saturating(*operands: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        product = exact(*operands, **out)
        return product.clamp_(-(2**15), 2**15 - 1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assembly._check_own_kernels.cache_clear()
    with pytest.raises(KernelError, match="int8 products on cpu: got wrong numbers"):
        Runner(given)


def test_pads_need_a_bank_or_the_weights(
    saved_model: Models, loopback: dict[str, Path], tmp_path: Path
) -> None:
    model = saved_model("llama")
    given = _offloading(model, "shielded-prefill", loopback)
    shutil.copytree(model.directory, tmp_path / "light")
    weights = tmp_path / "light" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if "_proj" not in name}, weights)
    for policy, where, got in (
        (given.policy, 'verify = "freivalds"', "no model.layers.0.self_attn.q_proj.weight and "),
        (with_results(given.policy, "none"), "mask pad", "no --bank, and not all linear weights"),
    ):
        with pytest.raises(PolicyError) as caught:
            Runner(replace(given, model=tmp_path / "light", policy=policy))
        assert caught.value.where == f"policy shielded-prefill: {where}"
        assert caught.value.got.startswith(got)


def test_a_generation_counts_only_its_own_waits(
    saved_model: Models, loopback: dict[str, Path]
) -> None:
    with Runner(_offloading(saved_model("llama"), "shielded", loopback)) as runner:
        first, second = _generate(runner, 6), _generate(runner, 2)
    assert first.pads is not None
    assert second.pads is not None
    # Eight were made for the first; five of them were used, and the second took one more.
    assert (first.pads.waited, first.pads.available) == (1, 3)
    assert (second.pads.waited, second.pads.available) == (0, 2)


@pytest.mark.parametrize(
    ("usable", "given", "bank", "expected"),
    [
        (16, None, True, (16, 15, 15, 3)),
        (16, None, False, (16, 16, 16, 4)),
        (16, 6, True, (16, 6, 6, 1)),
        (2, None, True, (2, 2, 2, 1)),
    ],
)
def test_cores_are_shared_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    usable: int,
    given: int | None,
    bank: bool,
    expected: tuple[int, ...],
) -> None:
    """Reading a bank has a core of its own where there are more than three.

    A prompt's pads are drawn by a fourth of the step's threads.
    """
    place = BankPlace.at(tmp_path / "bank", beside_bank=True) if bank else None
    masks = MaskSettings(bank=place)
    settings = RunnerSettings(tmp_path, load_policy("shielded"), masks=masks, threads=given)
    asked: list[int | None] = []
    monkeypatch.setattr(native, "usable_cores", lambda: usable)
    monkeypatch.setattr(native, "set_up", lambda _kernels, threads: asked.append(threads))
    monkeypatch.setattr(native, "set_threads", asked.append)
    monkeypatch.setattr(native, "threads", lambda: asked[-1])
    assert tuple(runner_module._share_cores(settings)) == expected
