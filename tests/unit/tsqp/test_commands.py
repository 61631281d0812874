"""Commands that make, show and ask: `tsqp api-key`, `audit`, `seal`, `health`; and `chat`."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from pydantic import create_model

from protocol.errors import EndpointError, KeyFileError, ModelError, SealError, SettingsError
from protocol.messages import HealthReply
from protocol.model.at_rest import SEAL_FILE, SealedModel
from tee_side.protect.masks.mask import Pad
from tee_side.serve.audit_log import AuditLog, AuditLogError
from tee_side.serve.keys import ApiKeys
from tests.kit.rows import each_row
from tsqp.catalogue import MaskEntry
from tsqp.cli.gpu_service import MIB, GpuServiceSettings, queue_limits
from tsqp.cli.main import command
from tsqp.cli.serve import Session
from tsqp.key_files import AUDIT_KEY, SEAL_KEY
from tsqp.run.settings import TextSettings, model_directory


def run(*arguments: object, **environment: str) -> Result:
    environment |= {"COLUMNS": "160"}
    return CliRunner().invoke(command, [str(one) for one in arguments], env=environment)


@each_row(
    ("given", "expected"),
    [
        ({}, (64, 512, 1024, 2048)),
        ({"max_message_mib": 1}, (64, 1, 1024, 4)),
        ({"max_queued_total_mib": 512, "max_queued_total_requests": 64}, (64, 512, 64, 512)),
    ],
)
def test_what_may_wait_follows_the_largest_message(
    given: dict[str, int], expected: tuple[int, int, int, int]
) -> None:
    """In MiB."""
    made = queue_limits(GpuServiceSettings(model="demo", **given))  # type: ignore[arg-type]
    assert (
        made.requests,
        made.bytes / MIB,
        made.total_requests,
        made.total_bytes / MIB,
    ) == expected


@each_row(
    "words",
    [("api-key", "alice", "--to"), ("audit", "new-key"), ("seal", "new-key"), ("keys", "new")],
)
def test_a_key_is_private_new_and_not_overwritten(
    words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("keys")
    assert run(*words, folder / "one").exit_code == 0
    path = folder / ("one.key" if words[0] == "keys" else "one")
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    again = run(*words, folder / "one")
    assert isinstance(again.exception, KeyFileError | SettingsError)
    assert path.read_bytes() == before
    other = run(*words, folder / "two")
    made = (folder / path.name.replace("one", "two")).read_bytes()
    assert made != before
    assert made.decode().split()[-1] not in other.output


def test_an_api_key_is_admitted_by_the_entry_that_was_made_with_it(tmp_path: Path) -> None:
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "5000", "--concurrent", "4")
    alice, bob = run("api-key", "alice", *limits, "--max-tokens", "256"), run("api-key", "bob")
    secret = alice.stderr.strip()
    assert (len(secret), secret in alice.stdout) == (48, False)
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(alice.stdout + bob.stdout)
    entry = ApiKeys(path).find(f"Bearer {secret}")
    assert entry is not None
    assert (entry.name, entry.max_tokens) == ("alice", 256)
    assert (entry.requests_per_minute, entry.tokens_per_minute, entry.concurrent) == (60, 5000, 4)
    other = ApiKeys(path).find(f"Bearer {bob.stderr.strip()}")
    assert other is not None
    assert (other.name, other.max_tokens) == ("bob", None)
    for name in ("", "a b", "a.b", "tsqp-x", "x" * 33, "\u00e9"):
        made = run("api-key", name)
        assert isinstance(made.exception, KeyFileError), name
        assert made.output == ""


def test_an_audit_log_is_shown_as_far_as_it_is_whole(tmp_path: Path) -> None:
    key, path = tmp_path / "audit.key", tmp_path / "audit.log"
    assert run("audit", "new-key", key).exit_code == 0
    with AuditLog(path, AUDIT_KEY.read(key)) as written:
        written.record("start", policy="shielded")
        written.record("request", key="alice", outcome="ok", completion_tokens=345)
        written.record("receipt", digest=b"\x0f\xf0")
    show = ("audit", "show", path, "--key", key)
    assert all(word in run(*show).stdout for word in ("alice", "0ff0"))
    content = path.read_bytes()
    # A zero would be a write that was cut short.
    changed = content[:-1] + bytes([content[-1] ^ (2 if content[-1] == 1 else 1)])
    for data, status, said in ((changed, 1, "record 3, at byte "), (content[:-5], 0, "torn tail")):
        path.write_bytes(data)
        shown = run(*show)
        assert (shown.exit_code, "alice" in shown.stdout) == (status, True)
        assert "0ff0" not in shown.stdout
        first, found = shown.stderr.splitlines()
        assert first.startswith(f"{path}: {said}")
        assert found.startswith(f"{path}: 2 records, chain ")
    run("audit", "new-key", tmp_path / "other")
    assert run(*show[:3], "--key", tmp_path / "other").exit_code == 1
    for log, by, error in (("none", key, AuditLogError), (path, path, KeyFileError)):
        refused = run("audit", "show", tmp_path / log, "--key", by)
        assert isinstance(refused.exception, error)


def test_a_model_is_sealed_and_given_to_another_key(tmp_path: Path) -> None:
    key, other, model, output = (tmp_path / name for name in ("key", "other", "model", "sealed"))
    for path in (key, other):
        run("seal", "new-key", path)
    (model / "original").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model_directory("demo") / name, model)
    done = run("seal", model, "--to", key, "-o", output)
    assert done.exit_code == 0, done.output
    assert "left out, as they are no files: original" in done.stderr
    digest = SealedModel(output, SEAL_KEY.read(key)).digest
    assert done.stdout.splitlines()[1] == f"SHA-256 of the seal: {digest}"
    assert sorted(p.name for p in output.iterdir()) == ["config.json", SEAL_FILE, "tokenizer.json"]
    rewrap = ("seal", "rewrap", output, "--seal-key", key, "--to", other)
    assert run(*rewrap).stdout.splitlines()[-1].split()[-1] == digest
    assert SealedModel(output, SEAL_KEY.read(other), digest)
    assert isinstance(run(*rewrap).exception, SealError)
    for arguments, error in (
        ((model, "--to", tmp_path / "none", "-o", tmp_path / "x"), KeyFileError),
        ((tmp_path / "none", "--to", key, "-o", tmp_path / "x"), ModelError),
        ((model, "--to", key, "-o", model), ModelError),
        ((output, "--to", key, "-o", tmp_path / "twice"), SealError),
    ):
        assert isinstance(run("seal", *arguments).exception, error), arguments


def test_a_chat_in_a_terminal_goes_on_without_its_oldest_turns(capsys: Any) -> None:
    lost = EndpointError("unix:///s", got="a lost connection", expected="one")
    answer, runner = mock.Mock(), mock.MagicMock()
    settings = TextSettings(model="demo", max_new_tokens=1)
    runner.config.context_length = 5  # words, one of them for the answer
    template = mock.Mock()
    template.encode = lambda said: " ".join(m["content"] for m in said.messages).split()
    runner.generate.side_effect = [answer, answer, lost, answer, answer, answer]

    def interrupted(*_: object) -> mock.Mock:
        signal.raise_signal(signal.SIGINT)
        return mock.Mock(text="so")

    lines = iter(
        ["a", "b", "c C", "c C", "d", "/stats", "/help", "/clear", "e", "/system X", "/quit"]
    )
    with (
        mock.patch.multiple("tsqp.cli.serve", stream=interrupted, sampling_of=mock.Mock()),
        mock.patch("tsqp.run.conversations.chat_template", return_value=template),
    ):
        made = Session(runner, settings, "Be.", in_terminal=True)
        made.run(lambda: next(lines))
    told = [" ".join(one.args[0]) for one in runner.generate.call_args_list]
    assert told == ["Be. a", "Be. a so b", "Be. c C", "Be. c C", "Be. d", "Be. e"]
    assert (answer.stop.call_count, made.messages[0]["content"]) == (5, "X")
    said = capsys.readouterr().err
    assert [said.count(f"is full: the oldest {turns} turn(s)") for turns in (1, 2, 3)] == [1, 2, 0]
    assert all(one in said for one in ("a lost connection", "statistics are off", "/quit "))


@each_row(("status", "code"), [("ready", 0), ("draining", 1)])
def test_health_is_a_line_and_an_exit_status(status: Any, code: int) -> None:
    ask = ("health", "unix:///s", "--timeout-s", "2")
    reply = HealthReply(status=status, uptime_s=61.4, queued_requests=3, queued_bytes=4096)
    with mock.patch("protocol.transport.open_channel") as opened:
        opened.return_value.__enter__.return_value.call.return_value.response = reply
        shown = [run(*ask), run(*ask, "--json")]
        opened.side_effect = EndpointError("unix:///s", got="nothing", expected="a reply")
        shown.append(run(*ask))
    assert ([one.exit_code for one in shown], shown[2].stdout) == ([code, code, 1], "")
    assert shown[0].stdout == f"{status}, up 61 s, queued 3 requests of 4096 bytes\n"
    assert json.loads(shown[1].stdout) == reply.model_dump()
    assert opened.call_args.kwargs["timeout_s"] == 2
    assert "ftp://there" in str(run("health", "ftp://there").exception)


def test_policies_and_masks_are_listed_beside_what_does_not_load() -> None:
    with mock.patch("tsqp.catalogue.policy_names", return_value=["gone", "shielded", "tee-only"]):
        shown, as_json = run("policies"), json.loads(run("policies", "--json").stdout)
    said = ("shielded (default)", "tee-only", "error: gone (package): ")
    assert all(one in shown.stdout for one in said)
    assert [one["name"] for one in as_json["policies"]] == ["shielded", "tee-only"]
    assert (shown.exit_code, as_json["default"]) == (0, "shielded")
    masks = json.loads(run("masks", "--json").stdout)["masks"]
    assert json.loads(run("masks", "pad", "--json").stdout) in masks
    assert "got 'rot13', expected one of " in str(run("masks", "rot13").exception)
    strange = create_model("Strange", __base__=Pad, table=(Path, Path("/x")))
    assert MaskEntry(strange).described()["options"][-1]["default"] == "/x"


def test_a_manifest_of_a_hub_s_name_is_told_what_gets_the_model() -> None:
    refused = run("manifest", "org/name").exception
    assert isinstance(refused, ModelError)
    assert "tsqp pull" in refused.expected


def test_a_model_may_be_in_a_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_directory("~/model") == tmp_path / "model"
