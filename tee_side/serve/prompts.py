"""Prompts of a body to token ids. What takes long for a long prompt runs in a thread."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import ModelError, TsqpError
from tee_side.serve.errors import ApiError, of_engine, wrong
from tee_side.serve.schema import Message, Prompt
from tee_side.serve.serving import ServedModel

# Of all prompts and samples of a request.
MAX_CHOICES = 2048


def listed(prompt: Prompt) -> list[str] | list[list[int]]:
    """Return one prompt or several as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt  # type: ignore[return-value]


def encode(
    model: ServedModel, prompt: Prompt, param: str, *, special: bool, samples: int = 1
) -> list[tuple[int, ...]]:
    """Return the ids of each prompt. Raises ApiError."""
    prompts = listed(prompt)
    if not prompts:
        raise wrong(param, "at least one prompt")
    if len(prompts) * samples > MAX_CHOICES:
        raise wrong(param, f"at most {MAX_CHOICES} prompts, all samples counted")
    found: list[tuple[int, ...]] = []
    for one in prompts:
        if isinstance(one, str):
            found.append(tuple(encode_text(model, one, param, special=special)))
        else:
            found.append(tuple(one))
        if not found[-1]:
            raise wrong(param, "at least one token")
        if max(found[-1]) >= model.config.vocab_size:
            raise wrong(param, f"token ids below {model.config.vocab_size}")
    return found


def encode_text(model: ServedModel, text: str, param: str, *, special: bool) -> list[int]:
    """Return the ids of a text. Raises ApiError."""
    try:
        return model.tokenizer.encode(text, add_special_tokens=special)
    except TsqpError as error:
        raise of_engine(error, param) from None


def encode_chat(
    model: ServedModel, messages: Sequence[Message], *, add_generation_prompt: bool
) -> tuple[int, ...]:
    """Return the ids of a conversation. Raises ApiError."""
    turns = [_turn(message, f"body.messages.{at}") for at, message in enumerate(messages)]
    try:
        ids = model.tokenizer.apply_chat_template(
            turns, add_generation_prompt=add_generation_prompt
        )
    except ModelError:
        # The operator's to mend; a completion may still be asked for.
        message = "the model has no chat template, or one that fails"
        raise ApiError(400, message, param="body.messages", code="no_chat_template") from None
    except TsqpError as error:
        raise of_engine(error, "body.messages") from None
    return tuple(ids)


def _turn(message: Message, param: str) -> dict[str, str]:
    content = message.content
    if content is None and message.role != "assistant":
        raise wrong(f"{param}.content", "a value")
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content
    turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text or "",
    }
    return turn | ({} if message.name is None else {"name": message.name})


def require_room(model: ServedModel, ids: Sequence[int], param: str, *, for_new: int) -> int:
    """Return how many tokens may follow a prompt, up to `for_new`.

    Raises ApiError, in llama.cpp's form, where none is possible and one is wanted, or where the
    prompt alone is too long.
    """
    room = model.max_model_len - len(ids)
    if room < min(1, for_new):
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, and the context {model.max_model_len}",
            kind="exceed_context_size_error",
            param=param,
            code="context_length_exceeded",
            n_prompt_tokens=len(ids),
            n_ctx=model.max_model_len,
        )
    return min(for_new, room)


def require_model(
    model: ServedModel, name: str | None, *, param: str | None = "body.model"
) -> None:
    """Raise ApiError (404) for the name of another model than the one that is served."""
    if name is not None and name != model.name:
        message = "there is no such model (GET /v1/models names the one that is served)"
        raise ApiError(404, message, param=param, code="model_not_found")
