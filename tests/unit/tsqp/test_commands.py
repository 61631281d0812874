"""Commands that make, show and ask: `tsqp api-key`, `audit`, `seal` and `health`."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpu_side.access import ServiceKeys
from gpu_side.encoding import encode_reply, open_request
from gpu_side.transport.bind import open_listener
from gpu_side.transport.listener import Listener
from protocol.errors import (
    EndpointError,
    ErrorCode,
    KeyFileError,
    ModelError,
    SealError,
    SettingsError,
)
from protocol.messages import HealthReply, Response
from protocol.model.sealed import SEAL_FILE, SealedModel
from tee_side.serve import audit_log
from tee_side.serve.audit_log import AuditLog, AuditLogError
from tee_side.serve.keys import ApiKeys
from tests.kit.rows import each_row
from tsqp.cli.main import command
from tsqp.cli.program import model_directory
from tsqp.key_files import new_key_pair
from tsqp.seal_keys import read_key

READY = HealthReply(status="ready", uptime_s=61.4, queued_requests=3, queued_bytes=4096)
DRAINING = READY.model_copy(update={"status": "draining"})


def run(*arguments: object, **environment: str) -> Result:
    environment |= {"COLUMNS": "160"}
    return CliRunner().invoke(command, [str(one) for one in arguments], env=environment)


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
    with AuditLog(path, audit_log.read_key(key)) as written:
        written.record("start", policy="shielded")
        written.record("request", key="alice", outcome="ok", completion_tokens=345)
        written.record("receipt", digest=b"\x0f\xf0")
        chain = written.chain.hex()
    show = ("audit", "show", path, "--key", key)
    assert "alice" in run(*show).stdout
    whole = run(*show, "--json")
    records = [json.loads(line) for line in whole.stdout.splitlines()]
    assert [record["kind"] for record in records] == ["start", "request", "receipt"]
    assert (records[1]["completion_tokens"], records[2]["digest"]) == (345, "0ff0")
    assert whole.stderr == f"{path}: 3 records, chain {chain}\n"
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
    digest = SealedModel(output, read_key(key)).digest
    assert done.stdout.splitlines()[1] == f"SHA-256 of the seal: {digest}"
    assert sorted(p.name for p in output.iterdir()) == ["config.json", SEAL_FILE, "tokenizer.json"]
    # The word `model` may be left out, wherever options stand.
    config = tmp_path / "settings.toml"
    config.write_text("threads = 1\n")
    to = ("--to", key, "-o")
    for number, words in enumerate((("model", model), ("--config", config, model))):
        again = run("seal", *words, *to, tmp_path / str(number))
        assert again.exit_code == 0, again.output
    rewrap = ("seal", "rewrap", output, "--seal-key", key, "--to", other)
    assert run(*rewrap).stdout.splitlines()[-1].split()[-1] == digest
    assert SealedModel(output, read_key(other), digest)
    assert isinstance(run(*rewrap).exception, SealError)
    for arguments, error in (
        ((model, "--to", tmp_path / "none", "-o", tmp_path / "x"), KeyFileError),
        ((tmp_path / "none", "--to", key, "-o", tmp_path / "x"), ModelError),
        ((model, "--to", key, "-o", model), ModelError),
        ((output, "--to", key, "-o", tmp_path / "twice"), SealError),
    ):
        assert isinstance(run("seal", *arguments).exception, error), arguments


# ---------------------------------------------------------------------------------------- health


@contextmanager
def answering(
    endpoint: str, reply: Response | ErrorCode | None, keys: ServiceKeys | None = None
) -> Iterator[str]:
    """Answer everything with one reply, or nothing."""
    listener = open_listener(endpoint, keys=keys)
    reader, writer = socket.socketpair()
    thread = threading.Thread(target=_answer, args=(listener, reader, reply))
    thread.start()
    try:
        yield listener.endpoint
    finally:
        writer.send(b"x")
        thread.join()
        reader.close()
        writer.close()
        listener.close()


def _answer(listener: Listener, wakeup: socket.socket, reply: Response | ErrorCode | None) -> None:
    while listener.wait(wakeup=wakeup):
        incoming = listener.receive()
        if incoming is not None and reply is not None:
            opened = open_request(incoming.frames, 2**20)
            frames = encode_reply(opened.form, opened.request_id, opened.method, reply)
            listener.send(incoming.route, frames)


@each_row(
    ("endpoint", "reply", "status", "out", "error"),
    [
        ("tcp://127.0.0.1:*", READY, 0, "ready, up 61 s, queued 3 requests of 4096 bytes\n", ""),
        ("unix://{0}/a", DRAINING, 1, "draining, up 61 s, queued 3 requests of 4096 bytes\n", ""),
        ("unix://{0}/b", ErrorCode.UNKNOWN_METHOD, 1, "", "UNKNOWN_METHOD"),
        ("ipc://{0}/c", None, 1, "", "0.1 s"),
    ],
)
def test_a_service_is_ready_or_not(
    endpoint: str,
    reply: HealthReply | ErrorCode | None,
    status: int,
    out: str,
    error: str,
    tmp_path: Path,
) -> None:
    with answering(endpoint.format(tmp_path), reply) as found:
        result = run("health", found, *(["--timeout-s", "0.1"] if reply is None else []))
    assert (result.exit_code, result.stdout) == (status, out)
    assert error in result.stderr


def test_a_service_with_keys_is_asked_with_keys(tmp_path: Path) -> None:
    for name in ("service", "watcher", "stranger"):
        new_key_pair(tmp_path / name)
    keys = ServiceKeys.read(tmp_path / "service.key", tmp_path / "watcher.pub")
    given = ("--service-key", tmp_path / "service.pub", "--identity")
    with answering(f"ipc://{tmp_path}/s", READY, keys) as endpoint:
        let_in = run("health", endpoint, *given, tmp_path / "watcher.key")
        turned_away = run("health", endpoint, *given, tmp_path / "stranger.key")
    assert (let_in.exit_code, let_in.stdout.split(",")[0]) == (0, "ready")
    assert (turned_away.exit_code, "allow" in turned_away.stderr) == (1, True)
    assert isinstance(run("health", "ftp://there").exception, EndpointError)
    unix = run("health", f"unix://{tmp_path}/s", *given, tmp_path / "watcher.key")
    assert isinstance(unix.exception, SettingsError)
