"""A runner whose every secret is known, and the search for them everywhere that is not it.

`tests.soak.secrets` starts this in a process of its own, with real services:

    python -m tests.soak.canaries FOLDER COUNT SEED BLOCK ENDPOINT,ENDPOINT URL,URL

It generates from random prompts, with a fault of the transport, of a service or of a result at one
request of each: in turn every fault at every request. In every block of prompts one generation is
longer, as a token or two cannot be looked for, and one prompt is refused in every way before it is
generated from. It logs and reports errors as the programs do, and looks for what nobody else may
have:

    prompts      their words, their token ids (as int64 and as text)
    answers      their text and their token ids, where they are long
    activations  what the model's layers read, as floats, as integers, as text
    keys         of pads, of the bank, and the vectors that results are verified with

in the logs of the runner and of the services, in what metrics say, in the errors (their text, repr
and traceback), in every file of its folders, and in shared memory. Then it puts one of each into
each of these places and looks again: what is not found then could not have been found before.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import socket
import string
import sys
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import torch

from protocol.encoding import decode_reply
from protocol.errors import TsqpError
from protocol.model.checkpoint import EMBEDDING, Checkpoint
from protocol.pending import NOT_PUT
from protocol.stream import StreamChannel
from tee_side.assembly import MaskSettings
from tee_side.engine.tokenizer import TEMPLATE_FILE, Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.protect.calibration import CALIBRATION_FILE
from tee_side.protect.padded import Padded, PaddedSite
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.store import PadStore
from tee_side.protect.verification import ExactCheck
from tee_side.remote import linear
from tee_side.remote.call import CallPlan
from tee_side.runner import Runner, RunnerSettings
from tsqp.cli.logs import configure
from tsqp.cli.program import complain
from tsqp.lab.research.float_check import FloatCheck

BLOCK = 100
NEW_TOKENS = 2
# What a block of prompts runs under. Half of them with pads on disk would use up the bank.
POLICIES = ("shielded", "shielded", "tsqp", "shielded", "two-server", "shielded with a bank")
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
# Chat templates that end in errors of which the library's own words hold the prompt.
TEMPLATES = {
    "refused by its template": "{{ raise_exception(messages[0].content) }}",
    "not in a dictionary": "{{ {}[messages[0].content].there }}",
    "not a template": "{% include messages[0].content %}",
}
NOT_UNICODE = "not Unicode"
REFUSALS = (*TEMPLATES, NOT_UNICODE)
# Of the long answers. A short one stands in a log by chance.
_LONG_TOKENS, _ANSWER_CHARACTERS = 16, 8
# Behind its first few tokens, whatever the policy.
_LONG_FAULT_AT = 40
_WINDOW = 6
PLACES = ("runner log", "service log", "metrics", "errors", "disk", "shared memory")
SHARED = Path("/dev/shm")
_LOGS = PLACES[:2]
_HEAD_BYTES = 4
_BITS = 20
_MAX_FILE_BYTES = 64 * 1024 * 1024
_SPACES = b" \n\t\r"
log = logging.getLogger("tee_side")


@dataclass
class Canaries:
    """What is looked for: patterns by kind. Text is compared without spaces."""

    patterns: list[tuple[str, bytes]] = field(default_factory=list)

    def add_prompt(self, words: Sequence[str], ids: Sequence[int]) -> None:
        """Look for a prompt: each of its words, and any place of its ids at three."""
        for word in words:
            self._add_bytes("prompt", word.encode())
        self.add_ids(ids)

    def add_ids(self, ids: Sequence[int]) -> None:
        """Look for token ids: the first, the middle and the last few of them."""
        last = len(ids) - _WINDOW
        for start in {0, last // 2, last} if last >= 0 else set():
            window = list(ids[start : start + _WINDOW])
            self.patterns.append(("token ids", torch.tensor(window).numpy().tobytes()))
            self.patterns.append(("token ids", ",".join(map(str, window)).encode()))

    def add_answer(self, said: str, token_ids: Sequence[int]) -> None:
        """Look for an answer, if it is long and not the same again and again."""
        if len(said) >= _ANSWER_CHARACTERS and len(set(said)) > _ANSWER_CHARACTERS // 2:
            self._add_bytes("answer", said.encode())
            self.add_ids(token_ids)

    def add_activation(self, row: torch.Tensor) -> None:
        """Look for the beginning of a row, in its own bytes and as people print it."""
        first = row[:4].contiguous()
        if not bool(first.any()):
            return
        self.patterns.append(("activation", first.view(torch.uint8).numpy().tobytes()))
        if first.is_floating_point():
            text = ",".join(f"{value:.4f}" for value in first.tolist())
            self.patterns.append(("activation", text.encode()))

    def add_secret(self, secret: bytes) -> None:
        """Look for a key."""
        self._add_bytes("key", secret)

    def _add_bytes(self, kind: str, content: bytes) -> None:
        self.patterns.append((kind, content))
        self.patterns.append((kind, content.hex().encode()))

    def found_in(self, content: bytes) -> list[str]:
        """Return the kinds of everything that stands there."""
        found = self._places_in(content) | self._places_in(content.translate(None, _SPACES))
        return [self.patterns[place][0] for place in sorted(found)]

    def _places_in(self, content: bytes) -> set[int]:
        """Return which patterns stand there: one pass over it for all that begin with a head."""
        heads: dict[bytes, list[int]] = {}
        for place, (_, pattern) in enumerate(self.patterns):
            heads.setdefault(pattern[:_HEAD_BYTES], []).append(place)
        short = [head for head in heads if len(head) < _HEAD_BYTES]
        found = {place for head in short if head in content for place in heads.pop(head)}
        if not heads:
            return found
        may_begin = np.zeros(1 << _BITS, dtype=np.bool_)
        may_begin[_hashed(b"".join(heads))] = True
        for offset in range(min(_HEAD_BYTES, len(content))):
            for at in np.flatnonzero(may_begin[_hashed(content, offset)]).tolist():
                start = offset + at * _HEAD_BYTES
                for place in heads.get(content[start : start + _HEAD_BYTES], ()):
                    if content.startswith(self.patterns[place][1], start):
                        found.add(place)
        return found


def _hashed(content: bytes, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return `_BITS` bits for every four bytes from there on."""
    whole = (len(content) - offset) // _HEAD_BYTES
    heads = np.frombuffer(content, np.uint32, whole, offset)
    return (heads * np.uint32(2654435761)) >> np.uint32(32 - _BITS)


class Places:
    """Everywhere that the secrets may not be; each is looked at from where it was left."""

    def __init__(self, folder: Path, metrics: Sequence[str]) -> None:
        self.errors: list[str] = []
        self.fetch: Callable[[str], bytes] = _fetch
        self._folder = folder
        self._metrics = metrics
        self._read: dict[Path, int] = {}
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._shared = set(SHARED.iterdir()) if SHARED.is_dir() else set()
        # Keys are in their own files, rightly; nothing else is.
        self.exempt: tuple[Path, ...] = (folder / "bank" / "bank.key",)

    def contents(self) -> Iterator[tuple[str, str, bytes]]:
        """Return what is new: place, name, content."""
        logs = self._folder / "logs"
        for path in sorted(logs.iterdir()):
            place = "runner log" if path.name == "runner.log" else "service log"
            with path.open("rb") as file:
                # A little from before: a line may have been written in two halves.
                file.seek(max(0, self._read.get(path, 0) - 4096))
                content = file.read()
                self._read[path] = file.tell()
            yield place, path.name, content
        for url in self._metrics:
            yield "metrics", url, self.fetch(url)
        yield "errors", "errors", "\n".join(self.errors).encode("utf-8", "backslashreplace")
        self.errors.clear()
        for name in ("work", "home", "tmp", "bank"):
            for path in sorted((self._folder / name).rglob("*")):
                if path.is_file() and path not in self.exempt and self._is_new(path):
                    yield "disk", str(path.relative_to(self._folder)), path.read_bytes()
        if SHARED.is_dir():
            for path in set(SHARED.iterdir()) - self._shared:
                with suppress(OSError):
                    if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                        yield "shared memory", path.name, path.read_bytes()

    def _is_new(self, path: Path) -> bool:
        """Say whether a file was written to since the last look: what is new is in no other."""
        status = path.stat()
        now = status.st_ino, status.st_size, status.st_mtime_ns
        known, self._seen[path] = self._seen.get(path), now
        return known != now


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: bytes = answer.read()
    return content


# ------------------------------------------------------------------------------------- faults


class Faults:
    """Makes one request of a generation go wrong.

    `made`: how often, by policy, fault and which request of its generation, from 1.
    """

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._left = -1
        self._fault = self._policy = ""
        self._at = 0
        self._on_reply: tuple[Any, int] | None = None
        self.secret = ""
        self.count = 0
        self.made: Counter[tuple[str, str, int]] = Counter()

    def arm(self, policy: str, fault: str, at: int, secret: str) -> None:
        """Let the request with this number, counted from now on, go wrong; "" for none."""
        self._policy, self._fault, self.secret = policy, fault, secret
        self._left = self._at = at
        self.count = 0
        self._on_reply = None

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

        def _send(channel: Any, method: str, frames: Any, size: int, timeout_s: float) -> int:
            if method not in ("Init", "Health"):
                frames = faults._sending(channel, frames)
            sent = send(channel, method, frames, size, timeout_s)
            if faults._left == 0 and faults._fault == "lost connection":
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
            return faults._received(frames, when)

        StreamChannel._put = _put  # type: ignore[method-assign]
        StreamChannel._take = _take  # type: ignore[method-assign]
        StreamChannel._send = _send  # type: ignore[method-assign]
        StreamChannel._receive = _receive  # type: ignore[method-assign]

    def _done(self) -> None:
        self.made[self._policy, self._fault, self._at] += 1
        self._fault, self._left, self._on_reply = "", -1, None

    def _sending(self, channel: Any, frames: list[Any]) -> list[Any]:
        self.count += 1
        if self._left > 0:
            self._left -= 1
        if self._left != 0 or not self._fault or self._on_reply is not None:
            return frames
        header, *rest = [bytes(frame) for frame in frames]
        fault = self._fault
        if fault == "cut request":
            rest = [frame[:-1] for frame in rest]
        elif fault == "garbled request":
            at = self._choose.randrange(len(header))
            header = header[:at] + bytes([header[at] ^ 0x55]) + header[at + 1 :]
        elif fault.startswith("request with"):
            fields = msgpack.unpackb(header)
            fields["request"][self.secret[:40]] = self.secret[:100]
            header = msgpack.packb(fields)
        elif fault != "lost connection":
            self._on_reply = channel, channel._last_id
            return frames
        else:
            return frames
        self._done()
        return [header, *rest]

    def _received(self, frames: list[Any], when: int) -> Any:
        *rest, last = [bytearray(frame) for frame in frames]
        fault = self._fault
        self._done()
        if fault == "no reply":
            return None
        if fault == "cut reply":
            del last[-1:]
        elif fault == "garbled reply":
            rest[0][self._choose.randrange(len(rest[0]))] ^= 0x55
        else:
            last[self._choose.randrange(len(last))] ^= 0x11
        return [memoryview(frame) for frame in (*rest, last)], when


# ------------------------------------------------------------------------------------- the run


class Session:
    """Generates with faults, and keeps what is secret of it."""

    def __init__(
        self,
        folder: Path,
        count: int,
        seed: int,
        gpu: Sequence[str],
        metrics: Sequence[str],
        block: int = BLOCK,
    ) -> None:
        self.folder, self.count, self.gpu, self.block = folder, count, gpu, block
        self.choose = random.Random(seed)
        self.faults = Faults(self.choose)
        self.places = Places(folder, metrics)
        self.tokenizer = Tokenizer(folder / "model")
        self.canaries = Canaries()
        self.previous = Canaries()
        self.hits: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        # How many a generation takes, by policy; and how many were to get a fault.
        self.requests: Counter[str] = Counter()
        self.armed: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.patterns = 0
        self.run: Runner | None = None
        self.policy = ""

    def generate_all(self, report: Callable[[int], None]) -> None:
        """Generate from `count` prompts, and look around after every block."""
        for first in range(0, self.count, self.block):
            self.policy = POLICIES[first // self.block % len(POLICIES)]
            self._close()
            for _ in range(first, min(first + self.block, self.count)):
                self._generate()
            self._answer_at_length(FAULTS[first // self.block % len(FAULTS)])
            self._refuse()
            self._close()
            self.hits += self.search()
            report(min(first + self.block, self.count))

    def search(self) -> Counter[str]:
        """Look everywhere for what was secret since the last time.

        And in logs for what was secret before: a line may be written long after what it is about.
        """
        found: Counter[str] = Counter()
        for place, _, content in self.places.contents():
            kinds = self.canaries.found_in(content)
            if place in _LOGS:
                kinds += self.previous.found_in(content)
            found.update(f"{kind} in {place}" for kind in kinds)
        self.patterns += len(self.canaries.patterns)
        self.kinds += Counter(kind for kind, _ in self.canaries.patterns)
        return found

    def forget(self) -> None:
        """Begin a new block of secrets, with those that all have in common."""
        self.previous, self.canaries = self.canaries, Canaries()
        checkpoint = Checkpoint(self.folder / "model")
        for row in checkpoint.rows(EMBEDDING, 32, 128):
            self.canaries.add_activation(row)

    def _open(self) -> Runner:
        if self.run is None:
            name, _, bank = self.policy.partition(" with a ")
            model = self.folder / "model"
            masks = MaskSettings(
                # One without int8 takes none, and would refuse to start.
                calibration=None if name == "tsqp" else model / CALIBRATION_FILE,
                bank=BankPlace.at(self.folder / "bank" / "bank", beside_bank=True)
                if bank
                else None,
                when_out="wait",
            )
            self.run = Runner(
                RunnerSettings(
                    model,
                    load_policy(name),
                    tuple(self.gpu),
                    masks,
                    connect_timeout_s=10,
                    request_timeout_s=0.5,
                    shares_in_the_clear=True,
                )
            )
        return self.run

    def _close(self) -> None:
        if self.run is not None:
            self.run.close()
        self.run = None

    def _prompt(self) -> tuple[str, list[int]]:
        """Return another prompt, which is looked for from now on, and its token ids."""
        words = ["".join(self.choose.choices(string.ascii_lowercase, k=10)) for _ in range(3)]
        text = " ".join(words)
        ids = self.tokenizer.encode(text)
        self.canaries.add_prompt(words, ids)
        return text, ids

    def _generate(self) -> None:
        text, ids = self._prompt()
        try:
            run = self._open()
            self.faults.arm(self.policy, *self._next_fault(), text)
            generation = run.generate(ids, max_new_tokens=NEW_TOKENS)
            for _ in generation:
                pass
            self.canaries.add_ids([*ids[-_WINDOW:], *generation.result().token_ids])
            # Whoever asks again after a fault asks more.
            known = self.requests[self.policy]
            self.requests[self.policy] = min(known or self.faults.count, self.faults.count)
            self.ended["right"] += 1
        except TsqpError as error:
            self.ended[type(error).__name__] += 1
            self._report(error)
            self._close()

    def _answer_at_length(self, fault: str) -> None:
        """Generate more tokens, with a fault among them, and look for them from now on."""
        text, ids = self._prompt()
        said, token_ids = "", []
        try:
            run = self._open()
            self.faults.arm(self.policy, fault, _LONG_FAULT_AT, text)
            generation = run.generate(ids, max_new_tokens=_LONG_TOKENS)
            for sampled in generation.steps():
                token_ids.append(sampled.token_id)
                said = generation.text or ""
        except TsqpError as error:
            self._report(error)
            self._close()
        self.canaries.add_answer(said, token_ids)

    def _refuse(self) -> None:
        """Have a prompt refused in every way before anything is generated."""
        text, _ = self._prompt()
        for name in REFUSALS:
            try:
                if name in TEMPLATES:
                    path = self.folder / "model" / TEMPLATE_FILE
                    path.write_text(TEMPLATES[name], encoding="utf-8")
                    self.tokenizer.apply_chat_template([{"role": "user", "content": text}])
                else:
                    self.tokenizer.encode(f"{text}\udc80")
            except TsqpError as error:
                self.refused[name] += 1
                # Behind it is the library's own error, which is about the prompt.
                self._report(error, suppressed=False)

    def _next_fault(self) -> tuple[str, int]:
        """Return what is to go wrong at which request: in time every fault at every one."""
        requests = self.requests[self.policy]
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
        def note(x_TI: torch.Tensor, encoded: torch.Tensor) -> None:
            if plan.operator == "qkv_proj":
                session.canaries.add_activation(x_TI[-1])
                if not encoded.is_floating_point():
                    session.canaries.add_activation(encoded[-1])

        def encode(x_TI: torch.Tensor) -> torch.Tensor:
            encoded: torch.Tensor = plan.encode(x_TI)
            note(x_TI, encoded)
            return encoded

        def hide(x_TI: torch.Tensor) -> Padded | None:
            masked = plan.padded.hide(x_TI) if plan.padded else None
            if masked is not None:
                note(x_TI, masked.encoded)
            return masked

        padded = plan.padded and cast("PaddedSite", SimpleNamespace(hide=hide))
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


def plant(session: Session, folder: Path) -> dict[str, bool]:
    """Put a secret into each place, and say where it was found."""
    session.forget()
    ids = session.tokenizer.encode("an answer that is known to nobody else")
    session.canaries.add_prompt(["qvxzkjwphm"], ids)
    session.canaries.add_secret(b"\x01\x9f\x33" * 10)
    row = torch.arange(1.5, 9.5)
    session.canaries.add_activation(row)
    shared = SHARED / f"tsqp-canary-{os.getpid()}"
    places = session.places
    planted: dict[str, Callable[[], object]] = {
        "runner log": lambda: log.warning("x", extra={"fields": {"y": "qvxz kjw phm"}}),
        "service log": lambda: _append(folder / "logs" / "service-0.log", f"ids={ids[:9]}\n"),
        "metrics": lambda: setattr(places, "fetch", lambda _: b'tsqp{x="%s"} 1' % row_text(row)),
        "errors": lambda: places.errors.append((b"\x01\x9f\x33" * 10).hex()),
        "disk": lambda: (folder / "tmp" / "x").write_bytes(torch.tensor(ids).numpy().tobytes()),
        "shared memory": lambda: shared.write_bytes(row.numpy().tobytes()),
    }
    if not places._metrics:
        del planted["metrics"]
    if not SHARED.is_dir():
        del planted["shared memory"]
    session.search()
    found: dict[str, bool] = {}
    try:
        for place, put in planted.items():
            put()
            found[place] = any(hit.endswith(f" in {place}") for hit in session.search())
    finally:
        shared.unlink(missing_ok=True)
    return found


def row_text(row: torch.Tensor) -> bytes:
    """Return the numbers of a row as torch prints them."""
    return str(row).encode()


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def main() -> None:
    """Run, and print one line of JSON."""
    folder, count, seed, block, gpu, metrics = sys.argv[1:]
    torch.set_num_threads(1)
    configure("debug")
    endpoints, urls = gpu.split(","), [url for url in metrics.split(",") if url]
    session = Session(Path(folder), int(count), int(seed), endpoints, urls, int(block))
    session.forget()
    session.faults.install()
    note_secrets(session)

    def report(done: int) -> None:
        session.forget()
        print(f"progress {done}", flush=True)  # noqa: T201 - to who started it

    session.generate_all(report)
    answer = {
        "hits": dict(session.hits),
        "ended": dict(session.ended),
        "faults": [[*which, times] for which, times in session.faults.made.items()],
        "requests": dict(session.requests),
        "patterns": session.patterns,
        "kinds": dict(session.kinds),
        "refused": dict(session.refused),
        "planted": plant(session, Path(folder)),
    }
    print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
