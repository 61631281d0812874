"""Row: random prompts with a fault at every request; nothing of them is anywhere but in the runner.

Two processes of their own generate, with real services: a runner, and `tee-runner serve` with its
libraries' logs at debug, a thread of which is the client. In every block of prompts one generation
is longer, as a token or two cannot be looked for. Then one of each kind of secret is put into each
place and looked for again: what is not found then could not have been found before.
"""

from __future__ import annotations

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
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from protocol.errors import TsqpError
from protocol.model.checkpoint import EMBEDDING, Checkpoint
from protocol.model.config import read_config
from tee_side.assembly import MaskSettings
from tee_side.engine import background
from tee_side.engine.engine import Engine
from tee_side.engine.tokenizer import TEMPLATE_FILE, Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.protect.calibration import CALIBRATION_FILE
from tee_side.protect.padded import Padded, PaddedSite
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.store import PadStore
from tee_side.protect.verification import ExactCheck
from tee_side.remote import linear
from tee_side.remote.call import CallPlan
from tee_side.remote.services.member import Member
from tee_side.runner import Runner, RunnerSettings
from tee_side.serve import answers, exchange, generating
from tee_side.serve.audit_log import AuditReader, encode_key, open_log, read_key
from tee_side.serve.keys import PREFIX, ApiKey, hash_of
from tests.faults.row import Found, Row
from tests.kit.canaries import FAULTS, KINDS, PLACES, Canaries, Faults, Places
from tests.kit.model import make_model, token_ids
from tests.kit.rows import each_row
from tests.kit.service import ENVIRONMENT, Forked, Workers, until
from tests.kit.service import run as run_program
from tsqp.calibrate import calibrate_on, save_calibration
from tsqp.cli import running
from tsqp.cli.logs import configure
from tsqp.cli.program import complain
from tsqp.cli.serve import serve
from tsqp.lab.research.float_check import FloatCheck

NEW_TOKENS, _LONG_TOKENS = 2, 16
# Of the long answer: behind its first few tokens, whatever the policy.
_LONG_FAULT_AT = 40
# What a block of prompts runs under. Half of them with pads on disk would use up the bank.
POLICIES = ("shielded", "shielded", "tsqp", "shielded", "two-server", "shielded with a bank")
_SERVED = ("shielded", "tsqp", "two-server")
# Where the server's own code fails, in the order in which it is made to.
CRASHES = ("before the engine", "in an answer", "on the event loop", "in the engine's thread")
# Chat templates that end in errors of which the library's own words hold the prompt.
TEMPLATES = {
    "refused by its template": "{{ raise_exception(messages[0].content) }}",
    "not in a dictionary": "{{ {}[messages[0].content].there }}",
    "not a template": "{% include messages[0].content %}",
}
_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
# A token of the server's model that stands in no prompt.
_LAST_BYTE = 255
_WAIT_S = 60.0
log = logging.getLogger("tee_side")
Body = Mapping[str, Any]


class Session:
    """Generates with faults, and keeps what is secret of it."""

    def __init__(self, folder: Path, seed: int, gpu: Sequence[str], metrics: Sequence[str]) -> None:
        self.folder, self.gpu = folder, gpu
        self.choose = random.Random(seed)
        self.faults = Faults(self.choose)
        self.places = Places(folder, metrics)
        self.tokenizer = Tokenizer(folder / "model")
        self.canaries = self._previous = Canaries()
        # What is told at the end. `requests`: how many a generation takes, by policy.
        names = ("hits", "ended", "requests", "kinds", "refused", "answered", "crashed")
        self.told: dict[str, Counter[str]] = {name: Counter() for name in names}
        self.armed: Counter[str] = Counter()
        self.patterns = 0
        self.policy = ""
        self._runner: Runner | None = None

    def generate_a_block(self, count: int, number: int) -> None:
        """Generate so often, and look around."""
        self.policy = POLICIES[number % len(POLICIES)]
        for _ in range(count):
            self._generate()
        self._answer_at_length(FAULTS[number % len(FAULTS)])
        self._refuse()
        self._close()
        self.search()

    def search(self) -> None:
        """Look everywhere for what was secret since the last time, and count it as a hit.

        And in logs for what was secret before: a line may be written long after what it is about.
        """
        for place, content in self.places.contents():
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

    def found(self) -> dict[str, Any]:
        """Plant secrets, and return what was found by then, and of these."""
        told = {name: dict(counts) for name, counts in self.told.items()}
        faults = [[*which, times] for which, times in self.faults.made.items()]
        patterns, planted = self.patterns, self._plant()
        return {**told, "faults": faults, "patterns": patterns, "planted": planted}

    def _plant(self) -> dict[str, bool]:
        """Put a secret into each place, and say where it was found."""
        self.forget()
        ids = self.tokenizer.encode("an answer that no one else knows")
        row, key = torch.arange(1.5, 9.5), b"\x01\x9f\x33" * 10
        self.canaries.add_prompt(["qvxzkjwphm"], ids)
        self.canaries.add_secret(key)
        self.canaries.add_activation(row)
        puts = self.places.plants(ids, row, key)
        puts["runner log"] = lambda: log.warning("x", extra={"fields": {"y": "qvxz kjw phm"}})
        self.search()
        found: dict[str, bool] = {}
        try:
            for place in PLACES:
                self.told["hits"].clear()
                puts[place]()
                self.search()
                found[place] = any(hit.endswith(f" in {place}") for hit in self.told["hits"])
        finally:
            puts[""]()
        return found

    def _open(self) -> Runner:
        if self._runner is None:
            name, _, bank = self.policy.partition(" with a ")
            model = self.folder / "model"
            # One without int8 takes no calibration, and would refuse to start.
            calibration = None if name == "tsqp" else model / CALIBRATION_FILE
            place = BankPlace.at(self.folder / "bank" / "bank", beside_bank=True) if bank else None
            masks = MaskSettings(calibration=calibration, bank=place, when_out="wait")
            given: dict[str, Any] = {"connect_timeout_s": 10, "request_timeout_s": 0.5}
            given |= {"masks": masks, "shares_in_the_clear": True}
            self._runner = Runner(
                RunnerSettings(model, load_policy(name), tuple(self.gpu), **given)
            )
        return self._runner

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def prompt(self) -> tuple[str, list[int]]:
        """Return another prompt, which is looked for from now on, and its token ids."""
        words = ["".join(self.choose.choices(string.ascii_lowercase, k=10)) for _ in range(3)]
        text = " ".join(words)
        ids = self.tokenizer.encode(text)
        self.canaries.add_prompt(words, ids)
        return text, ids

    def _generate(self) -> None:
        text, ids = self.prompt()
        try:
            runner = self._open()
            self.faults.arm(self.policy, *self.next_fault(), text)
            generation = runner.generate(ids, max_new_tokens=NEW_TOKENS)
            list(generation)
            self.canaries.add_ids([*ids[-6:], *generation.result().token_ids])
            self.count_requests(self.faults.count)
            self.told["ended"]["right"] += 1
        except TsqpError as error:
            self.told["ended"][type(error).__name__] += 1
            self._report(error)
            self._close()

    def count_requests(self, made: int) -> None:
        """Note how many a generation takes: after a fault there are more."""
        known = self.told["requests"][self.policy]
        self.told["requests"][self.policy] = min(known or made, made)

    def _answer_at_length(self, fault: str) -> None:
        """Generate more tokens, with a fault among them, and look for them from now on."""
        text, ids = self.prompt()
        said, token_ids = "", []
        try:
            runner = self._open()
            self.faults.arm(self.policy, fault, _LONG_FAULT_AT, text)
            generation = runner.generate(ids, max_new_tokens=_LONG_TOKENS)
            for sampled in generation.steps():
                token_ids.append(sampled.token_id)
                said = generation.text or ""
        except TsqpError as error:
            self._report(error)
            self._close()
        self.canaries.add_answer(said, token_ids)

    def _refuse(self) -> None:
        """Have a prompt refused in every way before anything is generated."""
        text, _ = self.prompt()
        path = self.folder / "model" / TEMPLATE_FILE
        for name in (*TEMPLATES, "not Unicode"):
            try:
                if name in TEMPLATES:
                    path.write_text(TEMPLATES[name], encoding="utf-8")
                    self.tokenizer.apply_chat_template([{"role": "user", "content": text}])
                else:
                    self.tokenizer.encode(f"{text}\udc80")
            except TsqpError as error:
                self.told["refused"][name] += 1
                # Behind it is the library's own error, which is about the prompt.
                self._report(error, suppressed=False)

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

    def _report(self, error: BaseException, *, suppressed: bool = True) -> None:
        """Say it in all ways in which the programs do, and in some more.

        `suppressed`: also say what `from None` keeps out of a traceback.
        """
        log.exception("failed", extra={"fields": {"error": str(error), "repr": repr(error)}})
        complain(f"tee-runner: error: {error}")
        chain: BaseException | None = error
        while chain is not None:
            self.places.errors += [str(chain), repr(chain), repr(chain.args), repr(vars(chain))]
            shown = suppressed or not chain.__suppress_context__
            chain = chain.__cause__ or (chain.__context__ if shown else None)
        self.places.errors += traceback.format_exception(error)


def note_secrets(session: Session) -> None:
    """Keep what a layer reads, and every key, at the moment at which they are made."""
    call, made = linear.carry_out, PadStore.__init__

    def _call(plan: CallPlan, x_TI: torch.Tensor) -> Any:
        def noted(x_TI: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
            if plan.operator == "qkv_proj":
                session.canaries.add_activation(x_TI[-1])
                if not encoded.is_floating_point():
                    session.canaries.add_activation(encoded[-1])
            return encoded

        def hide(x_TI: torch.Tensor) -> Padded | None:
            masked = plan.padded.hide(x_TI) if plan.padded else None
            if masked is not None:
                noted(x_TI, masked.encoded)
            return masked

        padded = plan.padded and cast("PaddedSite", SimpleNamespace(hide=hide))
        encode = lambda x_TI: noted(x_TI, plan.encode(x_TI))  # noqa: E731
        return call(replace(plan, encode=encode, padded=padded), x_TI)

    def make(store: Any, layout: Any, capacity: int, key: bytes, **settings: Any) -> None:
        session.canaries.add_secret(key)
        made(store, layout, capacity, key, **settings)

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            check = draw(*arguments)
            products = check.low_kI if isinstance(check, ExactCheck) else check._products
            secret = products.flatten()[:4].contiguous()
            session.canaries.add_secret(secret.view(torch.uint8).numpy().tobytes())
            return check

        return noted

    linear.carry_out = _call
    PadStore.__init__ = make  # type: ignore[method-assign]
    for check in (ExactCheck, FloatCheck):
        check.draw = staticmethod(noting(check.draw))  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------- a server

_JSON = {"content-type": "application/json"}


def wrong_requests(word: str, own: Body) -> Iterator[tuple[str, str, str, Body | bytes, Body]]:
    """Yield requests that are refused and hold a word: name, method, path, body, headers."""
    turn = {"role": "user", "content": word}
    schema = {"type": "json_schema", "json_schema": {"name": word, "schema": {"type": word}}}
    fields: dict[str, dict[str, Any]] = {
        "completions": {
            # The name of a field is repeated, so that a client finds its mistake; no value is.
            **dict.fromkeys(("no_such_field", "model", "temperature", "guided_json"), word),
            "prompt": {word: word},
            "stop": [word * 20],
            "logit_bias": {word: 1},
            "stream_options": {"include_usage": word},
            "guided_grammar": f"start: {word}",
            "guided_regex": f"({word}",
            "guided_choice": [{word: word}],
            "cache_salt": word * 30,
        },
        "chat/completions": {
            "response_format": schema,
            "tools": [{word: word}],
            "tool_choice": word,
            "messages": [turn | {"role": word}],
        },
        "embeddings": {"dimensions": word, "encoding_format": word},
    }
    usual = {"completions": {"prompt": word}, "embeddings": {"input": word}}
    for path, changes in fields.items():
        right = usual.get(path, {"messages": [turn]})
        for name, value in changes.items():
            stream = {"stream": True} if name == "stream_options" else {}
            yield name, "POST", f"/v1/{path}", right | stream | {name: value}, own
    content = {"messages": [turn | {"content": [{word: word}]}]}
    path = "/v1/completions"
    yield "a prompt too long", "POST", path, {"prompt": f"{word} " * 40}, own
    yield "part", "POST", "/v1/chat/completions", content, own
    yield "tokenize", "POST", "/tokenize", {"prompt": word, "content": word}, own
    yield "detokenize", "POST", "/detokenize", {"tokens": [word]}, own
    yield "no JSON", "POST", path, f'{{"prompt": "{word}'.encode(), own
    yield "no object", "POST", path, f'"{word}"'.encode(), own
    yield "no text", "POST", path, f"{word}\udc80".encode("utf-8", "replace"), own
    yield "content type", "POST", path, word.encode(), {**own, "content-type": f"text/{word}"}
    yield "API key", "POST", path, usual["completions"], {"authorization": f"Bearer {word}"}
    named = {"x-request-id": word}
    yield "no API key", "POST", f"{path}?{word}={word}", usual["completions"], named
    yield "path", "GET", f"/{word}?{word}={word}", b"", {**own, "cookie": f"{word}={word}"}
    yield "model's path", "GET", f"/v1/models/{word}", b"", own
    yield "method", "DELETE", path, word.encode(), {**own, word: word}
    yield "length", "POST", path, word.encode(), {**own, "content-length": "9" * 12}


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
        self.policy = _SERVED[number % len(_SERVED)]
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
        for name, method, path, body, headers in wrong_requests(word, self.own):
            self.told["refused"][name] += 400 <= self._ask(method, path, body, headers) < 500
        self._bad_protocol(word)
        text, ids = self.prompt()
        for number, (path, fields) in enumerate(right_requests(text, ids)):
            self.told["answered"][f"{path} {number}"] += self._post(path, fields) == 200
        for path in ("/metrics", "/version", "/health", "/tokenizer_info", "/v1/models"):
            self.told["answered"][path] += self._ask("GET", path, b"", self.own) == 200
        for _ in range(count):
            self._with_fault(*self.next_fault(), NEW_TOKENS)
        for fault in ("", FAULTS[count % len(FAULTS)]):
            self._with_fault(fault, _LONG_FAULT_AT, _LONG_TOKENS)
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
        """Send what is no HTTP."""
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


# ------------------------------------------------------------------------------------- the row


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


_BEFORE = """
import os, sys
from tests.faults.test_secrets import be_process
be_process(*sys.argv[1:])
os._exit(0)
"""


def make_place(folder: Path, bank_tokens: int, eos_token_id: int | None) -> None:
    """Make a model that reads bytes, its calibration, a bank of pads, and the empty folders.

    `bank_tokens`: 0 for no bank. `eos_token_id`: which grammars need.
    """
    for name in ("model", "logs", "work", "home", "tmp", "bank"):
        (folder / name).mkdir()
    model, size = folder / "model", 300
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    make_model(model, seed=3, vocab_size=size, head_dim=8, **sizes, eos_token_id=eos_token_id)
    chunks = [token_ids(100, seed, size) for seed in range(8)]
    calibration = calibrate_on(read_config(model), Checkpoint(model), chunks)
    save_calibration(calibration, model / CALIBRATION_FILE)
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([], trainer)
    raw.save(str(model / "tokenizer.json"))
    if bank_tokens:
        options = ("--bank", str(folder / "bank" / "bank"), "--bank-key-beside-bank")
        command = ("pads", "make", str(model), *options, "--tokens", str(bank_tokens))
        assert run_program("tee-runner", *command).returncode == 0


def find_leaks(folder: Path, count: int, block: int, seed: int, served: str) -> dict[str, Any]:
    """Generate from `count` prompts, `block` under one policy; return what that process found."""
    with Workers() as workers, (folder / "logs" / "runner.log").open("ab") as log:
        endpoints, urls = [], []
        for number in range(2):
            service_log = folder / "logs" / f"service-{number}.log"
            options = ("--log-level", "debug", "--metrics", "127.0.0.1:*")
            bind = ("--bind", f"unix://{folder}/service-{number}")
            made = workers.start(str(folder / "model"), *bind, *options, log=service_log)
            endpoints.append(made.endpoint)
            urls.append(service_log.read_text().split("url=", 1)[1].split()[0].strip('"'))
        home = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        arguments = [str(folder), str(count), str(block), str(seed), served]
        arguments += [",".join(endpoints), ",".join(urls)]
        outputs = {"stdout": log.fileno(), "stderr": log.fileno(), "before": _BEFORE}
        process = Forked("tee-runner", arguments, {**ENVIRONMENT, **home}, **outputs)
        try:
            status = process.wait()
        finally:
            process.kill()
    tail = (folder / "logs" / "runner.log").read_text(encoding="utf-8")[-3000:]
    assert status == 0, f"the runner ended with {status}:\n{tail}"
    found: dict[str, Any] = json.loads((folder / "found").read_text(encoding="utf-8"))
    found["runner log"] = (folder / "logs" / "runner.log").read_text(encoding="utf-8")
    logs = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("logs/*-*.log"))]
    audit = folder / "logs" / "audit.log"
    return found | {"logs": logs, "audit log": audit.read_text() if served else ""}


def hit_requests(found: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, by policy, how many requests of a generation a fault hit, and how many it has."""
    hit = {(policy, at) for policy, _, at, _ in found["faults"]}
    return {
        policy: (sum((policy, at) in hit for at in range(1, requests + 1)), requests)
        for policy, requests in found["requests"].items()
    }


def are_hit(positions: Mapping[str, tuple[int, int]], *, full: bool) -> bool:
    """Say whether every request of every policy was hit; in the short run, more than the first."""
    return positions.keys() == set(POLICIES) and all(
        hit == requests if full else hit > 1 for hit, requests in positions.values()
    )


@Row(
    "secrets",
    "secrets",
    "random canary prompts, also to a server in every field and path, a fault at every RPC",
    "0 hits in logs, metrics, errors, disk and shared memory",
    short=48,
    long=10_000,
    minutes=12,
)
def secrets(count: int, full: bool) -> Found:
    """Generate from so many prompts, and ask a server with some more."""
    both: list[dict[str, Any]] = []
    block = 100 if full else count // len(POLICIES)
    for served, share, each in (("", count, block), ("served", count // 8, 50)):
        with tempfile.TemporaryDirectory() as name:
            tokens = 0 if served else 4096 if full else 256
            make_place(Path(name), tokens, _LAST_BYTE if served else None)
            both.append(find_leaks(Path(name), share, each, len(both) + 1, served))
    ran, served_ = both
    hits = Counter(ran["hits"]) + Counter(served_["hits"])
    faults = [sum(times for *_, times in one["faults"]) for one in both]
    kinds = [{kind for _, kind, _, _ in one["faults"]} for one in both]
    positions, blocks = hit_requests(ran), served_["blocks"]
    pairs = [sum(numbers) for numbers in zip(*positions.values(), strict=True)]
    planted = [found for one in both for found in one["planted"].values()]
    ways = [
        times for name in ("refused", "answered", "crashed") for times in served_[name].values()
    ]
    ended = [sum(one["ended"].values()) for one in both]
    return Found(
        {
            "prompts": ended[0],
            "prompts to a server": ended[1],
            "faults": sum(faults),
            "positions of requests hit": f"{pairs[0]} of {pairs[1]}",
            "typed errors": ended[0] - ran["ended"].get("right", 0),
            "refused before": sum(ran["refused"].values()),
            "refused by the server": sum(served_["refused"].values()),
            "crashes of the server": sum(served_["crashed"].values()),
            "searched for": sum(one["patterns"] for one in both),
            "planted": len(planted),
            "planted and found": sum(planted),
            "hits": hits.total(),
        },
        {
            f"no secret elsewhere: {dict(hits)}": not hits,
            "everything searched for everywhere": all(
                set(one["kinds"]) >= KINDS and list(one["planted"]) == list(PLACES) for one in both
            )
            and all(planted),
            "every fault, every request": kinds[0] == set(FAULTS)
            and are_hit(positions, full=full)
            and kinds[1] >= (set(FAULTS) if full else {"lost connection"})
            and faults[0] > count // 2
            and faults[1] > (count // 16 if full else 1),
            "every refusal": set(ran["refused"]) == {*TEMPLATES, "not Unicode"},
            f"every answer, refusal and crash of the server: {ways}": set(ways) == {blocks},
            "some right": all(one["ended"].get("right", 0) > 0 for one in both),
            "logs are written": "failed" in ran["runner log"]
            and all("refused" in text for text in ran["logs"])
            and served_["runner log"].count(" engine_died ") == blocks
            and "completion_tokens" in served_["audit log"],
        },
    )


# --------------------------------------------------------------------- what the search is worth


@each_row(
    ("content", "kind"),
    [
        (b"the answer: qvxzkjwphm!", "prompt"),
        (b"q v\nxzk jwp\thm", "prompt"),
        (b"x=" + b"qvxzkjwphm".hex().encode(), "prompt"),
        (b"tensor([ 9, 14, 15, 16,\n 17, 18, 19, 20])", "token ids"),
        (b"\0\0" + b"".join(n.to_bytes(8, "little") for n in range(11, 22)), "token ids"),
        (b"[0.5000, 1.2500,  -3.0000, 4.0000]", "activation"),
        (b"key " + b"\x00\x01\x02\x03" * 8, "key"),
        (b"it said \xc3\xa9]kR mq;w3", "answer"),
        (b"nothing of it 1, 2, 3, 0.5, 1.25, kR mq;w and qvxzkjwph", ""),
    ],
)
def test_the_search_finds(content: bytes, kind: str) -> None:
    canaries = Canaries()
    canaries.add_prompt(["qvxzkjwphm"], list(range(11, 23)))
    canaries.add_activation(torch.tensor([0.5, 1.25, -3.0, 4.0, 7.0]))
    canaries.add_secret(b"\x00\x01\x02\x03" * 8)
    canaries.add_answer("\u00e9]kR mq;w3", [31, 32])
    for said in ("kR mq;w", "a a a a a a"):  # may stand anywhere by chance
        canaries.add_answer(said, list(range(12)))
    for before in range(5):
        assert set(canaries.found_in(b"-" * before + content)) == ({kind} if kind else set())


@pytest.mark.parametrize("requests", [1, 9, 40])
def test_in_time_every_fault_is_at_every_request(requests: int) -> None:
    session = object.__new__(Session)
    session.policy, session.armed = "tsqp", Counter()
    session.told = {"requests": Counter()}
    assert session.next_fault() == ("", 0)
    session.told["requests"]["tsqp"] = requests
    made = {session.next_fault() for _ in range(8 * len(FAULTS) * requests)}
    everywhere = {(fault, at) for fault in FAULTS for at in range(1, requests + 1)}
    # It takes its whole deadline, so there are fewer of it.
    assert {fault for fault, _ in everywhere - made} <= {"no reply"}
    assert "no reply" in {fault for fault, _ in made}
    assert made <= everywhere


@each_row(("last", "short", "full"), [(1, False, False), (2, True, False), (8, True, True)])
def test_every_request_is_to_be_hit(last: int, short: bool, full: bool) -> None:
    faults = Faults(random.Random(1))
    for policy in POLICIES:
        for at in range(1, last + 1):
            faults.arm(policy, "cut request", at, "")
            for number in range(1, 9):
                sent = faults.sending(None, [b"head", b"body"])
                assert sent == [b"head", b"bod" if number == at else b"body"]
    found = [[*which, times] for which, times in faults.made.items()]
    positions = hit_requests({"faults": found, "requests": dict.fromkeys(POLICIES, 8)})
    assert set(positions.values()) == {(last, 8)}
    assert are_hit(positions, full=False) == short
    assert are_hit(positions, full=True) == full
    del positions["two-server"]
    assert not are_hit(positions, full=False)
