"""A runner whose every secret is known: it generates with faults, and looks around."""

from __future__ import annotations

import logging
import math
import random
import string
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from protocol.errors import TsqpError
from protocol.model.checkpoint import EMBEDDING, Checkpoint
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
from tests.kit.canaries import FAULTS, PLACES, Canaries, Faults, Places
from tsqp.cli.program import complain
from tsqp.lab.research.float_check import FloatCheck

NEW_TOKENS, LONG_TOKENS = 2, 16
# Of the long answer: behind its first few tokens, whatever the policy.
LONG_FAULT_AT = 40
# What a block of prompts runs under. Half of them with pads on disk would use up the bank.
POLICIES = ("shielded", "shielded", "tsqp", "shielded", "two-server", "shielded with a bank")
# Chat templates that end in errors of which the library's own words hold the prompt.
TEMPLATES = {
    "refused by its template": "{{ raise_exception(messages[0].content) }}",
    "not in a dictionary": "{{ {}[messages[0].content].there }}",
    "not a template": "{% include messages[0].content %}",
}
log = logging.getLogger("tee_side")


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
            self.faults.arm(self.policy, fault, LONG_FAULT_AT, text)
            generation = runner.generate(ids, max_new_tokens=LONG_TOKENS)
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
