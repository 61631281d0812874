"""What a client may send, as the API of OpenAI names it, with some fields of vLLM and llama.cpp.

Null is as good as left out. A field that is not here is refused, and so is one that would change
the answer and is not supported (`_NOT_SUPPORTED`): no client gets another answer than it asked for.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from tee_side.engine.reading import MAX_TOP
from tee_side.engine.request import Pooling
from tee_side.serve.grammar import GrammarKind

T = TypeVar("T")
# The first fault ends the reading: pydantic would take some kilobytes for each.
_List: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
_MAX_FIELDS = 1024


def _few_fields(value: object) -> object:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise PydanticCustomError("fewer_fields", "fewer fields")
    return value


Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Prompt: TypeAlias = str | _List[str] | _List[Id] | _List[_List[Id]]
_Empty: TypeAlias = Annotated[list[Any], Field(max_length=0)]
_Name: TypeAlias = Annotated[str, Field(max_length=256)]
_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
_Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
# Every token of a text is compared with all beginnings of all of these.
_Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=100)]
Likeliest: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: object) -> object:
        return _few_fields(value)


_B = TypeVar("_B", bound=_Body)
# As SamplingSettings names them.
SAMPLING: dict[str, Any] = {
    "seed": Annotated[int, Field(ge=0, lt=2**62)] | None,
    "top_p": Annotated[float, Field(gt=0, le=1)] | None,
    "min_p": Annotated[float, Field(ge=0, le=1)] | None,
    "frequency_penalty": _Penalty | None,
    "presence_penalty": _Penalty | None,
    "repetition_penalty": Annotated[float, Field(ge=0.01, le=100)] | None,
}
# By the names of vLLM's fields, in both of its forms: the kind, and what the field may be.
GRAMMARS: dict[str, tuple[GrammarKind, Any]] = {
    "json": ("json_schema", dict[str, Any] | str | None),
    "regex": ("regex", str | None),
    "grammar": ("grammar", str | None),
    "choice": ("choice", _List[str] | None),
}


def _accepting(fields: dict[str, Any]) -> Callable[[type[_B]], type[_B]]:
    """Return what adds fields to a model that are not read one by one, None by default."""

    def add(model: type[_B]) -> type[_B]:
        given: dict[str, Any] = {name: (kind, None) for name, kind in fields.items()}
        named = model.__name__
        return create_model(
            named, __base__=model, __doc__=model.__doc__, __module__=__name__, **given
        )

    return add


# What clients send that changes no answer: accepted, and not looked at.
_UNUSED: dict[str, Any] = dict.fromkeys(
    (
        *(
            "user",
            "metadata",
            "store",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_retention",
        ),
        *("safety_identifier", "parallel_tool_calls", "priority", "request_id", "cache_prompt"),
        *("guided_decoding_backend", "spaces_between_special_tokens", "session_id", "chat_id"),
        "id_slot",
    ),
    Any,
)
# What would change the answer, with the only values that do not.
_NOT_SUPPORTED: dict[str, Any] = {
    "best_of": Literal[1] | None,
    "functions": _Empty | None,
    "function_call": Literal["none"] | None,
    "tools": _Empty | None,
    "tool_choice": Literal["none"] | None,
    "audio": None,
    "modalities": list[Literal["text"]] | None,
    "prediction": None,
    "reasoning_effort": Literal["none"] | None,
    "web_search_options": None,
    "min_tokens": Literal[0] | None,
    "use_beam_search": Literal[False] | None,
    "length_penalty": Annotated[float, Field(ge=1, le=1)] | None,
    "include_stop_str_in_output": Literal[False] | None,
    "skip_special_tokens": Literal[True] | None,
    "truncate_prompt_tokens": None,
    "suffix": None,
    "prompt_logprobs": None,
    "verbosity": None,
    "allowed_token_ids": None,
    "bad_words": _Empty | None,
    "chat_template_kwargs": Annotated[dict[str, Any], Field(max_length=0)] | None,
    "continue_final_message": Literal[False] | None,
    "detokenize": Literal[True] | None,
    "early_stopping": Literal[False] | None,
    "return_token_ids": Literal[False] | None,
    "return_tokens_as_token_ids": Literal[False] | None,
    "timings_per_token": Literal[False] | None,
}


class StreamOptions(_Body):
    """`include_obfuscation` is accepted and unused."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class JsonSchema(_Body):
    """A schema by its name; `strict`: it is always followed."""

    name: _Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Body):
    """OpenAI's form of a grammar."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


@_accepting({f"{name}_": Annotated[may, Field(alias=name)] for name, (_, may) in GRAMMARS.items()})
class StructuredOutputs(_Body):
    """vLLM's form of a grammar; one of the fields."""

    json_object: bool | None = None


@_accepting(
    _UNUSED
    | _NOT_SUPPORTED
    | SAMPLING
    | {f"guided_{name}": may for name, (_, may) in GRAMMARS.items()}
)
class Generating(_Body):
    """What completions and chats have in common."""

    model: _Name | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=_MAX_FIELDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    logit_bias: Annotated[dict[str, _Bias], BeforeValidator(_few_fields)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: _Name | None = None


class CompletionRequest(Generating):
    """`/v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Likeliest | None = None
    add_special_tokens: bool | None = None


class TextPart(_Body):
    """A part of a message; there are no others than text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("type", "text") != "text":
            raise PydanticCustomError("text_alone", "text: images, sound and files are not read")
        return value


class ChatMessage(_Body):
    """A turn of a conversation. Only an assistant's may have no content."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | _List[TextPart] | None = None
    name: _Name | None = None
    refusal: None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None
    tool_calls: _Empty | None = None


Messages: TypeAlias = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatRequest(Generating):
    """`/v1/chat/completions`."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    add_generation_prompt: bool | None = None
    # A template writes its own.
    add_special_tokens: Literal[False] | None = None
    chat_template: None = None
    echo: Literal[False] | None = None


@_accepting(_UNUSED)
class EmbeddingsRequest(_Body):
    """`/v1/embeddings`. `pooling`: another than the server was started with.

    `prompt_name`: which of the model's own prompts stands in front of each text.
    """

    input: Prompt
    model: _Name | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: None = None


class TokenizeRequest(_Body):
    """`/tokenize`: vLLM's prompt or messages, or llama.cpp's content."""

    model: _Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Literal[True] | None = None


class DetokenizeRequest(_Body):
    """`/detokenize`."""

    model: _Name | None = None
    tokens: _List[Id]


_MODELS: tuple[type[BaseModel], ...] = (
    *(CompletionRequest, ChatRequest, EmbeddingsRequest, TokenizeRequest, DetokenizeRequest),
    *(StreamOptions, JsonSchema, ResponseFormat, StructuredOutputs, ChatMessage, TextPart),
)
# Of all of these, so that errors can tell them from what a client wrote in their place.
FIELD_NAMES = frozenset(
    info.alias or name for model in _MODELS for name, info in model.model_fields.items()
)
