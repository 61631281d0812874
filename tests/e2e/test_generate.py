"""tee-runner generate against a real gpu-service process, compared with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from protocol.errors import EndpointError
from protocol.model.config import read_config
from tests.e2e.in_process import call
from tests.e2e.reference import greedy
from tests.support import ENVIRONMENT, Service, run
from tsqp.cli.program import model_directory

POLICIES = ("tee-only", "tsqp", "attention-in-tee")
CLEAR = ("--policy", "attention-in-tee")
PROMPT = "Once upon a time"
LAYERS = read_config(model_directory("demo")).num_hidden_layers
ROUND_TRIPS_A_FORWARD = {"tee-only": 0, "tsqp": 9 * LAYERS + 2, "attention-in-tee": 4 * LAYERS}


def generate(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        "tee-runner",
        *("generate", "demo", "--gpu", service.endpoint, "--dtype", "float32"),
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
        *("rpc", "pads"),
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
    demo_service: Service, reference: Any, reference_tokenizer: Any
) -> None:
    requests = ("Tell me a story about a fox.", "Tell me a story about Mia and a kite.")
    command = [
        str(Path(sys.executable).parent / "tee-runner"),
        *("chat", "demo", "--gpu", demo_service.endpoint, "--dtype", "float32"),
        *(*CLEAR, "--json", "--max-new-tokens", "120"),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runners = [subprocess.Popen(command, **pipes, text=True, env=ENVIRONMENT) for _ in requests]
    for runner in runners:
        # Printed once connected: only when both are does either of them get its request.
        assert runner.stderr is not None
        assert runner.stderr.readline().startswith("policy attention-in-tee")
    for runner, request in zip(runners, requests, strict=True):
        assert runner.stdin is not None
        runner.stdin.write(f"{request}\n")
        runner.stdin.flush()
    texts = []
    for runner in runners:
        stdout, stderr = runner.communicate(timeout=60)
        assert runner.returncode == 0, stderr
        (turn,) = json.loads(stdout)["turns"]
        want, _ = greedy(reference, turn["prompt_token_ids"], 120)
        assert turn["token_ids"] == want
        texts.append(turn["text"])
    assert "fox" in texts[0]
    assert "Mia" in texts[1]


def test_chat_shows_the_finished_turns_when_the_service_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = iter(["Tell me a story about a fox."])

    def read_turn() -> str:
        if (line := next(lines, None)) is None:
            raise EndpointError("tcp://x", got="a lost connection", expected="a gpu-service")
        return line

    monkeypatch.setattr("tsqp.cli.tee_runner.read_turn", read_turn)
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
    disclosure, summary = result.stderr.splitlines()
    assert disclosure.startswith("policy attention-in-tee: the GPU sees hidden states")
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


def test_chunked_prefill_gives_the_same_tokens(demo_service: Service) -> None:
    arguments = (*CLEAR, "--prompt", PROMPT * 8, "--max-new-tokens", "12", "--json")
    whole = json.loads(generate(demo_service, *arguments).stdout)
    chunked = json.loads(generate(demo_service, *arguments, "--step-tokens", "5").stdout)
    assert chunked["token_ids"] == whole["token_ids"]
    assert chunked["rpc"]["count"] > whole["rpc"]["count"]


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


def test_prompt_from_standard_input_equals_prompt_argument(demo_service: Service) -> None:
    command = [
        str(Path(sys.executable).parent / "tee-runner"),
        *("generate", "demo", "--policy", "tee-only", "--prompt-file", "-"),
        *("--max-new-tokens", "8", "--dtype", "float32"),
    ]
    piped = subprocess.run(
        command, input=PROMPT, capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    direct = generate(
        demo_service, "--policy", "tee-only", "--prompt", PROMPT, "--max-new-tokens", "8"
    )
    assert piped.stdout == direct.stdout


def test_chat_keeps_the_conversation(demo_service: Service, reference_tokenizer: Any) -> None:
    command = [
        str(Path(sys.executable).parent / "tee-runner"),
        *("chat", "demo", "--gpu", demo_service.endpoint, "--json", "--max-new-tokens", "40"),
    ]
    turns = ["Tell me a story about a fox.", "Tell me another one about Ben."]
    result = subprocess.run(
        command,
        input="\n".join(turns) + "\n",
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    answer = json.loads(result.stdout)
    assert [m["role"] for m in answer["messages"]] == ["user", "assistant"] * 2
    assert [m["content"] for m in answer["messages"][::2]] == turns
    rendered = reference_tokenizer.apply_chat_template(
        answer["messages"][:3], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert answer["turns"][1]["prompt_token_ids"] == list(rendered["input_ids"])
    assert answer["messages"][1]["content"] == answer["turns"][0]["text"]
