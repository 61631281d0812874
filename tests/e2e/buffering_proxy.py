"""A reverse proxy as serverless hosts have it: it passes on whole requests and whole answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_WAIT_S = 30


@dataclass
class BufferingProxy:
    """`cut_every`: of so many requests it drops the connection of one, before or after its answer.

    `passed`, `cut`: how many of each.
    """

    server: tuple[str, int]
    cut_every: int = 0
    url: str = ""
    asked: int = 0
    passed: int = 0
    cut: int = 0


def _handler(proxy: BufferingProxy) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer is two writes: 40 ms each

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                proxy.asked += 1
                cuts = proxy.cut_every and proxy.asked % proxy.cut_every == 0
                proxy.cut += bool(cuts)
                before = cuts and proxy.cut % 2
            if before:
                self.close_connection = True
                return
            try:
                # A connection of its own for each: no request of a client follows another there.
                with closing(HTTPConnection(*proxy.server, timeout=_WAIT_S)) as upstream:
                    upstream.request("POST", self.path, body, dict(self.headers))
                    reply = upstream.getresponse()
                    status, headers, content = reply.status, reply.getheaders(), reply.read()
            except (OSError, HTTPException):
                status, headers, content = 502, [], b""
            if cuts:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "date", "server"):
                    self.send_header(name.title(), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            with lock:
                proxy.passed += 1

    return Handler


@contextmanager
def buffering_proxy(url: str, cut_every: int = 0) -> Iterator[BufferingProxy]:
    """Run one in front of a service with a URL, until the block ends."""
    host, _, port = url.removeprefix("http://").partition(":")
    proxy = BufferingProxy((host, int(port)), cut_every)
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy)) as listening:
        listening.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown()
            thread.join()
