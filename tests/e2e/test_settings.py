"""Settings from the command line, the environment and a TOML file; help and completion."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

from click.testing import CliRunner

from gpu_side.handler import QueueLimits
from gpu_side.service import ServiceSettings
from tee_side.assembly import MaskSettings
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.runner import RunnerSettings
from tests.e2e.test_bad_input import refused
from tests.kit.rows import each_row
from tests.kit.service import ENVIRONMENT, call, run
from tsqp.cli.generate import generate
from tsqp.cli.gpu_service import command as gpu_service
from tsqp.cli.main import command as tsqp
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.cli.terminal import chosen_prompt
from tsqp.key_files import new_key_pair, public_key_of
from tsqp.run.load import sampling_of
from tsqp.run.settings import TextSettings, settings_of

TEE_ONLY = ("--policy", "tee-only", "--prompt-token-ids", "1,2,3", "--json")


def new_tokens(*arguments: str, **environment: str) -> int:
    result = call("tee-runner", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    usage: dict[str, int] = json.loads(result.stdout)["usage"]
    return usage["completion_tokens"]


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('model = "demo"\nmax-new-tokens = 2\nstop = ["zzz"]\n')
    environment = {"TSQP_MAX_NEW_TOKENS": "3"}
    from_file = ("--config", str(config), "generate", *TEE_ONLY)
    assert new_tokens(*from_file) == 2
    assert new_tokens(*from_file, **environment) == 3
    assert new_tokens(*from_file, "--max-new-tokens", "4", **environment) == 4
    assert new_tokens("generate", *TEE_ONLY, **environment, TSQP_MODEL="demo") == 3


@each_row(
    ("program", "content", "fragments"),
    [
        ("tee-runner", "[tee-runner]\nseeed = 3\n", ["[tee-runner]: seeed", "did you mean seed?"]),
        ("tee-runner", "[tee-runner]\nbind = 'x'\n", ["[tee-runner]: bind: got an unknown name"]),
        ("gpu-service", "dtype = \n", ["invalid TOML"]),
        ("gpu-service", 'threads = "2"\n', ["threads: got '2', expected an integer"]),
        ("gpu-service", f"threads = 0x{'f' * 6000}\n", ["threads", "64 bits"]),
        ("gpu-service", f"threads = {'9' * 6000}\n", ["settings.toml", "digits"]),
        ("gpu-service", "max-message-mib = 1\nmax_message_mib = 2\n", ["max_message_mib", "twice"]),
        ("gpu-service", "a = " + "[" * 5000 + "]" * 5000 + "\n", ["settings.toml", "nested"]),
        ("tee-runner", "json = 1\n", ["json: got 1, expected true or false"]),
        ("tee-runner", 'top-p = "0.5"\n', ["top-p: got '0.5', expected a number"]),
        ("tee-runner", "top-p = nan\n", ["--top-p", "nan"]),
        ("tee-runner", "stop = [1]\n", ["stop", "expected strings only"]),
        ("tee-runner", "gpu = 5\n", ["gpu: got 5", "a string or a list of strings"]),
    ],
)
def test_bad_settings_files_are_refused(
    program: str, content: str, fragments: list[str], tmp_path: Path
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(content)
    command = [] if program == "gpu-service" else ["generate", "demo", "--prompt", "x"]
    refused(call(program, "--config", str(config), *command), *fragments)


def test_one_file_is_for_all_commands_and_programs_and_a_table_for_one(tmp_path: Path) -> None:
    """What another command or program has is ignored; a table goes before what is outside it."""
    config = tmp_path / "tsqp.toml"
    config.write_text(
        'model = "demo"\nthreads = 2\nbind = "unix:///none"\nsystem = "Be brief."\n'
        "max-new-tokens = 7\n"
        '[tee-runner]\nmax-new-tokens = 2\n[gpu-service]\narithmetic = "int8"\nanything = 1\n'
    )
    for arguments in (
        ("--config", str(config), "generate", *TEE_ONLY),
        ("generate", "--config", str(config), *TEE_ONLY),
    ):
        assert new_tokens(*arguments) == 2
    assert new_tokens("generate", *TEE_ONLY, TSQP_CONFIG=str(config)) == 2
    other = tmp_path / "other.toml"
    other.write_text("max-new-tokens = 3\n")
    typed = ("--config", str(other), "generate", "demo", *TEE_ONLY)
    assert new_tokens(*typed, TSQP_CONFIG=str(config)) == 3
    refused(call("gpu-service", "--config", str(config)), "[gpu-service]: anything", "unknown name")


@each_row("command", ["tee-runner generate demo --prompt x", "gpu-service demo", "tsqp policies"])
def test_a_variable_that_no_option_has_is_refused(command: str) -> None:
    """It would have been ignored: with the default policy for the one that was meant."""
    result = call(*command.split(), TSQP_POLCY="tee-only")
    refused(result, "TSQP_POLCY: got an unknown name", "did you mean TSQP_POLICY?")


def _service_settings(*arguments: str) -> ServiceSettings:
    """Return what the service would run with."""
    with mock.patch("gpu_side.service.serve") as serve:
        CliRunner().invoke(gpu_service, ["demo", *arguments], catch_exceptions=False)
    settings: ServiceSettings = serve.call_args.args[0]
    return settings


class _NoFurtherError(Exception):
    """In place of a run."""


def _runner_settings(*arguments: str) -> tuple[RunnerSettings, str]:
    """Return what the runner would run with, and what it said before."""
    with mock.patch("tee_side.runner.Runner", side_effect=_NoFurtherError) as made:
        result = CliRunner().invoke(tee_runner, ["generate", "demo", "--prompt", "x", *arguments])
    assert isinstance(result.exception, _NoFurtherError), result.output
    settings: RunnerSettings = made.call_args.args[0]
    return settings, result.stderr


def _is_all_different(settings: object, default: object, *, but: frozenset[str]) -> None:
    """Check that no option was left at its default, where one that does nothing is not seen."""
    for name, usual in vars(default).items():
        if name not in but:
            assert vars(settings)[name] != usual, name


def test_what_gpu_service_is_told_reaches_its_settings(tmp_path: Path) -> None:
    identity, allow = tmp_path / "a.key", tmp_path / "allow"
    told = f"""--bind tcp://10.0.0.5:1 --device null --dtype float16 --arithmetic int8
        --kernels portable --threads 3 --max-message-mib 4 --spin-us 5.5 --layers 1-2
        --sessions-mib 15 --session-client-mib 14 --session-ttl-s 12.5 --session-spill {tmp_path}
        --session-spill-mib 13 --metrics 9100 --max-queued-requests 6 --max-queued-mib 7
        --max-queued-total-requests 8 --max-queued-total-mib 9 --drain-timeout-s 10.5
        --identity {identity} --allow {allow} --heartbeat-timeout-s 11.5 --allow-anyone"""
    settings = _service_settings(*told.split())
    assert (settings.bind, settings.identity, settings.allow) == (
        "tcp://10.0.0.5:1",
        identity,
        allow,
    )
    assert settings.job.max_message_bytes == 4 * 2**20
    default, of_http = _service_settings(), {"http_tokens", "http_cert", "http_key"}
    _is_all_different(settings, default, but=frozenset({"secret", *of_http}))
    _is_all_different(settings.job, default.job, but=frozenset({"model", "store", "place"}))
    _is_all_different(settings.queue, default.queue, but=frozenset())
    assert default.queue == QueueLimits()
    # As much as there must be is enough.
    QueueLimits(total_bytes=2**29, total_requests=64).check(2**29)
    queue = _service_settings("--max-message-mib", "3").queue
    assert (queue.bytes, queue.total_bytes) == (3 * 2**20, 12 * 2**20)
    http = ("--http-tokens", "tokens", "--http-cert", "cert.pem", "--http-key", "key.pem")
    settings = _service_settings("--http", "8080", *http, "--tensor-parallel", "2")
    assert settings.job.place == (0, 2)
    found = (settings.http_tokens, settings.http_cert, settings.http_key)
    assert found == (Path("tokens"), Path("cert.pem"), Path("key.pem"))
    assert settings.bind == "http://127.0.0.1:8080"


def test_what_tee_runner_is_told_reaches_its_settings(tmp_path: Path) -> None:
    for name in ("runner", "service"):
        new_key_pair(tmp_path / name)
    told = f"""--gpu tcp://10.0.0.5:1 --dealer tcp://10.0.0.6:1 --policy quantized-clear
        --identity {tmp_path}/runner.key --service-key {tmp_path}/service.pub
        --heartbeat-timeout-s 1.5 --key {tmp_path}/key --bank {tmp_path}/bank
        --bank-key {tmp_path}/bank-key --bank-index {tmp_path}/index
        --bank-witness {tmp_path}/witness --when-out tee --dtype float16 --kernels portable
        --threads 3 --step-tokens 4 --micro-batches 5 --spin-us 6.5 --link-gbps 7.5
        --link-rtt-us 8.5 --connect-timeout-s 9.5 --request-timeout-s 10.5 --max-kv-mib 11
        --max-message-mib 12 --dealer-in-the-clear --bank-key-beside-bank"""
    settings, said = _runner_settings(*told.split())
    assert said == ""
    assert [key.public for key in settings.keys] == [public_key_of(tmp_path / "runner.pub")]
    assert [key.service for key in settings.keys] == [public_key_of(tmp_path / "service.pub")]
    assert (settings.gpu, settings.dealers) == (("tcp://10.0.0.5:1",), ("tcp://10.0.0.6:1",))
    files = [tmp_path / name for name in ("bank", "bank-key", "index", "witness")]
    assert settings.masks == MaskSettings(
        key=tmp_path / "key",
        bank=BankPlace(*files, beside_bank=True),
        when_out="tee",
    )
    default, _ = _runner_settings()
    but = frozenset({"model", "manifest", "appraise_service", "http"})
    _is_all_different(settings, default, but=but)


def test_how_to_sample_is_what_the_options_say() -> None:
    wanted = {"top_k": 3, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.25, "seed": 6}
    told = [f"--{name.replace('_', '-')}={value}" for name, value in wanted.items()]
    context = generate.make_context("generate", ["demo", *told])
    given = {name: context.params[name] for name in settings_of(TextSettings)}
    found = sampling_of(TextSettings(**given))
    assert found.model_dump(include=set(wanted)) == wanted


@each_row("content", ["\ufeffOnce\n more", "\ufeffOnce\n more\n", "Once\n more\r\n"])
def test_a_prompt_comes_from_a_file_or_standard_input(content: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(content.encode())
    for file in (str(path), "-"):
        context = generate.make_context("generate", ["demo", "--prompt-file", file])
        with path.open() as stdin, mock.patch("sys.stdin", stdin):
            found = chosen_prompt(context, prompt=None, prompt_file=file, prompt_token_ids=None)
        assert found == "Once\n more"


@each_row(
    ("policy", "endpoints", "named"),
    [
        ("attention-in-tee", "tcp://10.0.0.5:1=0-2 tcp://h:2=3-4", "tcp://10.0.0.5:1, tcp://h:2: "),
        ("attention-in-tee", "tcp://127.0.0.1:1 tcp://[fe80::1]:2", "tcp://[fe80::1]:2: "),
        ("attention-in-tee", "tcp://localhost:1 unix:///s vsock://2:5 ipc:///s", ""),
        ("tee-only", "tcp://10.0.0.5:1", ""),
    ],
)
def test_a_runner_says_that_a_network_is_used_without_keys(
    policy: str, endpoints: str, named: str
) -> None:
    given = [word for endpoint in endpoints.split() for word in ("--gpu", endpoint)]
    _, said = _runner_settings("--policy", policy, *given)
    assert said.count("\n") == bool(named)
    assert said.startswith(f"{named}the connection is not encrypted, and anyone" if named else "")


def test_help_imports_nothing_heavy() -> None:
    code = """
import contextlib, sys
from tsqp.cli import gpu_service, main, tee_runner
for program, *words in ((gpu_service,), (main, "demo"), (tee_runner, "generate")):
    sys.argv = ["program", *words, "--help"]
    with contextlib.suppress(SystemExit):
        program.main()
print("heavy", {"torch", "transformers", "numpy", "pydantic", "zmq"} & set(sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert result.stdout.count("Usage: ") == 3
    assert result.stdout.splitlines()[-1] == "heavy set()"


def test_completion_offers_the_policies() -> None:
    words = {"COMP_WORDS": "tee-runner generate demo --policy tee", "COMP_CWORD": "4"}
    result = run("tee-runner", _TEE_RUNNER_COMPLETE="bash_complete", **words)
    assert result.stdout.split() == ["plain,tee-only", "plain,tee-only-int8"]
    said = CliRunner().invoke(tsqp, ["completion", "bash"]).stdout
    assert all(f"_{name}_COMPLETE=" in said for name in ("TEE_RUNNER", "GPU_SERVICE", "TSQP"))
