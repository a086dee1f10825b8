"""The API against generated requests (schemathesis): no status 500, and every error has the documented format."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = 8  # a path and kind
PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize",
]  # fmt: skip


def described(server: Any) -> dict[str, Any]:
    """The API's description, with the model that there is: other names would all end at the same 404."""
    found: dict[str, Any] = server.get("/openapi.json").json()
    for model in found["components"]["schemas"].values():
        if "model" in model.get("properties", {}):
            model["properties"]["model"] = {"enum": ["tiny", "random/tiny"]}
        if "max_tokens" in model.get("properties", {}):
            model["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 4}
    return found


@pytest.mark.parametrize("path", PATHS)
def test_api_never_returns_500_for_schema_cases(server: Any, path: str) -> None:
    schema = schemathesis.openapi.from_dict(described(server))
    (operation,) = schema[path].values()
    checks = {"ok": 0, "refused": 0}
    for mode in schemathesis.GenerationMode:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            answer = case.call(base_url=server.url, timeout=60)
            assert answer.status_code not in (500, 503), (case.body, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            checks["ok" if answer.status_code < 400 else "refused"] += 1

        ask()
    assert checks["ok"], "nothing that it made up was answered: the test sees refusals alone"
