"""Limits of a JSON body's shape, checked before it is validated: depth, values, and fields of an object.

Validation costs time and memory for each value, and an error object for each wrong one: 4 MB of `{}` held the event loop
for half a minute. A list of token ids is exempt, because it is validated in one pass and stops at its first error
(`FastList` of `protocol.py`).
"""

from __future__ import annotations

from typing import Any

from whorl.serve.errors import ApiError

MAX_DEPTH = 64  # nesting levels
MAX_VALUES = 50_000  # items of lists and fields of objects together, without those of lists of integers
MAX_FIELDS = 1024  # of one object


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
