"""OpenAI's own client for Python."""

import json
from typing import Any

import openai
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

client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0)
chat, responses = client.chat.completions, client.responses
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
BOTH: Any = [{"role": "user", "content": "The weather of both."}]


class City(BaseModel):
    """Where."""

    name: str
    people: int
    rivers: list[str]


@check("models")
def _() -> None:
    same([one.id for one in client.models.list()], [MODEL])
    same(client.models.retrieve(MODEL).id, MODEL)


@check("chat")
def _() -> None:
    answer = chat.create(model=MODEL, messages=USER, n=2, logprobs=True, top_logprobs=2)
    same([one.message.content for one in answer.choices], [SAID, SAID])
    true(answer.choices[1].logprobs)


@check("chat, streamed, with usage")
def _() -> None:
    usage: Any = {"include_usage": True}
    chunks = list(chat.create(model=MODEL, messages=USER, stream=True, stream_options=usage))
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), SAID)
    true(chunks[-1].usage)


@check("chat, without waiting")
async def _() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="unused") as waiting:
        stream = await waiting.chat.completions.create(model=MODEL, messages=USER, stream=True)
        same("".join([c.choices[0].delta.content or "" async for c in stream]), SAID)


def _called(**options: Any) -> list[str]:
    given = {"messages": USER, "tools": [WEATHER, CLOCK], **options}
    message = chat.create(model=MODEL, **given).choices[0].message
    return [one.function.name for one in message.tool_calls or []]  # type: ignore[union-attr]


@check("tools: auto, required, named, none, several")
def _() -> None:
    same(_called(), ["weather"])
    same(_called(tool_choice="required"), ["weather"])
    same(_called(tool_choice={"type": "function", "function": {"name": "clock"}}), ["clock"])
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    same(_called(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}), ["clock"])
    same(_called(tool_choice="none"), [])
    same(_called(messages=BOTH), ["weather", "weather"])
    same(_called(messages=BOTH, parallel_tool_calls=False), ["weather"])


@check("tools: a result is read")
def _() -> None:
    first = chat.create(model=MODEL, messages=USER, tools=[WEATHER]).choices[0].message
    (call,) = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
    turns: Any = [*USER, first, result]
    second = chat.create(model=MODEL, messages=turns, tools=[WEATHER])
    same(second.choices[0].message.content, f"The tool says: {SUNNY}")


@check("chat.completions.stream, with tools")
def _() -> None:
    with chat.stream(model=MODEL, messages=BOTH, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    true("tool_calls.function.arguments.done" in kinds, f"an event of arguments in {kinds}")
    same(len(message.tool_calls or []), 2)


@check("chat.completions.parse, and streamed")
def _() -> None:
    message = chat.parse(model=MODEL, messages=USER, response_format=City).choices[0].message
    true(isinstance(message.parsed, City))
    with chat.stream(model=MODEL, messages=USER, response_format=City) as stream:
        true(isinstance(stream.get_final_completion().choices[0].message.parsed, City))


@check("chat.completions.parse, of strict tools")
def _() -> None:
    tool = openai.pydantic_function_tool(City)
    message = chat.parse(model=MODEL, messages=USER, tools=[tool]).choices[0].message
    true(isinstance((message.tool_calls or [])[0].function.parsed_arguments, City))


@check("chat.completions.parse: its turn is sent back, with a result")
def _() -> None:
    tool = openai.pydantic_function_tool(City)
    first = chat.parse(model=MODEL, messages=USER, tools=[tool]).choices[0].message
    (call,) = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
    for turn in (first, first.model_dump(), first.model_dump(exclude_none=True)):
        turns: Any = [*USER, turn, result]
        second = chat.parse(model=MODEL, messages=turns, tools=[tool])
        same(second.choices[0].message.content, f"The tool says: {SUNNY}")
    first = chat.parse(model=MODEL, messages=USER, response_format=City).choices[0].message
    for turn in (first, first.model_dump()):
        turns = [*USER, turn, *USER]
        same(chat.create(model=MODEL, messages=turns).choices[0].message.content, SAID)


@check("responses.parse: its items are sent back")
def _() -> None:
    first = responses.parse(model=MODEL, input="Hello", text_format=City)
    for items in (first.output, [one.model_dump() for one in first.output]):
        turns: Any = [*USER, *items, *USER]
        same(responses.create(model=MODEL, input=turns).output_text, SAID)


@check("json_object")
def _() -> None:
    form: Any = {"type": "json_object"}
    answer = chat.create(model=MODEL, messages=USER, response_format=form)
    json.loads(answer.choices[0].message.content or "")


@check("reasoning")
def _() -> None:
    message: Any = (
        chat.create(model=MODEL, messages=USER, reasoning_effort="low").choices[0].message
    )
    same((message.content, message.reasoning_content), (SAID, "What was asked is plain."))


@check("responses")
def _() -> None:
    same(responses.create(model=MODEL, input="Hello").output_text, SAID)
    answer = responses.create(model=MODEL, input="Hello", reasoning={"effort": "low"})
    same([one.type for one in answer.output], ["reasoning", "message"])
    parsed = responses.parse(model=MODEL, input="Hello", text_format=City)
    true(isinstance(parsed.output_parsed, City))


@check("responses, streamed")
def _() -> None:
    with responses.stream(model=MODEL, input="Hello", reasoning={"effort": "low"}) as stream:
        kinds = [event.type for event in stream]
        same(stream.get_final_response().output_text, SAID)
    same((kinds[0], kinds[-1]), ("response.created", "response.completed"))
    with responses.stream(model=MODEL, input="Hello", text_format=City) as stream:
        stream.until_done()
        true(isinstance(stream.get_final_response().output_parsed, City))


@check("responses, with tools")
def _() -> None:
    turns: Any = [{"role": "user", "content": "How is the weather?"}]
    with responses.stream(model=MODEL, input=turns, tools=[FLAT]) as stream:
        stream.until_done()
        first: Any = stream.get_final_response()
    (call,) = first.output
    same((call.type, json.loads(call.arguments)), ("function_call", {"city": "Paris"}))
    turns += first.output
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": SUNNY})
    second = responses.create(model=MODEL, input=turns, tools=[FLAT])
    same(second.output_text, f"The tool says: {SUNNY}")


@check("completions")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt=["Hello", "Hi"], max_tokens=64)
    same([one.text for one in answer.choices], [SAID, SAID])


@check("embeddings")
def _() -> None:
    vectors = client.embeddings.create(model=MODEL, input=["a cat", "a bird"])
    whole = client.embeddings.create(model=MODEL, input="a cat", encoding_format="float")
    same(vectors.data[0].embedding, whole.data[0].embedding)


@check("with_raw_response: request id")
def _() -> None:
    raw = chat.with_raw_response.create(model=MODEL, messages=USER)
    true(raw.headers.get("x-request-id"))
    same(raw.parse()._request_id, raw.headers["x-request-id"])


@check("errors")
def _() -> None:
    for body, code in (
        ({"messages": [{"role": "user", "content": TOO_LONG}]}, "context_length_exceeded"),
        ({"model": "another", "messages": USER}, "model_not_found"),
    ):
        try:
            chat.create(**{"model": MODEL, **body})  # type: ignore[call-overload]
        except openai.APIStatusError as error:
            same(error.code, code)
        else:
            raise AssertionError("no error")


run("openai")
