"""The runner: several generations in turns, what it loads, what it refuses before starting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import DeadlineExceededError, ModelError, PromptError, SettingsError
from tee_side.policy import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.support import make_model

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
    with pytest.raises(ModelError, match=r"q_proj\.weight: got no such tensor"):
        Runner(settings(tmp_path))
    # Everything that attention-in-tee needs is there: it gets as far as asking a service.
    offloading = replace(
        settings(tmp_path, "attention-in-tee"),
        gpu=f"ipc://{tmp_path}/nobody",
        connect_timeout_s=0.05,
    )
    with pytest.raises(DeadlineExceededError, match="nobody"):
        Runner(offloading)


def test_a_policy_that_offloads_needs_an_endpoint(model: tuple[Path, Any]) -> None:
    with pytest.raises(SettingsError, match="--gpu"):
        Runner(settings(model[0], "attention-in-tee"))


def test_stop_strings_need_a_tokenizer(model: tuple[Path, Any]) -> None:
    with Runner(settings(model[0])) as runner, pytest.raises(PromptError, match="stop strings"):
        runner.generate([1], max_new_tokens=1, stop=["x"], with_text=False)
    with Runner(settings(model[0])) as runner, pytest.raises(ModelError, match=r"tokenizer\.json"):
        runner.generate([1], max_new_tokens=1)
