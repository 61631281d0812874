"""Who is served by a real gpu-service with keys: the right key, and nobody else, whatever fails."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest
import torch
import zmq
from click.testing import CliRunner

from protocol.curve import ClientKeys, public_key, read_secret_key
from protocol.errors import EndpointError, ErrorCode, ServiceError, TsqpError
from protocol.messages import InitRequest
from protocol.zmq_channel import ZmqChannel
from tests.fault.test_service_limits import slow_device, submit_until_some_wait
from tests.kit.model import SavedModel, make_model
from tests.kit.service import CALM_S, Service, run, running_service
from tests.kit.wire import HIDDEN_BYTES, header, inline, part, segment
from tsqp.cli.gpu_service import command as gpu_service
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.key_files import new_key_pair

REQUEST = inline("Init", {})
FRAMED_REQUEST = [header(method="Init", request={})]
# The last where nothing listens: a service ends when its ZAP handler has failed, maybe before all
# clients have connected.
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CLOSED
)


@dataclass(frozen=True)
class Files:
    """Key files: of the service, and of clients that are on its list, once were, or never."""

    directory: Path

    def secret(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def public(self, name: str) -> Path:
        return self.directory / f"{name}.pub"

    def allow(self, *names: str) -> Path:
        path = self.directory / "allow"
        path.write_text("".join(self.public(name).read_text() for name in names))
        path.chmod(0o600)
        return path

    def options(self, *allowed: str) -> tuple[str, ...]:
        identity = str(self.secret("service"))
        return ("--identity", identity, "--allow", str(self.allow(*allowed)), "--threads", "1")

    def client(self, name: str, service: str = "service") -> ClientKeys:
        return ClientKeys(read_secret_key(self.secret(name)), public_key(str(self.public(service))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture
def files(tmp_path: Path) -> Files:
    directory = tmp_path / "keys"
    directory.mkdir()
    for name in ("service", "friend", "other", "stranger"):
        new_key_pair(directory / name)
    return Files(directory)


class Client:
    """A socket of any kind, and what became of its handshake."""

    def __init__(
        self, kind: int, endpoint: str, set_up: Callable[[zmq.Socket[bytes]], None]
    ) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        set_up(self.socket)
        self.failures = self.socket.get_monitor_socket(FAILED)
        self.socket.connect(endpoint)
        self.socket.send_multipart([REQUEST] if kind == zmq.REQ else FRAMED_REQUEST)

    def is_served(self) -> bool:
        """Wait until it is known."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.failures, zmq.POLLIN)
        ready = dict(poller.poll(30_000))
        assert ready, "neither served nor refused"
        if self.socket not in ready:
            return False
        return bool(msgpack.unpackb(self.socket.recv_multipart()[0])["status"] == "success")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.failures.close()
        self.socket.close()
        self._context.term()


def _curve(secret: bytes, public: bytes, service: bytes) -> Callable[[zmq.Socket[bytes]], None]:
    def set_up(client: zmq.Socket[bytes]) -> None:
        client.curve_secretkey, client.curve_publickey = secret, public
        client.curve_serverkey = service

    return set_up


def _plain(client: zmq.Socket[bytes]) -> None:
    client.plain_username, client.plain_password = b"admin", b"admin"


def _strangers(files: Files) -> dict[str, Callable[[zmq.Socket[bytes]], None]]:
    friend, stranger = files.client("friend"), files.client("stranger")
    service = friend.service
    return {
        "NULL": lambda _: None,
        "PLAIN": _plain,
        "random key": _curve(stranger.secret, stranger.public, service),
        "revoked key": _curve(files.client("other").secret, files.client("other").public, service),
        "another's public key": _curve(stranger.secret, friend.public, service),
        "the service's own public key": _curve(stranger.secret, service, service),
        "another service's key": _curve(friend.secret, friend.public, stranger.public),
    }


# What stands in for the ZAP handler's answers, in the service's own process.
ABSENT = """
import gpu_side.transport.zap
def absent(self):
    self._requests.close()
    while True:
        self._failures.recv_multipart()
gpu_side.transport.zap.ZapHandler._answer_all = absent
"""
DIES = """
import gpu_side.transport.zap
def dies(self, request):
    raise KeyError("a mistake")
gpu_side.transport.zap.ZapHandler._answer = dies
"""
SILENT = """
import gpu_side.transport.zap, threading
gpu_side.transport.zap.ZapHandler._answer = lambda self, request: threading.Event().wait()
"""
TALKS_NONSENSE = """
import gpu_side.transport.zap
gpu_side.transport.zap.ZapHandler._answer = lambda self, request: [b"200", b"OK"]
"""


@contextmanager
def _service(model: Path, endpoint: str, files: Files, fault: str) -> Iterator[Service]:
    """Start a real gpu-service, with a fault of its ZAP handler."""
    # "other" is on the list, until SIGHUP finds it gone: a revoked key and not only a random one.
    options = files.options("friend", "other")
    with running_service(model, endpoint, *options, before=fault) as service:
        files.allow("friend")
        service.process.send_signal(signal.SIGHUP)
        _log_until(service, " allow_list ")
        try:
            yield service
        finally:
            if fault:
                # With a handler that does not come back from its work it cannot end.
                service.stop(signal.SIGKILL)


def _log_until(service: Service, text: str) -> str:
    """Read the log up to the first line with a text in it, and return that line."""
    assert service.process.stderr is not None
    while text not in (line := service.process.stderr.readline()):
        assert line, f"the service has ended:\n{service.log}"
        service.log.append(line.rstrip("\n"))
    service.log.append(line.rstrip("\n"))
    return line


RIGHT = {"right key over REQ", "right key over DEALER"}


@pytest.mark.parametrize(
    ("transport", "fault", "expected"),
    [
        ("tcp", "", RIGHT),
        ("tcp", ABSENT, set()),
        ("tcp", DIES, set()),
        ("tcp", SILENT, set()),
        ("tcp", TALKS_NONSENSE, set()),
        ("ipc", "", RIGHT),
        ("ipc", ABSENT, set()),
    ],
    ids=["tcp-up", "tcp-absent", "tcp-dies", "tcp-silent", "tcp-nonsense", "ipc-up", "ipc-absent"],
)
def test_only_the_right_key_is_ever_served(
    model: Path,
    files: Files,
    tmp_path: Path,
    transport: str,
    fault: str,
    expected: set[str],
) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s"
    friend = files.client("friend")
    cases = {
        **_strangers(files),
        "right key": _curve(friend.secret, friend.public, friend.service),
    }
    with (
        _service(model, endpoint, files, fault) as service,
        ExitStack() as stack,
    ):
        clients = {}
        # All at once, and the right ones among them: nobody profits from another's answer.
        for name, set_up in cases.items():
            for kind in (zmq.REQ, zmq.DEALER):
                client = Client(kind, service.endpoint, set_up)
                stack.callback(client.close)
                clients[f"{name} over {zmq.SocketType(kind).name}"] = client
        assert {name for name, client in clients.items() if client.is_served()} == expected
        # And nobody was served later, when others were.
        assert not any(client.socket.poll(0) for client in clients.values())


# Greetings of old versions of ZMTP, which know of no mechanism at all.
ZMTP_1 = b"\x01\x00"
ZMTP_2 = b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x03" + b"\0\0"


def _frames_1(body: bytes) -> bytes:
    return b"\x01\x01" + b"\xff" + (len(body) + 1).to_bytes(8, "big") + b"\0" + body


def _frames_2(body: bytes) -> bytes:
    return b"\x01\0" + bytes([0, len(body)]) + body


@pytest.mark.parametrize("with_keys", [True, False])
def test_old_protocols_are_no_way_around_keys_and_names(
    model: Path, files: Files, with_keys: bool
) -> None:
    options = files.options("friend") if with_keys else ()
    with running_service(model, "tcp://127.0.0.1:*", *options) as service:
        host, _, port = service.endpoint.removeprefix("tcp://").partition(":")
        for sent in (ZMTP_1 + _frames_1(REQUEST), ZMTP_2 + _frames_2(REQUEST)):
            with socket.create_connection((host, int(port)), timeout=30) as client:
                client.sendall(sent)
                received = b""
                with suppress(ConnectionResetError):
                    while more := client.recv(65536):
                        received += more
            assert b"success" not in received


# ------------------------------------------------------------------------------- routing ids


@pytest.mark.parametrize("with_keys", [True, False])
def test_what_clients_call_themselves_neither_ends_the_service_nor_brings_a_reply(
    model: Path, files: Files, tmp_path: Path, with_keys: bool
) -> None:
    options = (*files.options("friend", "other"), "--device", slow_device(tmp_path, 1.0))
    keys = {name: _set_up_curve(files.client(name)) for name in ("friend", "other")}
    if not with_keys:
        options, keys = options[-2:], dict.fromkeys(keys, lambda _: None)
    with running_service(model, "tcp://127.0.0.1:*", *options) as service, ExitStack() as stack:

        def client(name: bytes, key: str = "other") -> Client:
            def set_up(made: zmq.Socket[bytes]) -> None:
                keys[key](made)
                if name:
                    made.setsockopt(zmq.ROUTING_ID, name)

            made = Client(zmq.DEALER, service.endpoint, set_up)
            assert made.is_served()
            return made

        # The ids that ZeroMQ would give to the next clients: the first of every process.
        for n in range(32):
            stack.enter_context(closing(client(b"\0" + (0x6B8B4567 + n).to_bytes(4))))
        for _ in range(33):
            stack.enter_context(closing(client(b"")))

        with closing(client(b"victim", "friend")) as victim:
            victim.socket.send_multipart([header(request_id=1), bytes(HIDDEN_BYTES)])
            victim.socket.send_multipart([header(request_id=2, method="Health", request={})])
            assert _id_of(victim) == 2  # the first is being computed
        with closing(client(b"victim")) as thief:
            thief.socket.send_multipart([header(request_id=3), bytes(HIDDEN_BYTES)])
            assert _id_of(thief) == 3
        assert service.stop() == 0
    log = "\n".join(service.log)
    assert " client_gone " in log
    assert b"victim".hex() not in log
    assert "6b8b45" not in log


def _set_up_curve(keys: ClientKeys) -> Callable[[zmq.Socket[bytes]], None]:
    return _curve(keys.secret, keys.public, keys.service)


def _id_of(client: Client) -> int:
    """Wait for a reply, and say to which request it is."""
    assert client.socket.poll(30_000)
    return int(msgpack.unpackb(client.socket.recv_multipart()[0])["request_id"])


# ------------------------------------------------------------------------------------- SIGHUP


def test_a_key_that_is_taken_off_the_list_is_cut_off(model: Path, files: Files) -> None:
    options = files.options("friend", "other")
    with (
        running_service(model, "tcp://127.0.0.1:*", *options) as service,
        _calm(service, files) as friend,
        _calm(service, files, "other") as other,
    ):
        friend.call(InitRequest())
        other.call(InitRequest())
        files.allow("friend")
        service.process.send_signal(signal.SIGHUP)
        # Its connection ends though nobody uses it.
        _until_lost(other)
        with pytest.raises(EndpointError, match="got a refusal of our key"):
            other.call(InitRequest())
        friend.call(InitRequest())

        # And the way back.
        files.allow("friend", "other")
        service.process.send_signal(signal.SIGHUP)
        _log_until(service, " connection_refused ")
        assert "keys=2" in _log_until(service, " allow_list ")
        other.call(InitRequest())
        assert service.stop() == 0
    log = "\n".join(service.log)
    assert " connections_cut " in log
    assert "Traceback" not in log


def _until_lost(client: ZmqChannel) -> None:
    while not client._lost:
        assert client._events.poll(30_000), "a client stays connected"
        client._note_events()


def test_what_was_taken_from_a_revoked_key_is_not_answered(
    model: Path, files: Files, tmp_path: Path
) -> None:
    options = (*files.options("friend", "other"), "--device", slow_device(tmp_path, 1.0))
    with (
        running_service(model, "tcp://127.0.0.1:*", *options) as service,
        _calm(service, files) as friend,
        _calm(service, files, "other") as other,
    ):
        submit_until_some_wait(other)
        files.allow("friend")
        service.process.send_signal(signal.SIGHUP)
        # One that an accelerator works on, and one that waits.
        for _ in range(3):
            assert 'detail="the key has been revoked"' in _log_until(service, " dropped ")
        friend.call(InitRequest())
        assert service.stop() == 0
    assert " client_gone " not in "\n".join(service.log)


def test_sessions_of_a_revoked_key_are_forgotten(
    saved_model: Callable[..., SavedModel], files: Files
) -> None:
    model = saved_model()
    h_TD = torch.ones(3, model.reference.config.hidden_size)
    whole = (0, model.reference.config.num_hidden_layers - 1)
    options = files.options("friend", "other")
    with (
        running_service(model.directory, "tcp://127.0.0.1:*", *options) as service,
        _calm(service, files) as friend,
        _calm(service, files, "other") as other,
    ):
        for client in (friend, other):
            client.call(segment(h_TD[:2], [part(1, 0, 2)], whole))
        files.allow("friend")
        service.process.send_signal(signal.SIGHUP)
        assert "keys=1" in _log_until(service, " allow_list ")
        for client in (friend, other):
            _until_lost(client)
        # When the second is answered, the loop has seen the list.
        for _ in range(2):
            friend.call(InitRequest())
        files.allow("friend", "other")
        service.process.send_signal(signal.SIGHUP)
        assert "keys=2" in _log_until(service, " allow_list ")
        more = segment(h_TD[2:], [part(1, 2, 1)], whole)
        friend.call(more)
        with pytest.raises(ServiceError) as caught:
            other.call(more)
        assert caught.value.code is ErrorCode.UNKNOWN_SESSION
        assert service.stop() == 0


def _calm(service: Service, files: Files, name: str = "friend") -> ZmqChannel:
    keys = files.client(name)
    return ZmqChannel(service.endpoint, timeout_s=60, keys=keys, heartbeat_timeout_s=CALM_S)


def test_a_damaged_list_changes_nothing_and_is_told(model: Path, files: Files) -> None:
    with (
        running_service(model, "tcp://127.0.0.1:*", *files.options("friend")) as service,
        _calm(service, files) as friend,
    ):
        friend.call(InitRequest())
        path = files.allow("other")
        for damage, told in (
            (lambda: path.write_text("nonsense\n"), "line 1: got 8 characters"),
            (lambda: path.chmod(0o622), "got mode 0622"),
            # An editor that saves nothing, or a disk without room: a slip, not a wish.
            (files.allow, "got no key, expected a client's public key a line"),
            (path.unlink, "got No such file or directory"),
        ):
            damage()
            service.process.send_signal(signal.SIGHUP)
            assert told in _log_until(service, " error allow_list_unchanged ")
        friend.call(InitRequest())
        assert friend._connection == 0
        with (
            _calm(service, files, "other") as other,
            pytest.raises(EndpointError, match="got a refusal of our key"),
        ):
            other.call(InitRequest())
        assert service.stop(signal.SIGINT) == 0


def test_many_hangups_and_then_the_end(model: Path, files: Files) -> None:
    with running_service(model, "tcp://127.0.0.1:*", *files.options("friend")) as service:
        for _ in range(50):
            service.process.send_signal(signal.SIGHUP)
        _log_until(service, " allow_list ")
        with _calm(service, files) as friend:
            friend.call(InitRequest())
        assert service.stop() == 0


# ----------------------------------------------------------------------------- the programs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--bind tcp://*:*: got an address that other machines reach"),
        (("--identity", "service.key"), "keys: got --identity, expected --identity and --allow"),
        (("--allow", "friend.pub"), "keys: got --allow, expected --identity and --allow"),
        (
            ("--identity", "service.key", "--allow", "friend.pub", "--allow-anyone"),
            "got --identity and --allow and --allow-anyone, expected --identity and --allow, or",
        ),
        (("--identity", "service.pub", "--allow", "friend.pub"), "service.pub: got a public key"),
        (("--identity", "service.key", "--allow", "friend.key"), "line 1: got a secret key"),
        (("--identity", "service.key", "--allow", "nobody"), "nobody: got no key"),
        (("--identity", "none.key", "--allow", "friend.pub"), "none.key: got No such file"),
        (("--identity", "open.key", "--allow", "friend.pub"), "open.key: got mode 0644"),
        (
            ("--bind", "unix:///tmp/s", "--identity", "service.key", "--allow", "friend.pub"),
            "keys for unix:///tmp/s: got a plain stream",
        ),
    ],
)
def test_a_service_does_not_start_with_wrong_keys(
    model: Path, files: Files, options: tuple[str, ...], message: str
) -> None:
    (files.directory / "nobody").write_text("# nobody\n")
    (files.directory / "open.key").write_text(files.secret("service").read_text())
    (files.directory / "open.key").chmod(0o644)
    for name in ("nobody", "service.pub", "friend.pub"):
        (files.directory / name).chmod(0o644)
    bind = () if "--bind" in options else ("--bind", "tcp://*:*")
    given = [_path(files, word) for word in options]
    result = CliRunner().invoke(gpu_service, [str(model), *bind, *given])
    assert isinstance(result.exception, TsqpError)
    assert message in str(result.exception)


def _path(files: Files, word: str) -> str:
    return str(files.directory / word) if word.endswith((".key", ".pub", "nobody")) else word


def test_a_refusal_to_start_is_one_line(model: Path, files: Files) -> None:
    result = run("gpu-service", str(model), "--identity", str(files.secret("service")))
    assert result.returncode == 2
    assert result.stderr == (
        "gpu-service: error: keys: got --identity, expected --identity and --allow, or neither\n"
    )


def test_anyone_can_be_let_in_on_purpose(model: Path) -> None:
    with running_service(model, "tcp://*:*", "--allow-anyone", "--threads", "1") as service:
        port = service.endpoint.rpartition(":")[2]
        with ZmqChannel(f"tcp://127.0.0.1:{port}", timeout_s=60) as channel:
            channel.call(InitRequest())
    assert "lets_in=anyone" in "\n".join(service.log)


def _generate(model: Path, endpoint: str, *options: str) -> tuple[int, str]:
    result = run(
        "tee-runner",
        "generate",
        str(model),
        "--policy",
        "attention-in-tee",
        "--prompt-token-ids",
        "5,6,7",
        "--max-new-tokens",
        "2",
        "--gpu",
        endpoint,
        *options,
    )
    return result.returncode, result.stderr


def test_a_runner_with_the_right_key_generates_and_others_do_not(model: Path, files: Files) -> None:
    def pair(name: str, service: str) -> tuple[str, ...]:
        key, known = str(files.secret(name)), str(files.public(service))
        return ("--identity", key, "--service-key", known)

    with running_service(model, "tcp://127.0.0.1:*", *files.options("friend")) as service:
        status, told = _generate(model, service.endpoint, *pair("friend", "service"))
        assert status == 0, told
        for options, message in (
            (pair("stranger", "service"), "got a refusal of our key"),
            (pair("friend", "stranger"), "the service that holds the key of --service-key"),
            ((), "or --identity and --service-key for one with them"),
        ):
            status, told = _generate(model, service.endpoint, *options)
            assert (status, message in told) == (2, True), told
            assert "waiting_for_service" not in told
    log = "\n".join(service.log)
    assert " connection_refused " in log
    for name in ("service", "friend", "stranger"):
        assert files.secret(name).read_text().split("\n")[1] not in log + told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--identity", "friend.key"),
            "keys: got --identity alone, expected --service-key as well, or neither",
        ),
        (("--service-key", "service.pub"), "--service-key alone, expected --identity as well"),
        (("--identity", "friend.pub", "--service-key", "service.pub"), "friend.pub: got a public"),
        (("--identity", "friend.key", "--service-key", "service.key"), "got a secret key"),
        (
            ("--identity", "friend.key", *(2 * ("--service-key", "service.pub"))),
            "--service-key: got 2 for 1 endpoints, expected one for all of them, or one for each",
        ),
        (
            ("--gpu", "unix:///tmp/s", "--identity", "friend.key", "--service-key", "service.pub"),
            "keys for unix:///tmp/s: got a plain stream",
        ),
    ],
)
def test_a_runner_does_not_start_with_wrong_keys(
    model: Path, files: Files, options: tuple[str, ...], message: str
) -> None:
    gpu = () if "--gpu" in options else ("--gpu", "tcp://127.0.0.1:9")
    given = [_path(files, word) for word in options]
    command = ["generate", str(model), *gpu, *given, "--policy", "attention-in-tee"]
    more = ["--prompt-token-ids", "5,6,7", "--connect-timeout-s", "1"]
    result = CliRunner().invoke(tee_runner, command + more)
    assert isinstance(result.exception, TsqpError)
    assert message in str(result.exception)
    # Nobody was dialled, who would have been blamed for it.
    assert " warning " not in result.output


def test_refusals_do_not_keep_a_service_from_its_work(model: Path, files: Files) -> None:
    with (
        running_service(model, "tcp://127.0.0.1:*", *files.options("friend")) as service,
        ExitStack() as stack,
        _calm(service, files) as friend,
    ):
        for set_up in list(_strangers(files).values()) * 4:
            client = Client(zmq.DEALER, service.endpoint, set_up)
            stack.callback(client.close)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            friend.call(InitRequest())
        assert friend._connection == 0
