"""Answers with sources: passages of a search index in the prompt, numbered, under a token budget.

The last message of the user, or the prompt of a completion, is the query. The passages come before it in the same message.
The response has them in `sources`, with the numbers that the answer cites.

POST /v1/search returns passages themselves, for the page /search and for clients.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import asdict
from threading import Lock
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from whorl.errors import shorten
from whorl.loop.search.reader import SearchReader
from whorl.search.documents import SearchQuery
from whorl.search.numbered_sources import SourcePassage, with_sources, within_budget
from whorl.search.query import read_filters
from whorl.serve.api.protocol import ChatRequest, CompletionRequest, StrictModel
from whorl.serve.api.request_parsing import ParsedRequest
from whorl.serve.app_state import AppState, in_thread_if_large
from whorl.serve.errors import ApiError, OrjsonResponse
from whorl.serve.worker.model_entry import ServedModel

Body = TypeVar("Body", ChatRequest, CompletionRequest)
MAX_SOURCES = 4  # by default
SHOWN = ("id", "version", "title", "text", "start", "score")  # of a source
_SYNTAX = re.compile(r'["*]|(?<!\S)-')  # of queries; a question has none


class SearchRequest(StrictModel):
    """Body of POST /v1/search. filters: FIELD=VALUE or FIELD=LOW..HIGH. facets: fields whose values are counted."""

    query: str = ""
    k: int = Field(default=10, ge=1, le=100)
    filters: list[str] = Field(default=[])
    facets: list[str] = Field(default=[])
    explain: bool = False


class SourceSearch:
    """The index of a server. budget: tokens of all sources of a prompt."""

    def __init__(self, reader: SearchReader, budget: int) -> None:
        self.reader, self.budget, self._lock = reader, budget, Lock()

    def find(self, question: str, k: int) -> list[dict[str, Any]]:
        """Return the best k passages."""
        with self._lock:
            hits = self.reader.search(SearchQuery(_SYNTAX.sub(" ", question), k)).hits
        return [{name: getattr(hit, name) for name in SHOWN} for hit in hits]

    def page(self, query: SearchQuery) -> dict[str, Any]:
        """Return results as the page /search shows them. steps: of the analysis. fields: that a filter may name."""
        with self._lock:
            index = self.reader.index()
            steps = [{"step": name, "result": result} for name, result in index.analyze(query.text)]
            return {
                "index": self.reader.name,
                "fields": index.fields(),
                "steps": steps,
                **asdict(index.search(query)),
            }

    def add_route(self, app: FastAPI, charge: Callable[[HttpRequest], Any]) -> None:
        """Add POST /v1/search. It shows every document of the index: to this machine, or to holders of a key."""

        @app.post("/v1/search", tags=["search"])
        async def search_index(body: SearchRequest, request: HttpRequest) -> Response:
            charge(request)
            filters = read_filters(body.filters)
            query = SearchQuery(body.query, body.k, filters=filters, facets=body.facets, explain=body.explain)
            return OrjsonResponse(await asyncio.to_thread(self.page, query))


async def add_sources(
    state: AppState,
    body: Body,
    served: ServedModel,
    http: HttpRequest,
    parse: Callable[[Body], ParsedRequest],
) -> tuple[Body, ParsedRequest, list[dict[str, Any]]]:
    """Return the body with sources in its question, what `parse` makes of it, and the sources.

    Raises:
        ApiError: 400, sources are requested and impossible; 503, the index failed; and as `parse`.
    """
    parsed = await in_thread_if_large(http, lambda: parse(body))
    question = _question(body)
    if body.sources and (state.sources is None or question is None):
        why = (
            "only for a prompt or a message of text"
            if state.sources
            else "start the server with `whorl serve --search`"
        )
        raise ApiError(400, f"sources: {why}", param="sources")
    if state.sources is None or not question or body.sources == 0:
        return body, parsed, []
    search: SourceSearch = state.sources
    try:
        found = await asyncio.to_thread(search.find, question, body.sources or MAX_SOURCES)
    except Exception as error:  # of any back end
        text = f"the search index failed: {shorten(str(error))}; sources: 0 answers without it"
        raise ApiError(503, text, param="sources", code="search_failed", retry_after=5) from error
    answer = (
        max(body.max_tokens or 0, getattr(body, "max_completion_tokens", 0) or 0) or served.max_model_len // 4
    )
    room = min(search.budget, served.max_model_len - parsed.n_prompt_tokens - answer)
    passages = [SourcePassage(one["text"].strip(), one["title"]) for one in found]
    kept = within_budget(passages, lambda text: len(served.tokenizer.encode_to_list(text)), room)
    if not kept:
        return body, parsed, []
    body = _replaced(body, with_sources(question, kept))
    shown = [
        {"number": n, **one, "text": source.text}
        for n, (one, source) in enumerate(zip(found, kept, strict=False), 1)
    ]
    return body, await in_thread_if_large(http, lambda: parse(body)), shown


def _question(body: ChatRequest | CompletionRequest) -> str | None:
    """Return the text that sources answer; None for token ids, several prompts, and messages without one of the user."""
    if isinstance(body, ChatRequest):
        return next((message.text for message in reversed(body.messages) if message.role == "user"), None)
    return body.prompt if isinstance(body.prompt, str) else None


def _replaced(body: Body, question: str) -> Body:
    if isinstance(body, ChatRequest):
        messages = list(body.messages)
        last = max(n for n, message in enumerate(messages) if message.role == "user")
        messages[last] = messages[last].model_copy(update={"content": question})
        return body.model_copy(update={"messages": messages})
    return body.model_copy(update={"prompt": question})
