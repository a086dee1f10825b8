"""Error responses in OpenAI's format: {"error": {"message", "type", "param", "code"}} and an HTTP status.

    400 bad request   401 key   404 unknown model or path   413 too large   429 limit   500 internal   503 busy or draining

A `WhorlError` is an error of the user: it becomes a 400 with its message. Every other exception is an internal error: the
client gets a 500 without details, and the traceback is logged.

Errors show at most 200 characters of what a client sent: messages shorten what they quote (`whorl.errors.shorten`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from whorl.errors import WhorlError, shorten
from whorl.http.guard import RefusedError
from whorl.log.port import LogUnavailableError
from whorl.loop.streams.store import ViewsUnavailableError

# Exceptions that end a task or the process. Others are those of a request: a panic of a library in Rust is no `Exception`.
STOPPING = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
LOG = logging.getLogger("whorl.serve")
MAX_MESSAGE = 400  # characters; a longer message quotes something, so that only its first 200 are kept
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(HTTPException):
    """An error response. retry_after: seconds, sent as the retry-after header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        all_headers = dict(headers or {})
        if retry_after is not None:
            all_headers["retry-after"] = str(max(1, math.ceil(retry_after)))
        if len(message) > MAX_MESSAGE:
            message = shorten(message)
        super().__init__(status, message, all_headers)
        self.message, self.param, self.code = message, shorten(param) if param else param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        return OrjsonResponse(self.body, self.status_code, self.headers)


class OrjsonResponse(Response):
    """A JSON response. NaN and infinity become null."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(orjson.dumps(content), status_code, headers)


def to_api_error(error: BaseException) -> ApiError:
    """Convert an exception to the error response for the client; log internal errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedError):
        return ApiError(error.status, error.message, code=error.code, retry_after=error.retry_after)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, LogUnavailableError | ViewsUnavailableError):
        return ApiError(503, error.what, code="log_unavailable", retry_after=1)
    if isinstance(error, WhorlError):
        message = error.what + (f"; expected {error.expected}" if error.expected else "")
        code = "context_length_exceeded" if getattr(error, "too_long", False) else None
        return ApiError(400, message, param=error.field, code=code)
    LOG.error("internal error", exc_info=error)
    return ApiError(500, "internal error; see the server's log", code="internal_error")


def from_validation_errors(errors: Sequence[Any]) -> ApiError:
    """Convert pydantic's errors to one error response that names the parameter.

    A field of a union type yields one error per branch. The error with the longest location comes from the intended branch.
    """
    if not errors:
        return ApiError(400, "the request cannot be parsed")
    error = max(errors, key=lambda e: (e.get("type") == "extra_forbidden", len(e.get("loc", ()))))
    location = [str(p) for p in error.get("loc", ()) if p != "body" and _is_field_name(p)]
    param = shorten(".".join(location)) or None
    if error.get("type") == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if error.get("type") == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: {param!r}.", param=param, code="unknown_parameter")
    if error.get("type") == "missing" and param is None:
        return ApiError(400, "the request has no JSON body; send one with content-type: application/json")
    message = str(error.get("msg", "invalid")).removeprefix("Value error, ")
    code = "missing_required_parameter" if error.get("type") == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def _is_field_name(part: Any) -> bool:
    """Return whether a part of a location is a field name or an index of the request, not a branch of a union."""
    return isinstance(part, int) or (
        isinstance(part, str) and part.isidentifier() and part not in UNION_BRANCHES
    )


UNION_BRANCHES = {"str", "int", "float", "bool", "TextPart"}


def install_error_handlers(app: FastAPI) -> None:
    """Convert all exceptions of an application to this format."""

    async def handle_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response
        route = shorten(f"{request.method} {request.url.path}")
        text = {404: f"no route for {route}"}.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, text, headers=error.headers).response

    async def handle_other(request: Request, error: Exception) -> Response:
        return to_api_error(error).response

    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(Exception, handle_other)
