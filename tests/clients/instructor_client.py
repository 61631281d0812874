"""Instructor: the modes that are for servers of OpenAI's API."""

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from checks import BASE_URL, MODEL, USER, check, run, same, true
from pydantic import BaseModel

# Its other modes are of other providers.
MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_O1", "MD_JSON", "JSON_SCHEMA", "RESPONSES_TOOLS")
ASKED: Any = {"model": MODEL, "messages": USER, "max_retries": 0}


class City(BaseModel):
    """Where."""

    name: str
    people: int


def _client(mode: str, *, waiting: bool = False) -> Any:
    kind = openai.AsyncOpenAI if waiting else openai.OpenAI
    client = kind(base_url=BASE_URL, api_key="unused", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


for mode in MODES:

    @check(f"{mode}")
    def _(mode: str = mode) -> None:
        true(isinstance(_client(mode).create(response_model=City, **ASKED), City), "a City")

    @check(f"{mode}: create_partial")
    def _(mode: str = mode) -> None:
        *_more, last = _client(mode).create_partial(response_model=City, **ASKED)
        same(type(last.people), int)


for mode in ("TOOLS", "JSON", "MD_JSON", "JSON_SCHEMA"):

    @check(f"{mode}: create_iterable")
    def _(mode: str = mode) -> None:
        found = list(_client(mode).create_iterable(response_model=City, **ASKED))
        true(found and isinstance(found[0], City), "a City")


@check("PARALLEL_TOOLS")
def _() -> None:
    turns = [{"role": "user", "content": "both"}]
    found = _client("PARALLEL_TOOLS").create(
        response_model=Iterable[City], **ASKED | {"messages": turns}
    )
    same([type(one) for one in found], [City, City])


@check("TOOLS: AsyncOpenAI")
async def _() -> None:
    client = _client("TOOLS", waiting=True)
    true(isinstance(await client.create(response_model=City, **ASKED), City), "a City")


run("instructor")
