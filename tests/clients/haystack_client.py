"""Haystack: its generators of chats and responses, an agent, and embeddings."""

from typing import Any

from checks import BASE_URL, MODEL, SAID, SUNNY, check, run, same
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

GIVEN: Any = {
    "api_key": Secret.from_token("unused"),
    "model": MODEL,
    "api_base_url": BASE_URL,
    "max_retries": 0,
}
KINDS = {"chats": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}
ASKED = [ChatMessage.from_user("How is the weather?")]


class City(BaseModel):
    """Where."""

    name: str
    people: int


@tool
def weather(city: str) -> str:
    """Say the weather."""
    return SUNNY


for kind, generator in KINDS.items():

    @check(f"{kind}: a text, streamed too")
    def _(generator: Any = generator) -> None:
        same(generator(**GIVEN).run(ASKED)["replies"][0].text, SAID)
        chunks: list[StreamingChunk] = []
        generator(**GIVEN, streaming_callback=chunks.append).run(ASKED)
        same("".join(one.content for one in chunks), SAID)

    @check(f"{kind}: tools, strict too")
    def _(generator: Any = generator) -> None:
        for strict in (False, True):
            made = generator(**GIVEN, tools=[weather], tools_strict=strict)
            first = made.run(ASKED)["replies"][0]
            (call,) = first.tool_calls
            same(call.arguments, {"city": "Paris"})
            result = ChatMessage.from_tool(SUNNY, origin=call)
            second = made.run([*ASKED, first, result])["replies"][0]
            same(second.text, f"The tool says: {SUNNY}")

    @check(f"{kind}: Agent, streamed too")
    def _(generator: Any = generator) -> None:
        for callback in (None, lambda chunk: None):
            agent = Agent(
                chat_generator=generator(**GIVEN), tools=[weather], streaming_callback=callback
            )
            done = agent.run(ASKED)
            same(done["last_message"].text, f"The tool says: {SUNNY}")

    @check(f"{kind}: a schema")
    def _(generator: Any = generator) -> None:
        name = "response_format" if generator is OpenAIChatGenerator else "text_format"
        made = generator(**GIVEN, generation_kwargs={name: City})
        City.model_validate_json(made.run(ASKED)["replies"][0].text)


@check("embeddings")
def _() -> None:
    same(len(OpenAITextEmbedder(**GIVEN).run("a cat")["embedding"]), 3)


run("haystack-ai")
