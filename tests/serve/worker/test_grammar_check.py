"""Grammars of clients: one that takes too long is refused in time, and neither the engine nor other grammars wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from tests.support.children import children
from tests.support.serve.live_server import Running

from whorl.engine.request import Grammar
from whorl.errors import ConfigError
from whorl.serve.worker.grammar_check import COMPILE_BYTES, GrammarChecker

SLOW = '{"type": "integer", "multipleOf": 1000003}'  # 10 s in llguidance


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    one = GrammarChecker(seconds=1.0)
    yield one
    one.close()


def test_slow_grammar_is_refused_and_its_process_replaced(checker: GrammarChecker) -> None:
    checker.check(Grammar(regex="a+"))
    began = time.monotonic()
    for _ in range(2):  # the second time from the kept results
        # A fast machine reaches the limit of memory within the second.
        with pytest.raises(ConfigError, match=r"too complex.*more than (1 s|64 MB)"):
            checker.check(Grammar(json_schema=SLOW))
    assert time.monotonic() - began < 8
    checker.check(Grammar(regex="b+"))


def test_invalid_grammar_is_named(checker: GrammarChecker) -> None:
    with pytest.raises(ConfigError, match="the regular expression cannot be compiled"):
        checker.check(Grammar(regex="("))


def test_process_that_dies_in_a_grammar_refuses_it(checker: GrammarChecker) -> None:
    checker.check(Grammar(regex="c+"))
    assert checker._child is not None
    pid = checker._child.pid
    checker._child.kill()  # as if earlier grammars had used up its memory: a new process decides
    checker.check(Grammar(regex="d+"))
    assert checker._child is not None and checker._child.pid != pid


def test_memory_of_the_process_is_limited() -> None:
    checker = GrammarChecker(seconds=60.0)
    checker.check(Grammar(regex="e+"))
    assert checker._child is not None
    idle = psutil.Process(checker._child.pid).memory_info().rss  # the interpreter and its libraries
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max([peak, *(child.memory_info().rss for child in children("grammars"))])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with pytest.raises(ConfigError, match="MB"):
            checker.check(Grammar(json_schema='{"type": "integer", "multipleOf": 599999}'))
    finally:
        done.set()
        watching.join()
        checker.close()
    assert peak < idle + COMPILE_BYTES + (16 << 20)


def test_streams_run_while_a_grammar_is_compiled(server: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "integer", "multipleOf": 1000003}},
    }
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            server.post("/v1/chat/completions", json=body | {"response_format": schema}, timeout=60)
        )
    )
    asking.start()
    n_before = 0
    while asking.is_alive():
        assert (
            server.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}).status_code
            == 200
        )
        n_before += asking.is_alive()
    asking.join()
    assert answers[0].status_code == 400 and "too complex" in answers[0].text
    assert n_before >= 3
