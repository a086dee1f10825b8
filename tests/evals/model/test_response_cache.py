"""The cache of responses: no request twice, after kill -9 exactly the missing ones, two processes at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.evals import cached_run
from tests.support.evals.cached_run import BATCH, make_requests

from whorl.errors import DataError
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Missing,
    Request,
    Response,
    Score,
    ScoreRequest,
    TextRequest,
)
from whorl.evals.model.response_cache import CachedBackend, ResponseCache, request_key

ROOT = Path(__file__).parents[3]


class Recorder:
    """Answers with given responses and records what it was sent."""

    name, address, max_length = "recorder", "recorder-1", 77

    def __init__(self, answer: Callable[[Request], Response]) -> None:
        self.answer, self.sent = answer, list[Request]()

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        self.sent += requests
        for n in reversed(range(len(requests))):
            on_response(n, self.answer(requests[n]))


def start(folder: Path, n: int) -> subprocess.Popen[str]:
    arguments = [str(folder / "cache.sqlite"), str(folder / "log"), str(n)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.evals.cached_run", *arguments],
        stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == "begins\n"
    return child


def log_lines(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "log").read_text().split()] if (folder / "log").exists() else []


def test_killed_run_requests_exactly_the_missing_ones(tmp_path: Path) -> None:
    n, rng = 1200, random.Random(0)
    keys = [request_key("slow-1", request) for request in make_requests(n)]
    stored: set[int] = set()
    for _ in range(10):
        before = len(log_lines(tmp_path))
        child = start(tmp_path, n)
        time.sleep(rng.uniform(0.02, 0.12))
        child.kill()
        child.communicate()
        sent = log_lines(tmp_path)[before:]
        assert sent == [i for i in range(n) if i not in stored][: len(sent)]
        with ResponseCache(tmp_path / "cache.sqlite") as cache:
            found = cache.get(keys)
        now = {i for i, key in enumerate(keys) if key in found}
        assert stored <= now and now - stored <= set(sent) and len(set(sent) - now) <= BATCH
        stored = now
    assert 0 < len(stored) < n
    before = len(log_lines(tmp_path))
    resumed = cached_run.run(tmp_path / "cache.sqlite", tmp_path / "log", n)
    assert sorted(log_lines(tmp_path)[before:]) == sorted(set(range(n)) - stored)
    assert resumed == cached_run.run(tmp_path / "fresh.sqlite", tmp_path / "log", n)


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    children = [start(tmp_path, 300) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    with ResponseCache(tmp_path / "cache.sqlite") as cache:
        assert len(cache) == 300


def test_second_run_sends_nothing(tmp_path: Path) -> None:
    requests: list[Request] = [
        ScoreRequest("a", "b"), TextRequest("a"), GenerateRequest("a", stop=("x",)),
        GenerateRequest(({"role": "user", "content": "a"},)), ScoreRequest("a", "b"),
    ]  # fmt: skip

    def answer(request: Request) -> Response:
        if isinstance(request, GenerateRequest):
            return Completion(f"{request.prompt}", (1, 2), (-0.1, float("-inf")), "length")
        return Score((3,), (-1 / 3,), True, 5, 6)

    for turn in range(2):
        backend, out = Recorder(answer), dict[int, Response]()
        with ResponseCache(tmp_path / "cache.sqlite") as cache:
            cached = CachedBackend(backend, cache)
            cached.respond(requests, out.__setitem__)
        assert out == {n: answer(request) for n, request in enumerate(requests)}
        assert len(backend.sent) == cached.n_sent == (4 if turn == 0 else 0)
        assert cached.n_cached == (0 if turn == 0 else 5)
    assert (cached.name, cached.address, cached.max_length) == ("recorder", "recorder-1", 77)


def test_missing_response_is_requested_again(tmp_path: Path) -> None:
    for turn in range(2):
        backend, out = Recorder(lambda _: Missing("timed out")), dict[int, Response]()
        with ResponseCache(tmp_path / "cache.sqlite") as cache:
            CachedBackend(backend, cache).respond([ScoreRequest("a", "b")], out.__setitem__)
        assert out == {0: Missing("timed out")} and len(backend.sent) == 1, turn


def test_error_of_a_backend_keeps_what_arrived(tmp_path: Path) -> None:
    def answer(request: Request) -> Response:
        assert isinstance(request, ScoreRequest)
        if request.context == "0":
            raise RuntimeError("out of memory")
        return Score((1,), (-1.0,), False)

    with (
        ResponseCache(tmp_path / "cache.sqlite") as cache,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        CachedBackend(Recorder(answer), cache).respond(make_requests(5), lambda n, response: None)
    with ResponseCache(tmp_path / "cache.sqlite") as cache:
        assert len(cache) == 4


texts = st.text(st.characters(codec="utf-8"), max_size=5)
requests = st.one_of(
    st.builds(ScoreRequest, texts, texts),
    st.builds(TextRequest, texts, st.integers(0, 2), st.integers(0, 2)),
    st.builds(
        GenerateRequest, texts, st.integers(1, 3), st.lists(texts, max_size=2).map(tuple), st.floats(0, 2)
    ),
)


@given(requests, requests)
def test_keys_are_equal_only_for_equal_requests(a: Request, b: Request) -> None:
    assert (request_key("m", a) == request_key("m", b)) == (a == b)
    assert request_key("m", a) != request_key("n", a)


def test_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"not a database " * 100)
    with pytest.raises(DataError, match=r"cache.sqlite cannot be read"):
        ResponseCache(path)
