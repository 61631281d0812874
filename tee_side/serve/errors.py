"""The one form of every error that leaves the server.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Nothing in it is the client's own words: they may be the prompt, and errors are logged by clients.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import EngineError, LimitError, PromptError, TsqpError
from protocol.validation import expectation
from tee_side.serve.schema import field_names

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
_MESSAGES = {
    400: "the body could not be read",
    404: "there is no such path",
    405: "the path has no such method",
}
# Of a field that we do not know: what else a client may write there is not repeated.
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
# pydantic's, that do not quote what they found.
_FIXED_MESSAGES = re.compile(
    r"(bool|dict|float|int|list|model|string)_(type|attributes_type)|(less|greater)_than(_equal)?"
    r"|missing|literal_error|none_required|finite_number|string_too_(short|long)|fewer_fields"
    r"|text_alone|function_alone|stateless"
)
_KNOWN_TYPES = {
    "extra_forbidden": "no such field",
    "missing": "a value",
    "none_required": "nothing: this is not supported",
    "too_long": "fewer entries",
    "too_short": "more entries",
    "json_invalid": "JSON",
    "body_type": "a JSON object (a body is sent as application/json)",
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "a JSON object"),
    "string_pattern_mismatch": "letters, digits and _.:/-, 128 at most",
}


class ErrorDetail(BaseModel):
    """What is wrong; some errors have fields of their own beside these."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An answer that is no success. `more`: fields of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: int,
    ) -> None:
        super().__init__(status, message, headers)
        kind = kind or _TYPES.get(status, "invalid_request_error")
        fields: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
        self.body = json.dumps({"error": fields | more}, separators=(",", ":"))

    @classmethod
    def unless(cls, holds: object, status: int, message: str, **more: Any) -> None:
        """Raise this error unless `holds`; `more`: what else it takes."""
        if not holds:
            raise cls(status, message, **more)

    def response(self) -> Response:
        """Return the answer."""
        return Response(self.body, self.status_code, self.headers, "application/json")


def require(holds: object, param: str, expected: str) -> None:
    """Raise the error of a field that is not as it should be unless `holds`."""
    ApiError.unless(holds, 400, f"{param}: expected {expected}", param=param)


def loading() -> ApiError:
    """Return the error of a server whose model is not there yet."""
    return ApiError(503, "the model is being loaded", code="starting", headers={"retry-after": "5"})


def of_engine(error: TsqpError, param: str | None = None) -> ApiError:
    """Return what a client is told of an error of the engine, a limit, or the tokenizer.

    Where it happened, and the other party's part in it, are left out: they are the operator's.
    """
    said = f"got {error.got}, expected {error.expected}"
    if isinstance(error, LimitError):
        headers: dict[str, str] = dict(getattr(error, "headers", {}))
        if not error.retryable:
            return ApiError(400, said, param=param, code="limit_exceeded", headers=headers)
        # A limit of the client's own, or a queue that is full.
        status = 429 if headers else 503
        message = said if headers else "there is no room for this now: try again later"
        code = "rate_limit_exceeded" if headers else "overloaded"
        return ApiError(status, message, code=code, headers={"retry-after": "1"} | headers)
    if isinstance(error, PromptError):
        return ApiError(400, said, param=param, code="invalid_prompt")
    if isinstance(error, EngineError):
        return ApiError(503, "the engine has ended", code="failed")
    message = f"the model could not compute this: {type(error).__name__}"
    if error.retryable:
        return ApiError(503, message, code="engine_error", headers={"retry-after": "1"})
    return ApiError(500, message, code="engine_error")


def of_validation(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error of a body that is not as its schema says: of its most specific fault."""
    where = [_path(fault) for fault in faults]
    # Of a union, the alternative that more of the value fitted.
    reached = [(len(path), [part for part in path if isinstance(part, int)]) for path in where]
    path = where[max(range(len(where)), key=reached.__getitem__)]
    expected = [_expected(fault) for fault, at in zip(faults, where, strict=True) if at == path]
    param, several = ".".join(map(str, path)), " or ".join(dict.fromkeys(expected[:6]))
    return ApiError(400, f"{param}: expected {several}", param=param)


def _path(fault: Mapping[str, Any]) -> list[str | int]:
    """Return where a fault is: fields of ours and places in lists.

    Left out are names of a union's alternatives, and keys that are the client's, but for the name
    of a field that there is not.
    """
    body, *parts = fault["loc"]
    if fault["type"] == "json_invalid":
        return [body]
    unknown = [str(parts.pop())] if fault["type"] == "extra_forbidden" else []
    path = [part for part in parts if isinstance(part, int) or part in field_names()]
    return [body, *path, *filter(_FIELD_NAME.fullmatch, unknown)]


def _expected(fault: Mapping[str, Any]) -> str:
    kind: str = fault["type"]
    if kind == "too_long" and not fault["ctx"]["max_length"]:
        kind = "none_required"
    if kind == "model_attributes_type" and len(fault["loc"]) == 1:
        kind = "body_type"
    if known := _KNOWN_TYPES.get(kind):
        return known
    return expectation(kind, fault["msg"]) if _FIXED_MESSAGES.fullmatch(kind) else "another value"


def answer_errors(app: FastAPI) -> None:
    """Make the app answer every error in this form."""

    @app.exception_handler(HTTPException)
    async def refused(_request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        status = error.status_code
        message = _MESSAGES.get(status, "the request was refused")
        return ApiError(status, message, headers=error.headers).response()

    @app.exception_handler(TsqpError)
    async def failed(_request: Request, error: TsqpError) -> Response:
        return of_engine(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors()).response()
