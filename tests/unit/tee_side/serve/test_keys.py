"""The API key file: who is let in, what is refused, and what is never quoted."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

import pytest

from protocol.errors import KeyFileError
from tee_side.serve.keys import ApiKey, ApiKeys, hash_of
from tests.kit.rows import each_row

ALICE, BOB = "tsqp-alice", "tsqp-bob"
ENTRIES = (
    ApiKey(name="alice", sha256=hash_of(ALICE), requests_per_minute=60, concurrent=2).entry()
    + ApiKey(name="bob", sha256=hash_of(BOB), tokens_per_minute=1000, max_tokens=16).entry()
)


def write(path: Path, text: str = ENTRIES) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys(write(tmp_path / "keys.toml"))


def test_a_key_is_found_with_its_limits(keys: ApiKeys) -> None:
    alice, bob = keys.find(f"Bearer {ALICE}"), keys.find(f"bearer  {BOB} ")
    assert alice is keys.of("alice")
    assert bob is not None
    assert (bob.name, bob.tokens_per_minute, bob.max_tokens) == ("bob", 1000, 16)
    others = (None, "", ALICE, "Bearer", "Bearer ", f"Basic {ALICE}", "Bearer \udcff\u00e9")
    # The hash itself is no key.
    for header in (*others, f"Bearer {ALICE}x", f"Bearer {hash_of(ALICE)}"):
        assert keys.find(header) is None


def test_every_entry_is_compared_whichever_it_is(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, compare = [], hmac.compare_digest

    def counted(a: str, b: str) -> bool:
        compared.append(b)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in (ALICE, BOB, "tsqp-nobody"):
        keys.find(f"Bearer {key}")
    assert compared == [hash_of(ALICE), hash_of(BOB)] * 3


SECRET = "tsqp-do-not-quote-me-0123456789abcdef0123456789"
GOOD = f'sha256 = "{"0" * 64}"'


@each_row(
    ("text", "message"),
    [
        (f"{SECRET} = 1\n[keys.a]\n{GOOD}", "got other keys or tables"),
        (f"[keys.{SECRET}]\n{GOOD}\n[keys.{SECRET}]", "got invalid TOML (at line 3"),
        (f"[keys.{SECRET}]\n{GOOD}", "name of a key: got 47 characters"),
        (f"[keys.'a b']\n{GOOD}", "name of a key: got 3 characters"),
        ("[keys]\na = 3", "a: got an unknown field, expected a table of sha256"),
        (f"[keys.a]\n{GOOD}\n{SECRET} = 3", "a: got an unknown field, expected a table of sha256"),
        ("[keys.a]\nconcurrent = 1", "a: sha256: got nothing, expected the 64 hex digits"),
        (f"[keys.a]\nsha256 = '{SECRET}'", "a: sha256: got another value, expected the 64 hex"),
        (f"[keys.a]\n{GOOD}\nconcurrent = 0", "a: concurrent: got another value, expected greater"),
        (f"[keys.a]\n{GOOD}\nmax_tokens = '{SECRET}'", "a: max_tokens: got another value"),
        (f"[keys.a]\n{GOOD}\n[keys.b]\n{GOOD}", "b: sha256: got the key of a"),
    ],
)
def test_a_bad_file_is_refused_and_not_quoted(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(KeyFileError) as refused:
        ApiKeys(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert SECRET[5:] not in str(refused.value)


def test_a_file_that_others_may_use_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml")
    for mode in (0o640, 0o604, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(KeyFileError, match=f"got mode {mode:04o}, expected 0600"):
            ApiKeys(path)


def test_reading_again_adds_and_removes_and_a_bad_file_changes_nothing(
    tmp_path: Path, keys: ApiKeys, caplog: pytest.LogCaptureFixture
) -> None:
    path, carol = tmp_path / "keys.toml", ApiKey(name="carol", sha256=hash_of("tsqp-carol"))
    write(path, f"[keys.a]\nsha256 = '{SECRET}'")
    with caplog.at_level(logging.ERROR, "tee_side"):
        assert not keys.reload()
    [record] = caplog.records
    assert record.message == "api_keys_unchanged"
    assert SECRET not in str(record.__dict__)
    assert keys.find(f"Bearer {ALICE}") is not None
    write(path, carol.entry())
    assert keys.reload()
    assert keys.find(f"Bearer {ALICE}") is None
    assert keys.find("Bearer tsqp-carol") == carol
