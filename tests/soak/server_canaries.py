"""A server whose every secret is known, and the search for them everywhere that is not it.

`tests.soak.secrets` starts this in a process of its own, with real services:

    python -m tests.soak.server_canaries FOLDER COUNT SEED BLOCK ENDPOINT,ENDPOINT URL,URL

The process is `tee-runner serve`, with its libraries' logs too at debug; a thread of it is the
client. Random prompts go through every endpoint, with a fault at one RPC of each; canaries stand in
every field, header and path that the server could repeat; and its own code fails on purpose, in the
engine's thread last, with errors whose words are the prompt. What `tests.soak.canaries` looks for
is looked for there, and in the audit log, in headers, in error bodies and in the events of a stream
that broke off.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
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
from tests.soak.canaries import FAULTS, NEW_TOKENS, Session, note_secrets, plant
from tsqp.cli import running
from tsqp.cli.logs import configure
from tsqp.cli.serve import serve

POLICIES = ("shielded", "tsqp", "two-server")
# Where the server's own code fails, in the order in which it is made to.
CRASHES = ("before the engine", "in an answer", "on the event loop", "in the engine's thread")
_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
_LONG_TOKENS, _LONG_FAULT_AT = 16, 40
_WAIT_S = 60.0
_READY = re.compile(r" ready: http://(\S+)/v1\n")
_JSON = {"content-type": "application/json"}
Body = Mapping[str, Any]


def wrong_requests(word: str, key: str) -> Iterator[tuple[str, str, str, Body | bytes, Body]]:
    """Yield requests that are refused and hold a word: name, method, path, body, headers."""
    own = {**_JSON, "authorization": f"Bearer {key}"}
    completion, chat = {"prompt": word}, {"messages": [{"role": "user", "content": word}]}
    schema = {"type": "json_schema", "json_schema": {"name": word, "schema": {"type": word}}}
    fields: dict[str, tuple[str, Body]] = {
        # The name of a field is repeated, so that a client finds its mistake; no value is.
        "a field that there is not": ("completions", completion | {"no_such_field": word}),
        "model": ("completions", completion | {"model": word}),
        "temperature": ("completions", completion | {"temperature": word}),
        "prompt": ("completions", {"prompt": {word: word}}),
        "a prompt too long": ("completions", {"prompt": f"{word} " * 40}),
        "stop": ("completions", completion | {"stop": [word * 20]}),
        "logit_bias": ("completions", completion | {"logit_bias": {word: 1}}),
        "stream_options": (
            "completions",
            completion | {"stream": True, "stream_options": {"include_usage": word}},
        ),
        "guided_grammar": ("completions", completion | {"guided_grammar": f"start: {word}"}),
        "guided_regex": ("completions", completion | {"guided_regex": f"({word}"}),
        "guided_json": ("completions", completion | {"guided_json": word}),
        "guided_choice": ("completions", completion | {"guided_choice": [{word: word}]}),
        "response_format": ("chat/completions", chat | {"response_format": schema}),
        "tools": ("chat/completions", chat | {"tools": [{word: word}]}),
        "tool_choice": ("chat/completions", chat | {"tool_choice": word}),
        "cache_salt": ("completions", completion | {"cache_salt": word * 30}),
        "role": ("chat/completions", {"messages": [{"role": word, "content": word}]}),
        "part": ("chat/completions", {"messages": [{"role": "user", "content": [{word: word}]}]}),
        "dimensions": ("embeddings", {"input": word, "dimensions": word}),
        "encoding_format": ("embeddings", {"input": word, "encoding_format": word}),
    }
    for name, (path, body) in fields.items():
        yield name, "POST", f"/v1/{path}", body, own
    yield "tokenize", "POST", "/tokenize", {"prompt": word, "content": word}, own
    yield "detokenize", "POST", "/detokenize", {"tokens": [word]}, own
    yield "no JSON", "POST", "/v1/completions", f'{{"prompt": "{word}'.encode(), own
    yield "no object", "POST", "/v1/completions", f'"{word}"'.encode(), own
    yield "no text", "POST", "/v1/completions", f"{word}\udc80".encode("utf-8", "replace"), own
    text = {"content-type": f"text/{word}"}
    yield "content type", "POST", "/v1/completions", word.encode(), own | text
    yield "API key", "POST", "/v1/completions", completion, {"authorization": f"Bearer {word}"}
    yield "no API key", "POST", f"/v1/completions?{word}={word}", completion, {"x-request-id": word}
    yield "path", "GET", f"/{word}?{word}={word}", b"", own | {"cookie": f"{word}={word}"}
    yield "model's path", "GET", f"/v1/models/{word}", b"", own
    yield "method", "DELETE", "/v1/completions", word.encode(), own | {word: word}
    yield "length", "POST", "/v1/completions", word.encode(), own | {"content-length": "9" * 12}


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

    def __init__(
        self, folder: Path, count: int, seed: int, gpu: Sequence[str], metrics: Sequence[str]
    ) -> None:
        super().__init__(folder, count, seed, gpu, metrics)
        key = f"{PREFIX}{random.Random(seed).randbytes(24).hex()}"
        self.key, self.address = key, ""
        # Where in the log the server begins that runs.
        self.log, self.started_at = folder / "logs" / "runner.log", 0
        self.answered: Counter[str] = Counter()
        self.sampled: list[int] = []
        self.crash = ""
        self.crashed: Counter[str] = Counter()
        self.error: BaseException | None = None
        # Services that are asked no more, after what was done to their replies here.
        self.quarantined: list[Member] = []
        # Keys are in their own files, rightly; nothing else is.
        self._audit, self._audit_key = folder / "work" / "audit", folder / "audit.key"
        self._keys = folder / "keys.toml"
        entry = ApiKey(name="canary", sha256=hash_of(key), concurrent=8, tokens_per_minute=10**9)
        for path, content in (
            (self._keys, entry.entry()),
            (self._audit_key, encode_key(random.Random(seed + 1).randbytes(32))),
        ):
            path.write_text(content, encoding="utf-8")
            path.chmod(0o600)
        (folder / "model" / TEMPLATE_FILE).write_text(_TEMPLATE, encoding="utf-8")

    def forget(self) -> None:
        """Begin a new block, of which the keys are secret again."""
        super().forget()
        self.canaries.add_secret(self.key.encode())
        self.canaries.add_secret(self._audit_key.read_bytes().strip())

    @property
    def arguments(self) -> list[str]:
        """What the server is started with."""
        model, audit = str(self.folder / "model"), ("--audit-log", str(self._audit))
        return [
            *(model, "--port", "0", "--policy", self.policy, "--api-keys", str(self._keys)),
            *(*audit, "--audit-key", str(self._audit_key), "--prefix-reuse"),
            *("--request-timeout-s", "0.5", "--shares-in-the-clear", "--speculative", "ngram"),
            *(f"--gpu={endpoint}" for endpoint in self.gpu),
        ]

    def ask_a_block(self, count: int) -> None:
        """Ask in every way, and look around; the server has died then."""
        self._find_address()
        self._until_healthy()
        for name, method, path, body, headers in wrong_requests(self._word(), self.key):
            status = self._ask(method, path, body, headers)
            self.refused[name] += 400 <= status < 500
        self._bad_protocol(self._word())
        text, ids = self._prompt()
        for number, (path, fields) in enumerate(right_requests(text, ids)):
            self.answered[f"{path} {number}"] += self._post(path, fields) == 200
        for path in ("/metrics", "/version", "/health", "/tokenizer_info", "/v1/models"):
            self.answered[path] += self._ask("GET", path, b"", self._own()) == 200
        for _ in range(count):
            self._with_fault(*self._next_fault(), NEW_TOKENS)
        for fault in ("", FAULTS[count % len(FAULTS)]):
            self._with_fault(fault, _LONG_FAULT_AT, _LONG_TOKENS)
        for crash in CRASHES:
            self._until_healthy()
            text, _ = self._prompt()
            self.crash = f"{crash}: {text}"
            self._post("/v1/completions", {"prompt": text, "max_tokens": 3, "stream": True})
            self.crashed[crash] += not self.crash
            self.crash = ""
        # The first words of a dead engine, too.
        self._post("/v1/completions", {"prompt": self._prompt()[0]})
        self._ask("GET", "/metrics", b"", self._own())
        self._read_audit_log()
        self.hits += self.search()

    def fail(self, where: str) -> None:
        """Fail there, if it is that one's turn, with the prompt for its words."""
        if self.crash.startswith(where):
            text, self.crash = self.crash, ""
            raise RuntimeError(text)

    def _with_fault(self, fault: str, at: int, new_tokens: int) -> None:
        self._until_healthy()
        text, ids = self._prompt()
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
            known = self.requests[self.policy]
            self.requests[self.policy] = min(known or made, made)
        self.ended["right" if status == 200 else str(status)] += 1

    def _word(self) -> str:
        text, _ = self._prompt()
        return text.split(" ")[0]

    def _own(self) -> dict[str, str]:
        return {**_JSON, "authorization": f"Bearer {self.key}"}

    def _post(self, path: str, fields: Body) -> int:
        return self._ask("POST", path, fields, self._own())

    def _ask(self, method: str, path: str, body: Body | bytes, headers: Body) -> int:
        """Return the status, 500 for a stream that broke off; keep all but a right answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.address, timeout=_WAIT_S)
        said = b""
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
        """Send what is no HTTP."""
        host, port = self.address.split(":")
        for line in (
            f"{word}\r\n\r\n",
            f"GET /{word} HTTP/7.{word}\r\n\r\n",
            f"GET / HTTP/1.1\r\n{word}\r\n\r\n",
        ):
            with socket.create_connection((host, int(port)), timeout=_WAIT_S) as connection:
                connection.sendall(line.encode())
                with suppress(OSError):
                    self.places.errors.append(connection.recv(4096).decode("utf-8", "replace"))

    def _until_healthy(self) -> None:
        """Wait until a token can be made again, by services that are innocent."""
        until = time.monotonic() + _WAIT_S
        while self._ask("GET", "/health", b"", {}) != 200:
            while self.quarantined:
                self.quarantined.pop().quarantined = None
            if time.monotonic() > until:
                raise TimeoutError("/health: got no 200, expected it by now")
            time.sleep(0.02)

    def _find_address(self) -> None:
        """Read from the log where the server listens."""
        until = time.monotonic() + _WAIT_S
        while True:
            log = self.log.read_text(encoding="utf-8")
            if found := _READY.findall(log, self.started_at):
                self.address = found[-1]
                return
            if time.monotonic() > until:
                raise TimeoutError("log: got no address, expected one by now")
            time.sleep(0.02)

    def _read_audit_log(self) -> None:
        """Put what the audit log says under its seal among the logs."""
        with open_log(self._audit) as file:
            records = list(AuditReader(file, read_key(self._audit_key), "audit log"))
        content = json.dumps(records, default=bytes.hex)
        (self.folder / "logs" / "audit.log").write_text(content, encoding="utf-8")


def install(session: Served) -> None:
    """Stand in the server's code, where it is to fail, and see every token."""
    prepare, add = generating.engine_requests, answers.StreamedAnswer.add
    deliver, step, sample = exchange.Exchange._deliver, Engine.step, Engine._sample
    quarantine = Member.quarantine

    def before(where: str, call: Callable[..., Any]) -> Callable[..., Any]:
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

    Member.quarantine = quarantined  # type: ignore[assignment, method-assign]
    generating.engine_requests = before(CRASHES[0], prepare)
    answers.StreamedAnswer.add = before(CRASHES[1], add)  # type: ignore[method-assign]
    exchange.Exchange._deliver = delivered  # type: ignore[assignment, method-assign]
    Engine.step = before(CRASHES[3], step)  # type: ignore[method-assign]
    Engine._sample = sampled  # type: ignore[assignment, method-assign]


def _log_everything(_level: str) -> None:
    """Have all that libraries and we log at debug, as no operator does."""
    configure("debug")
    logging.getLogger().setLevel(logging.DEBUG)


def _serve(session: Served, count: int) -> None:
    """Serve in this thread, and ask in another, which ends the server."""

    def ask() -> None:
        try:
            session.ask_a_block(count)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            session.error = error
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    session.started_at = len(session.log.read_text(encoding="utf-8"))
    asking = threading.Thread(target=ask)
    asking.start()
    with suppress(KeyboardInterrupt, click.Abort):
        serve.main(session.arguments, standalone_mode=False)
    asking.join()
    if session.error is not None:
        raise session.error


def main() -> None:
    """Run, and print one line of JSON."""
    folder, count, seed, block, gpu, metrics = sys.argv[1:]
    torch.set_num_threads(1)
    # Whatever is printed from now on is searched, too.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    urls = [url for url in metrics.split(",") if url]
    session = Served(Path(folder), int(count), int(seed), gpu.split(","), urls)
    background._PROBE_S = 0.05  # two seconds after every other fault would be most of the time
    running.configure = _log_everything  # type: ignore[assignment, attr-defined]
    session.forget()
    session.faults.install()
    note_secrets(session)
    install(session)
    for number, first in enumerate(range(0, int(count), int(block))):
        session.policy = POLICIES[number % len(POLICIES)]
        _serve(session, min(int(block), int(count) - first))
        session.hits += session.search()
        session.forget()
        print(f"progress {min(first + int(block), int(count))}", file=out, flush=True)
    session.hits += session.search()
    answer = {
        "hits": dict(session.hits),
        "ended": dict(session.ended),
        "faults": [[*which, times] for which, times in session.faults.made.items()],
        "requests": dict(session.requests),
        "patterns": session.patterns,
        "kinds": dict(session.kinds),
        "refused": dict(session.refused),
        "answered": dict(session.answered),
        "crashed": dict(session.crashed),
        "blocks": len(range(0, int(count), int(block))),
        "planted": plant(session, Path(folder)),
    }
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
