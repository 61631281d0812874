"""tee-runner generate against a real gpu-service process, compared with transformers."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from safetensors.torch import load_file

from protocol import native
from protocol.errors import EndpointError
from protocol.model.config import read_config
from tee_side.runner import Runner
from tests.kit.model import greedy
from tests.kit.service import CALM, ENVIRONMENT, Forked, Service, call, run
from tsqp.cli.program import model_directory

POLICIES = ("tee-only", "tsqp", "attention-in-tee")
CLEAR = ("--policy", "attention-in-tee")
PROMPT = "Once upon a time"
LAYERS = read_config(model_directory("demo")).num_hidden_layers
ROUND_TRIPS_A_FORWARD = {"tee-only": 0, "tsqp": 9 * LAYERS + 2, "attention-in-tee": 4 * LAYERS}


def generate(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        "tee-runner",
        *("generate", "demo", "--gpu", service.endpoint, "--dtype", "float32", *CALM),
        *arguments,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_and_logits_equal_transformers(
    policy: str, demo_service: Service, reference: Any, reference_tokenizer: Any, tmp_path: Path
) -> None:
    logits_file = tmp_path / "logits.safetensors"
    result = generate(
        demo_service,
        *("--policy", policy, "--prompt", PROMPT, "--max-new-tokens", "64", "--json"),
        *("--save-logits", str(logits_file)),
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert set(answer) == {
        *("prompt_token_ids", "token_ids", "text", "finish_reason", "usage", "timing", "policy"),
        *("rpc", "pads", "model", "model_digest", "policy_digest", "seed", "kernels", "cores"),
    }
    assert answer["prompt_token_ids"] == reference_tokenizer(PROMPT)["input_ids"]
    want, expected = greedy(reference, answer["prompt_token_ids"], 64)
    assert answer["token_ids"] == want
    assert len(want) == 64
    difference = load_file(logits_file)["logits"] - expected
    assert difference.abs().max().item() < 1e-4
    assert answer["text"] == reference_tokenizer.decode(want, skip_special_tokens=True)
    # One forward a token: the prompt is one chunk, and the last token is never fed back.
    assert answer["rpc"]["count"] == ROUND_TRIPS_A_FORWARD[policy] * 64
    assert (answer["rpc"]["bytes_sent"] > 0) == (policy != "tee-only")


def test_two_runners_at_once_each_get_their_own_text(
    demo_service: Service, reference: Any, tmp_path: Path
) -> None:
    requests = ("Tell me a story about a fox.", "Tell me a story about Mia and a kite.")
    command = ("chat", "demo", "--gpu", demo_service.endpoint, "--dtype", "float32", *CALM)
    command += (*CLEAR, "--json", "--max-new-tokens", "40")
    with ExitStack() as stack:
        runners, inputs, outputs = [], [], []
        for number in range(2):
            os.mkfifo(pipe := tmp_path / str(number))
            outputs.append(stack.enter_context(TemporaryFile("w+")))
            before = f"import sys\nsys.stdin = open({str(pipe)!r})"
            runners.append(
                Forked(
                    "tee-runner", command, ENVIRONMENT, stdout=outputs[-1].fileno(), before=before
                )
            )
            stack.callback(runners[-1].kill)
            inputs.append(stack.enter_context(pipe.open("w")))
        for runner in runners:
            # Printed once connected: only when both are does either of them get its request.
            assert runner.stderr.readline().startswith("policy attention-in-tee")
        for file, request in zip(inputs, requests, strict=True):
            file.write(f"{request}\n")
            file.close()
        texts = []
        for runner, output in zip(runners, outputs, strict=True):
            status, (_, errors) = runner.wait(60), runner.communicate()
            assert status == 0, errors
            output.seek(0)
            (turn,) = json.load(output)["turns"]
            want, _ = greedy(reference, turn["prompt_token_ids"], 40)
            assert turn["token_ids"] == want
            texts.append(turn["text"])
    assert "fox" in texts[0]
    assert "Mia" in texts[1]


def test_chat_shows_the_finished_turns_when_the_service_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter(["Tell me a story about a fox."])

    def read_line() -> str:
        if (line := next(lines, None)) is None:
            raise EndpointError("tcp://x", got="a lost connection", expected="a gpu-service")
        return line

    monkeypatch.setattr("tsqp.cli.chat.read_line", read_line)
    arguments = ("--policy", "tee-only", "--max-new-tokens", "4", "--json")
    result = call("tee-runner", "chat", "demo", *arguments)
    assert result.returncode == 2
    assert "a lost connection" in result.stderr
    answer = json.loads(result.stdout)
    assert len(answer["turns"]) == 1
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant"]


def test_text_goes_to_stdout_and_everything_else_to_stderr(
    demo_service: Service, reference_tokenizer: Any, tmp_path: Path
) -> None:
    report_file = tmp_path / "report.json"
    result = generate(
        demo_service,
        *(*CLEAR, "--prompt", PROMPT, "--max-new-tokens", "16", "--report", str(report_file)),
    )
    report = json.loads(report_file.read_text())
    assert result.stdout == report["text"] + "\n"
    leakage_summary, summary = result.stderr.splitlines()
    assert leakage_summary.startswith("policy attention-in-tee: the GPU sees hidden states")
    assert summary.startswith("attention-in-tee: ")
    operators = report["operators"]
    assert operators["qkv_proj"]["place"] == "gpu"
    assert operators["qkv_proj"]["round_trips"] == LAYERS * 16
    # Scores, softmax and values in one.
    assert operators["attn_scores"]["calls"] == operators["softmax"]["calls"] == 0
    assert operators["attention"] == {
        **dict.fromkeys(("round_trips", "bytes_sent", "bytes_received"), 0),
        **dict.fromkeys(("wire_s", "queue_s", "gpu_s"), 0.0),
        "place": "tee",
        "calls": LAYERS * 16,
        "tee_s": operators["attention"]["tee_s"],
    }
    assert operators["attention"]["tee_s"] > 0
    total = sum(row["bytes_sent"] for row in operators.values())
    assert total == report["rpc"]["bytes_sent"]


def test_a_seed_repeats_and_sampling_differs_from_greedy(demo_service: Service) -> None:
    def text(*arguments: str) -> str:
        common = ("--prompt", PROMPT, "--max-new-tokens", "32", "--policy", "tee-only")
        return generate(demo_service, *common, *arguments).stdout

    hot = ("--temperature", "1.5", "--top-k", "50", "--seed")
    assert text(*hot, "1") == text(*hot, "1")
    assert len({text(), text(*hot, "1"), text(*hot, "2")}) == 3


def test_stop_string_ends_the_text_before_it(demo_service: Service) -> None:
    whole = json.loads(
        generate(demo_service, "--prompt", PROMPT, "--max-new-tokens", "40", "--json").stdout
    )
    stop = whole["text"][20:24]
    answer = json.loads(
        generate(
            demo_service,
            *("--prompt", PROMPT, "--max-new-tokens", "40", "--json", "--stop", stop),
        ).stdout
    )
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == whole["text"][: whole["text"].index(stop)]


def given(text: str, *arguments: str) -> str:
    """Return what tee-runner says to a text that is piped to it."""
    # A forked process has no standard input: it makes a pipe of its own.
    before = f"""
import os, sys
read, write = os.pipe()
os.write(write, {text.encode()!r})
os.close(write)
os.dup2(read, 0)
sys.stdin = open(0)
"""
    with TemporaryFile("w+") as output:
        process = Forked(
            "tee-runner", arguments, ENVIRONMENT, stdout=output.fileno(), before=before
        )
        status, (_, errors) = process.wait(60), process.communicate()
        assert status == 0, errors
        output.seek(0)
        return output.read()


def test_chat_keeps_the_conversation(demo_service: Service, reference_tokenizer: Any) -> None:
    turns = ["Tell me a story about a fox.", "Tell me another one about Ben."]
    said = given(
        "\n".join(turns) + "\n",
        *("chat", "demo", "--gpu", demo_service.endpoint, "--json", "--max-new-tokens", "40"),
    )
    answer = json.loads(said)
    assert [m["role"] for m in answer["messages"]] == ["user", "assistant"] * 2
    assert [m["content"] for m in answer["messages"][::2]] == turns
    rendered = reference_tokenizer.apply_chat_template(
        answer["messages"][:3], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert answer["turns"][1]["prompt_token_ids"] == list(rendered["input_ids"])
    assert answer["messages"][1]["content"] == answer["turns"][0]["text"]


TEE_ONLY = ("generate", "demo", "--policy", "tee-only")


@pytest.mark.parametrize("option", ["--report", "--save-logits"])
def test_what_is_saved_is_readable_by_its_owner_alone(option: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.touch(0o644)
    for path in (tmp_path / "new", old):
        arguments = ("--prompt", PROMPT, "--max-new-tokens", "1", option, str(path))
        assert call("tee-runner", *TEE_ONLY, *arguments).returncode == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size > 0


def test_json_says_what_it_takes_to_get_the_same_again() -> None:
    def answer(*arguments: str) -> dict[str, Any]:
        common = ("--prompt", PROMPT, "--max-new-tokens", "8", "--temperature", "1.5", "--json")
        found: dict[str, Any] = json.loads(
            call("tee-runner", *TEE_ONLY, *common, *arguments).stdout
        )
        return found

    first = answer()
    again = answer("--seed", str(first["seed"]))
    assert again["token_ids"] == first["token_ids"]
    assert again["seed"] == first["seed"] != answer()["seed"]
    assert (first["model"], first["policy"]) == ("demo", "tee-only")
    for name in ("model_digest", "policy_digest"):
        assert re.fullmatch("[0-9a-f]{64}", first[name])
        assert again[name] == first[name]
    assert first["kernels"] == native.choice().variant
    # Of a seed that is known: logits differ by 1e-5, and one in thousands gives another token.
    by_native, by_torch = (answer("--seed", "1", *more) for more in ((), ("--kernels", "torch")))
    assert by_torch["kernels"] == "torch"
    assert by_torch["token_ids"] == by_native["token_ids"]


def test_an_error_in_json_has_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Runner.step
    steps = iter(range(100))

    def lost(runner: Runner) -> None:
        if next(steps) == 3:
            raise EndpointError("unix:///s", got="a lost connection", expected="a gpu-service")
        step(runner)

    arguments = (*TEE_ONLY, "--prompt", PROMPT, "--json", "--max-new-tokens")
    whole = json.loads(call("tee-runner", *arguments, "3").stdout)
    monkeypatch.setattr(Runner, "step", lost)
    result = call("tee-runner", *arguments, "9")
    assert result.returncode == 2
    assert result.stderr == (
        "tee-runner: error: unix:///s: got a lost connection, expected a gpu-service\n"
    )
    assert json.loads(result.stdout) == {
        "error": {
            "type": "EndpointError",
            "where": "unix:///s",
            "got": "a lost connection",
            "expected": "a gpu-service",
            "retryable": True,
        },
        "token_ids": whole["token_ids"],
        "text": whole["text"],
    }
