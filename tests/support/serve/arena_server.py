"""The server of an arena in this process, over models that are functions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from tests.support.evals.backend import by_text
from whorl.evals.arena.arena import ModelArena
from whorl.evals.arena.arena_log import ArenaLog
from whorl.evals.arena.options import AnswerSettings
from whorl.evals.model.requests import Response
from whorl.http.draining_server import server_config
from whorl.serve.arena import ArenaState, create_arena_app
from whorl.serve.config import ServeConfig
from whorl.serve.server import bind_socket

Answer = Callable[[str], str | Response]
NAMES = ("sparrow", "heron")
ANSWERS: dict[str, Answer] = {name: lambda text, n=n: f"answer {n} to {text}" for n, name in enumerate(NAMES)}


@dataclass
class RunningArena:
    """A server that listens."""

    url: str
    arena: ModelArena
    state: ArenaState

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, content: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=content, timeout=60, **options)


@contextmanager
def arena_server(
    folder: Path,
    answers: dict[str, Answer] | None = None,
    prompts: Sequence[str] = (),
    settings: AnswerSettings | None = None,
    **config: Any,
) -> Iterator[RunningArena]:
    """Serve an arena; its log is `arena.sqlite` in the folder."""
    models = {name: by_text(answer) for name, answer in (answers or ANSWERS).items()}
    log = ArenaLog(folder / "arena.sqlite")
    arena = ModelArena(models, log, np.random.default_rng(0), settings or AnswerSettings())
    state = ArenaState(arena, ServeConfig(port=0, **config), prompts, random.Random(0))
    listener = bind_socket(state.config)
    server = uvicorn.Server(server_config(create_arena_app(state)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield RunningArena(f"http://127.0.0.1:{listener.getsockname()[1]}", arena, state)
    finally:
        server.should_exit = True
        thread.join(30)
        log.close()
