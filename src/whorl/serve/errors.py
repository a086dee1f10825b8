"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}} with the status that clients map to
exceptions.

    400 bad request   401 key   404 unknown model or path   413 too large   429 limit   500 our bug   503 busy or stopping

A `WhorlError` is the user's to mend, here as on the command line: it becomes a 400 with its message. Whatever else is
raised is a bug of ours: a 500 that says nothing of the inside, whose traceback stands in the server's log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from whorl.errors import WhorlError

LOG = logging.getLogger("whorl.serve")
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(HTTPException):
    """A refusal. retry_after: seconds after which to ask again."""

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
        every = dict(headers or {})
        if retry_after is not None:
            every["retry-after"] = str(max(1, math.ceil(retry_after)))
        super().__init__(status, message, every)
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        return OrjsonResponse(self.body, self.status_code, self.headers)


class OrjsonResponse(Response):
    """A JSON answer; numbers that JSON has no word for are null."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(orjson.dumps(content), status_code, headers)


def to_api_error(error: BaseException) -> ApiError:
    """What the client is told about `error`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, WhorlError):
        said = error.what + (f"; expected {error.expected}" if error.expected else "")
        code = "context_length_exceeded" if getattr(error, "too_long", False) else None
        return ApiError(400, said, code=code)
    LOG.error("a bug of the server", exc_info=error)
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def from_validation_errors(errors: Sequence[Any]) -> ApiError:
    """pydantic's findings as one refusal that names the parameter.

    Where a field may be several things each of them complains: the complaint that got deepest is about what was meant.
    """
    if not errors:
        return ApiError(400, "the request cannot be read")
    worst = max(errors, key=lambda e: (e.get("type") == "extra_forbidden", len(e.get("loc", ()))))
    place = [str(p) for p in worst.get("loc", ()) if p != "body" and _is_field_name(p)]
    param = ".".join(place) or None
    if worst.get("type") == "json_invalid":
        return ApiError(400, "the body is no valid JSON", code="invalid_json")
    if worst.get("type") == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: {param!r}.", param=param, code="unknown_parameter")
    if worst.get("type") == "missing" and param is None:
        return ApiError(400, "the request has no JSON body; send one with content-type: application/json")
    said = str(worst.get("msg", "invalid")).removeprefix("Value error, ")
    code = "missing_required_parameter" if worst.get("type") == "missing" else "invalid_value"
    return ApiError(400, f"{param}: {said}" if param else said, param=param, code=code)


def _is_field_name(part: Any) -> bool:
    """Whether a part of a location is a name or a number of the request, and not pydantic's name for a branch of a union."""
    return isinstance(part, int) or (
        isinstance(part, str) and part.isidentifier() and part not in UNION_BRANCHES
    )


UNION_BRANCHES = {"str", "int", "float", "bool", "Stop", "TextPart"}


def install_error_handlers(app: FastAPI) -> None:
    """All that an application raises, in this shape."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return error.response
        text = {404: f"there is nothing at {request.method} {request.url.path}"}.get(
            error.status_code, str(error.detail)
        )
        return ApiError(error.status_code, text, headers=error.headers).response

    async def other(request: Request, error: Exception) -> Response:
        return to_api_error(error).response

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(Exception, other)
