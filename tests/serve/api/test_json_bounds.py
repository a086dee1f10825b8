"""Bodies of wrong types are refused after a bounded amount of work: few values are validated, few errors are made."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from whorl.serve.api import protocol
from whorl.serve.api.json_bounds import MAX_DEPTH, MAX_FIELDS, MAX_VALUES, check_bounds
from whorl.serve.errors import ApiError

N = 40_000  # items: below the limit of values, so that validation sees them
MODEL: dict[str, Any] = {"model": "m"}
WRONG_ITEMS: dict[str, tuple[type, dict[str, Any]]] = {
    "prompt objects": (protocol.CompletionRequest, {"prompt": [{}] * N}),
    "prompt mixed": (protocol.CompletionRequest, {"prompt": [1, "a"] * (N // 2)}),
    "prompt lists of texts": (protocol.CompletionRequest, {"prompt": [["a"]] * N}),
    "stop numbers": (protocol.CompletionRequest, {"prompt": "a", "stop": [1] * N}),
    "messages": (protocol.ChatRequest, {"messages": [{}] * N}),
    "content parts": (protocol.ChatRequest, {"messages": [{"role": "user", "content": [{}] * N}]}),
    "tools": (protocol.ChatRequest, {"messages": [{"role": "user"}], "tools": [{}] * N}),
    "tool calls": (protocol.ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * N}]}),
    "modalities": (protocol.ChatRequest, {"messages": [{"role": "user"}], "modalities": ["x"] * N}),
    "responses input": (protocol.ResponsesRequest, {"input": [{}] * N}),
    "embeddings input": (protocol.EmbeddingsRequest, {"input": [{}] * N}),
    "tokens": (protocol.DetokenizeRequest, {"tokens": ["a"] * N}),
}


@pytest.mark.parametrize("case", WRONG_ITEMS)
def test_validation_stops_at_the_first_wrong_item(case: str) -> None:
    model, fields = WRONG_ITEMS[case]
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(model).validate_python(MODEL | fields)
    assert caught.value.error_count() < 20


def test_token_ids_are_exempt_from_the_limit_of_values() -> None:
    body = MODEL | {"prompt": [1] * (20 * MAX_VALUES)}
    check_bounds(body)
    check_bounds(MODEL | {"prompt": [list(range(200))] * 1000})
    assert len(protocol.CompletionRequest.model_validate(body).prompt) == 20 * MAX_VALUES


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[]] * (MAX_VALUES + 1), "values"),
        ([1, "a"] * MAX_VALUES, "values"),
        ({"a": [[{}] * 100] * 1000}, "values"),
        ({str(i): 0 for i in range(MAX_FIELDS + 1)}, "fields"),
    ],
)
def test_too_many_values_are_refused(value: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        check_bounds(value)
    assert caught.value.status_code == 400


def test_depth_is_limited_without_recursion() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    check_bounds(value)
    for _ in range(100_000):
        value = {"a": value}
    with pytest.raises(ApiError, match="levels deep"):
        check_bounds(value)
