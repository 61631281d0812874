"""What `tee-runner generate` and `chat` print and save; tokens under policies: test_policies."""

import json
import re
import stat
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import transformers

from protocol import native
from protocol.errors import EndpointError
from tee_side.engine.engine import Engine
from tests.kit.service import ENVIRONMENT, Forked, Service, call
from tsqp.run.settings import model_directory

PROMPT = "Once upon a time"


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


def test_chat_keeps_the_conversation(demo_service: Service) -> None:
    turns = ["Tell me a story about a fox.", "Tell me another one about Ben."]
    said = given(
        "\n".join(turns) + "\n",
        *("chat", "demo", "--gpu", demo_service.endpoint, "--json", "--max-new-tokens", "16"),
    )
    answer = json.loads(said)
    assert [m["role"] for m in answer["messages"]] == ["user", "assistant"] * 2
    assert [m["content"] for m in answer["messages"][::2]] == turns
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory("demo"))
    rendered = tokenizer.apply_chat_template(
        answer["messages"][:3], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert answer["turns"][1]["prompt_token_ids"] == list(rendered["input_ids"])
    assert answer["messages"][1]["content"] == answer["turns"][0]["text"]


TEE_ONLY = ("generate", "demo", "--policy", "tee-only")


def test_what_is_saved_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    report, logits = tmp_path / "new", tmp_path / "old"
    logits.touch(0o644)
    options = ("--report", str(report), "--save-logits", str(logits), "--max-new-tokens", "1")
    ended = call("tee-runner", *TEE_ONLY, "--prompt", PROMPT, *options)
    assert re.search(r"tee-only: \d+ \+ 1 tokens \(length\), first after \d+ ms$", ended.stderr)
    for path in (report, logits):
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


def test_what_was_said_before_a_service_is_lost_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, iter(range(100))
    lost = EndpointError("unix:///s", got="a lost connection", expected="a gpu-service")

    def losing(*asked: Any) -> Any:
        if next(steps) == 3:
            raise lost
        return step(*asked)

    arguments = (*TEE_ONLY, "--prompt", PROMPT, "--json", "--max-new-tokens")
    whole = json.loads(call("tee-runner", *arguments, "3").stdout)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", losing)
        result = call("tee-runner", *arguments, "9")
    assert (result.returncode, result.stderr) == (2, f"tee-runner: error: {lost}\n")
    said = json.loads(result.stdout)
    assert (said["token_ids"], said["text"]) == (whole["token_ids"], whole["text"])
    assert (said["error"]["type"], said["error"]["retryable"]) == ("EndpointError", True)

    lines = iter(["Tell me a story about a fox."])

    def read_line() -> str:
        if (line := next(lines, None)) is None:
            raise lost
        return line

    monkeypatch.setattr("tsqp.cli.serve.read_line", read_line)
    result = call("tee-runner", "chat", *TEE_ONLY[1:], "--max-new-tokens", "4", "--json")
    assert result.returncode == 2
    assert len(json.loads(result.stdout)["turns"]) == 1
