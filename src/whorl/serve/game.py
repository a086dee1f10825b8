"""The server of `whorl rl play`: a page on which a person plays against an agent, and its API.

    GET  /v1/game             the agent's name, its game and its simulations
    POST /v1/game/position    {moves, search} -> `TrainedPlayer.position`

The page keeps the moves, so the server has no state: taking a move back is a request with fewer moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from whorl.agents.search.play import TrainedPlayer
from whorl.errors import ConfigError
from whorl.http.draining_server import server_config
from whorl.http.hosts import http_address
from whorl.serve import errors
from whorl.serve.api.strict_route import ErrorHandlingRoute
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError
from whorl.serve.middleware.admission import AdmissionMiddleware
from whorl.serve.page_files import add_page_routes
from whorl.serve.server import bind_socket


class PositionBody(BaseModel):
    """Actions from the start of a game. search: whether the agent searches the position after them."""

    model_config = ConfigDict(extra="forbid")
    moves: list[Annotated[int, Field(ge=0, le=100)]] = Field(max_length=100)
    search: bool = True


def create_game_app(agent: TrainedPlayer) -> FastAPI:
    """Return the application of a game against an agent, for this machine alone and without keys."""
    app, one_search = FastAPI(title="Whorl game", docs_url=None, redoc_url=None), asyncio.Lock()
    app.router.route_class = ErrorHandlingRoute
    errors.install_error_handlers(app)
    state = SimpleNamespace(config=ServeConfig(), key_store=None, local_only=True)
    state.check_accepting, state.count_response = lambda limits: None, lambda path, status: None
    app.add_middleware(AdmissionMiddleware, state=state)
    add_page_routes(app, {"/": "game.html"})

    @app.get("/v1/game")
    async def about() -> dict[str, Any]:
        game = agent.method.game
        shape = {"rows": game.shape[0], "columns": game.shape[1], "gravity": game.gravity}
        return {"agent": agent.name, "game": game.name, "simulations": agent.simulations, **shape}

    @app.post("/v1/game/position")
    async def position(body: PositionBody) -> dict[str, Any]:
        async with one_search:
            try:
                return await asyncio.to_thread(agent.position, body.moves, body.search)
            except ConfigError as error:
                raise ApiError(400, error.what, param="moves") from error

    return app


def run_game_server(agent: TrainedPlayer, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the page to this machine until a signal. Calls `on_ready` with the URL."""
    config = ServeConfig(port=port)
    sock = bind_socket(config)
    on_ready(http_address(config.host, sock.getsockname()[1]))
    uvicorn.Server(server_config(create_game_app(agent))).run(sockets=[sock])
