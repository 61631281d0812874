"""`tsqp audit`: a key is made, and a log is shown, checked and told from one that was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protocol.errors import KeyFileError
from tee_side.serve.audit_log import AuditLog, AuditLogError, read_key
from tsqp.cli.main import command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["audit", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "audit.key"
    made = run("new-key", str(path))
    assert made.exit_code == 0
    assert read_key(path).hex() not in made.output
    return path


@pytest.fixture
def log(tmp_path: Path, key: Path) -> Path:
    path = tmp_path / "audit.log"
    with AuditLog(path, read_key(key)) as written:
        written.record("start", policy="shielded")
        written.record(
            "request",
            key="alice",
            outcome="ok",
            prompt_tokens=12,
            completion_tokens=345,
            duration_s=1.5,
        )
        written.record("receipt", digest=b"\x0f\xf0")
    return path


def test_a_key_is_private_new_and_not_overwritten(tmp_path: Path, key: Path) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other.key"
    run("new-key", str(other))
    assert read_key(other) != read_key(key)
    before = key.read_bytes()
    assert isinstance(run("new-key", str(key)).exception, KeyFileError)
    assert key.read_bytes() == before


def test_a_table(log: Path, key: Path) -> None:
    shown = run("show", str(log), "--key", str(key))
    assert shown.exit_code == 0
    (row,) = (line for line in shown.stdout.splitlines() if "alice" in line)
    assert row.split()[1:] == ["request", "alice", "ok", "12", "345", "1.5"]
    assert '"digest": "0ff0"' in shown.stdout
    assert shown.stderr.startswith(f"{log}: 3 records, chain ")


def test_in_a_pipe_a_record_stays_on_a_line(log: Path, key: Path) -> None:
    with AuditLog(log, read_key(key)) as written:
        written.record("request", key="k" * 300, outcome="ok")
    shown = run("show", str(log), "--key", str(key))
    assert "k" * 300 in shown.stdout


def test_json_lines(log: Path, key: Path) -> None:
    shown = run("show", str(log), "--key", str(key), "--json")
    records = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [record["kind"] for record in records] == ["start", "request", "receipt"]
    assert records[1]["completion_tokens"] == 345
    assert records[2]["digest"] == "0ff0"
    with AuditLog(log, read_key(key)) as written:
        assert shown.stderr == f"{log}: 3 records, chain {written.chain.hex()}\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_changed_log_is_status_1_with_what_was_before(
    log: Path, key: Path, as_json: bool
) -> None:
    content = bytearray(log.read_bytes())
    content[-1] ^= 2 if content[-1] == 1 else 1  # a zero would be a write that was cut short
    log.write_bytes(content)
    shown = run("show", str(log), "--key", str(key), *["--json"] * as_json)
    assert shown.exit_code == 1
    assert "alice" in shown.stdout
    assert "receipt" not in shown.stdout
    changed, found = shown.stderr.splitlines()
    assert changed.startswith(f"{log}: record 3, at byte ")
    assert "got other bytes than were written there" in changed
    assert found.startswith(f"{log}: 2 records, chain ")


def test_a_torn_tail_is_said_and_no_failure(log: Path, key: Path) -> None:
    log.write_bytes(log.read_bytes()[:-5])
    shown = run("show", str(log), "--key", str(key))
    assert shown.exit_code == 0
    torn, found = shown.stderr.splitlines()
    assert torn.startswith(f"{log}: torn tail: ")
    assert found.startswith(f"{log}: 2 records, chain ")


def test_what_cannot_be_read_is_refused(tmp_path: Path, log: Path, key: Path) -> None:
    missing = str(tmp_path / "missing")
    assert isinstance(run("show", missing, "--key", str(key)).exception, AuditLogError)
    assert isinstance(run("show", str(log), "--key", missing).exception, KeyFileError)
    assert isinstance(run("show", str(log), "--key", str(log)).exception, KeyFileError)
    other = tmp_path / "other.key"
    run("new-key", str(other))
    assert run("show", str(log), "--key", str(other)).exit_code == 1
