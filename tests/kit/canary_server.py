"""A server whose every secret is known; a thread of its process is the client."""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import torch

from protocol.errors import TsqpError
from tee_side.engine import background
from tee_side.engine.engine import Engine
from tee_side.engine.tokenizer import TEMPLATE_FILE
from tee_side.remote.services.member import Member
from tee_side.serve import answers, exchange, generating
from tee_side.serve.audit_log import AuditReader, encode_key, open_log, read_key
from tee_side.serve.keys import PREFIX, ApiKey, hash_of
from tests.kit.canaries import FAULTS
from tests.kit.canary_runner import (
    LONG_FAULT_AT,
    LONG_TOKENS,
    NEW_TOKENS,
    Session,
    note_secrets,
)
from tests.kit.service import until
from tsqp.cli import running
from tsqp.cli.logs import configure
from tsqp.cli.serve import serve

POLICIES = ("shielded", "tsqp", "two-server")
# Where the server's own code fails, in the order in which it is made to.
CRASHES = ("before the engine", "in an answer", "on the event loop", "in the engine's thread")
_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
_WAIT_S = 60.0
Body = Mapping[str, Any]
_JSON = {"content-type": "application/json"}


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
    for content in ({"role": word}, {"content": [{word: word}]}):
        yield "POST", chat, {"messages": [turn | content]}, own
    yield "POST", "/v1/embeddings", {"input": word, "dimensions": word}, own
    yield "POST", path, {"prompt": f"{word} " * 40}, own
    yield "POST", "/detokenize", {"tokens": [word]}, own
    yield "POST", path, f'{{"prompt": "{word}'.encode(), own
    yield "POST", path, word.encode(), {**own, "content-type": f"text/{word}"}
    yield "POST", path, right, {"authorization": f"Bearer {word}"}
    yield "POST", f"{path}?{word}={word}", right, {"x-request-id": word}
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


class Served(Session):
    """Asks a server of this process, and keeps what is secret of it."""

    def __init__(self, folder: Path, seed: int, gpu: Sequence[str], metrics: Sequence[str]) -> None:
        super().__init__(folder, seed, gpu, metrics)
        self.key = f"{PREFIX}{random.Random(seed).randbytes(24).hex()}"
        self.own = {**_JSON, "authorization": f"Bearer {self.key}"}
        self.address, self.crash = "", ""
        self.log = folder / "logs" / "runner.log"
        self.sampled: list[int] = []
        # Services that are asked no more, after what was done to their replies here.
        self.quarantined: list[Member] = []
        # Keys are in their own files, rightly; nothing else is.
        self._audit, self._audit_key = folder / "work" / "audit", folder / "audit.key"
        self._keys = folder / "keys.toml"
        allowed = hash_of(self.key)
        entry = ApiKey(name="canary", sha256=allowed, concurrent=8, tokens_per_minute=10**9)
        self._keys.write_text(entry.entry(), encoding="utf-8")
        self._audit_key.write_text(encode_key(random.Random(seed + 1).randbytes(32)))
        for path in (self._keys, self._audit_key):
            path.chmod(0o600)
        (folder / "model" / TEMPLATE_FILE).write_text(_TEMPLATE, encoding="utf-8")

    def forget(self) -> None:
        """Begin a new block, of which the keys are secret again."""
        super().forget()
        self.canaries.add_secret(self.key.encode())
        self.canaries.add_secret(self._audit_key.read_bytes().strip())

    def serve_a_block(self, count: int, number: int) -> None:
        """Serve in this thread, and ask in another, which ends the server."""
        failed: list[BaseException] = []
        self.policy = POLICIES[number % len(POLICIES)]
        before = len(self.log.read_text(encoding="utf-8"))

        def ask() -> None:
            try:
                self._ask_a_block(count, before)
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                failed.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

        asking = threading.Thread(target=ask)
        asking.start()
        arguments = [
            *(str(self.folder / "model"), "--port", "0", "--policy", self.policy, "--prefix-reuse"),
            *("--api-keys", str(self._keys), "--request-timeout-s", "0.5", "--speculative=ngram"),
            *("--audit-log", str(self._audit), "--audit-key", str(self._audit_key)),
            *("--shares-in-the-clear", *(f"--gpu={endpoint}" for endpoint in self.gpu)),
        ]
        with suppress(KeyboardInterrupt, click.Abort):
            serve.main(arguments, standalone_mode=False)
        asking.join()
        for error in failed:
            raise error
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
            records = list(AuditReader(file, read_key(self._audit_key), "audit log"))
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
        self.faults.arm(self.policy, "", -1, "")
        self.canaries.add_ids([*ids[-4:], *self.sampled])
        if new_tokens > NEW_TOKENS:
            self.canaries.add_answer(self.tokenizer.decode(self.sampled), self.sampled)
        elif status == 200:
            self.count_requests(made)
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
            self.places.errors += [f"{name}: {value}" for name, value in reply.getheaders()]
            said, status = reply.read(), reply.status
        except http.client.IncompleteRead as broken:
            said, status = broken.partial, 500
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
        events = [line for line in said.split(b"\n\n") if line.startswith(b'data: {"error"')]
        if status == 200 and events:
            status = 500
        for text in [said] if status != 200 and not said.startswith(b"data: ") else events:
            self.places.errors.append(text.decode("utf-8", "replace"))
        if path == "/metrics":
            self.places.errors.append(said.decode())
        return status

    def _bad_protocol(self, word: str) -> None:
        host, port = self.address.split(":")
        for line in (word, f"GET /{word} HTTP/7.{word}", f"GET / HTTP/1.1\r\n{word}"):
            with socket.create_connection((host, int(port)), timeout=_WAIT_S) as connection:
                connection.sendall(f"{line}\r\n\r\n".encode())
                with suppress(OSError):
                    self.places.errors.append(connection.recv(4096).decode("utf-8", "replace"))

    def _until_healthy(self) -> None:
        """Wait until a token can be made again, by services that are innocent."""

        def healthy() -> bool:
            if self._ask("GET", "/health", b"", {}) == 200:
                return True
            while self.quarantined:
                self.quarantined.pop().quarantined = None
            return False

        until(healthy)


def stand_in(session: Served) -> None:
    """Stand in the server's code, where it is to fail, and see every token."""
    deliver, sample, quarantine = exchange.Exchange._deliver, Engine._sample, Member.quarantine

    def before(where: str, call: Callable[..., Any]) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            session.fail(where)
            return call(*arguments, **more)

        return called

    def delivered(*arguments: Any) -> None:
        deliver(*arguments)
        # What is delivered would be waited for.
        session.fail(CRASHES[2])

    def sampled(*arguments: Any) -> Any:
        found = sample(*arguments)
        session.sampled.append(found.token_id)
        return found

    def quarantined(member: Member, error: TsqpError) -> None:
        quarantine(member, error)
        session.quarantined.append(member)

    def log_everything(_level: str) -> None:
        configure("debug")
        logging.getLogger().setLevel(logging.DEBUG)

    for owner, name, replaced in (
        (Member, "quarantine", quarantined),
        (generating, "engine_requests", before(CRASHES[0], generating.engine_requests)),
        (answers.StreamedAnswer, "add", before(CRASHES[1], answers.StreamedAnswer.add)),
        (exchange.Exchange, "_deliver", delivered),
        (Engine, "step", before(CRASHES[3], Engine.step)),
        (Engine, "_sample", sampled),
        (running, "configure", log_everything),
        (background, "_PROBE_S", 0.05),  # seconds after every other fault would be most of the time
    ):
        setattr(owner, name, replaced)


def be_process(
    folder: str, count: str, block: str, seed: str, served: str, gpu: str, metrics: str
) -> None:
    """Be one of the two processes: generate, or serve, and write what was found."""
    os.chdir(f"{folder}/work")
    tempfile.tempdir = None
    torch.set_num_threads(1)
    configure("debug")
    kind = Served if served else Session
    session = kind(Path(folder), int(seed), gpu.split(","), metrics.split(","))
    session.forget()
    session.faults.install()
    note_secrets(session)
    if isinstance(session, Served):
        stand_in(session)
    run = session.serve_a_block if isinstance(session, Served) else session.generate_a_block
    firsts = range(0, int(count), int(block))
    for number, first in enumerate(firsts):
        run(min(int(block), int(count) - first), number)
        session.forget()
    session.search()
    found = {**session.found(), "blocks": len(firsts)}
    Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
