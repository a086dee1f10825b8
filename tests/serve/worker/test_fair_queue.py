"""Work of several clients takes turns, and work beside running sequences gets half of the engine's time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
import torch
from tests.support.serve.live_server import Running, make_tiny_decoder, make_tokenizer

from whorl.embedding.embedder import result_of
from whorl.engine.request import Delta
from whorl.http.shares import Shares
from whorl.serve.worker import model_entry
from whorl.serve.worker.fair_queue import FairQueue, FairThread
from whorl.serve.worker.model_entry import mean_pooled_embedding
from whorl.serve.worker.worker import JOB_SHARE, EngineWorker

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_clients_take_turns_and_keep_their_order() -> None:
    queue = FairQueue[str]()
    for client, item in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]:
        queue.put(client, item)
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.pop() is None and not queue


def test_shares_bound_the_sum_and_each_client() -> None:
    shares = Shares(3, 2)
    assert [shares.take(client) for client in "aaabb"] == [True, True, False, True, False]
    shares.give_back("a")
    assert shares.take("b") and not shares.take("c")
    with shares.place("c") as found:
        assert not found
    for client in "abb":
        shares.give_back(client)
    assert shares.total == 0 and not shares.held


async def test_grammar_waits_for_one_of_another_client() -> None:
    thread, release, done = FairThread("grammars", 20, 8), threading.Event(), list[str]()

    def work(name: str) -> str:
        release.wait(10)
        done.append(name)
        return name

    async def run(client: str) -> str:
        return await thread.run(client, lambda: work(client))

    heavy = [asyncio.ensure_future(run("heavy")) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(asyncio.QueueFull):
        await run("heavy")
    other = asyncio.ensure_future(run("other"))
    await asyncio.sleep(0)
    heavy[7].cancel()  # holds its place until its turn
    await asyncio.sleep(0)
    with pytest.raises(asyncio.QueueFull):
        await run("heavy")
    release.set()
    await asyncio.gather(*heavy, other, return_exceptions=True)
    assert done[:2] == ["heavy", "other"] and done.count("heavy") == 7
    await asyncio.sleep(0.05)
    assert await run("heavy") == "heavy"
    thread.close()


class BusyEngine:
    """Always has a sequence to step; measures the time of its steps."""

    busy, seconds = True, 0.0

    def step(self) -> list[Delta]:
        began = time.perf_counter()
        time.sleep(0.002)
        self.seconds += time.perf_counter() - began
        return []

    def add(self, request: Any) -> None: ...
    def abort(self, request_id: str) -> bool:
        return False


async def test_jobs_take_their_share_of_time_beside_sequences() -> None:
    engine, spent = BusyEngine(), list[float]()

    def pieces(n: int) -> Generator[None, None, int]:
        for _ in range(n):
            began = time.perf_counter()
            time.sleep(0.01)
            spent.append(time.perf_counter() - began)
            yield
        return n

    worker = EngineWorker(engine)
    worker.start()

    async def client(name: str) -> list[int]:
        return [await worker.compute(name, pieces(2)) for _ in range(5)]

    found = await asyncio.gather(*(client(name) for name in "abcd"))
    assert found == [[2] * 5] * 4 and len(spent) == 40
    assert JOB_SHARE * engine.seconds > 0.9 * (sum(spent) - max(spent))
    await worker.stop()


async def test_error_in_a_job_is_that_of_its_caller() -> None:
    class Panic(BaseException):
        """As pyo3's PanicException, which is no Exception."""

    def broken() -> Generator[None, None, None]:
        yield
        raise Panic("a panic of a library")

    def endless() -> Generator[None, None, None]:
        while True:
            yield

    worker = EngineWorker(BusyEngine())
    worker.start()
    with pytest.raises(Panic):
        await worker.compute("a", broken())
    left = asyncio.ensure_future(worker.compute("a", endless()))
    await asyncio.sleep(0.02)
    left.cancel()
    assert await worker.call(lambda engine: engine.busy)
    stopped = asyncio.ensure_future(worker.compute("b", endless()))
    await asyncio.sleep(0.02)
    await worker.stop()
    with pytest.raises(RuntimeError, match="the engine stopped"):
        await stopped


async def test_panic_in_a_step_ends_all_streams() -> None:
    class Panic(BaseException):
        pass

    engine = BusyEngine()
    worker = EngineWorker(engine)
    worker.start()

    def step() -> list[Delta]:
        raise Panic

    engine.step = step  # type: ignore[method-assign]
    for _ in range(100):
        if worker.error is not None:
            break
        await asyncio.sleep(0.02)
    assert isinstance(worker.error, Panic)


def test_embedding_in_pieces_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_decoder(make_tokenizer())
    ids = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = result_of(mean_pooled_embedding(model, ids))
    monkeypatch.setattr(model_entry, "PIECE_TOKENS", 16)
    pieces = mean_pooled_embedding(model, ids)
    assert sum(1 for _ in pieces) == 5
    assert result_of(mean_pooled_embedding(model, ids)) == pytest.approx(whole, abs=1e-5)


def test_embeddings_and_grammars_over_the_queue_get_503(server: Running) -> None:
    places = server.api._embedding_places
    client = "127.0.0.1"
    assert server.in_loop(lambda: places.take(client, places.limit_per_client))
    answer = server.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue_full"
    server.in_loop(lambda: places.give_back(client, places.limit_per_client))
    assert server.post("/v1/embeddings", json={"model": "tiny", "input": "x"}).status_code == 200
    grammars, body = (
        server.api._grammar_thread._places,
        {"model": "tiny", "prompt": "x", "regex": "fair|queue"},
    )
    assert server.in_loop(lambda: grammars.take(client, grammars.limit_per_client))
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
    server.in_loop(lambda: grammars.give_back(client, grammars.limit_per_client))
    assert server.post("/v1/completions", json=body | {"max_tokens": 2}).status_code == 200
    assert places.total == 0
