"""The key of sealed models: from a file, a descriptor and a command, and never in a message."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EndpointError, KeyFileError, SettingsError
from tee_side.attest.statement import Statement
from tee_side.serve.hpke_key import HpkeKey, seal
from tests.kit.rows import each_row
from tsqp import seal_keys
from tsqp.seal_keys import (
    encode_key,
    key_of_command,
    key_of_server,
    provided_key,
    read_key,
    read_key_from,
    release_info,
)

KEY = bytes(range(32))
TEXT = encode_key(KEY)
NOTHING: dict[str, Any] = dict.fromkeys(("seal_key", "seal_key_fd", "seal_key_command"))
WAIT_S = 30
NONCE = bytes(range(32, 64))
STATED = Statement(claims=b"claims", evidence=b"evidence")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.key"
    path.write_text(TEXT)
    path.chmod(0o600)
    return path


def pipe(content: str) -> int:
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    return reading


def python(code: str) -> str:
    return shlex.join((sys.executable, "-c", code))


def test_each_provider_gives_the_key(file: Path) -> None:
    descriptor = pipe(TEXT.rstrip("\n"))  # a tool may leave out the newline
    assert read_key_from(descriptor) == KEY
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for given in (
        {"seal_key": file},
        {"seal_key_fd": pipe(TEXT)},
        {"seal_key_command": f"cat {file}"},
    ):
        assert provided_key(NOTHING | given) == KEY


def test_one_provider_is_asked(file: Path) -> None:
    for given, count in (({}, 0), ({"seal_key": file, "seal_key_command": "cat"}, 2)):
        with pytest.raises(SettingsError, match=f"got {count} options, expected one of --seal-k"):
            provided_key(NOTHING | given)


def test_a_key_server_is_asked_by_programs_that_can_alone(file: Path) -> None:
    asked = NOTHING | {"seal_key_server": "http://a"}
    assert provided_key(asked, lambda url: url.encode()) == b"http://a"
    for release, count, named in ((None, 0, False), (lambda url: KEY, 2, True)):
        with pytest.raises(SettingsError, match=f"got {count} options") as refused:
            provided_key(asked | ({"seal_key": file} if release else {}), release)
        assert ("--seal-key-server" in str(refused.value)) == named


class Answers:
    """What a key server, maybe a false one, answers: bytes, or what makes pieces of them."""

    def __init__(self) -> None:
        self.nonce: Any = http(NONCE.hex().encode())
        self.key: Any = b""
        self.asked: list[bytes] = []
        self.hpke: list[HpkeKey] = []

    def state(self, nonce: bytes, key: HpkeKey) -> Statement:
        assert nonce == NONCE
        self.hpke.append(key)
        return STATED

    def sealed(self, plain: bytes = KEY, info: bytes = release_info(NONCE)) -> Callable[[], Any]:
        """Return what seals to the key that was stated last."""
        return lambda: [http(seal(self.hpke[-1].suite, self.hpke[-1].public, info, plain))]


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """Answer connections one after another, and give the URL."""
    over = threading.Event()

    def answer(near: socket.socket) -> None:
        near.settimeout(WAIT_S)
        request = b""
        ends = {b"G": b"\r\n\r\n", b"P": STATED.encode()}
        while not request or not request.endswith(ends[request[:1]]):
            if not (piece := near.recv(4096)):
                return
            request += piece
        answers.asked.append(request)
        said = answers.nonce if request.startswith(b"GET ") else answers.key
        pieces: Iterable[bytes] = [said] if isinstance(said, bytes) else said()
        for piece in pieces:
            near.sendall(piece)
        if said == b"":
            near.recv(1)  # silent, until the other end has gone

    def accept() -> None:
        while True:
            with suppress(OSError), listening.accept()[0] as near:
                answer(near)
            if over.is_set():
                return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            with suppress(OSError), socket.create_connection(listening.getsockname(), WAIT_S):
                pass
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_a_key_comes_from_a_key_server_sealed_to_a_new_key() -> None:
    answers = Answers()
    answers.key = answers.sealed()
    with answering(answers) as url:
        for end in ("", "/"):
            assert key_of_server(url + end, answers.state) == KEY
    assert len({key.public for key in answers.hpke}) == 2
    gets, posts = answers.asked[::2], answers.asked[1::2]
    assert {one.split(b"\r\n")[0] for one in gets} == {b"GET /v1/nonce HTTP/1.1"}
    assert {one.split(b"\r\n")[0] for one in posts} == {b"POST /v1/key HTTP/1.1"}
    assert {one.partition(b"\r\n\r\n")[2] for one in posts} == {STATED.encode()}


def test_a_false_key_server_is_refused_and_not_quoted() -> None:
    answers = Answers()
    nonces = (b"", b"secret", NONCE.hex()[:-1].encode(), NONCE.hex().upper().encode(), b"0" * 65)
    keys = [(http(body), "another answer") for body in (b"", b"secret", b"\0" * 1168, b"x" * 2000)]
    keys += [
        (answers.sealed(info=release_info(bytes(32))), "another answer"),
        (answers.sealed(info=b"TSQP sealed body 1\0" + NONCE), "another answer"),
        (answers.sealed(KEY[:16]), "another answer"),
        (answers.sealed(KEY + b"x"), "another answer"),
        (http(b"key of service 1", 403), "a refusal: the step 'key of service 1' failed"),
        (http(b"\x1b[31msecret", 403), "status 403"),
        (http(b"secret\nsecret", 403), "status 403"),
        (http(b"s" * 101, 403), "status 403"),
        (http(b"secret", 500), "status 500"),
        (http(b"secret", 302), "status 302"),
    ]
    rows = [(http(nonce), answers.sealed(), "another answer") for nonce in nonces]
    rows += [(answers.nonce, key, got) for key, got in keys]
    with answering(answers) as url:
        for answers.nonce, answers.key, got in rows:
            with pytest.raises(KeyFileError) as refused:
                key_of_server(url, answers.state)
            assert f"--seal-key-server {url}: got {got}, expected " in str(refused.value)
            assert "secret" not in str(refused.value)
            assert KEY.hex() not in str(refused.value)


def test_what_is_no_http_is_refused_and_not_quoted() -> None:
    answers = Answers()
    with answering(answers) as url:
        for answers.nonce in (
            b"secret\r\n\r\n",
            b"HTTP/1.1 secret\r\n\r\n",
            b"HTTP/1.1 200 x\r\n" + b"secret: secret\r\n" * 200,
            b"HTTP/1.1 200 x\r\ncontent-length: 64\r\n\r\nsecret",
            http(b"0" * 5000),
            b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\nsecret\r\n",
            list,
        ):
            with pytest.raises(EndpointError, match=f"^--seal-key-server {url}: got ") as refused:
                key_of_server(url, answers.state)
            assert "secret" not in str(refused.value)


def test_a_key_server_that_is_silent_or_slow_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seal_keys, "_SERVER_TIMEOUT_S", 0.2)
    pause = threading.Event()

    def slowly() -> Iterator[bytes]:
        """Give a right answer, in ten seconds."""
        whole = http(NONCE.hex().encode())
        front = b"HTTP/1.1 200 x\r\na: " + b"b" * 1000
        for byte in front:
            pause.wait(0.01)
            yield bytes([byte])
        yield whole[len(b"HTTP/1.1 200 x") :]

    def slowly_to_its_end() -> Iterator[bytes]:
        """Give a body, as a reply that is the last one of its connection."""
        yield b"HTTP/1.1 200 x\r\nconnection: close\r\ncontent-length: 1000\r\n\r\n"
        for _ in range(1000):
            pause.wait(0.01)
            yield b"0"

    answers = Answers()
    answers.key = answers.sealed()
    with answering(answers) as url:
        for answers.nonce in (b"", slowly, slowly_to_its_end):
            with pytest.raises(EndpointError, match=r"got no whole answer within 0\.2 s"):
                key_of_server(url, answers.state)
        # The library's limit of one read may be over before the timer's thread runs.
        monkeypatch.setattr(threading.Timer, "start", lambda timer: None)
        answers.nonce = b""
        with pytest.raises(EndpointError, match=r"got no whole answer within 0\.2 s"):
            key_of_server(url, answers.state)


def test_where_nothing_listens_there_is_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(EndpointError, match=f"http://127.0.0.1:{port}: got Connection refused"):
        key_of_server(f"http://127.0.0.1:{port}", Answers().state)


@each_row(
    "url",
    [
        *("", "host:80", "https://host:80", "http://", "http://:80", "http://host:x"),
        *("http://user:secret@host", "http://host/secret", "http://host?secret", "http://h#secret"),
        *("http://host:65536", "http://host:-1", "http://[secret]", "http://ho st", "HTTP://host"),
        "http://host\n",
    ],
)
def test_another_form_of_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(SettingsError, match="got another form, expected http://HOST") as refused:
        key_of_server(url, Answers().state)
    assert "secret" not in str(refused.value)


@each_row(
    ("command", "got"),
    [
        ("false", "exit status 1"),
        (python("import os; os.abort()"), "exit status -6"),
        ("/nowhere/kms-tool --token secret", "No such file or directory"),
        ("", "no command"),
        ("cat 'secret", "no command"),
        ("cat a\0b", "no command"),
        ("true", "another content"),
        (f"echo {TEXT.strip()}; echo secret", "another content"),  # no shell runs it
        (python("print('secret' * 1000)"), "another content"),
    ],
)
def test_a_command_that_gives_no_key_is_refused_and_not_quoted(command: str, got: str) -> None:
    with pytest.raises(KeyFileError, match=f"^--seal-key-command: got {got}") as refused:
        key_of_command(command)
    assert "secret" not in str(refused.value)
    assert KEY.hex() not in str(refused.value)


def test_a_command_has_no_stdin_and_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, other = os.dup(0), pipe("what the program is told")
    os.dup2(other, 0)
    try:
        echo = python(f"import sys; print(sys.stdin.read() + {TEXT!r}, end='')")
        assert key_of_command(echo) == KEY
    finally:
        os.dup2(ours, 0)
        os.close(ours)
        os.close(other)
    monkeypatch.setattr(seal_keys, "_COMMAND_TIMEOUT_S", 0.01)
    with pytest.raises(KeyFileError, match=r"got nothing within 0\.01 s"):
        key_of_command("sleep 60")


def test_a_key_file_is_for_its_owner_alone(file: Path) -> None:
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(KeyFileError, match=f"got mode {mode:04o}"):
            read_key(file)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", TEXT * 2, TEXT[:-2], TEXT.upper(), " " + TEXT, TEXT + "\n", "\xff" * 80),
        TEXT.replace("seal", "audit"),
        "x" * 10_000,
    ],
)
def test_another_content_is_refused_and_not_quoted(file: Path, text: str) -> None:
    file.write_text(text, encoding="latin-1")
    for read in (lambda: read_key(file), lambda: read_key_from(pipe(text))):
        with pytest.raises(KeyFileError) as refused:
            read()
        assert KEY.hex() not in str(refused.value).lower()


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    with pytest.raises(KeyFileError, match="descriptor 999: got Bad file descriptor"):
        read_key_from(999)
