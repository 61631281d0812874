"""Services with keys serve the right key and no other, whatever fails, and say why they start not.

The row has clients with every kind of key ask at once. They are raw sockets, so that nothing of our
own client refuses before the service does.
"""

import logging
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import PropertyMock, patch

import pytest
import zmq
from click.testing import CliRunner

from gpu_side.access import ServiceKeys
from gpu_side.handler import RequestHandler
from gpu_side.transport.zmq_admission import ZapHandler
from protocol.curve import ClientKeys, read_key
from protocol.encoding import encode_request
from protocol.errors import EndpointError, TsqpError
from protocol.messages import InitRequest
from protocol.zmq_channel import ZmqChannel
from tests.faults.row import Found, Row, note
from tests.kit.demo import DEMO
from tests.kit.lie import MaliciousService, operators_of
from tests.kit.model import make_model
from tests.kit.rows import each_row
from tests.kit.service import CALM_S, Service, running_service
from tests.kit.wire import inline
from tsqp.cli.gpu_service import command as gpu_service
from tsqp.cli.tee_runner import command as tee_runner
from tsqp.key_files import new_key_pair, public_key

STATES = ("up", "dead", "silent")
CLIENTS = ("no key", "NULL", "PLAIN", "random", "revoked", "another service", "right")
# As long as a client waits that is not served; one that is waits for milliseconds.
_UNSERVED_S, _SERVED_S = 0.3, 20.0


def disable_keeper(service: MaliciousService, state: str, stack: ExitStack) -> None:
    """Have what looks at keys die at the first one, or never answer, until the stack ends."""
    handler, closing = service.listener._zap_handler, threading.Event()
    assert handler is not None

    def fail(_: list[bytes]) -> list[bytes]:
        if state == "dead":
            raise RuntimeError("died")
        closing.wait()
        return [b""]

    stack.enter_context(patch.object(handler, "_answer", fail))
    # A listener that sees its handler dead ends. This one does not see it: ZeroMQ itself has to let
    # no client in.
    unseen = PropertyMock(return_value=False)
    stack.enter_context(patch.object(ZapHandler, "failed", unseen, create=True))
    stack.callback(closing.set)


def served(operators: RequestHandler, state: str, stack: ExitStack) -> dict[str, bool]:
    """Have a client of every kind ask, and say which of them got an answer."""
    own, right, revoked, random, unknown = (zmq.curve_keypair() for _ in range(5))
    keys = ServiceKeys(own[1], frozenset({right[0], revoked[0]}))
    service = stack.enter_context(MaliciousService(operators, keys=keys))
    if state != "up":
        disable_keeper(service, state, stack)
    service.listener.allow(frozenset({right[0]}))
    pairs = {"random": random, "revoked": revoked, "another service": right, "right": right}
    context, dealers = stack.enter_context(zmq.Context()), {}
    for kind in CLIENTS:
        dealers[kind] = dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.linger = 0
        if kind == "PLAIN":
            dealer.plain_username = dealer.plain_password = b"admin"
        elif kind != "NULL":
            dealer.curve_serverkey = (unknown if kind == "another service" else own)[0]
            pair = pairs.get(kind, (b"0" * 40, b"0" * 40))
            dealer.curve_publickey, dealer.curve_secretkey = pair
        dealer.connect(service.endpoint)
        # Without a connection it stays in the queue.
        dealer.send_multipart(encode_request(InitRequest(), 1, 10_000), zmq.NOBLOCK)
    # The one that is to be served first: meanwhile the others have time to get in, too.
    right_s = _SERVED_S if state == "up" else _UNSERVED_S
    found = {"right": bool(dealers.pop("right").poll(int(1000 * right_s)))}
    until = time.monotonic() + _UNSERVED_S
    for kind, dealer in dealers.items():
        found[kind] = bool(dealer.poll(max(0, int(1000 * (until - time.monotonic())))))
    return found


@Row(
    "access",
    "access",
    "no key, NULL, PLAIN, random, revoked, another service's key, right key, with ZAP up, dead and"
    " silent: the full matrix, again and again",
    "only the right key is ever served",
    short=len(STATES) * len(CLIENTS),
    long=20 * len(STATES) * len(CLIENTS),
)
def access(count: int, full: bool) -> Found:
    cells = wrongly = rightly = rounds = 0
    operators = operators_of(DEMO)
    # A ZAP handler that dies says so with a traceback.
    logging.getLogger("gpu_service").setLevel(logging.CRITICAL)
    try:
        while cells < count:
            rounds += 1
            for state in STATES:
                with ExitStack() as stack:
                    found = served(operators, state, stack)
                cells += len(found)
                for kind, got in found.items():
                    due = kind == "right" and state == "up"
                    rightly += got and due
                    wrongly += got and not due
                    if got != due:
                        note(f"{kind}, ZAP {state}: got served {got}")
    finally:
        logging.getLogger("gpu_service").setLevel(logging.NOTSET)
    return Found(
        {
            "clients": len(CLIENTS),
            "cells": cells,
            "wrongly served": wrongly,
            "right key served with ZAP up": f"{rightly} of {rounds}",
        },
        {"none wrongly served": not wrongly, "the right one is": rightly == rounds},
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key files: of the service, and of two clients; and a model."""
    directory = tmp_path_factory.mktemp("keys")
    for name in ("service", "friend", "other"):
        new_key_pair(directory / name)
        (directory / f"{name}.pub").chmod(0o644)
    make_model(directory / "model")
    return directory


def said(service: Service, text: str) -> str:
    """Read the log up to the first line with a text in it, and return that line."""
    while text not in (line := service.process.stderr.readline()):
        assert line, f"the service has ended:\n{service.log}"
        service.log.append(line)
    service.log.append(line)
    return line


# A greeting of ZMTP 1.0 and 2.0, which know of no keys, and a request in a frame of each.
_REQUEST = inline("Init", {})
OLD = (
    b"\x01\x00\x01\x01\xff" + (len(_REQUEST) + 1).to_bytes(8, "big") + b"\0" + _REQUEST,
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x03\0\0\x01\0" + bytes([0, len(_REQUEST)]) + _REQUEST,
)


def test_a_list_of_keys_from_its_first_client_to_its_last(files: Path) -> None:
    path, public = files / "allow", public_key(str(files / "service.pub"))

    def allow(*names: str) -> None:
        path.write_text("".join((files / f"{name}.pub").read_text() for name in names))
        path.chmod(0o600)

    def connect(name: str) -> ZmqChannel:
        keys = ClientKeys(read_key(files / f"{name}.key", secret=True), public)
        return ZmqChannel(service.endpoint, timeout_s=60, keys=keys, heartbeat_timeout_s=CALM_S)

    allow("friend", "other")
    keys = ("--identity", str(files / "service.key"), "--allow", str(path), "--threads", "1")
    with (
        running_service(files / "model", "tcp://127.0.0.1:*", *keys) as service,
        connect("friend") as friend,
        connect("other") as other,
    ):
        host, port = service.endpoint.removeprefix("tcp://").split(":")
        for greeting in OLD:
            with socket.create_connection((host, int(port)), timeout=30) as client:
                client.sendall(greeting)
                with suppress(ConnectionResetError):
                    assert b"success" not in b"".join(iter(lambda: client.recv(65536), b""))
        for one in (friend, other):
            one.call(InitRequest())
        # Without a way to read the list, all stays as it was.
        for damage in (
            lambda: path.write_text("nonsense\n"),
            lambda: path.chmod(0o622),
            allow,  # an editor that saves nothing, or a disk without room
            path.unlink,
        ):
            damage()
            service.process.send_signal(signal.SIGHUP)
            said(service, " error allow_list_unchanged ")
        other.call(InitRequest())
        allow("friend")
        for _ in range(20):
            service.process.send_signal(signal.SIGHUP)
        assert "keys=1" in said(service, " allow_list ")
        # Connections end though no client uses them; the friend's comes back.
        for one in (friend, other):
            while not one._lost:
                assert one._events.poll(30_000), "a client stays connected"
                one._note_events()
        with pytest.raises(EndpointError, match="got a refusal of our key"):
            other.call(InitRequest())
        for _ in range(2):  # when the second is answered, the loop has seen the list
            friend.call(InitRequest())
        # And the way back.
        allow("friend", "other")
        service.process.send_signal(signal.SIGHUP)
        said(service, " allow_list keys=2")
        other.call(InitRequest())
        assert service.stop() == 0
    log = "\n".join(service.log)
    assert " connection_refused " in log
    assert " connections_cut " in log
    assert "Traceback" not in log
    for name in ("service", "friend", "other"):
        assert (files / f"{name}.key").read_text().split("\n")[1] not in log


_SERVICE = ("--bind", "tcp://*:*")
_RUNNER = ("--gpu", "tcp://127.0.0.1:9")
_BOTH = ("--identity", "service.key", "--allow", "friend.pub")


@each_row(
    ("options", "message"),
    [
        (_SERVICE, "--bind tcp://*:*: got an address that other machines reach"),
        ((*_SERVICE, *_BOTH[:2]), "keys: got --identity, expected --identity and --allow, or"),
        ((*_SERVICE, *_BOTH[2:]), "keys: got --allow, expected --identity and --allow"),
        ((*_SERVICE, *_BOTH, "--allow-anyone"), "got --identity and --allow and --allow-anyone"),
        # What would not be used.
        ((*_SERVICE, *_BOTH, "--attest", "simulated"), "--attest: got other options of keys"),
        ((*_SERVICE, *_BOTH, "--http-tokens", "t.key"), "--http-tokens: got --bind tcp://*:*"),
        ((*_SERVICE, *_BOTH, "--http-cert", "t.key"), "--http-cert: got --bind tcp://*:*"),
        ((*_RUNNER, "--identity", "friend.key"), "keys: got --identity alone, expected"),
        ((*_RUNNER, "--service-key", "service.pub"), "--service-key alone, expected --identity"),
    ],
)
def test_a_program_does_not_start_with_wrong_keys(
    files: Path, options: tuple[str, ...], message: str
) -> None:
    model, suffixes = str(files / "model"), (".key", ".pub")
    given = [str(files / one) if one.endswith(suffixes) else one for one in options]
    is_service = "--bind" in options
    prompt = ("--policy", "attention-in-tee", "--prompt-token-ids", "5", "--connect-timeout-s", "1")
    command = [model] if is_service else ["generate", model, *prompt]
    result = CliRunner().invoke(gpu_service if is_service else tee_runner, [*command, *given])
    assert isinstance(result.exception, TsqpError)
    assert message in str(result.exception)
    assert " warning " not in result.output  # no service was dialled, and blamed for it
