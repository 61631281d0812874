"""Seals requests to a server's key as a client does, and opens what comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.sealed_bodies import CONTENT_TYPE, SALT_BYTES, Direction, seal_secret
from tee_side.serve.sealed_heads import RequestHead, ResponseHead
from tee_side.serve.sealing import Sealing
from tests.unit.tee_side.serve.fakes import Connection, Reply, connection

NOW_S = 1_764_000_000
KEY = HpkeKey(hybrid=False)
JSON = {"content-type": b"application/json"}
OUTSIDE = {"content-type": CONTENT_TYPE}


def clock() -> float:
    return float(NOW_S)


class SealedRequest(NamedTuple):
    """What a client sends, in parts: the secret, the head, chunks of the body."""

    path: str
    secret: bytes
    parts: list[bytes]

    def ask(self, path: str = "", chunk: int = 2**30) -> Connection:
        body = b"".join(self.parts)
        return connection("POST", path or self.path, body, OUTSIDE, chunk)

    def opened(self, reply: Reply) -> Reply:
        """Open an answer. Raises ProtocolError."""
        assert reply.status == 200
        assert reply.headers["content-type"] == CONTENT_TYPE
        data = b"".join(reply.writes)
        opening = Direction(b"response", data[:SALT_BYTES], self.secret)
        head, *rest = opening.open(data[SALT_BYTES:])
        opening.close()
        read = ResponseHead.decode(head)
        headers = {name: value.decode() for name, value in read.headers.items()}
        return Reply(read.status, headers, [piece for piece in rest if piece])


def sealed(
    path: str,
    *pieces: bytes,
    method: str = "POST",
    headers: dict[str, bytes] = JSON,
    key: HpkeKey = KEY,
    target: bytes | None = None,
    head: bytes | None = None,
    time: int = NOW_S,
) -> SealedRequest:
    """Seal a request, each piece in chunks of its own. `head`: in place of the one of the rest."""
    secret, front = seal_secret(key.suite, key.public, target or path.encode())
    direction = Direction(b"request", front, secret)
    first = head or RequestHead(time=time, method=method, headers=headers).encode()
    parts = [front, direction.seal(first)]
    pieces = pieces or (b"",)
    parts += [direction.seal(one) for one in pieces[:-1]]
    return SealedRequest(path, secret, [*parts, direction.seal(pieces[-1], final=True)])


async def send(app: Sealing, to: Connection) -> Reply:
    await app(to.scope, to.receive, to.send)
    return to.reply


def sealing(app: Any, **changes: Any) -> Sealing:
    return Sealing(app, **({"key": KEY, "clock": clock} | changes))
