"""LangChain: its chat model of OpenAI's API, embeddings, and agents."""

import json
from typing import Any

from checks import BASE_URL, MODEL, SAID, SUNNY, TOO_LONG, check, run, same, true
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

GIVEN: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": "unused", "max_retries": 0}
KINDS = {"chats": False, "responses": True}
ASKED = "How is the weather?"


class City(BaseModel):
    """Where."""

    name: str
    people: int


@tool
def weather(city: str) -> str:
    """Say the weather."""
    return SUNNY


def _model(kind: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(**GIVEN, use_responses_api=KINDS[kind], **options)


for kind in KINDS:

    @check(f"{kind}: invoke")
    def _(kind: str = kind) -> None:
        answer = _model(kind).invoke(ASKED)
        same(answer.text, SAID)
        true(answer.usage_metadata)

    @check(f"{kind}: stream, with usage")
    async def _(kind: str = kind) -> None:
        whole: Any = None
        async for chunk in _model(kind, stream_usage=True).astream(ASKED):
            whole = chunk if whole is None else whole + chunk
        same(whole.text, SAID)
        true(whole.usage_metadata["output_tokens"])

    @check(f"{kind}: bind_tools: auto, any, named, strict")
    def _(kind: str = kind) -> None:
        turns: list[Any] = [HumanMessage(ASKED)]
        for options in ({}, {"tool_choice": "any"}, {"tool_choice": "weather"}, {"strict": True}):
            answer = _model(kind).bind_tools([weather], **options).invoke(turns)
            same([one["args"] for one in answer.tool_calls], [{"city": "Paris"}])
        turns += [answer, ToolMessage(SUNNY, tool_call_id=answer.tool_calls[0]["id"])]
        answer = _model(kind).bind_tools([weather]).invoke(turns)
        same(answer.text, f"The tool says: {SUNNY}")

    for method in ("json_schema", "function_calling", "json_mode"):

        @check(f"{kind}: with_structured_output, {method}")
        def _(kind: str = kind, method: Any = method) -> None:
            asked = f"{ASKED} As JSON of {json.dumps(City.model_json_schema())}"
            bound = _model(kind).with_structured_output(City, method=method)
            true(isinstance(bound.invoke(asked), City), "a City")

    @check(f"{kind}: create_agent")
    def _(kind: str = kind) -> None:
        done = create_agent(_model(kind), [weather]).invoke({"messages": [HumanMessage(ASKED)]})
        same(done["messages"][-1].text, f"The tool says: {SUNNY}")

    @check(f"{kind}: create_agent, streamed")
    async def _(kind: str = kind) -> None:
        agent, text = create_agent(_model(kind), [weather]), ""
        given: Any = {"messages": [HumanMessage(f"{ASKED} both")]}
        async for chunk, _more in agent.astream(given, stream_mode="messages"):
            text += chunk.text if chunk.type == "AIMessageChunk" else ""
        same(text, f"The tool says: {SUNNY}")

    @check(f"{kind}: create_agent with response_format")
    def _(kind: str = kind) -> None:
        agent = create_agent(_model(kind), [], response_format=City)
        done = agent.invoke({"messages": [HumanMessage(ASKED)]})
        true(isinstance(done["structured_response"], City), "a City")

    @check(f"{kind}: reasoning")
    def _(kind: str = kind) -> None:
        same(_model(kind, reasoning_effort="low").invoke(ASKED).text, SAID)

    @check(f"{kind}: a prompt that is too long")
    def _(kind: str = kind) -> None:
        try:
            _model(kind).invoke(TOO_LONG)
        except Exception as error:  # noqa: BLE001
            same(type(error).__name__, "OpenAIContextOverflowError")
        else:
            raise AssertionError("no error")


@check("completions")
def _() -> None:
    same(OpenAI(**GIVEN).invoke("Hello"), SAID)


@check("embeddings")
def _() -> None:
    # Otherwise it sends tokens of OpenAI's own vocabulary.
    embeddings = OpenAIEmbeddings(**GIVEN, check_embedding_ctx_length=False)
    same(len(embeddings.embed_documents(["a cat", "a bird"])), 2)


run("langchain-openai")
