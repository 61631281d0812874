"""What rows ask a server of the demo model, and what the model says to each prompt alone.

The right answers come of an engine in this process over a service in it, in the same integers
without pads, one request at a time: nothing of the server is used but its names of tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.grammar import GrammarCompiler
from tee_side.engine.request import Request
from tee_side.engine.sampling import SamplingSettings
from tee_side.engine.sequence import Sampled
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.token_names import TokenNames
from tests.kit.model import assemble
from tests.soak.demo import DEMO, prompt
from tests.soak.row import note
from tests.soak.served import Reply

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# The same bits as under `shielded`, without the work for pads.
_POLICY = "quantized-clear"
_STOPS = ((), (), (" the",), (".", " and"), ("\n", " was a"))
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.1},
)
_GRAMMARS: tuple[tuple[dict[str, Any], str, Any], ...] = (
    ({"response_format": {"type": "json_object"}}, "json_object", {}),
    ({"guided_regex": "(once|then) [a-z ]{5,60}[.]"}, "regex", "(once|then) [a-z ]{5,60}[.]"),
)
# As long a stretch of text is in no two answers by chance, or seldom.
_STRETCH = 12


@dataclass(frozen=True)
class Said:
    """One choice: its text, its tokens by name, logprobs, and how it ends."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    finish: str


@dataclass(frozen=True, eq=False)
class Job:
    """A request and the right answer. `fields`: its body, which says nothing of streaming."""

    path: str
    fields: dict[str, Any]
    prompt_tokens: int
    choices: tuple[Said, ...]

    def visible(self) -> tuple[Said, ...]:
        """Return what of the choices an answer shows: names of tokens where they are asked for."""
        if "logprobs" in self.fields:
            return self.choices
        return tuple(Said(said.text, (), (), said.finish) for said in self.choices)

    @property
    def new_tokens(self) -> int:
        """Of all choices."""
        return sum(len(said.tokens) for said in self.choices)


class Asker:
    """Makes jobs; one of a kind for the rows of a process."""

    def __init__(self, seed: int = 1) -> None:
        self._chance = random.Random(seed)
        self._tokenizer = Tokenizer(DEMO)
        self._names = TokenNames(self._tokenizer)
        self._tee = assemble(DEMO, _POLICY)
        config = self._tee.model.config
        self._stop_ids = config.eos_token_ids
        self._compiler = GrammarCompiler(self._tokenizer, config.vocab_size, self._stop_ids)

    def close(self) -> None:
        """End what makes the right answers."""
        self._tee.assembly.close()

    def jobs(self, count: int, most_tokens: int) -> list[Job]:
        """Return so many of every kind, with answers of up to so many tokens."""
        return [self._any(number, most_tokens) for number in range(count)]

    def long(self, new_tokens: int, prompt_tokens: int = 6) -> Job:
        """Return a completion that has exactly so many tokens."""
        ids: list[int] = prompt(prompt_tokens, self._chance)
        sampling = {"temperature": 0.8, "seed": self._chance.randrange(2**31)}
        return self._job(COMPLETIONS, {"prompt": ids, "ignore_eos": True} | sampling, new_tokens)

    def _any(self, number: int, most_tokens: int) -> Job:
        chance = self._chance
        ids = prompt(chance.randint(3, 40), chance)
        fields: dict[str, Any] = {"seed": chance.randrange(2**31), "n": 1 + (number % 4 == 1)}
        fields |= _SAMPLING[number % len(_SAMPLING)]
        if stop := chance.choice(_STOPS):
            fields["stop"] = list(stop)
        if number % 8 == 3:
            fields |= _GRAMMARS[number // 8 % len(_GRAMMARS)][0]
        with_logprobs, new_tokens = number % 2 == 0, chance.randint(2, most_tokens)
        if number % 3:
            said = ids if number % 5 else self._tokenizer.decode(ids)
            fields |= {"prompt": said} | ({"logprobs": 0} if with_logprobs else {})
            return self._job(COMPLETIONS, fields, new_tokens)
        turn = {"role": "user", "content": self._tokenizer.decode(ids)}
        fields |= {"messages": [turn]} | ({"logprobs": True} if with_logprobs else {})
        return self._job(CHAT, fields, new_tokens)

    def _job(self, path: str, fields: dict[str, Any], new_tokens: int) -> Job:
        given: Any = fields.get("prompt")
        ids: list[int]
        if path == CHAT:
            ids = self._tokenizer.apply_chat_template(fields["messages"])
        else:
            ids = self._tokenizer.encode(given) if isinstance(given, str) else given
        names = SamplingSettings.model_fields.keys()
        grammars = [
            (kind, source) for mark, kind, source in _GRAMMARS if mark.items() <= fields.items()
        ]
        request = Request(
            prompt_ids=tuple(ids),
            max_new_tokens=new_tokens,
            samples=fields.get("n", 1),
            sampling=SamplingSettings(**{n: fields[n] for n in names & fields.keys()}),
            stop=tuple(fields.get("stop", ())),
            stop_ids=frozenset() if fields.get("ignore_eos") else None,
            logprobs=0,
            grammar=self._compiler.compile(*grammars[0]) if grammars else None,  # type: ignore[arg-type]
        )
        engine = Engine(self._tee.model, self._tee.lanes, EngineSettings(), self._tokenizer)
        engine.admit(request)
        found: list[list[Sampled]] = [[] for _ in range(request.samples)]
        while engine.running:
            for sampled in engine.step():
                found[sampled.sequence.sample].append(sampled)
        choices = tuple(self._said(sampled, request) for sampled in found)
        return Job(path, fields | {"max_tokens": new_tokens}, len(ids), choices)

    def _said(self, sampled: Sequence[Sampled], request: Request) -> Said:
        ids = [one.token_id for one in sampled]
        ends = self._stop_ids if request.stop_ids is None else request.stop_ids
        text = self._tokenizer.decode(ids[:-1] if ids[-1] in ends else ids)
        cuts = [at for stop in request.stop if (at := text.find(stop)) >= 0]
        return Said(
            text[: min(cuts, default=len(text))],
            tuple(json.loads(self._names.of(token_id)[0]) for token_id in ids),
            tuple(one.logprob.logprob for one in sampled if one.logprob is not None),
            sampled[-1].finish_reason or "",
        )


@dataclass
class Tally:
    """What came of the answers.

    `right`: with every token, in order, to the last byte. `lost`: with fewer than there are, or no
    end. `duplicated`: with more, or a second id, end or opening. `crossed`: with a stretch of
    another prompt's answer. `wrong`: not right, those among them. `tokens`, `prompt_tokens`: of the
    right ones.
    """

    right: int = 0
    lost: int = 0
    duplicated: int = 0
    crossed: int = 0
    wrong: int = 0
    tokens: int = 0
    prompt_tokens: int = 0

    def judge(self, job: Job, reply: Reply, others: Collection[Job] = ()) -> bool:
        """Count an answer to its end, and say whether it is right. `others`: what else is asked."""
        got = _Got(len(job.choices))
        if reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream"):
            got.read_stream(reply.events)
        elif reply.status == 200:
            got.read_whole(json.loads(reply.body))
        tokens = [len(said.tokens) for said in job.choices]
        usage = {"prompt_tokens": job.prompt_tokens, "completion_tokens": job.new_tokens}
        whole = got.chunks is None or got.chunks == tokens
        whole = whole and got.ends and not got.twice and got.usage in ({}, usage)
        if whole and got.said() == job.visible():
            self.right += 1
            self.tokens += job.new_tokens
            self.prompt_tokens += job.prompt_tokens
            return True
        chunks = got.chunks or tokens
        self.wrong += 1
        self.lost += not got.ends or any(n < most for n, most in zip(chunks, tokens, strict=True))
        self.duplicated += got.twice or any(
            n > most for n, most in zip(chunks, tokens, strict=True)
        )
        self.crossed += any(
            _is_crossed(text, said.text, others)
            for text, said in zip(got.texts, job.choices, strict=True)
        )
        note(f"got status {reply.status}, {got}; expected {job}")
        return False


def is_broken_off(job: Job, reply: Reply) -> bool:
    """Say whether a stream is the right one up to one typed error, its last event."""
    events = reply.events if reply.status == 200 else []
    if not events or events[-1] == "[DONE]" or "error" not in json.loads(events[-1]):
        return False
    got = _Got(len(job.choices))
    got.read_stream(events)
    error = json.loads(events[-1])["error"]
    begins = all(
        said.text.startswith(text) for text, said in zip(got.texts, job.choices, strict=True)
    )
    return begins and not got.twice and error["code"] is not None


def _is_crossed(text: str, own: str, others: Collection[Job]) -> bool:
    stretches = {text[at : at + _STRETCH] for at in range(len(text) - _STRETCH + 1)}
    foreign = {stretch for stretch in stretches if stretch not in own}
    texts = [said.text for job in others for said in job.choices]
    return any(stretch in other for stretch in foreign for other in texts if other != own)


class _Got:
    """An answer as it came, choice by choice. `chunks`: of a stream, those with a token.

    `twice`: whether something came a second time, or at another place than its own.
    """

    def __init__(self, count: int) -> None:
        self.texts = [""] * count
        self.tokens: list[list[str]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.finish = [""] * count
        self.chunks: list[int] | None = None
        self.usage: dict[str, int] = {}
        self.ends = self.twice = False

    def __repr__(self) -> str:
        return repr(vars(self))

    def said(self) -> tuple[Said, ...]:
        """Return the choices."""
        parts = zip(self.texts, self.tokens, self.logprobs, self.finish, strict=True)
        return tuple(Said(text, (*names,), (*own,), how) for text, names, own, how in parts)

    def read_whole(self, answer: dict[str, Any]) -> None:
        """Take an answer in one piece."""
        self.twice = [c["index"] for c in answer["choices"]] != list(range(len(self.texts)))
        for choice in answer["choices"]:
            self._add(choice, choice.get("message", choice).get("content", choice.get("text")))
        self._count(answer["usage"])
        self.ends = all(self.finish)

    def read_stream(self, events: Sequence[str]) -> None:
        """Take events in their order."""
        self.chunks = [0] * len(self.texts)
        if events[-1:] == ["[DONE]"]:
            events = events[:-1]
            self.ends = True
        ids, opened = set(), set()
        for event in map(json.loads, events):
            if "error" in event:
                self.ends = False
                return
            ids.add(event["id"])
            for choice in event["choices"]:
                index, delta = choice["index"], choice.get("delta", {})
                self.twice |= bool(self.finish[index])
                if "role" in delta:
                    self.twice |= index in opened or self.chunks[index] > 0
                    opened.add(index)
                    continue
                self.chunks[index] += 1
                self._add(choice, delta.get("content", choice.get("text")))
            self._count(event.get("usage"))
        self.twice |= len(ids) > 1
        self.ends = self.ends and all(self.finish)

    def _count(self, usage: dict[str, Any] | None) -> None:
        if usage is not None:
            self.twice |= bool(self.usage)
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}

    def _add(self, choice: dict[str, Any], text: str) -> None:
        index, logprobs = choice["index"], choice["logprobs"]
        self.texts[index] += text
        self.finish[index] = choice["finish_reason"] or ""
        if logprobs is None:
            return
        names = self.tokens[index]
        if "content" in logprobs:
            names += [one["token"] for one in logprobs["content"]]
            self.logprobs[index] += [one["logprob"] for one in logprobs["content"]]
            return
        for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            before = "".join(names)
            # A part of a character has a name that is longer than its text.
            self.twice |= before.isascii() and "bytes:" not in before and offset != len(before)
            names.append(name)
        self.logprobs[index] += logprobs["token_logprobs"]
