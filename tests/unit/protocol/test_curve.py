"""Tests of key files and allow-lists: what is written, read and refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from gpu_side.access import ServiceKeys, read_allow_list
from protocol import curve
from protocol.curve import (
    PUBLIC_HEADER,
    SECRET_HEADER,
    ClientKeys,
    is_beyond_loopback,
    is_exposed,
    one_for_each,
    read_public_key,
    read_secret_key,
)
from protocol.errors import KeyFileError, SettingsError
from tests.kit.rows import each_row
from tsqp.key_files import new_key_pair, public_key_of

# 85 ** 5 - 1, which is more than 32 bits hold.
TOO_LARGE = "#" * 5


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, str]:
    return new_key_pair(tmp_path / "mine")


def _file(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _public() -> str:
    return zmq.curve_keypair()[0].decode()


# ----------------------------------------------------------------------------------- key pairs


def test_a_new_pair_is_read_as_it_was_written(pair: tuple[Path, Path, str]) -> None:
    secret_path, public_path, public = pair
    assert (secret_path.name, public_path.name) == ("mine.key", "mine.pub")
    assert (_mode(secret_path), _mode(public_path)) == (0o600, 0o644)
    secret = read_secret_key(secret_path)
    assert zmq.curve_public(secret) == public.encode() == read_public_key(public_path)
    assert public_key_of(secret_path) == public_key_of(public_path) == public.encode()
    assert secret.decode() not in public_path.read_text()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_secret_file_is_private_and_a_public_one_is_not_whatever_the_umask(
    tmp_path: Path, umask: int
) -> None:
    previous = os.umask(umask)
    try:
        secret_path, public_path, _ = new_key_pair(tmp_path / "mine")
    finally:
        os.umask(previous)
    assert (_mode(secret_path), _mode(public_path)) == (0o600, 0o644)


def test_two_pairs_differ(tmp_path: Path) -> None:
    assert new_key_pair(tmp_path / "a")[2] != new_key_pair(tmp_path / "b")[2]


@pytest.mark.parametrize("taken", ["mine.key", "mine.pub"])
def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path: Path, taken: str) -> None:
    _file(tmp_path / taken, "precious")
    with pytest.raises(KeyFileError, match=rf"{taken}: got File exists, expected a new file"):
        new_key_pair(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "precious"


def test_a_dot_in_a_name_stays(tmp_path: Path) -> None:
    assert new_key_pair(tmp_path / "vm.example.org")[0].name == "vm.example.org.key"


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o610, 0o644, 0o666])
def test_a_secret_that_others_may_use_is_refused(pair: tuple[Path, Path, str], mode: int) -> None:
    pair[0].chmod(mode)
    with pytest.raises(KeyFileError, match=rf"mine.key: got mode {mode:04o}, expected 0600"):
        read_secret_key(pair[0])


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o622])
def test_a_public_key_that_others_may_change_is_refused(
    pair: tuple[Path, Path, str], mode: int
) -> None:
    pair[1].chmod(mode)
    with pytest.raises(KeyFileError, match=rf"got mode {mode:04o}, expected a file that only"):
        read_public_key(pair[1])
    with pytest.raises(KeyFileError, match=rf"got mode {mode:04o}, expected a file that only"):
        read_allow_list(pair[1])


def test_a_file_of_another_user_is_refused(
    pair: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode says that only its owner can change it: that must not be somebody else."""
    us, other = 1000, 1001
    owner = {"user": us}
    fstat = os.fstat

    def owned(descriptor: int) -> os.stat_result:
        fields = list(fstat(descriptor))
        fields[stat.ST_UID] = owner["user"]
        return os.stat_result(fields)

    monkeypatch.setattr(os, "geteuid", lambda: us)
    monkeypatch.setattr(os, "fstat", owned)
    readers = ((read_secret_key, pair[0]), (read_public_key, pair[1]), (read_allow_list, pair[1]))
    for read, path in readers:
        for user in (us, 0):
            owner["user"] = user
            assert read(path)
        owner["user"] = other
        with pytest.raises(KeyFileError, match="got a file of user 1001, expected one of root or"):
            read(path)


def test_swapped_keys_are_named(pair: tuple[Path, Path, str]) -> None:
    secret_path, public_path, _ = pair
    with pytest.raises(KeyFileError, match=r"mine.pub: got a public key, expected a secret key"):
        read_secret_key(public_path)
    with pytest.raises(KeyFileError, match=r"mine.key: got a secret key, expected a public key"):
        read_public_key(secret_path)
    with pytest.raises(KeyFileError, match=r"mine.key: line 1: got a secret key, expected public"):
        read_allow_list(secret_path)


GOOD = "a" * 40


@each_row(
    ("content", "message"),
    [
        ("", "got an empty file, expected a secret key"),
        (GOOD, "got another first line"),
        ("# a key\n" + GOOD, "got another first line"),
        (f"{SECRET_HEADER} \n{GOOD}\n", "got another first line"),
        (f"{SECRET_HEADER}\n", "line 2: got 0 characters, expected a key of 40"),
        (f"{SECRET_HEADER}", "got 0 lines after the first, expected one"),
        (f"{SECRET_HEADER}\n{GOOD}\n{GOOD}\n", "got 3 lines after the first, expected one"),
        (f"{SECRET_HEADER}\n{GOOD[1:]}\n", "line 2: got 39 characters"),
        (f"{SECRET_HEADER}\n{GOOD}a\n", "line 2: got 41 characters"),
        (f"{SECRET_HEADER}\n {GOOD}\n", "line 2: got 41 characters"),
        (f"{SECRET_HEADER}\n{GOOD[1:]}~\n", "line 2: got a character that Z85 has not"),
        (f"{SECRET_HEADER}\n{GOOD[1:]}\u00e9\n", "line 2: got a character that Z85 has not"),
        (f"{SECRET_HEADER}\n{GOOD[5:]}{TOO_LARGE}\n", "line 2: got five characters beyond 32"),
        (b"\xff" * 50, "got bytes that are no text"),
        (bytes(32), "got another first line"),
        ("x" * 2000, "got a larger file, expected at most 1024 bytes"),
    ],
)
def test_a_malformed_key_file_is_refused(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = _file(tmp_path / "k", content)
    with pytest.raises(KeyFileError) as info:
        read_secret_key(path)
    assert message in str(info.value)
    assert info.value.where.startswith(str(path))
    # It may be a secret with a slip of the pen.
    assert GOOD[5:] not in str(info.value)


def test_lines_may_end_as_on_other_systems(tmp_path: Path) -> None:
    assert read_secret_key(_file(tmp_path / "k", f"{SECRET_HEADER}\r\n{GOOD}\r\n")) == GOOD.encode()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, got in (
        ("none", "No such file or directory"),
        ("pipe", "no regular file"),
        (".", "Is a directory"),
    ):
        for read in (read_secret_key, read_public_key, read_allow_list, public_key_of):
            with pytest.raises(KeyFileError, match=f"got {got}"):
                read(tmp_path / name)


def test_z85_agrees_with_the_library(tmp_path: Path) -> None:
    # Every character, and the largest number that five of them may say.
    largest = z85.encode(b"\xff" * 32)
    assert (
        read_secret_key(_file(tmp_path / "k", f"{SECRET_HEADER}\n{largest.decode()}\n")) == largest
    )
    for start in range(0, 80, 5):
        text = bytes(z85.Z85CHARS[(start + n) % 80] for n in range(40))
        path = _file(tmp_path / "k", SECRET_HEADER.encode() + b"\n" + text + b"\n")
        assert read_secret_key(path) == text == z85.encode(z85.decode(text))


# --------------------------------------------------------------------------------- allow-lists


def test_an_allow_list_has_keys_and_comments(tmp_path: Path) -> None:
    first, second, third = _public(), _public(), _public()
    text = (
        f"# who may use it\n\n{first}\n  {second}   # the other VM\n#\n#{third}\n"
        f"{PUBLIC_HEADER}\n{third}\n{first}\n"
    )
    expected = {first.encode(), second.encode(), third.encode()}
    assert read_allow_list(_file(tmp_path / "allow", text, 0o644)) == expected
    assert read_allow_list(_file(tmp_path / "allow", text.replace("\n", "\r\n"))) == expected


def test_public_key_files_appended_to_each_other_are_an_allow_list(tmp_path: Path) -> None:
    _, first_path, first = new_key_pair(tmp_path / "a")
    _, second_path, second = new_key_pair(tmp_path / "b")
    path = _file(tmp_path / "allow", first_path.read_text() + second_path.read_text())
    assert read_allow_list(path) == {first.encode(), second.encode()}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "line 2: got 5 characters, expected a key of 40 Z85 characters"),
        (GOOD + " the other VM", "line 2: got more after the key, expected nothing, or # a comm"),
        (GOOD + "," + GOOD, "line 2: got 81 characters"),
        (TOO_LARGE.replace("#", "$") + GOOD[5:], "line 2: got five characters beyond 32 bits"),
        (SECRET_HEADER, "line 2: got a secret key"),
    ],
)
def test_a_malformed_allow_list_is_refused_as_a_whole(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(KeyFileError) as info:
        read_allow_list(_file(tmp_path / "allow", f"{_public()}\n{line}\n{_public()}\n"))
    assert message in str(info.value)


def test_a_list_of_nobody_is_refused(tmp_path: Path) -> None:
    for text in ("", "# nobody\n", f"\n#{_public()}\n"):
        with pytest.raises(KeyFileError, match=r"allow: got no key, expected a client's public"):
            read_allow_list(_file(tmp_path / "allow", text))


# --------------------------------------------------------------------------------- both sides


def test_settings_of_both_sides_never_show_a_secret(pair: tuple[Path, Path, str]) -> None:
    secret_path, public_path, public = pair
    client = ClientKeys(read_secret_key(secret_path), read_public_key(public_path))
    service = ServiceKeys.read(secret_path, public_path)
    assert client.public == client.service == service.public == public.encode()
    assert service.allowed == {public.encode()}
    secret = read_secret_key(secret_path).decode()
    assert secret not in f"{client!r} {service!r} {client} {service}"


def test_zeromq_without_curve_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(curve.zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(SettingsError, match="without CURVE, expected one built with it"):
        new_key_pair(tmp_path / "mine")
    with pytest.raises(SettingsError, match="without CURVE"):
        curve.require_zmq_keys("tcp://127.0.0.1:5555")
    assert list(tmp_path.iterdir()) == []


@each_row(
    "endpoint",
    [
        "tcp://127.0.0.1:*",
        "tcp://127.1.2.3:5555",
        "tcp://localhost:5555",
        "tcp://lo:5555",
        "tcp://[::1]:5555",
        "ipc:///run/s",
        "unix:///run/s",
        "vsock://any:5555",
        "ivshmem:///m,any:5555",
    ],
)
def test_who_is_on_this_machine_needs_no_key(endpoint: str) -> None:
    assert not is_beyond_loopback(endpoint)


@each_row(
    "host",
    ["*", "0.0.0.0", "10.0.0.5", "eth0", "[::]", "[fe80::1%eth0]", "127.0.0.1.example.org", "1270"],
)
def test_other_machines_need_a_key(host: str) -> None:
    assert is_beyond_loopback(f"tcp://{host}:5555")


def test_keys_go_with_endpoints_in_order() -> None:
    assert one_for_each([], ["a", "b"]) == [None, None]
    assert one_for_each([1], ["a", "b"]) == [1, 1]
    assert one_for_each([1, 2], ["a", "b"]) == [1, 2]
    for keys, endpoints in (([1, 2], ["a"]), ([1, 2], ["a", "b", "c"]), ([1, 2], [])):
        with pytest.raises(SettingsError, match=rf"got 2 for {len(endpoints)} endpoints"):
            one_for_each(keys, endpoints)


def test_a_url_has_no_key_and_counts_for_none() -> None:
    urls = ["a", "https://b", "c", "http://d"]
    assert one_for_each([1, 2], urls) == [1, None, 2, None]
    assert one_for_each([1], urls) == [1, None, 1, None]
    assert one_for_each([], urls) == [None] * 4
    with pytest.raises(SettingsError, match="got 1 for 0 endpoints"):
        one_for_each([1], ["https://b"])
    with pytest.raises(SettingsError, match="got 4 for 2 endpoints"):
        one_for_each([1, 2, 3, 4], urls)


@pytest.mark.parametrize(
    ("url", "beyond", "exposed"),
    [
        ("http://gpu.example/path", True, True),
        ("https://gpu.example:8443", True, False),
        ("http://127.0.0.1:1", False, False),
        ("http://localhost/x", False, False),
        ("https://[::1]:1", False, False),
        ("http://127.0.0.1.example.org", True, True),
        ("tcp://10.0.0.5:1", True, True),
        ("unix:///tmp/s", False, False),
    ],
)
def test_what_crosses_a_network_in_the_clear(url: str, beyond: bool, exposed: bool) -> None:
    assert is_beyond_loopback(url) is beyond
    assert is_exposed(url) is exposed


def test_a_url_takes_no_keys() -> None:
    with pytest.raises(SettingsError, match="got a URL, which has tokens and certificates"):
        curve.require_zmq_keys("https://gpu.example/path")
