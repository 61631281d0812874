"""LlamaIndex: OpenAILike, and an agent of it; its own class for OpenAI's responses."""

from typing import Any

from checks import BASE_URL, MODEL, SAID, SUNNY, check, run, same, true
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ASKED = "How is the weather?"
GIVEN: Any = {"model": MODEL, "api_base": BASE_URL, "api_key": "unused", "max_retries": 0}


class City(BaseModel):
    """Where."""

    name: str
    people: int


def weather(city: str) -> str:
    """Say the weather."""
    return SUNNY


TOOL = FunctionTool.from_defaults(weather)


def _model(**options: Any) -> OpenAILike:
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 16384}
    return OpenAILike(**GIVEN, **{**kind, **options})


def _said(*texts: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text) for text in texts]


@check("complete, of a chat and of a completion")
def _() -> None:
    same(_model().complete(ASKED).text, SAID)
    same(_model(is_chat_model=False, max_tokens=64).complete(ASKED).text, SAID)


@check("chat, stream_chat, astream_chat")
async def _() -> None:
    same(_model().chat(_said(ASKED)).message.content, SAID)
    same(list(_model().stream_chat(_said(ASKED)))[-1].message.content, SAID)
    chunks = [one async for one in await _model().astream_chat(_said(ASKED))]
    same("".join(one.delta or "" for one in chunks), SAID)


@check("chat_with_tools: auto, required, streamed")
async def _() -> None:
    for required in (False, True):
        answer = _model().chat_with_tools([TOOL], ASKED, tool_required=required)
        calls = _model().get_tool_calls_from_response(answer)
        same([one.tool_kwargs for one in calls], [{"city": "Paris"}])
    stream = await _model().astream_chat_with_tools([TOOL], "both", allow_parallel_tool_calls=True)
    last = [one async for one in stream][-1]
    same(len(_model().get_tool_calls_from_response(last)), 2)


@check("predict_and_call")
def _() -> None:
    same(_model().predict_and_call([TOOL], ASKED).response, SUNNY)


@check("structured_predict")
def _() -> None:
    true(isinstance(_model().structured_predict(City, PromptTemplate(ASKED)), City), "a City")
    bound = _model(should_use_structured_outputs=True)
    true(isinstance(bound.structured_predict(City, PromptTemplate(ASKED)), City), "a City")


@check("FunctionAgent")
async def _() -> None:
    agent = FunctionAgent(tools=[TOOL], llm=_model())
    same(str(await agent.run(ASKED)), f"The tool says: {SUNNY}")


@check("OpenAIResponses: chat, streamed, tools, an agent")
async def _() -> None:
    model = OpenAIResponses(**GIVEN, context_window=16384)
    same(model.chat(_said(ASKED)).message.content, SAID)
    same(list(model.stream_chat(_said(ASKED)))[-1].message.content, SAID)
    agent = FunctionAgent(tools=[TOOL], llm=model)
    same(str(await agent.run(ASKED)), f"The tool says: {SUNNY}")


run("llama-index-llms-openai-like")
