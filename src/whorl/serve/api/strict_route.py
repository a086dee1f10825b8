"""A route that parses bodies strictly and returns every error in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from whorl.serve import errors
from whorl.serve.api.json_bounds import parse_json, parse_large_json
from whorl.serve.config import LARGE_BODY_BYTES


class _StrictJSONRequest(HttpRequest):
    """Parses JSON strictly: no NaN, no lone surrogates, bounded shape (`json_bounds.py`). A large body becomes a `model`."""

    model: type[BaseModel] | None = None

    async def json(self) -> Any:
        body = await self.body()
        if len(body) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(parse_large_json, body, self.model)
        return parse_json(body)


class ErrorHandlingRoute(APIRoute):
    """See the top of this file."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None

        async def handle(request: HttpRequest) -> Response:
            strict = _StrictJSONRequest(request.scope, request.receive)
            strict.model = model
            try:
                return await original(strict)
            except RequestValidationError as error:
                if model is not None and (kind := _wrong_content_type(request)):
                    message = f"the content-type is {kind!r}; send the JSON with the header content-type: application/json"
                    return errors.ApiError(400, message).response
                return errors.from_validation_errors(error.errors()).response
            except errors.STOPPING:
                raise
            except (
                BaseException
            ) as error:  # handled here: outside of the routes it would be logged and raised again
                return errors.to_api_error(error).response

        return handle


def _wrong_content_type(request: HttpRequest) -> str:
    """Return the content type of a request if it is not JSON, shortened; `curl -d` sends the one of a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return "" if kind == "application/json" or kind.endswith("+json") else kind[:100]
