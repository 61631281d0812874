"""Key files and allow-lists: what is written, read and refused, and which endpoints need keys."""

import os
import stat
from functools import partial
from pathlib import Path

import pytest
import zmq

from gpu_side.access import ServiceKeys, read_allow_list
from protocol.curve import (
    PUBLIC_HEADER,
    SECRET_HEADER,
    ClientKeys,
    read_key,
    require_zmq_keys,
)
from protocol.endpoint import is_beyond_loopback, is_exposed
from protocol.errors import KeyFileError, SettingsError
from tests.kit.rows import each_row
from tsqp.key_files import new_key_pair, public_key_of

# 85 ** 5 - 1, which is more than 32 bits hold.
TOO_LARGE = "#" * 5
GOOD = "a" * 40
Pair = tuple[Path, Path, str]
read_secret_key, read_public_key = (partial(read_key, secret=which) for which in (True, False))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return new_key_pair(tmp_path / "mine")


def _file(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@each_row("umask", [0, 0o077])
def test_a_new_pair_is_read_as_it_was_written_and_only_its_public_half_is(
    tmp_path: Path, umask: int
) -> None:
    previous = os.umask(umask)
    try:
        secret_path, public_path, public = new_key_pair(tmp_path / f"vm.{umask}")
    finally:
        os.umask(previous)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (secret_path, public_path)]
    assert modes == [0o600, 0o644]
    secret = read_secret_key(secret_path)
    assert zmq.curve_public(secret) == public.encode() == read_public_key(public_path)
    assert public_key_of(secret_path) == public_key_of(public_path) == public.encode()
    client = ClientKeys(secret, read_public_key(public_path))
    service = ServiceKeys(secret, read_allow_list(public_path))
    assert (client.public, service.allowed) == (public.encode(), {public.encode()})
    shown = f"{client!r} {service!r} {client} {service} {public_path.read_text()}"
    assert secret.decode() not in shown
    with pytest.raises(KeyFileError, match="got File exists, expected a new file"):
        new_key_pair(tmp_path / f"vm.{umask}")
    assert read_secret_key(secret_path) == secret


def test_files_that_others_may_use_or_change_are_refused(pair: Pair) -> None:
    secret_path, public_path, _ = pair
    for mode in (0o640, 0o604, 0o660, 0o620, 0o610, 0o644, 0o666):
        secret_path.chmod(mode)
        with pytest.raises(KeyFileError, match=rf"mine.key: got mode {mode:04o}, expected 0600"):
            read_secret_key(secret_path)
    for mode in (0o664, 0o646, 0o622):
        public_path.chmod(mode)
        for read in (read_public_key, read_allow_list):
            with pytest.raises(KeyFileError, match=rf"got mode {mode:04o}, expected a file that"):
                read(public_path)


def test_a_file_of_another_user_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode says that only its owner can change it: that must be us, or root."""
    owner, fstat = 1000, os.fstat

    def owned(descriptor: int) -> os.stat_result:
        fields = list(fstat(descriptor))
        fields[stat.ST_UID] = owner
        return os.stat_result(fields)

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "fstat", owned)
    for owner in (1000, 0, 1001):
        for read, path in ((read_secret_key, pair[0]), (read_public_key, pair[1])):
            if owner != 1001:
                assert read(path)
                continue
            with pytest.raises(KeyFileError, match="got a file of user 1001, expected one of root"):
                read(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, got in (("none", "No such file or dir"), ("pipe", "no regular file")):
        for read in (read_secret_key, read_public_key, read_allow_list, public_key_of):
            with pytest.raises(KeyFileError, match=f"got {got}"):
                read(tmp_path / name)


@each_row(
    ("content", "message"),
    [
        ("", "got an empty file, expected a secret key"),
        ("# a key\n" + GOOD, "got another first line"),
        (f"{PUBLIC_HEADER}\n{GOOD}\n", "got a public key, expected a secret key"),
        (f"{SECRET_HEADER} \n{GOOD}\n", "got another first line"),
        (f"{SECRET_HEADER}\n", "line 2: got 0 characters, expected a key of 40"),
        (f"{SECRET_HEADER}", "got 0 lines after the first, expected one"),
        (f"{SECRET_HEADER}\n{GOOD}\n{GOOD}\n", "got 3 lines after the first, expected one"),
        (f"{SECRET_HEADER}\n{GOOD[1:]}\n", "line 2: got 39 characters"),
        (f"{SECRET_HEADER}\n {GOOD}\n", "line 2: got 41 characters"),
        (f"{SECRET_HEADER}\n{GOOD[1:]}~\n", "line 2: got a character that Z85 has not"),
        (f"{SECRET_HEADER}\n{GOOD[5:]}{TOO_LARGE}\n", "line 2: got five characters beyond 32"),
        (b"\xff" * 50, "got bytes that are no text"),
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


def test_an_allow_list_is_keys_and_comments_or_it_is_refused(pair: Pair, tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "allow", (zmq.curve_keypair()[0] for _ in range(2))
    text = f"# who\n\n  {first.decode()}   # a VM\n#{second.decode()}\n{pair[1].read_text()}"
    assert read_allow_list(_file(path, text, 0o644)) == {first, pair[2].encode()}
    for line, said in (
        (GOOD + " the other VM", "line 2: got more after the key, expected nothing, or # a comm"),
        (GOOD + "," + GOOD, "line 2: got 81 characters"),
    ):
        with pytest.raises(KeyFileError, match=said):
            read_allow_list(_file(path, f"{first.decode()}\n{line}\n"))


HERE = [
    *("tcp://127.0.0.1:*", "tcp://127.1.2.3:5555", "tcp://localhost:5555", "tcp://lo:5555"),
    *("tcp://[::1]:5555", "ipc:///run/s", "unix:///run/s", "vsock://any:5555"),
    *("ivshmem:///m,any:5555", "http://127.0.0.1:1", "http://localhost/x", "https://[::1]:1"),
]
BEYOND = [
    *("tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://10.0.0.5:5555", "tcp://eth0:5555"),
    *("tcp://[::]:5555", "tcp://[fe80::1%eth0]:5555", "tcp://127.0.0.1.example.org:5555"),
    *("tcp://1270:5555", "http://gpu.example/path", "http://127.0.0.1.example.org"),
]


def test_what_may_cross_a_network_in_the_clear_is_known() -> None:
    for endpoints, beyond, exposed in (
        (HERE, False, False),
        (BEYOND, True, True),
        (["https://gpu.example:8443"], True, False),
    ):
        for endpoint in endpoints:
            said = is_beyond_loopback(endpoint), is_exposed(endpoint)
            assert said == (beyond, exposed), endpoint


def test_a_zeromq_without_curve_is_refused_where_keys_are_needed() -> None:
    require_zmq_keys("tcp://127.0.0.1:5555")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq, "has", lambda _: False)
        with pytest.raises(SettingsError, match="without CURVE, expected one built with it"):
            require_zmq_keys("tcp://127.0.0.1:5555")
