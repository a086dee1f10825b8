"""The FastAPI application: routes, pages, OpenAPI schema. The handlers are in the other modules of this folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from whorl.http.server_process import trim_memory
from whorl.serve import errors
from whorl.serve.api import chat, embeddings, responses
from whorl.serve.api import completions as text_completions
from whorl.serve.api.feedback import add_feedback_routes, add_loop_routes
from whorl.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from whorl.serve.api.strict_route import ErrorHandlingRoute
from whorl.serve.app_state import AppState, actor_of
from whorl.serve.errors import OrjsonResponse
from whorl.serve.middleware.admission import AdmissionMiddleware
from whorl.serve.page_files import add_page_routes
from whorl.serve.worker.engine_group import engine_of
from whorl.serve.worker.engine_state import engine_counters, engine_snapshot, evicted_tokens
from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel

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


def create_app(state: AppState) -> FastAPI:
    """Return the server's application with its middleware. Its lifespan starts and stops the engine thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.worker.start()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(LARGE_WORK_THREADS))
        await asyncio.to_thread(app.openapi)  # kept; a request for it would hold the event loop
        background = [start() for start in state.background]
        work = (state.end_revoked_streams(), state.watchdog.run(), trim_memory(), *background)
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
    pages = {"/": "chat.html", "/engine": "engine.html"}
    if state.events is not None:
        add_feedback_routes(app, state.events, lambda http: state.charge_rate_limit(http, 0))
        if state.events.pages is not None and (state.local_only or state.key_store is not None):
            add_loop_routes(app, state.events.pages, actor_of)
            pages |= {"/feed": "feed.html", "/loop": "loop.html"}
    if state.sources is not None and (state.local_only or state.key_store is not None):
        state.sources.add_route(app, lambda http: state.charge_rate_limit(http, 0))
        pages |= {"/search": "search.html"}
    add_page_routes(app, pages)
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
    def card_of(model: ServedModel | ServedEmbedder) -> dict[str, Any]:
        if not isinstance(model, ServedModel):
            return model.card
        more: dict[str, Any] = {"search": True} if state.sources is not None else {}
        more |= {"log": True, "compare": state.compare} if state.events is not None else {}
        return {**model.card, "whorl": {**model.card["whorl"], **more}}

    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        return OrjsonResponse({"object": "list", "data": [card_of(model) for model in state.models]})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        return OrjsonResponse(card_of(state.find_model(name)))


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
