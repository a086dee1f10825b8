"""What all routes share: settings, models, worker, metrics, keys; and the one way in for a sequence.

A sequence is admitted here or nowhere: while the server stops, while the queue is full, or when a key has used its minute, a
request is refused before the engine hears of it; what the engine itself refuses (a grammar that does not compile) comes back
before the first byte of the answer, so that it is a 400 and not a broken stream.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from whorl.engine.request import Request
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError
from whorl.serve.middleware.auth import KeyLimits, KeyStore
from whorl.serve.middleware.metrics import ServerMetrics
from whorl.serve.worker.model_entry import ServedEmbedder, ServedModel
from whorl.serve.worker.worker import EngineProtocol, EngineWorker, Stream

T = TypeVar("T")
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
LARGE_TEXT_CHARS = 1 << 16  # characters beyond which work on a text leaves the event loop


class AppState:
    """One server's parts.

    Args:
        engine: None where only an embedder is served.
        models: the first is the language model, if there is one.
    """

    def __init__(
        self,
        config: ServeConfig,
        models: Sequence[ServedModel | ServedEmbedder],
        engine: EngineProtocol | None,
    ) -> None:
        self.config, self.models = config, list(models)
        self.metrics = ServerMetrics(config.slo_ttft, config.slo_tpot)
        self.worker = EngineWorker(engine if engine is not None else _NoEngine(), self._on_finish)
        self.metrics.worker = self.worker
        self.key_store = KeyStore(config.key_file) if config.key_file is not None else None
        self.local_only = self.key_store is None and config.host in LOOPBACK_HOSTS
        self.draining = False
        self.start_time, self.boot_id = (
            time.time(),
            secrets.token_hex(8),
        )  # boot: another one after each start
        self._limits_by_request: dict[str, KeyLimits] = {}

    def check_accepting(self) -> None:
        """Raises ApiError while nothing new is taken."""
        if self.draining:
            wait = self.config.drain_seconds
            raise ApiError(503, "the server is stopping", code="draining", retry_after=wait)
        if self.worker.error is not None:
            raise ApiError(
                503, "the engine failed; the server's log says why", code="engine_failed", retry_after=30
            )

    @property
    def status(self) -> str:
        if self.worker.error is not None:
            return "failed"
        return "draining" if self.draining else "ok"

    def find_model(self, name: str | None) -> ServedModel | ServedEmbedder:
        """The model of that name; the first if none is named.

        Raises:
            ApiError: 404.
        """
        for model in self.models:
            if name is None or name == model.name or name in model.aliases:
                return model
        known = ", ".join(repr(model.name) for model in self.models)
        raise ApiError(
            404,
            f"The model {name!r} does not exist; there is {known}.",
            param="model",
            code="model_not_found",
        )

    def generation_model(self, name: str | None) -> ServedModel:
        """A model that generates.

        Raises:
            ApiError: 404, or 400 if it is an embedder.
        """
        model = self.find_model(name)
        if not isinstance(model, ServedModel):
            raise ApiError(
                400,
                f"The model {model.name!r} makes embeddings and no text.",
                param="model",
                code="not_supported",
            )
        return model

    async def submit(self, requests: Sequence[Request], http: HttpRequest, n_prompt: int) -> list[Stream]:
        """Hands sequences to the engine; returns when it has taken all of them.

        n_prompt: tokens of prompts, which a key pays for at once; what is written it pays for at the end.

        Raises:
            ApiError: 429, 503; WhorlError: what the engine does not take. None runs then.
        """
        self.check_accepting()
        worker = self.worker
        if worker.waiting + len(requests) > max(self.config.max_queue, len(requests) * (not worker.streams)):
            raise ApiError(503, "the queue is full", code="queue_full", retry_after=1)
        account = self.charge_rate_limit(http, n_prompt)
        streams = []
        try:
            for request in requests:
                streams.append(worker.submit(request))
                if account is not None:
                    self._limits_by_request[request.id] = account
            for stream in streams:
                await stream.admitted()
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def charge_rate_limit(self, http: HttpRequest, n_prompt: int) -> KeyLimits | None:
        """Takes a request and its prompt from the limits of its key, which is returned.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        account: KeyLimits | None = http.scope.get("state", {}).get("account")
        if account is None:
            return None
        for what, bucket, amount in (
            ("requests", account.requests, 1),
            ("tokens", account.tokens, n_prompt),
        ):
            wait = bucket.seconds_until(amount)
            if wait > 0:
                never = wait == float("inf")
                said = f"this prompt of {n_prompt:,} tokens is longer than" if never else "over"
                raise ApiError(
                    429,
                    f"{said} the limit of {bucket.limit:,} {what} a minute for the key {account.key.name!r}",
                    code="rate_limit_exceeded",
                    retry_after=60 if never else wait,
                    headers=account.headers,
                )
        account.requests.consume(1)
        account.tokens.consume(n_prompt)
        return account

    def _on_finish(self, stream: Stream) -> None:
        self.metrics.observe_finished(stream)
        if account := self._limits_by_request.pop(stream.request.id, None):
            account.tokens.consume(stream.n_tokens)


def rate_limit_headers(http: HttpRequest) -> dict[str, str]:
    """What an answer tells of the key's limits."""
    account: KeyLimits | None = http.scope.get("state", {}).get("account")
    return account.headers if account is not None else {}


def client_id(http: HttpRequest) -> str:
    """For whom the engine is to work: clients are served in equal measure. The key, or where there is none the address."""
    account: KeyLimits | None = http.scope.get("state", {}).get("account")
    return account.key.id if account is not None else (http.client.host if http.client else "")


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """`work()`, in another thread if it is about much text: encoding megabytes would hold up every other connection."""
    return await asyncio.to_thread(work) if size > LARGE_TEXT_CHARS else work()


class _NoEngine:
    """The engine of a server that only embeds."""

    busy = False

    def add(self, request: Request) -> None:
        raise ApiError(400, "this server writes no text")

    def step(self) -> list[Any]:
        return []

    def abort(self, request_id: str) -> bool:
        return False
