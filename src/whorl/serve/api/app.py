"""The routes. What each does lives in its own file; here is which path leads there, and what the API's schema says of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import FileResponse, Response

from whorl.serve import errors
from whorl.serve.api import chat, embeddings, responses
from whorl.serve.api import completions as text_completions
from whorl.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from whorl.serve.app_state import AppState
from whorl.serve.errors import ApiError, OrjsonResponse
from whorl.serve.middleware.admission import AdmissionMiddleware
from whorl.serve.worker.engine_state import engine_counters, engine_snapshot, evicted_tokens

PAGES_FOLDER = Path(__file__).parents[1] / "pages"
MAX_JSON_DEPTH = 64  # levels of JSON: beyond that somebody tries something
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    for status, said in (
        (400, "what was asked for cannot be; the parameter is named"),
        (401, "no key, or an unknown one"),
        (404, "no such model"),
        (413, "too large"),
        (429, "over the key's limit"),
        (500, "a bug of the server"),
        (503, "busy, stopping or failed; retry-after says when to ask again"),
    )
}
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, whole or as it comes",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


class _StrictJSONRequest(HttpRequest):
    """Reads JSON by the letter: no NaN, no half of a surrogate pair, no depth that would overrun somebody's stack."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            said = f"the body is no valid JSON: {error}"
            raise ApiError(400, said, code="invalid_json") from error
        if _depth(found) > MAX_JSON_DEPTH:
            raise ApiError(400, f"the JSON is more than {MAX_JSON_DEPTH} levels deep", code="invalid_json")
        return found


class _ErrorHandlingRoute(APIRoute):
    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()

        async def handle(request: HttpRequest) -> Response:
            try:
                return await original(_StrictJSONRequest(request.scope, request.receive))
            except RequestValidationError as error:
                return errors.from_validation_errors(error.errors()).response
            except (
                Exception
            ) as error:  # here, since outside of the routes it would be logged and raised once more
                return errors.to_api_error(error).response

        return handle


def create_app(api: AppState) -> FastAPI:
    """The server's application, guard and all. Its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        api.worker.start()
        yield
        await api.worker.stop()

    app = FastAPI(
        title="Whorl",
        description="An OpenAI-compatible API over one engine: docs/serve.md.",
        docs_url=None,  # they would be fetched from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=ERROR_RESPONSES,
    )
    app.router.route_class = _ErrorHandlingRoute
    app.state.api = api
    errors.install_error_handlers(app)
    app.add_middleware(AdmissionMiddleware, state=api)
    _add_generation_routes(app, api)
    _add_model_routes(app, api)
    _add_monitoring_routes(app, api)
    _add_page_routes(app)
    return app


def _add_generation_routes(app: FastAPI, api: AppState) -> None:
    @app.post("/v1/completions", responses=STREAM_RESPONSES, tags=["generate"])
    async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
        return await text_completions.create_completion(api, body, request)

    @app.post("/v1/chat/completions", responses=STREAM_RESPONSES, tags=["generate"])
    async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
        return await chat.create_chat_completion(api, body, request)

    @app.post("/v1/responses", responses=STREAM_RESPONSES, tags=["generate"])
    async def new_response(body: ResponsesRequest, request: HttpRequest) -> Response:
        return await responses.create_response(api, body, request)

    @app.post("/v1/embeddings", tags=["generate"])
    async def vectors(body: EmbeddingsRequest, request: HttpRequest) -> Response:
        return await embeddings.create_embeddings(api, body, request)

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> Response:
        return await embeddings.tokenize(api, body)

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        return await embeddings.detokenize(api, body)


def _add_model_routes(app: FastAPI, api: AppState) -> None:
    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        return OrjsonResponse({"object": "list", "data": [model.card for model in api.models]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        return OrjsonResponse(api.find_model(name).card)


def _add_monitoring_routes(app: FastAPI, api: AppState) -> None:
    @app.get("/health", tags=["watch"])
    async def health() -> Response:
        worker = api.worker
        told = {
            "status": api.status,
            "boot_id": api.boot_id,
            "uptime": round(time.time() - api.start_time, 3),
            "running": worker.running,
            "queue": worker.waiting,
            "evicted_tokens": evicted_tokens(worker.engine),
        }
        return OrjsonResponse(told, 503 if api.status == "failed" else 200)

    @app.get("/health/live", tags=["watch"])
    async def live() -> Response:
        return OrjsonResponse({"status": api.status}, 503 if api.status == "failed" else 200)

    @app.get("/health/ready", tags=["watch"])
    async def ready() -> Response:
        return OrjsonResponse({"status": api.status}, 200 if api.status == "ok" else 503)

    @app.get("/metrics", tags=["watch"])
    async def metrics() -> Response:
        if api.worker.error is None:
            api.metrics.engine_stats = await api.worker.call(engine_counters)
        return Response(api.metrics.exposition, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/engine/state", tags=["watch"])
    async def state() -> Response:
        told = await api.worker.call(engine_snapshot) if api.worker.error is None else {}
        config = api.config
        return OrjsonResponse(
            {
                "model": api.models[0].name,
                "status": api.status,
                "uptime": round(time.time() - api.start_time, 3),
                "slo": {"ttft": config.slo_ttft, "tpot": config.slo_tpot},
                "latencies": api.metrics.latencies,
                **told,
            }
        )


def _add_page_routes(app: FastAPI) -> None:
    def page(name: str) -> Response:
        path = (PAGES_FOLDER / name).resolve()
        if (
            not path.is_relative_to(PAGES_FOLDER.resolve())
            or not path.is_file()
            or path.suffix not in MEDIA_TYPES
        ):
            raise ApiError(404, f"there is no page {name!r}")
        told = {
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix], headers=told)

    @app.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        return page("chat.html")

    @app.get("/engine", include_in_schema=False)
    async def engine_page() -> Response:
        return page("engine.html")

    @app.get("/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:
        return page(name)


def _depth(value: Any) -> int:
    """Levels of lists and objects inside of one another; without recursion, which is what depth would exhaust."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth
