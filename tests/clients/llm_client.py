"""The command `llm`, with the server in its extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from checks import BASE_URL, MODEL, SAID, SUNNY, check, run, same, true

YAML = f"""- model_id: tsqp
  model_name: {MODEL}
  api_base: {BASE_URL}
  supports_tools: true
  supports_schema: true
- model_id: tsqp-completions
  model_name: {MODEL}
  api_base: {BASE_URL}
  completion: true
"""
_folder = TemporaryDirectory()
(Path(_folder.name) / "extra-openai-models.yaml").write_text(YAML)
os.environ["LLM_USER_PATH"] = _folder.name


def _llm(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[-400:] or done.stdout)
    return done.stdout.strip()


@check("a prompt, streamed and whole")
def _() -> None:
    same(_llm("-m", "tsqp", "Hello"), SAID)
    same(_llm("-m", "tsqp", "--no-stream", "-u", "Hello"), SAID)


@check("a conversation goes on")
def _() -> None:
    same(_llm("-m", "tsqp", "-s", "Be short.", "Hello"), SAID)
    same(_llm("-c", "And now?"), SAID)


@check("options")
def _() -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "3", "-o", "seed", "7")
    true(SAID.startswith(_llm("-m", "tsqp", *options, "Hello")))


@check("tools")
def _() -> None:
    code = f"def weather(city: str) -> str:\n    return {SUNNY!r}"
    for more in ((), ("--no-stream",)):
        said = _llm("-m", "tsqp", "--functions", code, *more, "How is the weather?")
        same(said, f"The tool says: {SUNNY}")


@check("a schema")
def _() -> None:
    same(
        type(json.loads(_llm("-m", "tsqp", "--schema", "name, people int", "Hello"))["people"]), int
    )


@check("completions")
def _() -> None:
    same(_llm("-m", "tsqp-completions", "-o", "max_tokens", "64", "Hello"), SAID)


run("llm")
