"""The FastAPI application: routes, pages, OpenAPI schema. The handlers are in the other modules of this folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from whorl.http.server_process import trim_memory
from whorl.serve import errors
from whorl.serve.api import chat, embeddings, responses
from whorl.serve.api import completions as text_completions
from whorl.serve.api.json_bounds import parse_json, parse_large_json
from whorl.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from whorl.serve.app_state import LARGE_BODY_BYTES, AppState
from whorl.serve.errors import OrjsonResponse
from whorl.serve.middleware.admission import AdmissionMiddleware
from whorl.serve.page_files import add_page_routes
from whorl.serve.worker.engine_group import engine_of
from whorl.serve.worker.engine_state import engine_counters, engine_snapshot, evicted_tokens
from whorl.serve.worker.model_entry import ServedModel

LARGE_WORK_THREADS = (
    2  # parsing and encoding of large requests; more would compete for the interpreter's lock
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
    status: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    for status, text in (
        (400, "invalid request; the error names the parameter"),
        (401, "missing or unknown API key"),
        (404, "unknown model"),
        (413, "too large"),
        (429, "rate limit of the key exceeded"),
        (500, "internal error"),
        (503, "busy, draining or failed; see the retry-after header"),
    )
}
STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "a full response, or a stream of events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


class _StrictJSONRequest(HttpRequest):
    """Parses JSON strictly: no NaN, no lone surrogates, bounded shape (`json_bounds.py`). A large body becomes a `model`."""

    model: type[BaseModel] | None = None

    async def json(self) -> Any:
        body = await self.body()
        if len(body) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(parse_large_json, body, self.model)
        return parse_json(body)


class ErrorHandlingRoute(APIRoute):
    """A route that parses bodies strictly and returns every error in OpenAI's format."""

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


def create_app(state: AppState) -> FastAPI:
    """Return the server's application with its middleware. Its lifespan starts and stops the engine thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LARGE_WORK_THREADS))
        await asyncio.to_thread(app.openapi)  # kept; a request for it would hold the event loop
        work = (state.end_revoked_streams(), state.watchdog.run(), trim_memory())
        tasks = [asyncio.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()
        await state.worker.stop()
        await asyncio.to_thread(state.close)

    app = FastAPI(
        title="Whorl",
        version=metadata.version("whorl"),
        description="An OpenAI-compatible API over one engine: docs/serve.md.",
        docs_url=None,  # the documentation pages load scripts from other hosts
        redoc_url=None,
        lifespan=lifespan,
        responses=ERROR_RESPONSES,
    )
    app.router.route_class = ErrorHandlingRoute
    app.state.whorl = state
    errors.install_error_handlers(app)
    app.add_middleware(AdmissionMiddleware, state=state)
    _add_generation_routes(app, state)
    _add_model_routes(app, state)
    _add_monitoring_routes(app, state)
    add_page_routes(app, {"/": "chat.html", "/engine": "engine.html"})
    return app


def _add_generation_routes(app: FastAPI, state: AppState) -> None:
    @app.post("/v1/completions", responses=STREAM_RESPONSES, tags=["generate"])
    async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
        return await text_completions.create_completion(state, body, request)

    @app.post("/v1/chat/completions", responses=STREAM_RESPONSES, tags=["generate"])
    async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
        return await chat.create_chat_completion(state, body, request)

    @app.post("/v1/responses", responses=STREAM_RESPONSES, tags=["generate"])
    async def create_response(body: ResponsesRequest, request: HttpRequest) -> Response:
        return await responses.create_response(state, body, request)

    @app.post("/v1/embeddings", tags=["generate"])
    async def create_embeddings(body: EmbeddingsRequest, request: HttpRequest) -> Response:
        return await embeddings.create_embeddings(state, body, request)

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeRequest, request: HttpRequest) -> Response:
        return await embeddings.tokenize(state, body, request)

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> Response:
        return await embeddings.detokenize(state, body, request)


def _add_model_routes(app: FastAPI, state: AppState) -> None:
    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        return OrjsonResponse({"object": "list", "data": [model.card for model in state.models]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        return OrjsonResponse(state.find_model(name).card)


def _add_monitoring_routes(app: FastAPI, state: AppState) -> None:
    @app.get("/health", tags=["monitoring"])
    async def health() -> Response:
        worker = state.worker
        body = {
            "status": state.status,
            "boot_id": state.boot_id,
            "keys_required": state.key_store is not None,
            "uptime": round(time.time() - state.start_time, 3),
            "running": worker.running,
            "queue": worker.waiting,
            "evicted_tokens": evicted_tokens(worker.engine),
        }
        return OrjsonResponse(body, 503 if state.status == "failed" else 200)

    @app.get("/health/live", tags=["monitoring"])
    async def live() -> Response:
        return OrjsonResponse({"status": state.status}, 503 if state.status == "failed" else 200)

    @app.get("/health/ready", tags=["monitoring"])
    async def ready() -> Response:
        return OrjsonResponse({"status": state.status}, 200 if state.status == "ok" else 503)

    @app.get("/metrics", tags=["monitoring"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        if state.worker.error is None:
            state.metrics.engine_stats = await state.worker.call(engine_counters)
        return Response(state.metrics.exposition, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/engine/state", tags=["monitoring"])
    async def engine_state(model: str | None = None) -> Response:
        shown, config = state.find_model(model), state.config
        name = shown.engine if isinstance(shown, ServedModel) else ""
        snapshot = {}
        if state.worker.error is None:
            snapshot = await state.worker.call(lambda engine: engine_snapshot(engine_of(engine, name)))
        return OrjsonResponse(
            {
                "model": shown.name,
                "status": state.status,
                "uptime": round(time.time() - state.start_time, 3),
                "slo": {"ttft": config.slo_ttft, "tpot": config.slo_tpot},
                "latencies": state.metrics.latencies,
                **snapshot,
            }
        )
