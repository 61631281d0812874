"""Runs of the laboratory on a small model, with attacks that do as they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tee_side.policy.placement import load_policy
from tests.kit.model import token_ids
from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.attacks.direct import NearestEmbedding
from tsqp.lab.leak.laboratory import Laboratory
from tsqp.lab.leak.model import PolicyLeak, Report
from tsqp.lab.leak.settings import LeakSettings

PROMPTS = tuple(tuple(token_ids(6, seed)) for seed in range(3))
FIRST = "layer 0 qkv_proj"


class Mine(Attack):
    """A family of attacks with a control that is easy."""

    reads: ClassVar[str] = "nothing"
    source: ClassVar[str] = "this test"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.9

    def refuses(self, view: View) -> str | None:
        return None if view.linear_places() else "no activations crossed"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        for session, trace in enumerate(view.traces):
            yield Reading(FIRST, session, range(trace.tokens), {})


class Blind(Mine):
    """Reads nothing anywhere."""

    name: ClassVar[str] = "blind"


class OnlyHere(Mine):
    """Reads nothing on its control and everything in the clear under integers."""

    name: ClassVar[str] = "only-here"
    control: ClassVar[str] = "row-rotation"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        if view.policy.name != self.control:
            yield from NearestEmbedding().read(view, work)


class Refuses(Mine):
    """Finds nothing to do on its control."""

    name: ClassVar[str] = "refuses"
    control: ClassVar[str] = "tee-only"


class Interrupts(Mine):
    """Raises an error under one policy."""

    name: ClassVar[str] = "interrupts"
    error: ClassVar[BaseException] = KeyboardInterrupt()

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        if view.policy.name == "row-rotation":
            raise self.error
        yield from NearestEmbedding().read(view, work)


def settings_of(
    model: Path, policies: Sequence[Any], attacks: Sequence[type[Attack]], **changed: Any
) -> LeakSettings:
    named = [
        (one, load_policy(one)) if isinstance(one, str) else (one.name, one) for one in policies
    ]
    settings: dict[str, Any] = {
        "command": "tsqp leak",
        "model": model,
        "policies": tuple(named),
        "attacks": tuple(attacks),
        "prompts": PROMPTS,
        "new_tokens": 5,
    }
    return LeakSettings(**{**settings, **changed})


def run(
    model: Path, folder: Path, policies: Sequence[Any], attacks: Sequence[type[Attack]], **more: Any
) -> Report:
    laboratory = Laboratory(settings_of(model, policies, attacks, **more), folder)
    laboratory.run()
    return laboratory.report()


def only(report: Report) -> PolicyLeak:
    (found,) = report.policies
    return found


def folder_of(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made
