"""The proxy does what it is told: otherwise a passed fault test says nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from tests.kit.proxy import HOLD, SWALLOW, Fault, MessageCounter, Proxy


@contextmanager
def echo_service() -> Iterator[str]:
    """Send back whatever comes, on every connection."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with echo_service() as endpoint, Proxy(endpoint) as made:
        yield made


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.endpoint.removeprefix("tcp://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := client.recv(size - len(data))):
        data += part
    return data


def stays_silent(client: socket.socket, for_s: float = 0.2) -> bool:
    client.settimeout(for_s)
    try:
        return client.recv(1) is None
    except TimeoutError:
        return True
    finally:
        client.settimeout(10)


def is_reset(proxy: Proxy) -> bool:
    """Connect, and say whether that, or the first look at what comes, ends in a reset."""
    try:
        with connect(proxy) as client:
            client.recv(1)
    except ConnectionResetError:
        return True
    return False


def test_without_faults_bytes_pass_unchanged(proxy: Proxy) -> None:
    sent = bytes(range(256)) * 4096
    with connect(proxy) as client:
        threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
        assert receive(client, len(sent)) == sent
    assert proxy.bytes == {"to_service": len(sent), "to_client": len(sent)}
    assert proxy.connections == 1


def test_the_end_of_a_stream_passes(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 100) == b"last words"


@pytest.mark.parametrize(
    "fault", [Fault(latency_s=0.15), Fault(bytes_per_s=200), Fault(slice_bytes=3)]
)
def test_slow_faults_change_no_byte(proxy: Proxy, fault: Fault) -> None:
    proxy.set(to_service=fault)
    sent = bytes(range(40))
    with connect(proxy) as client:
        began = time.monotonic()
        client.sendall(sent)
        assert receive(client, len(sent)) == sent
    if fault.slice_bytes is None:
        assert time.monotonic() - began >= 0.15


def test_held_bytes_come_when_it_heals(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.set(to_client=HOLD)
        client.sendall(b"abc")
        assert stays_silent(client)
        proxy.set()
        assert receive(client, 3) == b"abc"


def test_swallowed_bytes_never_come(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.set(to_service=SWALLOW)
        client.sendall(b"abc")
        assert stays_silent(client)
        until = time.monotonic() + 30
        while proxy.bytes["to_service"] < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        proxy.set()
        client.sendall(b"def")
        assert receive(client, 3) == b"def"


def test_reset_after_a_number_of_bytes(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.when("to_client", proxy.reset, bytes=5)
        client.sendall(b"0123456789")
        with pytest.raises(ConnectionResetError):
            receive(client, 10)
    assert proxy.bytes["to_client"] == 5


def test_half_open_neither_answers_nor_hangs_up(proxy: Proxy) -> None:
    with connect(proxy) as client, connect(proxy) as other:
        client.sendall(b"abc")
        assert receive(client, 3) == b"abc"
        proxy.half_open()
        client.sendall(b"def")
        assert stays_silent(client)
        assert stays_silent(other)
        with connect(proxy) as later:
            later.sendall(b"ghi")
            assert receive(later, 3) == b"ghi"


def test_refused_connections_are_reset_until_they_are_taken_again(proxy: Proxy) -> None:
    proxy.refuse()
    assert is_reset(proxy)
    proxy.refuse(False)
    with connect(proxy) as client:
        client.sendall(b"abc")
        assert receive(client, 3) == b"abc"


def test_no_service_behind_it_is_a_reset(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    proxy.retarget(f"tcp://127.0.0.1:{port}")
    assert is_reset(proxy)


def test_messages_of_zeromq_are_counted_and_trigger(proxy: Proxy) -> None:
    context = zmq.Context()
    service, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for one in (service, client):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, 10_000)
        port = service.bind_to_random_port("tcp://127.0.0.1")
        proxy.retarget(f"tcp://127.0.0.1:{port}")
        triggered = threading.Event()
        proxy.when("to_service", triggered.set, messages=3)
        client.connect(proxy.endpoint)
        for number in range(3):
            assert not triggered.is_set()
            frames = [b"header", bytes(1000 * number), b""]
            client.send_multipart(frames)
            assert service.recv_multipart()[1:] == frames
        assert triggered.wait(10)
        assert proxy.messages == {"to_service": 3, "to_client": 0}
    finally:
        client.close()
        service.close()
        context.term()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_are_counted_however_they_are_cut(size: int) -> None:
    frames = [
        b"\x04\x06\x05READY",  # a command of the handshake
        b"\x01\x03abc\x00\x02de",  # a message of two frames
        b"\x02" + (300).to_bytes(8, "big") + bytes(300),
        b"\x00\x00",  # an empty message
        b"\x04\x0a\x07MESSAGE\x00\x01",  # encrypted
    ]
    stream = bytes(64) + b"".join(frames)
    counter = MessageCounter()
    for start in range(0, len(stream), size):
        data = stream[start : start + size]
        while (place := counter.feed(data)) is not None:
            data = data[place:]
    assert counter.count == 4


def test_over_a_unix_socket_bytes_pass_and_are_held(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        server.bind(str(tmp_path / "service"))
        server.listen()
        proxy = stack.enter_context(Proxy(f"unix://{tmp_path / 'service'}"))
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.settimeout(10)
        client.connect(proxy.endpoint.removeprefix("unix://"))
        service = stack.enter_context(server.accept()[0])
        client.sendall(b"asked")
        assert receive(service, 5) == b"asked"
        proxy.set(HOLD, HOLD)
        service.sendall(b"answered")
        assert stays_silent(client)
        proxy.set()
        assert receive(client, 8) == b"answered"
        proxy.half_open()
        assert service.recv(1) == b""
        assert stays_silent(client)
    assert not Path(proxy.endpoint.removeprefix("unix://")).exists()
