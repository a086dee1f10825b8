"""Request bodies: JSON text -> bounds -> values -> bounds -> model; outside of the event loop if they are large.

Validation costs time and memory for each value, and an error object for each wrong one: 4 MB of `{}` held the event loop
for half a minute. So depth, values and fields of an object are limited before it, and those of a large body even before
it is parsed (`http/json_text.py`). A list of token ids is exempt from the limit of values, because it is validated in one
pass and stops at its first error (`FastList` of `protocol.py`).
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from whorl.http.json_text import json_text_problem
from whorl.serve.errors import ApiError, from_validation_errors

MAX_DEPTH = 64  # nesting levels
MAX_VALUES = 50_000  # items of lists and fields of objects together, without those of lists of integers
MAX_FIELDS = 1024  # of one object


def parse_json(body: bytes) -> Any:
    """Return the values of a small body.

    Raises:
        ApiError: invalid JSON (also NaN and lone surrogates), or a shape beyond the bounds.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if isinstance(value, dict | list):
        check_bounds(value)
    return value


def parse_large_json(body: bytes, model: type[BaseModel] | None) -> Any:
    """Return a large body as `model`, or its values without a model. Called outside of the event loop.

    Raises:
        ApiError: as `parse_json`, or the first field that `model` rejects.
    """
    if problem := json_text_problem(body):
        raise ApiError(400, f"the JSON has {problem}", code="request_too_large")
    value = parse_json(body)
    if model is None:
        return value
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation_errors(error.errors(include_url=False, include_input=False)) from None


def check_bounds(value: Any) -> None:
    """Raise ApiError if parsed JSON is too deep, has too many values, or has an object with too many fields.

    Computed without recursion, level by level; the work is bounded by the limits and one pass over lists of integers.
    """
    n_values, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if len(container) > MAX_FIELDS:
                    raise _too_large(f"an object of {len(container):,} fields", f"{MAX_FIELDS:,} fields")
                children: Any = container.values()
            elif container and set(map(type, container)) == {int}:
                continue
            else:
                children = container
            n_values += len(container)
            if n_values > MAX_VALUES:
                raise _too_large(f"more than {MAX_VALUES:,} values", f"{MAX_VALUES:,} values in one request")
            inner += [child for child in children if isinstance(child, dict | list)]
        level = inner
        if not level:
            return
    raise ApiError(400, f"the JSON is more than {MAX_DEPTH} levels deep", code="invalid_json")


def _too_large(found: str, limit: str) -> ApiError:
    return ApiError(400, f"the JSON has {found}; at most {limit} are accepted", code="request_too_large")
