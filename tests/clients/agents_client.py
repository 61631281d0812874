"""OpenAI's Agents SDK, by chats and by responses."""

import openai
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from checks import BASE_URL, MODEL, SAID, SUNNY, check, run, same, true
from pydantic import BaseModel

set_tracing_disabled(True)
KINDS = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class City(BaseModel):
    """Where."""

    name: str
    people: int


@function_tool
def weather(city: str) -> str:
    """Say the weather.

    Args:
        city: Where.
    """
    return SUNNY


def _agent(kind: str, **options: object) -> Agent:
    client = AsyncOpenAI(base_url=BASE_URL, api_key="unused", max_retries=0)
    model = KINDS[kind](model=MODEL, openai_client=client)
    return Agent(name="a", instructions="Be short.", model=model, **options)  # type: ignore[arg-type]


for kind in KINDS:

    @check(f"{kind}: a text")
    async def _(kind: str = kind) -> None:
        same((await Runner.run(_agent(kind), "Hello")).final_output, SAID)

    @check(f"{kind}: tools")
    async def _(kind: str = kind) -> None:
        done = await Runner.run(_agent(kind, tools=[weather]), "The weather of both.")
        same(done.final_output, f"The tool says: {SUNNY}")
        true(done.context_wrapper.usage.output_tokens)

    @check(f"{kind}: tools, streamed")
    async def _(kind: str = kind) -> None:
        done = Runner.run_streamed(_agent(kind, tools=[weather]), "How is the weather?")
        kinds = {event.type async for event in done.stream_events()}
        same(done.final_output, f"The tool says: {SUNNY}")
        true("raw_response_event" in kinds)

    @check(f"{kind}: output_type")
    async def _(kind: str = kind) -> None:
        true(
            isinstance(
                (await Runner.run(_agent(kind, output_type=City), "Hello")).final_output, City
            )
        )

    @check(f"{kind}: a tool that is required, and reasoning")
    async def _(kind: str = kind) -> None:
        settings = ModelSettings(
            tool_choice="required", reasoning=openai.types.shared.Reasoning(effort="low")
        )
        done = await Runner.run(_agent(kind, tools=[weather], model_settings=settings), "Hello")
        same(done.final_output, f"The tool says: {SUNNY}")

    @check(f"{kind}: handoff")
    async def _(kind: str = kind) -> None:
        other = _agent(kind)
        first = _agent(kind, handoffs=[handoff(other, tool_name_override="other")])
        done = await Runner.run(first, "Hello")
        true(done.last_agent is other, "the other agent")


run("openai-agents")
