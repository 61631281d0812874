"""What a client may send, as the API of OpenAI names it, with some fields of vLLM and llama.cpp.

Null is as good as left out, of whatever field. A value that changes no answer is accepted: fields
that never do (`_UNUSED`), and the neutral values of what is not supported (`_NEUTRAL`). Any other
field is refused: no client gets another answer than it asked for.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tee_side.chat.reply import Effort
from tee_side.engine.reading import MAX_TOP
from tee_side.engine.request import Pooling
from tee_side.serve.grammar import GrammarKind

T = TypeVar("T")
# The first fault ends the reading: pydantic would take some kilobytes for each.
_List: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
_MAX_FIELDS = 1024
_Few: TypeAlias = Annotated[list[T], Field(max_length=_MAX_FIELDS, fail_fast=True)]


def _few_fields(value: object) -> object:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise PydanticCustomError("fewer_fields", "fewer fields")
    return value


Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Prompt: TypeAlias = str | _List[str] | _List[Id] | _List[_List[Id]]
_Empty: TypeAlias = Annotated[list[Any], Field(max_length=0)]
_Nothing: TypeAlias = Literal[""]
_Name: TypeAlias = Annotated[str, Field(max_length=256)]
_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
_Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
# Every token of a text is compared with all beginnings of all of these.
_Stop: TypeAlias = Annotated[str, Field(max_length=100)]
Likeliest: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP)]
# -1, and nothing, is as many as there is room for.
_Limit: TypeAlias = Annotated[int, Field(ge=-1, lt=2**31)]


def _only(value: float) -> Any:
    return Annotated[float, Field(ge=value, le=value)] | None


class Body(BaseModel):
    """What is sent, or a part of it."""

    # A null is left out before it is looked at.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _said(cls, value: object) -> object:
        if not isinstance(_few_fields(value), dict):
            return value
        return {key: one for key, one in value.items() if one is not None}  # type: ignore[attr-defined]


_B = TypeVar("_B", bound=Body)
# As SamplingSettings names them.
SAMPLING: dict[str, Any] = {
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


def accepting(fields: dict[str, Any]) -> Callable[[type[_B]], type[_B]]:
    """Return what adds fields to a model that has them not yet, None by default."""

    def add(model: type[_B]) -> type[_B]:
        own, named = model.model_fields, model.__name__
        given: dict[str, Any] = {k: (kind, None) for k, kind in fields.items() if k not in own}
        return create_model(
            named, __base__=model, __doc__=model.__doc__, __module__=__name__, **given
        )

    return add


# What clients send that changes no answer: accepted, and not looked at. In the last lines, settings
# of llama.cpp's samplers that are off.
_UNUSED: dict[str, Any] = dict.fromkeys(
    (
        *("user", "metadata", "store", "service_tier", "prompt_cache_key"),
        *("prompt_cache_retention", "safety_identifier", "priority", "request_id"),
        *("cache_prompt", "guided_decoding_backend", "spaces_between_special_tokens"),
        *("session_id", "chat_id", "id_slot", "prediction", "mirostat_tau", "mirostat_eta"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("xtc_threshold", "dynatemp_exponent", "repeat_last_n", "penalize_nl", "min_keep"),
        *("n_keep", "n_discard"),
    ),
    Any,
)
# What answers have, and clients send back as parts of a conversation: not looked at either.
SENT_BACK: dict[str, Any] = dict.fromkeys(
    (
        *("annotations", "cache_control", "encrypted_content", "id", "index", "logprobs"),
        *("parsed", "parsed_arguments", "phase", "status"),
        *("provider_specific_fields", "reasoning_details", "thinking_blocks"),
    ),
    Any,
)
# What would change the answer, with the only values that do not.
_NEUTRAL: dict[str, Any] = {
    "functions": _Empty | None,
    "tools": _Empty | None,
    "function_call": Literal["none", "auto"] | None,
    "audio": None,
    "modalities": list[Literal["text"]] | None,
    "web_search_options": None,
    "verbosity": Literal["medium"] | None,
    "use_beam_search": Literal[False] | None,
    "length_penalty": _only(1),
    "early_stopping": Literal[False] | None,
    "logits_processors": _Empty | None,
    "include_reasoning": Literal[True] | None,
    "grammar": _Nothing | None,
    "samplers": _Empty | None,
    "n_predict": _only(-1),
    "detokenize": Literal[True] | None,
    "timings_per_token": Literal[False] | None,
    "post_sampling_probs": Literal[False] | None,
    "return_progress": Literal[False] | None,
    "do_sample": Literal[True] | None,
    "watermark": Literal[False] | None,
    "n_probs": _only(0),
    "typical_p": _only(1),
    "tfs_z": _only(1),
    "top_n_sigma": _only(-1),
    "mirostat": _only(0),
    "dry_multiplier": _only(0),
    "xtc_probability": _only(0),
    "dynatemp_range": _only(0),
    "repeat_penalty": _only(1),
}


class StreamOptions(Body):
    """`continuous_usage_stats`: counts so far, in every chunk.

    `include_obfuscation`: random letters fill events up, so that their sizes tell less; on.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """A schema by its name; `strict`: it is always followed."""

    name: _Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's form of a grammar. `schema`: beside json_object, as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


@accepting({f"{name}_": Annotated[may, Field(alias=name)] for name, (_, may) in GRAMMARS.items()})
class StructuredOutputs(Body):
    """vLLM's form of a grammar; one of the fields."""

    json_object: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None


@accepting(
    _UNUSED | _NEUTRAL | SAMPLING | {f"guided_{name}": may for name, (_, may) in GRAMMARS.items()}
)
class Generating(Body):
    """What completions and chats have in common."""

    model: _Name | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    # Of as many, all are returned.
    best_of: Annotated[int, Field(ge=0, le=128)] | None = None
    max_tokens: _Limit | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: _Few[Id] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # -1: a fresh one, as llama.cpp has it.
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    logit_bias: (
        Annotated[dict[str, _Bias], BeforeValidator(lambda value: _few_fields(value) or {})] | None
    ) = None
    allowed_token_ids: Annotated[list[Id], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[_Stop], Field(max_length=_MAX_FIELDS)] | None = None
    truncate_prompt_tokens: _Limit | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=MAX_TOP)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
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
    suffix: _Nothing | None = None


@accepting(SENT_BACK)
class TextPart(Body):
    """A part of a message; there are no others than text. Its type is told by several names."""

    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        if value.get("type") == "refusal":
            return {"type": "text", "text": value.get("refusal")}
        if value.get("type", "text") not in ("text", "input_text", "output_text"):
            raise PydanticCustomError("text_alone", "text: images, sound and files are not read")
        return value


@accepting(SENT_BACK)
class CalledFunction(Body):
    """Which tool was called, with arguments as JSON, in a text or not."""

    name: str
    arguments: str | dict[str, Any] = ""


@accepting(SENT_BACK)
class ToolCall(Body):
    """A call in a turn of the assistant."""

    id: _Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


@accepting(SENT_BACK | {"images": _Empty | None})
class ChatMessage(Body):
    """A turn of a conversation. Only an assistant's may have no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _List[TextPart] | None = None
    name: _Name | None = None
    tool_calls: _Few[ToolCall] | None = None
    tool_call_id: _Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    prefix: Literal[False] | None = None


Messages: TypeAlias = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
ToolName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class Function(Body):
    """A tool. `strict`: its arguments follow the schema whenever it is called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the client has; others would have to be the server's. `sent`: as it came."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None
    _sent: dict[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise PydanticCustomError("function_alone", "function: no tool runs here")
        tool = read(value)
        if isinstance(value, dict):
            function = {k: v for k, v in value["function"].items() if v is not None}
            tool._sent = {key: value[key] for key in value if key in ("type", "function")}
            tool._sent["function"] = function
        return tool

    @property
    def sent(self) -> dict[str, Any]:
        """What the client wrote, in its order: templates write it so."""
        return self._sent


class NamedTool(Body):
    """A tool that is called, and no other, by its name."""

    type: Literal["function"]
    function: Function


class AllowedNames(Body):
    """Some of the tools, and whether one has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=_MAX_FIELDS)]


class AllowedTools(Body):
    """OpenAI's form of these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class Chat(Body):
    """What a conversation is beside its messages, wherever one is read."""

    tools: _Few[Tool] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=_MAX_FIELDS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_few_fields)] | None = None
    reasoning_effort: Effort | None = None


class ChatRequest(Chat, Generating):
    """`/v1/chat/completions`."""

    messages: Messages
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: _Limit | None = None
    logprobs: bool | Annotated[int, Field(ge=0, le=0)] | None = None
    top_logprobs: Likeliest | None = None
    # A template writes its own.
    add_special_tokens: Literal[False] | None = None
    chat_template: None = None
    echo: Literal[False] | None = None


@accepting(_UNUSED | {"stream": Literal[False] | None})
class EmbeddingsRequest(Chat):
    """`/v1/embeddings`: of texts, or of a conversation.

    `pooling`: another than the server was started with. `prompt_name`: which of the model's own
    prompts stands in front of each text.
    """

    input: Prompt | None = None
    messages: Messages | None = None
    model: _Name | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: _Limit | None = None


class TokenizeRequest(Chat):
    """`/tokenize`: vLLM's prompt or messages, or llama.cpp's content."""

    model: _Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Messages | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Literal[True] | None = None


class DetokenizeRequest(Body):
    """`/detokenize`."""

    model: _Name | None = None
    tokens: _List[Id]


def _models(above: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in above.__subclasses__():
        yield model
        yield from _models(model)


@cache
def field_names() -> frozenset[str]:
    """Return names of all fields, so that errors can tell them from what a client wrote."""
    fields = (field for model in _models(Body) for field in model.model_fields.items())
    return frozenset(info.alias or name for name, info in fields)
