"""The API against generated requests (schemathesis): no status 500, and every error has the documented format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.support.serve.live_server import make_state, running

import whorl
from whorl.serve.completion_log import CompletionLog

REPRODUCIBLE = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate])
PER_MODE = settings(REPRODUCIBLE, max_examples=8, suppress_health_check=list(HealthCheck))
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
MODEL = {"enum": ["tiny", "random/tiny"]}  # other names would all end at the same 404
FEW_TOKENS = {"type": "integer", "minimum": 1, "maximum": 4}


def described(server: Any) -> dict[str, Any]:
    """The API's description with `MODEL` and `FEW_TOKENS`."""
    found: dict[str, Any] = server.get("/openapi.json").json()
    for schema in found["components"]["schemas"].values():
        fields = schema.get("properties", {})
        fields |= dict.fromkeys(fields.keys() & {"model"}, MODEL)
        fields |= dict.fromkeys(fields.keys() & {"max_tokens"}, FEW_TOKENS)
    return found


def test_schema_states_content_types_and_limits(server: Any) -> None:
    found = server.get("/openapi.json").json()
    assert found["info"]["version"] == whorl.__version__
    content = found["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert list(content) == [server.get("/metrics").headers["content-type"].partition(";")[0]]
    schemas = found["components"]["schemas"]
    lists = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][1:]
    assert [(one["minItems"], one.get("maxItems")) for one in lists] == [(1, 2048), (1, None), (1, 2048)]
    assert schemas["EmbeddingsRequest"]["properties"]["input"]["anyOf"][0]["minLength"] == 1
    assert "oneOf" in schemas["TokenizeRequest"] and "anyOf" in schemas["ChatRequest"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(make_state(events=CompletionLog.open(tmp_path_factory.mktemp("store")))) as one:
        yield one


@pytest.mark.parametrize("path", ["/v1/feedback", "/v1/feed", "/v1/feedback/counts"])
def test_feedback_routes_never_return_500(logged: Any, path: str) -> None:
    test_api_never_returns_500_for_schema_cases(
        logged, path, must_answer=path != "/v1/feedback"
    )  # tokens are random


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_api_never_returns_500_for_schema_cases(server: Any, path: str, must_answer: bool = True) -> None:
    schema = schemathesis.openapi.from_dict(described(server))
    (operation,) = schema[path].values()
    answered = 0
    for mode in schemathesis.GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode))
        @PER_MODE
        def ask(case: Any) -> None:
            nonlocal answered
            answer = case.call(base_url=server.url, timeout=60)
            assert answer.status_code not in (500, 503), (case.body, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            answered += answer.status_code < 400

        ask()
    assert answered or not must_answer, "every generated request was rejected"
