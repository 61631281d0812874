"""A server whose every secret is known, and which fails; a thread of its process is the client.

Prompts and answers, as text and as token ids; what the model's layers read; keys of pads, of the
bank, and the vectors that results are verified with. `PLACES` are where they are looked for.
"""

import http.client
import json
import logging
import math
import os
import random
import re
import signal
import socket
import string
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgpack
import numpy as np
import torch

from protocol.channel import NOT_PUT
from protocol.encoding import decode_reply
from protocol.model.checkpoint import EMBEDDING, Checkpoint
from protocol.stream import StreamChannel
from tee_side.chat.template import TEMPLATE_FILES
from tee_side.engine.engine import Engine
from tee_side.engine.tokenizer import Tokenizer
from tee_side.protect.pads.store import PadStore
from tee_side.protect.verification import ExactCheck
from tee_side.remote import call as remote_call
from tee_side.remote.call import CallPlan
from tee_side.remote.services.member import Member
from tee_side.serve import answers, background, completions, exchange
from tee_side.serve.audit_log import AuditReader, open_log
from tee_side.serve.keys import PREFIX, ApiKey, hash_of
from tests.kit.service import until
from tsqp.cli.serve import serve
from tsqp.key_files import AUDIT_KEY
from tsqp.lab.research.float_check import FloatCheck
from tsqp.run import load
from tsqp.run.process import configure

PLACES = ("runner log", "service log", "metrics", "errors", "disk", "shared memory")
KINDS = {"prompt", "answer", "token ids", "activation", "key"}
FAULTS = (
    "lost connection",
    "lost connection",
    "cut request",
    "garbled request",
    "request with a secret for a field's name",
    "cut reply",
    "garbled reply",
    "wrong number",
    "no reply",
)
_SHARED = Path("/dev/shm")
_ANSWER_CHARACTERS = 8
_WINDOW = 6
_HEAD_BYTES, _BITS = 4, 20
_MAX_FILE_BYTES = 64 * 1024 * 1024


class Canaries:
    """What is looked for: patterns by kind. Text is compared without spaces."""

    def __init__(self) -> None:
        self.patterns: list[tuple[str, bytes]] = []

    def add(self, kind: str, *contents: bytes) -> None:
        for content in contents:
            self.patterns += [(kind, content), (kind, content.hex().encode())]

    def add_ids(self, ids: Sequence[int]) -> None:
        last = len(ids) - _WINDOW
        for start in {0, last // 2, last} if last >= 0 else set():
            window = list(ids[start : start + _WINDOW])
            self.patterns.append(("token ids", torch.tensor(window).numpy().tobytes()))
            self.patterns.append(("token ids", ",".join(map(str, window)).encode()))

    def add_activation(self, row: torch.Tensor) -> None:
        """Look for the beginning of a row, in its own bytes and as people print it."""
        first = row[:4].contiguous()
        if bool(first.any()):
            self.patterns.append(("activation", first.view(torch.uint8).numpy().tobytes()))
            if first.is_floating_point():
                text = ",".join(f"{value:.4f}" for value in first.tolist())
                self.patterns.append(("activation", text.encode()))

    def found_in(self, content: bytes) -> list[str]:
        """Return the kinds of what stands there: one pass over it for all patterns."""
        content += bytes(2 * _HEAD_BYTES) + content.translate(None, b" \n\t\r")
        heads: dict[bytes, list[int]] = {}
        for place, (_, pattern) in enumerate(self.patterns):
            heads.setdefault(pattern[:_HEAD_BYTES], []).append(place)
        may_begin = np.zeros(1 << _BITS, dtype=np.bool_)
        may_begin[_hashed(b"".join(heads))] = True
        found = set()
        for offset in range(_HEAD_BYTES):
            for at in np.flatnonzero(may_begin[_hashed(content, offset)]).tolist():
                start = offset + at * _HEAD_BYTES
                for place in heads.get(content[start : start + _HEAD_BYTES], ()):
                    if content.startswith(self.patterns[place][1], start):
                        found.add(place)
        return [self.patterns[place][0] for place in sorted(found)]


def _hashed(content: bytes, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return `_BITS` bits for every four bytes from there on."""
    whole = (len(content) - offset) // _HEAD_BYTES
    heads = np.frombuffer(content, np.uint32, whole, offset)
    return (heads * np.uint32(2654435761)) >> np.uint32(32 - _BITS)


class Faults:
    """Makes one request of a generation go wrong. `count`: its requests so far.

    `made`: how often, by policy, fault and which request of its generation, from 1.
    """

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self.made: Counter[tuple[str, str, int]] = Counter()
        self.arm("", "", -1)

    def arm(self, policy: str, fault: str, at: int, secret: str = "") -> None:
        """Let the request with this number, counted from now on, go wrong; "" for none."""
        self._which, self._secret = (policy, fault, at), secret
        self._fault, self.count = fault, 0
        self._on_reply: tuple[Any, int] | None = None

    def install(self) -> None:
        """Stand between the runner and its transport."""
        faults, send, receive = self, StreamChannel._send, StreamChannel._receive
        put, take = StreamChannel._put, StreamChannel._take

        def _put(channel: Any, *request: Any) -> int:
            """Leave the request that a fault is meant for, and those before it, to `_send`."""
            place = NOT_PUT if faults._fault else put(channel, *request)
            faults.count += place != NOT_PUT
            return place

        def _take(channel: Any, *request: Any) -> None:
            if faults._on_reply is None:
                take(channel, *request)

        def _send(channel: Any, method: str, frames: Any, *more: Any) -> int:
            fault = ""
            if method not in ("Init", "Health"):
                faults.count += 1
                fault = faults._fault if faults.count == faults._which[2] else ""
            if "request" in fault:
                frames = faults._changed_request(*frames)
            elif fault not in ("", "lost connection"):
                faults._on_reply = channel, channel._last_id
            sent = send(channel, method, frames, *more)
            if fault == "lost connection":
                faults._done()
                channel._socket.shutdown(socket.SHUT_RDWR)
            return sent

        def _receive(channel: Any, deadline: float) -> Any:
            received = receive(channel, deadline)
            if received is None or faults._on_reply is None:
                return received
            frames, when = received
            # Of several that are on their way, the one to the request that was counted.
            if faults._on_reply != (channel, decode_reply(frames).request_id):
                return received
            changed = faults._changed_reply(*frames)
            return changed and ([memoryview(frame) for frame in changed], when)

        for replaced in (_put, _take, _send, _receive):
            setattr(StreamChannel, replaced.__name__, replaced)

    def _done(self) -> str:
        """Count the fault, which is over, and return it."""
        self.made[self._which] += 1
        self._fault, self._on_reply = "", None
        return self._which[1]

    def _flipped(self, frame: bytes, bits: int) -> bytearray:
        flipped = bytearray(frame)
        flipped[self._choose.randrange(len(frame))] ^= bits
        return flipped

    def _changed_request(self, header: bytes, *rest: bytes) -> list[bytes]:
        fault = self._done()
        if fault == "cut request":
            return [header, *(bytes(frame)[:-1] for frame in rest)]
        if fault == "garbled request":
            return [bytes(self._flipped(header, 0x55)), *rest]
        fields = msgpack.unpackb(header)
        fields["request"][self._secret[:40]] = self._secret[:100]
        return [msgpack.packb(fields), *rest]

    def _changed_reply(self, *frames: bytes) -> list[bytearray] | None:
        fault = self._done()
        if fault == "no reply":
            return None
        *rest, last = map(bytearray, frames)
        if fault == "cut reply":
            return [*rest, last[:-1]]
        if fault == "garbled reply":
            return [self._flipped(rest[0], 0x55), *rest[1:], last]
        return [*rest, self._flipped(last, 0x11)]


# What a block of prompts runs under.
POLICIES = ("shielded", "dealt", "published", "shielded with a bank")
# Where the server's own code fails, in the order in which it is made to.
CRASHES = ("before the engine", "in an answer", "on the event loop", "in the engine's thread")
NEW_TOKENS, LONG_TOKENS = 2, 16
# Of the long answer: behind its first few tokens, whatever the policy.
LONG_FAULT_AT = 40
# What a system says ends in an error of which the library's own words hold the prompt.
_TEMPLATE = """\
{% for m in messages %}{% if m.role == "system" %}{{ raise_exception(m.content) }}{% endif %}
{{ m.content }} {% endfor %}"""
_WAIT_S = 60.0
Body = Mapping[str, Any]
log = logging.getLogger("tee_side")


def wrong_requests(word: str, own: Body) -> Iterator[tuple[str, str, Body | bytes, Body]]:
    """Yield requests that are refused and hold a word: method, path, body, headers."""
    turn, right = {"role": "user", "content": word}, {"prompt": word}
    schema = {"type": "json_schema", "json_schema": {"name": word, "schema": {"type": word}}}
    path, chat = "/v1/completions", "/v1/chat/completions"
    changes: dict[str, Any] = {
        # The name of a field is repeated, so that a client finds its mistake; no value is.
        **dict.fromkeys(("no_such_field", "model", "temperature", "guided_json"), word),
        "prompt": {word: word},
        "stop": [word * 20],
        "logit_bias": {word: 1},
        "guided_grammar": f"start: {word}",
        "guided_regex": f"({word}",
        "cache_salt": word * 30,
    }
    for name, value in changes.items():
        yield "POST", path, right | {name: value}, own
    for fields in ({"response_format": schema}, {"tools": [{word: word}]}, {"tool_choice": word}):
        yield "POST", chat, {"messages": [turn]} | fields, own
    for content in ({"role": word}, {"role": "system"}, {"content": [{word: word}]}):
        yield "POST", chat, {"messages": [turn | content]}, own
    yield "POST", "/v1/embeddings", {"input": word, "dimensions": word}, own
    yield "POST", path, {"prompt": f"{word} " * 40}, own
    yield "POST", "/detokenize", {"tokens": [word]}, own
    yield "POST", path, f'{{"prompt": "{word}'.encode(), own
    yield "POST", path, word.encode(), {**own, "content-type": f"text/{word}"}
    yield "POST", path, right, {"authorization": f"Bearer {word}"}
    yield "POST", f"{path}?{word}={word}", right, {"x-correlation-id": word}
    yield "GET", f"/v1/models/{word}?{word}={word}", b"", {**own, "cookie": f"{word}={word}"}
    yield "DELETE", path, word.encode(), {**own, word: word}
    yield "POST", path, word.encode(), {**own, "content-length": "9" * 12}


def right_requests(text: str, ids: Sequence[int]) -> list[tuple[str, Body]]:
    """Return requests that are answered, to every endpoint that takes a prompt."""
    turns = [{"role": "user", "content": text}]
    unused = dict.fromkeys(("user", "metadata", "prompt_cache_key", "request_id"), text)
    few = {"max_tokens": 3, "cache_salt": text[:40], "stop": text[:20], **unused}
    return [
        ("/v1/completions", {"prompt": text, "echo": True, "logprobs": 2, "n": 2, **few}),
        ("/v1/completions", {"prompt": list(ids), "stream": True, **few}),
        ("/v1/completions", {"prompt": text, "max_tokens": 9, "guided_choice": [text[:9]]}),
        ("/v1/chat/completions", {"messages": turns, "logprobs": True, "stream": True, **few}),
        ("/v1/embeddings", {"input": [text, text[:12]], "user": text}),
        ("/tokenize", {"content": text, "with_pieces": True}),
        ("/tokenize", {"messages": turns, "return_token_strs": True}),
        ("/detokenize", {"tokens": list(ids)}),
    ]


class Served:
    """Asks a server of this process, and keeps what is secret of it.

    `errors`: what was said to clients, but for right answers.
    """

    def __init__(self, folder: Path, seed: int, gpu: Sequence[str], metrics: Sequence[str]) -> None:
        self.folder, self.gpu, self._metrics = folder, gpu, metrics
        self.choose = random.Random(seed)
        self.faults = Faults(self.choose)
        self.tokenizer = Tokenizer(folder / "model")
        self.canaries = self._previous = Canaries()
        # What is told at the end. `requests`: how many a generation takes, by policy.
        names = ("hits", "ended", "requests", "kinds", "refused", "answered", "crashed")
        self.told: dict[str, Counter[str]] = {name: Counter() for name in names}
        self.armed: Counter[str] = Counter()
        self.patterns = 0
        self.policy = self.address = self.crash = ""
        self.key = f"{PREFIX}{random.Random(seed).randbytes(24).hex()}"
        self.own = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        self.log = folder / "logs" / "runner.log"
        self.errors: list[bytes] = []
        # How far the files are read, and what is of others.
        self._read: Counter[Path] = Counter()
        self._shared = set(_SHARED.iterdir())
        self.sampled: list[int] = []
        # Services that are asked no more, after what was done to their replies here.
        self.quarantined: list[Member] = []
        # Keys are in their own files, rightly; nothing else is.
        self._audit, self._audit_key = folder / "work" / "audit", folder / "audit.key"
        self._keys = folder / "keys.toml"
        allowed = hash_of(self.key)
        entry = ApiKey(name="canary", sha256=allowed, concurrent=8, tokens_per_minute=10**9)
        self._keys.write_text(entry.entry(), encoding="utf-8")
        self._audit_key.write_text(AUDIT_KEY.encode(random.Random(seed + 1).randbytes(32)))
        for path in (self._keys, self._audit_key):
            path.chmod(0o600)
        (folder / "model" / TEMPLATE_FILES["default"]).write_text(_TEMPLATE, encoding="utf-8")

    def fetch(self, url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=5) as answer:
            content: bytes = answer.read()
        return content

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield what is new everywhere that the secrets may not be."""
        for path in sorted((self.folder / "logs").iterdir()):
            with path.open("rb") as file:
                # A little from before: a line may have been written in two halves.
                file.seek(max(0, self._read[path] - 4096))
                content = file.read()
                self._read[path] = file.tell()
            yield "runner log" if path == self.log else "service log", content
        for url in self._metrics:
            yield "metrics", self.fetch(url)
        yield "errors", b"\n".join(self.errors)
        self.errors.clear()
        for name in ("work", "home", "tmp", "bank"):
            for path in sorted((self.folder / name).rglob("*")):
                if path.is_file() and path.name != "bank.key":
                    yield "disk", path.read_bytes()
        for path in set(_SHARED.iterdir()) - self._shared:
            with suppress(OSError):
                if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                    yield "shared memory", path.read_bytes()

    def search(self) -> None:
        """Look everywhere for what was secret since the last time, and count it as a hit.

        And in logs for what was secret before: a line may be written long after what it is about.
        """
        for place, content in self.contents():
            kinds = self.canaries.found_in(content)
            if place in PLACES[:2]:
                kinds += self._previous.found_in(content)
            self.told["hits"].update(f"{kind} in {place}" for kind in kinds)
        self.patterns += len(self.canaries.patterns)
        self.told["kinds"].update(kind for kind, _ in self.canaries.patterns)

    def forget(self) -> None:
        """Begin a new block of secrets, with those that all have in common."""
        self._previous, self.canaries = self.canaries, Canaries()
        for row in Checkpoint(self.folder / "model").rows(EMBEDDING, 32, 128):
            self.canaries.add_activation(row)
        self.canaries.add("key", self.key.encode(), self._audit_key.read_bytes().strip())

    def found(self) -> dict[str, Any]:
        told = {name: dict(counts) for name, counts in self.told.items()}
        faults = [[*which, times] for which, times in self.faults.made.items()]
        patterns, planted = self.patterns, self._plant()
        return {**told, "faults": faults, "patterns": patterns, "planted": planted}

    def _plant(self) -> dict[str, bool]:
        """Put a secret into each place, and say of each whether it is found there."""
        self.forget()
        ids = self.tokenizer.encode("an answer that no one else knows")
        row, key = torch.arange(1.5, 9.5), b"\x01\x9f\x33" * 10
        self.canaries.add("prompt", b"qvxzkjwphm")
        self.canaries.add_ids(ids)
        self.canaries.add("key", key)
        self.canaries.add_activation(row)
        shared = _SHARED / f"tsqp-canary-{os.getpid()}"
        content = torch.tensor(ids).numpy().tobytes()

        def append() -> None:
            with (self.folder / "logs" / "service-0.log").open("a", encoding="utf-8") as file:
                file.write(f"ids={ids[:9]}\n")

        puts: dict[str, Callable[[], object]] = {
            "runner log": lambda: log.warning("x", extra={"fields": {"y": "qvxz kjw phm"}}),
            "service log": append,
            "metrics": lambda: setattr(self, "fetch", lambda _: b'x="%s"' % str(row).encode()),
            "errors": lambda: self.errors.append(key.hex().encode()),
            "disk": lambda: (self.folder / "tmp" / "x").write_bytes(content),
            "shared memory": lambda: shared.write_bytes(row.numpy().tobytes()),
        }
        self.search()
        found: dict[str, bool] = {}
        try:
            for place in PLACES:
                self.told["hits"].clear()
                puts[place]()
                self.search()
                found[place] = any(hit.endswith(f" in {place}") for hit in self.told["hits"])
        finally:
            shared.unlink(missing_ok=True)
        return found

    def prompt(self) -> tuple[str, list[int]]:
        """Return another prompt, which is looked for from now on, and its token ids."""
        words = ["".join(self.choose.choices(string.ascii_lowercase, k=10)) for _ in range(3)]
        text = " ".join(words)
        ids = self.tokenizer.encode(text)
        self.canaries.add("prompt", *(word.encode() for word in words))
        self.canaries.add_ids(ids)
        return text, ids

    def next_fault(self) -> tuple[str, int]:
        """Return what is to go wrong at which request: in time every fault at every one."""
        requests = self.told["requests"][self.policy]
        if not requests:
            return "", 0  # The first shows how many there are.
        number = self.armed[self.policy]
        self.armed[self.policy] += 1
        # Both go on by one, and the request by one more when they would begin again together.
        fault = FAULTS[number % len(FAULTS)]
        again = number // math.lcm(len(FAULTS), requests)
        if fault == "no reply" and number // len(FAULTS) % 8 > 0:
            fault = "wrong number"  # each takes its whole deadline
        return fault, 1 + (number + again) % requests

    def serve_a_block(self, count: int, number: int) -> None:
        """Serve in this thread, and ask in another, which ends the server."""
        self.policy = POLICIES[number % len(POLICIES)]
        before = len(self.log.read_text(encoding="utf-8"))
        policy, _, bank = self.policy.partition(" with a ")
        arguments = [
            *(str(self.folder / "model"), "--port", "0", "--policy", policy, "--prefix-reuse"),
            *("--api-keys", str(self._keys), "--request-timeout-s", "0.5", "--speculative=ngram"),
            *("--audit-log", str(self._audit), "--audit-key", str(self._audit_key)),
            *("--dealer-in-the-clear", f"--gpu={self.gpu[0]}"),
            *(f"--{'dealer' if policy == 'dealt' else 'gpu'}={one}" for one in self.gpu[1:]),
        ]
        if bank:
            arguments += ["--bank", str(self.folder / "bank" / "bank"), "--bank-key-beside-bank"]
            arguments += ["--when-out", "wait"]
        with ThreadPoolExecutor(1) as pool, suppress(KeyboardInterrupt, click.Abort):
            asking = pool.submit(self._ask_a_block, count, before)
            asking.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGINT))
            serve.main(arguments, standalone_mode=False)
        asking.result()
        self.search()

    def _ask_a_block(self, count: int, log_begins: int) -> None:
        """Ask in every way, and look around; the server has died then."""
        ready = re.compile(r" ready: http://(\S+)/v1\n")
        until(lambda: ready.search(self.log.read_text(encoding="utf-8"), log_begins))
        self.address = ready.findall(self.log.read_text(encoding="utf-8"))[-1]
        self._until_healthy()
        word = self.prompt()[0].split(" ")[0]
        for number, (method, path, body, headers) in enumerate(wrong_requests(word, self.own)):
            refused = 400 <= self._ask(method, path, body, headers) < 500
            self.told["refused"][str(number)] += refused
        self._bad_protocol(word)
        text, ids = self.prompt()
        for number, (path, fields) in enumerate(right_requests(text, ids)):
            self.told["answered"][f"{path} {number}"] += self._post(path, fields) == 200
        for path in ("/metrics", "/version", "/health", "/tokenizer_info", "/v1/models"):
            self.told["answered"][path] += self._ask("GET", path, b"", self.own) == 200
        for _ in range(count):
            self._with_fault(*self.next_fault(), NEW_TOKENS)
        for fault in ("", FAULTS[count % len(FAULTS)]):
            self._with_fault(fault, LONG_FAULT_AT, LONG_TOKENS)
        for crash in CRASHES:
            self._until_healthy()
            text, _ = self.prompt()
            self.crash = f"{crash}: {text}"
            self._post("/v1/completions", {"prompt": text, "max_tokens": 3, "stream": True})
            self.told["crashed"][crash] += not self.crash
            self.crash = ""
        # The first words of a dead engine, too.
        self._post("/v1/completions", {"prompt": self.prompt()[0]})
        self._ask("GET", "/metrics", b"", self.own)
        # What the audit log says under its seal is searched with the logs.
        with open_log(self._audit) as file:
            records = list(AuditReader(file, AUDIT_KEY.read(self._audit_key), "audit log"))
        (self.folder / "logs" / "audit.log").write_text(json.dumps(records, default=bytes.hex))
        self.search()

    def fail(self, where: str) -> None:
        """Fail there, if it is that one's turn, with the prompt for its words."""
        if self.crash.startswith(where):
            text, self.crash = self.crash, ""
            raise RuntimeError(text)

    def _with_fault(self, fault: str, at: int, new_tokens: int) -> None:
        self._until_healthy()
        text, ids = self.prompt()
        self.sampled.clear()
        self.faults.arm(self.policy, fault, at, text)
        streamed = self.choose.random() < 0.5
        fields = {"prompt": text, "max_tokens": new_tokens, "seed": at, "ignore_eos": True}
        status = self._post("/v1/completions", fields | {"stream": streamed})
        made = self.faults.count
        # What was not reached is for no later request.
        self.faults.arm("", "", -1)
        self.canaries.add_ids([*ids[-4:], *self.sampled])
        if new_tokens > NEW_TOKENS:
            said = self.tokenizer.decode(self.sampled)
            # A short one, or the same again and again, stands in a log by chance.
            if len(said) >= _ANSWER_CHARACTERS and len(set(said)) > _ANSWER_CHARACTERS // 2:
                self.canaries.add("answer", said.encode())
                self.canaries.add_ids(self.sampled)
        elif status == 200:
            # After a fault there are more.
            known = self.told["requests"][self.policy]
            self.told["requests"][self.policy] = min(known or made, made)
        self.told["ended"]["right" if status == 200 else str(status)] += 1

    def _post(self, path: str, fields: Body) -> int:
        return self._ask("POST", path, fields, self.own)

    def _ask(self, method: str, path: str, body: Body | bytes, headers: Body) -> int:
        """Return the status, 500 for a stream that broke off; keep all but a right answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.address, timeout=_WAIT_S)
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            self.errors += [f"{name}: {value}".encode() for name, value in reply.getheaders()]
            said, status = reply.read(), reply.status
        except http.client.IncompleteRead as broken:
            said, status = broken.partial, 500
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
        events = [line for line in said.split(b"\n\n") if line.startswith(b'data: {"error"')]
        right = status == 200 and path != "/metrics"
        self.errors += events if right or said.startswith(b"data: ") else [said]
        return 500 if status == 200 and events else status

    def _bad_protocol(self, word: str) -> None:
        host, port = self.address.split(":")
        for line in (word, f"GET /{word} HTTP/7.{word}", f"GET / HTTP/1.1\r\n{word}"):
            with socket.create_connection((host, int(port)), timeout=_WAIT_S) as connection:
                connection.sendall(f"{line}\r\n\r\n".encode())
                with suppress(OSError):
                    self.errors.append(connection.recv(4096))

    def _until_healthy(self) -> None:
        """Wait until a token can be made again, by services that are innocent."""

        def healthy() -> bool:
            if self._ask("GET", "/health", b"", {}) == 200:
                return True
            while self.quarantined:
                one = self.quarantined.pop()
                one.options.barred.pop(one.endpoint, None)
            return False

        until(healthy)


def around(
    call: Callable[..., Any],
    *,
    before: Callable[..., object] = lambda *_: None,
    after: Callable[..., object] = lambda *_: None,
) -> Callable[..., Any]:
    """Return what calls it; `before` gets its arguments, and `after` its result and those."""

    def called(*arguments: Any, **more: Any) -> Any:
        before(*arguments)
        found = call(*arguments, **more)
        after(found, *arguments)
        return found

    return called


def stand_in(session: Served) -> None:
    """Stand in the server's code, where it is to fail, and where tokens and secrets are made."""
    call = remote_call.carry_out

    def carry_out(plan: CallPlan, x_TI: torch.Tensor) -> Any:
        def note(encoded: torch.Tensor) -> None:
            if not encoded.is_floating_point():
                session.canaries.add_activation(encoded[-1])

        if plan.operator != "qkv_proj":
            return call(plan, x_TI)
        session.canaries.add_activation(x_TI[-1])
        padded: Any = plan.padded
        if padded is not None:
            note(padded.site.encode(x_TI)[0])
        encode = around(plan.encode, after=lambda found, _: note(found[0]))
        return call(replace(plan, encode=encode, padded=padded), x_TI)

    def secret(products: torch.Tensor) -> None:
        first = products.flatten()[:4].contiguous()
        session.canaries.add("key", first.view(torch.uint8).numpy().tobytes())

    def log_everything(_level: str) -> None:
        configure("debug")
        logging.getLogger().setLevel(logging.DEBUG)

    fails = [lambda *_, where=where: session.fail(where) for where in CRASHES]
    told: Sequence[tuple[str, Any, str, Callable[..., object]]] = (
        ("before", completions, "exchange", fails[0]),
        ("before", answers.StreamedAnswer, "add", fails[1]),
        ("before", Engine, "step", fails[3]),
        ("before", PadStore, "__init__", lambda *which: session.canaries.add("key", which[3])),
        # What is not delivered would be waited for.
        ("after", exchange.EngineResponse, "_deliver", fails[2]),
        ("after", Engine, "_sample", lambda found, *_: session.sampled.append(found.token_id)),
        ("after", Member, "quarantine", lambda _, one, __: session.quarantined.append(one)),
        ("after", ExactCheck, "draw", lambda check, *_: secret(check.low_kI)),
        ("after", FloatCheck, "draw", lambda check, *_: secret(check._products)),
    )
    for when, owner, name, call_ in told:
        setattr(owner, name, around(getattr(owner, name), **{when: call_}))
    remote_call.carry_out = carry_out
    load.configure = log_everything
    # Seconds after every other fault would be most of the time.
    background._PROBE_S = 0.05


def be_process(folder: str, count: str, block: str, seed: str, gpu: str, metrics: str) -> None:
    os.chdir(f"{folder}/work")
    tempfile.tempdir = None
    torch.set_num_threads(1)
    configure("debug")
    session = Served(Path(folder), int(seed), gpu.split(","), metrics.split(","))
    session.forget()
    session.faults.install()
    stand_in(session)
    firsts = range(0, int(count), int(block))
    for number, first in enumerate(firsts):
        session.serve_a_block(min(int(block), int(count) - first), number)
        session.forget()
    session.search()
    found = {**session.found(), "blocks": len(firsts)}
    Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
