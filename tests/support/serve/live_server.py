"""A real server on a free port, around a tiny model of random weights and our own tokenizer."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support.tiny import decoder_config
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Delta
from whorl.evals.model.sampling import open_engine
from whorl.http.draining_server import DrainingServer, server_config
from whorl.models import Transformer
from whorl.serve.api.app import create_app
from whorl.serve.app_state import AppState
from whorl.serve.completion_log import CompletionLog
from whorl.serve.config import ServeConfig
from whorl.serve.server import bind_socket
from whorl.serve.worker.model_loading import served_model
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.tokenizer import Tokenizer

MARKS = ("<|im_start|>", "<|im_end|>")
TEXT = "def add(a, b):\n    return a + b\n\n\nclass Stack:\n    def push(self, item):\n        self.items.append(item)\n"


@functools.cache
def make_tokenizer(specials: tuple[str, ...] = MARKS) -> Tokenizer:
    return Tokenizer.train([TEXT * 20], 300, special_tokens=specials)


def make_tiny_decoder(tokenizer: Tokenizer) -> Transformer:
    """A decoder with random weights that samples varied text."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(decoder_config(vocab_size=tokenizer.vocab_size), generator)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model.eval()


def make_tiny_engine(tokenizer: Tokenizer | None = None) -> Engine:
    tokenizer = tokenizer or make_tokenizer()
    model = make_tiny_decoder(tokenizer)
    config = EngineConfig(max_model_len=1024, kv_cache_tokens=4096, block_size=16, max_num_seqs=8)
    encoder = TokenEncoder(tokenizer)
    return open_engine(model, config, encoder, grammar_ends=encoder.stop_ids)


def make_state(engine: Any = None, events: CompletionLog | None = None, **settings: Any) -> AppState:
    tokenizer = make_tokenizer()
    engine = engine or make_tiny_engine(tokenizer)
    model = served_model(["tiny", "random/tiny"], TokenEncoder(tokenizer), engine)
    return AppState(ServeConfig(port=0, **settings), [model], engine, events=events)


class Running:
    """A server that listens."""

    def __init__(self, api: AppState) -> None:
        self.api = api
        self.socket = bind_socket(api.config)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = server_config(create_app(api), timeout_keep_alive=5, timeout_graceful_shutdown=None)
        self.server = DrainingServer(config, api, api.config.drain_seconds)
        self.began = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.began.wait(30)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            serving = asyncio.ensure_future(self.server.serve(sockets=[self.socket]))
            while not self.server.started and not serving.done():
                await asyncio.sleep(0.005)
            self.began.set()
            await serving

        asyncio.run(main())

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, **options)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's event loop and return its result."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def ask(self, function: Any) -> Any:
        """Run `function(engine)` between two steps."""
        return self.wait(self.api.worker.call(function))

    def reset_watchdog(self) -> None:
        """Count holds of the event loop from now on, without collections of all objects of the test suite.

        A server exempts what it has loaded from the garbage collector, too (`prepare_server_process`).
        """
        gc.collect()
        gc.freeze()
        self.in_loop(self.api.watchdog.reset)

    def in_loop(self, function: Any) -> Any:
        """Run `function()` in the server's event loop."""

        async def call() -> Any:
            return function()

        return self.wait(call())


@contextmanager
def running(api: AppState) -> Iterator[Running]:
    server = Running(api)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server for all tests that only send requests. At the end it must hold no pages, streams or limits."""
    with running(make_state()) as one:
        yield one
        one.ask(lambda engine: engine.check_integrity())
        assert one.ask(lambda engine: engine.busy) is False
        assert one.api.worker.streams == {} and one.api._limits_by_request == {}


class Gate:
    """Releases the steps of an engine one by one."""

    def __init__(self, engine: Any) -> None:
        self.turns, self.real = threading.Semaphore(0), engine.step
        engine.step = self.step

    def step(self) -> list[Delta]:
        assert self.turns.acquire(timeout=60)
        return list(self.real())

    def let(self, n: int) -> None:
        self.turns.release(n)
