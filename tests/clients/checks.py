"""What the programs of this folder have in common: named checks, one line of JSON for each.

Each program is run by a Python of its own, without this repository's packages:

    python tests/clients/NAME_client.py ADDRESS
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

ADDRESS = sys.argv[1]
BASE_URL = f"{ADDRESS}/v1"
MODEL = "demo"
# What the scripted model says to anything else.
SAID = "The cat sat on the mat, and looked at a bird."
TOO_LONG = "cat " * 20_000
USER: Any = [{"role": "user", "content": "How is the weather?"}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Says the weather.", "parameters": PARAMETERS},
}
SUNNY = "sunny in Paris"

_checks: list[tuple[str, Callable[[], Any]]] = []


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a check: a function, or a coroutine, that raises what is wrong."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((name, function))
        return function

    return add


def same(got: Any, expected: Any) -> None:
    """Raise AssertionError unless both are equal."""
    if got != expected:
        raise AssertionError(f"got {got!r}, expected {expected!r}")


def true(value: Any, what: str = "a value") -> None:
    """Raise AssertionError unless there is something."""
    if not value:
        raise AssertionError(f"got {value!r}, expected {what}")


def run(package: str) -> None:
    """Run all checks of a program, and print a line for each. `package`: whose version counts."""
    # One loop for all: clients keep connections.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for name, function in _checks:
        only = os.environ.get("ONLY")
        if only and only not in name:
            continue
        reason = ""
        try:
            found = function()
            if inspect.iscoroutine(found):
                loop.run_until_complete(found)
        except Exception as error:  # noqa: BLE001 - whatever a client raises
            reason = f"{type(error).__name__}: {error}"
        line = {"version": version(package), "check": name, "reason": " ".join(reason.split())}
        sys.stdout.write(f"\n{json.dumps(line)}\n")
        sys.stdout.flush()
