"""State that all routes share: settings, models, engine worker, metrics, API keys. Also the only path into the engine.

`AppState.submit` rejects a request before the engine sees it if the server is draining, the queue is full, or the key has
reached its rate limit. Errors that the engine raises (such as a grammar that does not compile) are raised before the first
byte of the response. The client then gets status 400 instead of a broken stream.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from whorl.engine.request import Request
from whorl.errors import shorten
from whorl.http.hosts import is_loopback
from whorl.http.loop_watchdog import LoopWatchdog
from whorl.http.shares import Shares
from whorl.serve.completion_log import CompletionLog
from whorl.serve.config import LARGE_BODY_BYTES, ServeConfig
from whorl.serve.errors import ApiError
from whorl.serve.middleware.admission import client_of
from whorl.serve.middleware.auth import RELOAD_SECONDS, KeyLimits, KeyStore
from whorl.serve.middleware.metrics import ServerMetrics
from whorl.serve.worker.fair_queue import FairThread
from whorl.serve.worker.grammar_check import GrammarChecker
from whorl.serve.worker.model_entry import Challenger, ServedEmbedder, ServedModel
from whorl.serve.worker.worker import EngineProtocol, EngineWorker, Stream

T = TypeVar("T")
LIMITS_FOLDER = "WHORL_LIMITS_FOLDER"  # set by `whorl serve --replicas`
MAX_WAITING_GRAMMARS, MAX_GRAMMARS_PER_CLIENT = 64, 8
ANONYMOUS, MAX_ACTOR = "anonymous", 256  # MAX_ACTOR: characters


class AppState:
    """The shared state of one server.

    Args:
        engine: None if only an embedder is served.
        models: the first is the default model.
        limits_folder: where replicas share the rate limits of a key; by default the variable `LIMITS_FOLDER`.
        events: the log of completions and feedback; closed with this state.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: Sequence[ServedModel | ServedEmbedder],
        engine: EngineProtocol | None,
        limits_folder: Path | None = None,
        events: CompletionLog | None = None,
    ) -> None:
        self.config, self.models, self.events = config, list(models), events
        self.challenger: Challenger | None = None
        self.sources: Any = None  # `SourceSearch`: the index that answers have sources of
        self.compare = 0.0  # share of the chat page's prompts with two answers
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []  # run while the server does
        self.metrics = ServerMetrics(config.slo_ttft, config.slo_tpot)
        self.worker = EngineWorker(engine if engine is not None else _NoEngine(), self._on_finish)
        self.metrics.worker = self.worker
        if events is not None:
            self.metrics.registry.register(events.unlogged)
        self.watchdog = self.metrics.watchdog = LoopWatchdog(self.metrics.loop_delay.observe)
        self.key_store: KeyStore | None = None
        if config.key_file is not None:
            shared = os.environ.get(LIMITS_FOLDER)
            folder = limits_folder or (Path(shared) if shared else None)
            self.key_store = KeyStore(config.key_file, folder=folder)
        self.local_only = self.key_store is None and is_loopback(config.host)
        self.draining = False
        self.start_time, self.boot_id = (
            time.time(),
            secrets.token_hex(8),
        )  # boot_id differs after each start
        self._limits_by_request: dict[str, KeyLimits] = {}
        self._grammar_checker = GrammarChecker()
        self._grammar_thread = FairThread("whorl-grammar", MAX_WAITING_GRAMMARS, MAX_GRAMMARS_PER_CLIENT)
        self._embedding_places = Shares(config.max_queue, max(1, config.max_queue // 2))

    def close(self) -> None:
        """End the process and the thread that compile grammars, and close the log and the index."""
        self._grammar_thread.close()
        self._grammar_checker.close()
        if self.events is not None:
            self.events.close()
        if self.sources is not None:
            self.sources.reader.close()

    def check_accepting(self, limits: KeyLimits | None = None) -> None:
        """Raise ApiError if the server is draining or its engine failed. Routes charge the limits of a key."""
        if self.draining:
            wait = self.config.drain_seconds
            raise ApiError(503, "the server is draining", code="draining", retry_after=wait)
        if self.worker.error is not None:
            raise ApiError(
                503, "the engine failed; see the server's log", code="engine_failed", retry_after=30
            )

    def count_response(self, path: str, status: int) -> None:
        """Count a response for /metrics. path: of the route."""
        self.metrics.http_requests.labels(path, str(status)).inc()

    @property
    def in_flight(self) -> int:
        """Running sequences."""
        return len(self.worker.streams)

    async def wait_drained(self) -> None:
        """Wait until no sequence runs."""
        await self.worker.wait_drained()

    def abort(self) -> None:
        """End all running sequences with an error."""
        error = ApiError(
            503, "the server shut down before the output was complete", code="shutdown", retry_after=1
        )
        for stream in list(self.worker.streams.values()):
            stream.end_with_error(error)

    @property
    def status(self) -> str:
        if self.worker.error is not None:
            return "failed"
        return "draining" if self.draining else "ok"

    def find_model(self, name: str | None) -> ServedModel | ServedEmbedder:
        """Return the model with this name or alias, or the first model if `name` is None.

        Raises:
            ApiError: 404, no such model.
        """
        named = [model for model in self.models if name in (None, model.name)]
        found = named or [model for model in self.models if name in model.aliases]
        if named or len(found) == 1:  # two models may share an alias, which then names none
            return found[0]
        available = ", ".join(repr(model.name) for model in self.models)
        raise ApiError(
            404,
            f"The model {shorten(name or '')!r} does not exist; available: {available}.",
            param="model",
            code="model_not_found",
        )

    def generation_model(self, name: str | None) -> ServedModel:
        """Return the model with this name if it generates text.

        Raises:
            ApiError: 404, no such model; 400, the model is an embedder.
        """
        model = self.find_model(name)
        if not isinstance(model, ServedModel):
            raise ApiError(
                400,
                f"The model {model.name!r} is an embedder and generates no text.",
                param="model",
                code="not_supported",
            )
        return model

    async def submit(self, requests: Sequence[Request], http: HttpRequest, n_prompt: int) -> list[Stream]:
        """Submit sequences to the engine. Returns their streams once the engine has admitted all of them.

        n_prompt: prompt tokens. They and the largest output are charged to the key now; what is not generated is refunded.

        Raises:
            ApiError: 403, 429, 503. WhorlError: the engine rejects a request. In all cases none of them runs.
        """
        worker, limits = self.worker, key_limits(http)
        self._check_queue(requests, limits)
        largest = sum(request.max_tokens for request in requests)
        self.charge_rate_limit(http, n_prompt, largest)
        streams: list[Stream] = []
        try:
            compiled = await self._compile_grammar(requests[0])
            if compiled is not None:  # time has passed
                self._check_queue(requests, limits)
        except BaseException:
            if limits is not None:
                with limits.exclusive():
                    limits.tokens.consume(-largest)
            raise
        try:
            for request in requests:
                if limits is not None:
                    self._limits_by_request[request.id] = limits
                streams.append(worker.submit(request))
            for stream in streams:
                await stream.admitted()
            del compiled  # each sequence has a copy
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    async def _compile_grammar(self, request: Request) -> Any:
        """Compile the grammar of a request outside of the engine's thread. The engine finds it while the result is kept.

        Raises:
            ApiError: 503, too many grammars wait. ConfigError: it is invalid or too complex.
        """
        if (grammar := request.grammar) is None:
            return None
        engine: Any = self.worker.engine
        engine = getattr(engine, "engines", {}).get(request.model, engine)
        compile_grammar = getattr(engine, "compile_grammar", None)
        work = partial(self._grammar_checker.compile, compile_grammar, grammar)
        try:
            return await self._grammar_thread.run(request.client, work)
        except asyncio.QueueFull:
            message = "too many grammars wait to be compiled"
            raise ApiError(503, message, code="queue_full", retry_after=2) from None

    @contextmanager
    def embedding_place(self, http: HttpRequest) -> Iterator[None]:
        """Hold a place of the request's client in the queue of embeddings.

        Raises:
            ApiError: 503, it is full, or the client holds half of it.
        """
        self.check_accepting()
        with self._embedding_places.place(client_id(http)) as found:
            if not found:
                raise ApiError(503, "the queue is full", code="queue_full", retry_after=1)
            yield

    def _check_queue(self, requests: Sequence[Request], limits: KeyLimits | None) -> None:
        """Check that the server accepts requests, and that the queue and the share of the key have room.

        Raises:
            ApiError: 403, the priority is reserved; 503, no room, or no engine.
        """
        self.check_accepting()
        if limits is not None:
            self._check_share(requests, limits)
        worker = self.worker
        if worker.waiting + len(requests) > max(self.config.max_queue, len(requests) * (not worker.streams)):
            raise ApiError(503, "the queue is full", code="queue_full", retry_after=1)

    def _check_share(self, requests: Sequence[Request], limits: KeyLimits) -> None:
        """As `_check_queue`, for one key."""
        if requests[0].priority < limits.key.min_priority:
            raise ApiError(
                403,
                f"priority: {requests[0].priority} is not allowed for the key {limits.key.name!r}; its lowest is "
                f"{limits.key.min_priority} (`whorl keys add --min-priority`)",
                param="priority",
            )
        own = [s for s in self.worker.streams.values() if s.request.client == limits.key.id]
        waiting = sum(not stream.first_token_time for stream in own)
        if own and waiting + len(requests) > self.config.max_queue // 2:
            message = f"the key {limits.key.name!r} holds half of the queue"
            raise ApiError(503, message, code="queue_full", retry_after=1)

    def charge_rate_limit(self, http: HttpRequest, n_prompt: int, max_output: int = 0) -> None:
        """Charge the limits of a request's key, if it has one, as `KeyLimits.charge`."""
        if (limits := key_limits(http)) is not None:
            limits.charge(n_prompt, max_output)

    async def end_revoked_streams(self) -> None:
        """End the sequences of revoked keys, within `RELOAD_SECONDS` of the revocation. Runs until it is cancelled."""
        while self.key_store is not None:
            await asyncio.sleep(RELOAD_SECONDS / 2)
            for stream in list(self.worker.streams.values()):
                limits = self._limits_by_request.get(stream.request.id)
                if limits is not None and not self.key_store.is_valid(limits):
                    error = ApiError(401, "the API key was revoked", code="invalid_api_key")
                    stream.end_with_error(error)

    def _on_finish(self, stream: Stream) -> None:
        self.metrics.observe_finished(stream)
        if limits := self._limits_by_request.pop(stream.request.id, None):
            with limits.exclusive():
                limits.tokens.consume(stream.n_tokens - stream.request.max_tokens)


def key_limits(http: HttpRequest) -> KeyLimits | None:
    """Return the limits of the request's key, or None without keys."""
    limits: KeyLimits | None = http.scope.get("state", {}).get("key_limits")
    return limits


def rate_limit_headers(http: HttpRequest) -> dict[str, str]:
    """Return the x-ratelimit headers of the request's key."""
    limits = key_limits(http)
    return limits.headers if limits is not None else {}


def client_id(http: HttpRequest) -> str:
    """Return the unit of fair scheduling, as `client_of`."""
    return client_of(http.scope)


def actor_of(http: HttpRequest, user: str | None = None) -> str:
    """Return the actor of a request: the API key's name, with the user behind a slash if the request names one.

    Without keys the user alone: `user` or `safety_identifier` of the body, else the header `x-whorl-actor` of the pages.

    Raises:
        ApiError: the name is too long, or has line breaks.
    """
    limits, given = key_limits(http), user or http.headers.get("x-whorl-actor", "")
    if len(given) > MAX_ACTOR or not given.isprintable():
        raise ApiError(400, f"user: at most {MAX_ACTOR} printable characters", param="user")
    if limits is not None:
        return f"{limits.key.name}/{given}" if given else limits.key.name
    return given or ANONYMOUS


async def in_thread_if_large(http: HttpRequest, work: Callable[[], T]) -> T:
    """Run `work()`, which processes a request's body, in a thread if the body is large.

    Encoding megabytes, or thousands of short messages, would block the event loop.
    """
    return await asyncio.to_thread(work) if len(await http.body()) > LARGE_BODY_BYTES else work()


class _NoEngine:
    """Engine of a server that only embeds."""

    busy = False

    def add(self, request: Request) -> None:
        raise ApiError(400, "this server generates no text")

    def step(self) -> list[Any]:
        return []

    def abort(self, request_id: str) -> bool:
        return False
