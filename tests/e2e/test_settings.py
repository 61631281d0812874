"""Settings from the command line, the environment and a TOML file; help and completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import click
import pytest

from tests.e2e.in_process import call
from tests.e2e.test_bad_input import refused
from tests.support import ENVIRONMENT, run
from tsqp.cli.tee_runner import generate

PROGRAMS = ("gpu-service", "tee-runner", "tsqp")
TEE_ONLY = ("--policy", "tee-only", "--prompt-token-ids", "1,2,3", "--json")


def new_tokens(*arguments: str, **environment: str) -> int:
    result = call("tee-runner", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    usage: dict[str, int] = json.loads(result.stdout)["usage"]
    return usage["completion_tokens"]


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('[generate]\nmodel = "demo"\nmax-new-tokens = 2\nstop = ["zzz"]\n')
    environment = {"TEE_RUNNER_GENERATE_MAX_NEW_TOKENS": "3"}
    from_file = ("--config", str(config), "generate", *TEE_ONLY)
    assert new_tokens(*from_file) == 2
    assert new_tokens(*from_file, **environment) == 3
    assert new_tokens(*from_file, "--max-new-tokens", "4", **environment) == 4
    assert new_tokens("generate", *TEE_ONLY, **environment, TEE_RUNNER_GENERATE_MODEL="demo") == 3


@pytest.mark.parametrize(
    ("program", "content", "fragments"),
    [
        ("tee-runner", "[generate]\nmax_tokens = 3\n", ["[generate]: max_tokens", "unknown key"]),
        ("tee-runner", "[generated]\n", ["generated", "unknown table"]),
        ("gpu-service", 'dtypo = "float32"\n', ["dtypo", "unknown key", "dtype"]),
        ("gpu-service", "dtype = \n", ["invalid TOML"]),
        ("gpu-service", 'model = "demo"\ndtype = "float12"\n', ["dtype", "float12"]),
        ("gpu-service", 'model = "demo"\nthreads = "many"\n', ["threads", "many"]),
        ("gpu-service", 'threads = "2"\n', ["threads: got '2', expected an integer"]),
        ("gpu-service", "threads = true\n", ["threads: got True, expected an integer"]),
        ("gpu-service", "threads = 2.0\n", ["threads: got 2.0, expected an integer"]),
        ("gpu-service", 'model = "demo"\nthreads = 100000\n', ["threads", "100000"]),
        ("gpu-service", f"threads = 0x{'f' * 6000}\n", ["threads", "64 bits"]),
        ("gpu-service", f"threads = {'9' * 6000}\n", ["settings.toml", "digits"]),
        ("gpu-service", "model = 3\n", ["model: got 3, expected a string"]),
        ("gpu-service", "model = 2026-01-31\n", ["model", "expected a string"]),
        ("gpu-service", 'model = ["demo"]\n', ["model", "expected a string"]),
        ("gpu-service", "dtype = 32\n", ["dtype: got 32, expected a string"]),
        ("gpu-service", "max-message-mib = 1\nmax_message_mib = 2\n", ["max_message_mib", "twice"]),
        ("gpu-service", "a = " + "[" * 5000 + "]" * 5000 + "\n", ["settings.toml", "nested"]),
        ("tee-runner", "[generate]\njson = 1\n", ["json: got 1, expected true or false"]),
        ("tee-runner", '[generate]\ntop-p = "0.5"\n', ["top-p: got '0.5', expected a number"]),
        ("tee-runner", "[generate]\ntop-p = false\n", ["top-p: got False, expected a number"]),
        ("tee-runner", "[generate]\ntop-p = nan\n", ["--top-p", "nan"]),
        ("tee-runner", '[generate]\nstop = "a b"\n', ["stop", "expected a list of strings"]),
        ("tee-runner", "[generate]\nstop = [1]\n", ["stop", "expected strings only"]),
        ("tee-runner", '[generate]\nstop = [""]\n', ["--stop", "empty"]),
        ("tee-runner", "[generate]\ngpu = 5\n", ["gpu: got 5", "a string or a list of strings"]),
        ("tee-runner", "[generate]\ngpu = [5]\n", ["gpu: got 5 in it", "strings only"]),
        ("tee-runner", "generate = 3\n", ["generate", "unknown key"]),
    ],
)
def test_bad_settings_files_are_refused(
    program: str, content: str, fragments: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(content)
    command = [] if program == "gpu-service" else ["generate", "demo", "--prompt", "x"]
    refused(call(program, "--config", str(config), *command), *fragments)


@pytest.mark.parametrize("value", ['"udp://a b"', '["udp://a b"]'])
def test_an_option_that_may_be_repeated_takes_a_string_or_a_list(
    value: str, tmp_path: Path
) -> None:
    """No such endpoint can be, so the error quotes what was read: the file's text, whole."""
    config = tmp_path / "settings.toml"
    config.write_text(f"[generate]\ngpu = {value}\n")
    command = ("--config", str(config), "generate", "demo", "--policy", "quantized-clear")
    result = call("tee-runner", *command, "--prompt-token-ids", "1", "--max-new-tokens", "1")
    refused(result, "udp://a b")


def test_an_integer_in_the_file_is_a_number_for_a_float_option(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text("[generate]\ntop-p = 1\ntemperature = 0\nmax-new-tokens = 2\n")
    assert new_tokens("--config", str(config), "generate", "demo", *TEE_ONLY) == 2


def test_stop_strings_in_the_environment_are_lines() -> None:
    seen: list[tuple[str, ...]] = []
    options = {option.name: option for option in generate.params}
    probe = click.Command(
        "probe", params=[options["stop"]], callback=lambda **given: seen.append(given["stop"])
    )
    for value in ("the end", "the end\n a b \n"):
        with mock.patch.dict(os.environ, {"PROBE_STOP": value}):
            probe.main([], "probe", auto_envvar_prefix="PROBE", standalone_mode=False)
    assert seen == [("the end",), ("the end", " a b ")]


def test_a_prompt_on_the_command_line_comes_before_the_others(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('[generate]\nprompt = "from the file"\n')
    environment = {"TEE_RUNNER_GENERATE_PROMPT_FILE": str(tmp_path / "none.txt")}
    command = ("--config", str(config), "generate", "demo", *TEE_ONLY, "--max-new-tokens", "2")
    assert new_tokens(*command, **environment) == 2
    without = command[: command.index("--prompt-token-ids")]
    refused(
        call("tee-runner", *without, **environment), "--prompt and --prompt-file", "exactly one"
    )
    refused(call("tee-runner", *without, "--prompt", "x", "--prompt-token-ids", "1"), "exactly one")
    assert new_tokens(*without, "--max-new-tokens", "2", "--json") == 2


def test_missing_settings_file_is_refused(tmp_path: Path) -> None:
    refused(call("gpu-service", "--config", str(tmp_path / "none.toml"), "demo"), "none.toml")


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("chat", "--help")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_imports_nothing_heavy(program: str, arguments: tuple[str, ...]) -> None:
    if program != "tee-runner" and len(arguments) > 1:
        arguments = {"gpu-service": ("--help",), "tsqp": ("demo", "--help")}[program]
    module = {"gpu-service": "gpu_service", "tee-runner": "tee_runner", "tsqp": "main"}[program]
    code = (
        f"import sys; from tsqp.cli.{module} import main; sys.argv[1:] = {list(arguments)!r}\n"
        "try:\n    main()\nexcept SystemExit as e:\n    status = e.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'zmq'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy), status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "Usage: " in result.stdout
    assert result.stdout.splitlines()[-1] == "heavy [] 0"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_covers_all_three_programs(shell: str) -> None:
    result = call("tsqp", "completion", shell)
    assert result.returncode == 0
    for program in PROGRAMS:
        assert f"_{program.replace('-', '_').upper()}_COMPLETE" in result.stdout


def test_completion_offers_the_policies() -> None:
    result = run(
        "tee-runner",
        _TEE_RUNNER_COMPLETE="bash_complete",
        COMP_WORDS="tee-runner generate demo --policy t",
        COMP_CWORD="4",
    )
    assert sorted(result.stdout.split()) == [
        f"plain,{name}" for name in ("tee-only", "tsqp", "tsqp-permuted", "two-server")
    ]


def test_doctor_reports_every_topic() -> None:
    result = call("tsqp", "doctor", "--json")
    findings = json.loads(result.stdout)["findings"]
    topics = {finding["topic"] for finding in findings}
    assert topics == {"versions", "processor", "memory", "gpu", "tee", "ports"}
    torch_version = next(f for f in findings if f["name"] == "torch")["detail"]
    assert torch_version.startswith("2.")
    assert call("tsqp", "doctor").stdout.startswith("versions:\n")


def test_doctor_looks_for_what_computes_and_encrypts() -> None:
    """Every dependency is there but those of the command line and of chat templates."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    needed = tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
    names = {re.split("[<>=]", requirement)[0] for requirement in needed}
    findings = json.loads(call("tsqp", "doctor", "--json").stdout)["findings"]
    versions = {found["name"]: found["state"] for found in findings if found["topic"] == "versions"}
    assert names - versions.keys() == {"click", "jinja2"}
    assert versions["cryptography"] == "ok"
