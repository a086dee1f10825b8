"""The server of an arena: a page on which people vote between two unnamed answers, and its API.

    GET  /v1/arena                       number of models and votes; whether there are prompts to draw
    POST /v1/arena/battles               {prompt} -> id and both answers; without a prompt, one is drawn
    POST /v1/arena/battles/ID/turns      {prompt} -> the conversation with one more turn
    POST /v1/arena/battles/ID/vote       {choice, voter} -> names, and ratings before and after
    GET  /v1/arena/standings             ratings, intervals, meetings

No response names a model of a battle before its vote. The id is random, so only the page that started a battle can vote in
it. A vote that is sent twice is confirmed twice and counts once. With API keys, the voter is the key.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from whorl.evals.arena.arena import AnswerMissingError, ModelArena
from whorl.evals.arena.arena_log import Battle, UnknownBattleError, VoteConflictError
from whorl.evals.arena.battles import Choice
from whorl.http.draining_server import server_config
from whorl.http.hosts import http_address, is_loopback
from whorl.http.server_process import prepare_server_process
from whorl.http.shares import Shares
from whorl.serve import errors
from whorl.serve.api.strict_route import ErrorHandlingRoute
from whorl.serve.app_state import key_limits
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError, OrjsonResponse
from whorl.serve.middleware.admission import AdmissionMiddleware, client_of
from whorl.serve.middleware.auth import KeyLimits, KeyStore
from whorl.serve.page_files import add_page_routes
from whorl.serve.server import raise_fd_limit

T = TypeVar("T")
MAX_PROMPT = 100_000  # characters
MAX_BATTLES = 8  # turns that are computed at once, half of them for one client; further ones get status 503


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BattleBody(_Body):
    """A new battle. prompt: None draws one."""

    prompt: str | None = Field(default=None, max_length=MAX_PROMPT)


class TurnBody(_Body):
    """One more prompt."""

    prompt: str = Field(max_length=MAX_PROMPT)


class VoteBody(_Body):
    """A vote. voter: random text that identifies a browser."""

    choice: Choice
    voter: str = Field(default="", max_length=64)


class ArenaState:
    """The state of the server.

    Args:
        prompts: those that the page may draw from; without them, voters write their own.
        rng: draws prompts.
    """

    def __init__(
        self,
        arena: ModelArena,
        config: ServeConfig,
        prompts: Sequence[str] = (),
        rng: random.Random | None = None,
    ) -> None:
        self.arena, self.config, self.prompts = arena, config, list(prompts)
        self.key_store = None if config.key_file is None else KeyStore(config.key_file)
        self.local_only = self.key_store is None and is_loopback(config.host)
        self._rng = rng or random.Random()
        self._places = Shares(MAX_BATTLES, MAX_BATTLES // 2)
        self.standings_lock = asyncio.Lock()

    def check_accepting(self, limits: KeyLimits | None) -> None:
        """Charge the requests of a key: battles, turns and votes. `run_turn` bounds the work."""
        if limits is not None:
            limits.charge()

    def count_response(self, path: str, status: int) -> None:
        """Count nothing: this server has no /metrics."""

    def draw_prompt(self) -> str:
        """Return a prompt. Raises ApiError: there are none."""
        if not self.prompts:
            raise ApiError(400, "this arena has no prompts to draw; write one", param="prompt")
        return self._rng.choice(self.prompts)

    async def run_turn(self, http: HttpRequest, work: Callable[..., Battle], *arguments: str) -> Response:
        """Run `start` or `go_on` of the arena in a thread, and return the battle without names.

        Raises:
            ApiError: 503, too many battles run, or an answer did not arrive; 404, 409: as `api_error`.
        """
        with self._places.place(client_of(http.scope)) as found:
            if not found:
                raise ApiError(503, "other battles are running", code="queue_full", retry_after=2)
            return OrjsonResponse(blind(await _in_thread(work, *arguments)))


def blind(battle: Battle) -> dict[str, Any]:
    """Return the conversation of a battle, without models, addresses and settings."""
    turns = [
        {
            "prompt": t.prompt, "left": t.left, "right": t.right,
            "left_cut": t.left_finish == "length", "right_cut": t.right_finish == "length",
        }
        for t in battle.turns
    ]  # fmt: skip
    return {"battle": battle.id, "turns": turns}


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run work in a thread; errors of the arena become those of the API."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except UnknownBattleError as error:
        raise ApiError(404, error.what, code="unknown_battle") from error
    except VoteConflictError as error:
        raise ApiError(409, error.what, code="vote_conflict") from error
    except AnswerMissingError as error:
        raise ApiError(503, "an answer did not arrive; try again", code="answer_missing") from error


def create_arena_app(state: ArenaState) -> FastAPI:
    """Return the application of an arena."""
    app = FastAPI(
        title="Whorl arena", description="Blind votes between models: docs/evals/arena.md.",
        version=metadata.version("whorl"),
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.router.route_class = ErrorHandlingRoute
    errors.install_error_handlers(app)
    app.add_middleware(AdmissionMiddleware, state=state)
    add_page_routes(app, {"/": "arena.html"})
    arena = state.arena

    @app.get("/health")
    async def health() -> Response:
        return OrjsonResponse({"status": "ok"})

    @app.get("/v1/arena")
    async def about() -> Response:
        content = {
            "models": len(arena.names), "votes": arena.log.n_votes(), "prompts": len(state.prompts),
            "complete": arena.settings.complete,
        }  # fmt: skip
        return OrjsonResponse(content)

    @app.post("/v1/arena/battles")
    async def start(body: BattleBody, request: HttpRequest) -> Response:
        prompt = state.draw_prompt() if body.prompt is None else body.prompt
        return await state.run_turn(request, arena.start, prompt)

    @app.post("/v1/arena/battles/{battle}/turns")
    async def go_on(battle: str, body: TurnBody, request: HttpRequest) -> Response:
        return await state.run_turn(request, arena.go_on, battle, body.prompt)

    @app.post("/v1/arena/battles/{battle}/vote")
    async def vote(battle: str, body: VoteBody, request: HttpRequest) -> Response:
        limits = key_limits(request)
        voter = body.voter if limits is None else f"key:{limits.key.id}"
        outcome = await _in_thread(arena.vote, battle, body.choice, voter)
        sides = {
            side: {"model": model, "before": outcome.before[k], "after": outcome.after[k]}
            for k, (side, model) in enumerate((("left", outcome.left), ("right", outcome.right)))
        }
        return OrjsonResponse({**sides, "counted": outcome.counted})

    @app.get("/v1/arena/standings")
    async def standings() -> Response:
        async with state.standings_lock:  # several requests after a vote compute them once
            found = await _in_thread(arena.standings)
        content = {"votes": 0, "models": sorted(arena.names)} if found is None else asdict(found)
        return OrjsonResponse(content)

    return app


def run_arena_server(
    state: ArenaState, sock: socket.socket, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve connections of `sock` until a signal. Calls `on_ready` with the URL."""
    raise_fd_limit()
    prepare_server_process()
    server = uvicorn.Server(server_config(create_arena_app(state)))
    on_ready(http_address(state.config.host, sock.getsockname()[1]))
    server.run(sockets=[sock])
