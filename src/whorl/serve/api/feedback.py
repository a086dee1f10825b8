"""POST /v1/feedback: one click on an answer, appended to the event log; and the routes of the pages /feed and /loop.

The token comes with the answer. It names the completion and the actor, so that a click needs no look-up. The response is
sent once the click is durable; views count it later. A click that is sent twice with one `id` is one event.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from whorl.log import Log
from whorl.log.event import new_id
from whorl.log.port import RecordTooLargeError
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import FEEDBACK, FeedbackGiven, FeedbackKind
from whorl.loop.feedback_token import TOKEN_SECONDS, FeedbackClaim, FeedbackTokenError
from whorl.loop.page_state import PageState
from whorl.serve import errors
from whorl.serve.api.protocol import StrictModel
from whorl.serve.api.strict_route import ErrorHandlingRoute
from whorl.serve.completion_log import CompletionLog
from whorl.serve.errors import ApiError, OrjsonResponse

MAX_EDIT = 1 << 18  # characters
CLOCK_SECONDS = 86400.0  # that a client's clock may be ahead
TOKEN_STATUS = {"unknown": 404, "forged": 403, "expired": 410}


class FeedbackRequest(StrictModel):
    """Body of POST /v1/feedback.

    choice, over_choice: index of the answer. over: token of the answer that this one is better than, or ties with.
    id: of the click; time: of the click in seconds since 1970, by the client's clock.
    """

    token: str = Field(max_length=4096)
    kind: FeedbackKind
    choice: int = Field(default=0, ge=0)
    text: str | None = Field(default=None, description="of an edit")
    over: str | None = Field(default=None, max_length=4096)
    over_choice: int = Field(default=0, ge=0)
    id: str | None = Field(default=None, min_length=1, max_length=128)
    time: float | None = None
    via: Literal["page", "api", "simulated"] = "api"


async def give_feedback(events: CompletionLog, body: FeedbackRequest) -> Response:
    """Append a click; return its id with status 202 once it is durable."""
    given, when = _checked(events, body, time.time())
    click = new_id()
    if body.id is not None:  # ids of other actors and answers cannot clash with it
        click = hashlib.sha256(f"{given.actor}\n{given.answer}\n{body.id}".encode()).hexdigest()[:32]
    try:
        await events.append(FEEDBACK, given.event(click, when))
    except RecordTooLargeError as error:
        raise ApiError(413, error.what, param="text") from error
    return OrjsonResponse({"id": click}, 202)


def _checked(events: CompletionLog, body: FeedbackRequest, now: float) -> tuple[FeedbackGiven, float]:
    """Return the click and its time. Raises ApiError, which names the field."""
    claim = _claim(events.secret, body.token, body.choice, "token", "choice", now)
    if body.text and len(body.text) > MAX_EDIT:
        raise ApiError(413, f"text: {len(body.text):,} characters; at most {MAX_EDIT:,}", param="text")
    if (body.kind == "edit") != bool(body.text):
        raise ApiError(400, "text: given exactly with the kind 'edit'", param="text")
    if (body.kind in ("better", "tie")) != bool(body.over):
        raise ApiError(400, "over: given exactly with the kinds 'better' and 'tie'", param="over")
    over = FeedbackClaim("", 1, "", 0)
    if body.over:
        over = _claim(events.secret, body.over, body.over_choice, "over", "over_choice", now)
        if over.actor != claim.actor:
            raise ApiError(400, "over: the token of another actor", param="over")
        if (over.completion, body.over_choice) == (claim.completion, body.choice):
            raise ApiError(400, "over: the same answer", param="over")
    when = now if body.time is None else body.time
    if not now - TOKEN_SECONDS <= when <= now + CLOCK_SECONDS:
        raise ApiError(
            400, f"time: {when:.0f} is {abs(when - now) / 86400:.0f} days off; the server's clock is {now:.0f}",
            param="time",
        )  # fmt: skip
    given = FeedbackGiven(
        claim.actor, claim.completion, body.kind, body.choice, body.text or "", over.completion, body.over_choice, body.via
    )  # fmt: skip
    return given, min(when, now)


def _claim(
    secret: bytes, token: str, choice: int, token_field: str, choice_field: str, now: float
) -> FeedbackClaim:
    try:
        claim = FeedbackClaim.read(secret, token, now)
    except FeedbackTokenError as error:
        status, code = TOKEN_STATUS[error.reason], f"{error.reason}_token"
        raise ApiError(status, f"{token_field}: {error.what}", param=token_field, code=code) from None
    if choice >= claim.choices:
        problem = f"{choice}; this completion has {claim.choices} answers"
        raise ApiError(400, f"{choice_field}: {problem}", param=choice_field)
    return claim


def add_feedback_routes(
    app: FastAPI, events: CompletionLog, charge: Callable[[HttpRequest], Any] = lambda http: None
) -> None:
    """Add the route of clicks. charge: raises ApiError if a request is over the limits of its key."""

    @app.post("/v1/feedback", status_code=202, tags=["feedback"])
    async def feedback(body: FeedbackRequest, request: HttpRequest) -> Response:
        charge(request)
        return await give_feedback(events, body)


def add_loop_routes(app: FastAPI, pages: PageState, actor_of: Callable[[HttpRequest], str]) -> None:
    """Add the routes of the pages /feed and /loop. They show text of users: to this machine, or to holders of a key."""

    @app.get("/v1/feed", tags=["feedback"])
    async def feed(
        request: HttpRequest, before: float | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> Response:
        return OrjsonResponse(await asyncio.to_thread(pages.feed, actor_of(request), before, limit))

    @app.get("/v1/feedback/counts", tags=["feedback"])
    async def counts(request: HttpRequest, answers: Annotated[str, Query(max_length=1024)]) -> Response:
        names = answers.split(",")
        found = await asyncio.to_thread(pages.counts.get, names)
        mine = await asyncio.to_thread(pages.counts.mine, actor_of(request), names)
        return OrjsonResponse({name: found[name] | {"mine": mine[name]} for name in names})

    @app.get("/v1/loop/state", tags=["feedback"])
    async def loop_state() -> Response:
        return OrjsonResponse(await asyncio.to_thread(pages.loop))


def feedback_app(log: Log, keys: ActorKeys, secret: bytes) -> FastAPI:
    """Return an application with the feedback routes alone: no engine, no keys, no limits. For tests and benches."""
    app = FastAPI(title="Whorl feedback", docs_url=None, redoc_url=None)
    app.router.route_class = ErrorHandlingRoute
    errors.install_error_handlers(app)
    add_feedback_routes(app, CompletionLog(log, keys, secret))
    return app
