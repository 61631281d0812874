"""LiteLLM."""

import json
from typing import Any

import litellm
from checks import (
    BASE_URL,
    MODEL,
    PARAMETERS,
    SAID,
    SUNNY,
    TOO_LONG,
    USER,
    WEATHER,
    check,
    run,
    same,
    true,
)
from pydantic import BaseModel

litellm.telemetry = False
GIVEN: Any = {"api_base": BASE_URL, "api_key": "unused", "num_retries": 0}
PREFIXES = ("openai", "hosted_vllm")


class City(BaseModel):
    """Where."""

    name: str
    people: int


for prefix in PREFIXES:
    options: Any = {"model": f"{prefix}/{MODEL}", "messages": USER, **GIVEN}

    @check(f"{prefix}: completion, streamed too")
    def _(options: Any = options) -> None:
        same(litellm.completion(**options).choices[0].message.content, SAID)
        usage = {"include_usage": True}
        chunks = list(litellm.completion(**options, stream=True, stream_options=usage))
        same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), SAID)
        true(litellm.stream_chunk_builder(chunks).usage.completion_tokens)

    @check(f"{prefix}: tools")
    async def _(options: Any = options) -> None:
        first = await litellm.acompletion(**options, tools=[WEATHER], tool_choice="auto")
        message = first.choices[0].message
        (call,) = message.tool_calls
        same(json.loads(call.function.arguments), {"city": "Paris"})
        result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
        turns = options | {"messages": [*USER, message, result]}
        second = await litellm.acompletion(**turns, tools=[WEATHER])
        same(second.choices[0].message.content, f"The tool says: {SUNNY}")

    @check(f"{prefix}: response_format")
    def _(options: Any = options) -> None:
        answer = litellm.completion(**options, response_format=City)
        City.model_validate_json(answer.choices[0].message.content)

    @check(f"{prefix}: reasoning_effort")
    def _(options: Any = options) -> None:
        allowed = {"allowed_openai_params": ["reasoning_effort"]}
        answer = litellm.completion(**options, reasoning_effort="low", **allowed)
        same(answer.choices[0].message.reasoning_content, "What was asked is plain.")

    @check(f"{prefix}: thinking and tools, sent back")
    def _(options: Any = options) -> None:
        thinks = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
        given = options | thinks | {"tools": [WEATHER]}
        message = litellm.completion(**given).choices[0].message
        true(message.reasoning_content)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": SUNNY}
        second = litellm.completion(**given | {"messages": [*USER, message, result]})
        same(second.choices[0].message.content, f"The tool says: {SUNNY}")

    @check(f"{prefix}: ContextWindowExceededError")
    def _(options: Any = options) -> None:
        try:
            litellm.completion(**options | {"messages": [{"role": "user", "content": TOO_LONG}]})
        except litellm.ContextWindowExceededError:
            return
        raise AssertionError("no error")

    @check(f"{prefix}: responses")
    def _(options: Any = options) -> None:
        given = {"model": options["model"], "input": "Hello", **GIVEN}
        answer = litellm.responses(**given)
        same(answer.output[0].content[0].text, SAID)
        kinds = [event.type for event in litellm.responses(**given, stream=True)]
        same(kinds[-1], "response.completed")
        flat = {"type": "function", "name": "weather", "parameters": PARAMETERS}
        same(litellm.responses(**given, tools=[flat]).output[0].type, "function_call")

    @check(f"{prefix}: embedding")
    def _(options: Any = options) -> None:
        answer = litellm.embedding(model=options["model"], input=["a cat"], **GIVEN)
        same(len(answer.data[0]["embedding"]), 3)


@check("openai: text_completion")
def _() -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="a", **GIVEN)
    true(SAID.startswith(answer.choices[0].text))


run("litellm")
