"""Disaggregated prefill and decode: equal tokens, and recovery when a process dies."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.engine import parity, tiny_engine
from tests.support.engine.parity import assert_same, drain, run_one, tokens_of

from whorl.engine.disaggregation.workers import _DecodeWorker
from whorl.engine.request import Grammar, Request
from whorl.engine.sampling.grammar import GrammarCompiler
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, ProducerError
from whorl.machine.process import Channel
from whorl.serve.worker.disaggregated import DisaggregatedEngine

RNG = random.Random(0)
LONG = tuple(RNG.randrange(50) for _ in range(300))
SAMPLED = SamplingParams()


def request(name: str, ids: Iterable[int] = LONG, **fields: Any) -> Request:
    return parity.request(name, ids, **{"max_tokens": 12, **fields})


@pytest.fixture(scope="module")
def engine() -> Iterator[DisaggregatedEngine]:
    with DisaggregatedEngine(tiny_engine.make, min_prefill_tokens=32) as disaggregated:
        disaggregated.wait_until_ready()
        yield disaggregated


def pages_open(pid: int | str) -> int:
    """Number of KV blocks that a process holds."""
    links = list(Path(f"/proc/{pid}/fd").iterdir()) if Path("/proc/self/fd").exists() else []
    found = 0
    for link in links:
        with suppress(FileNotFoundError):  # closed meanwhile
            found += "whorl-pages" in str(link.readlink())
    return found


def test_disaggregated_tokens_match_one_engine(engine: DisaggregatedEngine) -> None:
    requests = [
        request("greedy", LONG),
        request("drawn", LONG[:150], sampling=SamplingParams(temperature=1.0, seed=3)),
        request("unseeded", (*LONG[:77], 1, 2, 3), sampling=SamplingParams(temperature=0.7)),
        request("short", (1, 2, 3), sampling=SAMPLED),
        request("scored", LONG[:60], sampling=SAMPLED, prompt_log_probs=True),
    ]
    before = engine.n_transferred
    want, got = drain(tiny_engine.make("both"), requests), drain(engine, requests)
    assert engine.n_transferred - before == 3 and engine.n_rejected_blocks == 0
    assert got.keys() == want.keys()
    for one in requests:
        tokens = tokens_of(got[one.id])
        assert_same(tokens, tokens_of(want[one.id]))
        assert len(tokens) == 12
        assert got[one.id][-1].finish_reason == want[one.id][-1].finish_reason == "length"
    # What the other half has just computed was not cached.
    assert got["greedy"][0].cached_tokens == 0
    longer = drain(engine, [request("longer", (*LONG, *(4,) * 9))])["longer"]
    # Little is missing: no hand-over.
    assert longer[0].cached_tokens == 296 and engine.n_transferred - before == 3


def test_abort_works_in_prefill_and_decode(engine: DisaggregatedEngine) -> None:
    prefill = engine._processes["prefill0"].process
    os.kill(prefill.pid, signal.SIGSTOP)
    engine.add(request("reading", tuple(reversed(LONG))))
    assert engine.abort("reading") and not engine.abort("reading")
    assert [d.finish_reason for d in drain(engine)["reading"]] == ["abort"]
    os.kill(prefill.pid, signal.SIGCONT)
    engine.add(request("writing", LONG[::2], max_tokens=3000))
    while not engine.step():
        pass
    assert engine.abort("writing")
    assert drain(engine)["writing"][-1].finish_reason == "abort"
    assert len(run_one(engine, request("after", LONG[::2]))) == 12


def test_invalid_requests_end_with_their_error(engine: DisaggregatedEngine) -> None:
    ended = drain(engine, [request("unknown id", (7, 99, *LONG)), request("too long", (1,) * 5000)])
    assert [d.finish_reason for ds in ended.values() for d in ds] == ["abort", "abort"]
    for name, message in (("unknown id", "99 is not an id"), ("too long", "has 5,000 tokens")):
        error = engine.errors.pop(name)
        assert isinstance(error, ConfigError) and message in str(error)


def test_dead_prefill_process_is_replaced_without_loss(engine: DisaggregatedEngine) -> None:
    unusable = engine.n_rejected_blocks
    orphan = request("orphan", ((x + 1) % 50 for x in LONG))
    following = request("following", ((x + 2) % 50 for x in LONG))
    old, engine.make_engine = engine._processes["prefill0"], tiny_engine.other_weights
    os.kill(old.process.pid, signal.SIGSTOP)  # it never reads its messages
    engine.add(orphan)
    assert engine._in_flight["orphan"].stage == "prefill"
    os.kill(old.process.pid, signal.SIGKILL)
    assert_same(tokens_of(drain(engine)["orphan"]), run_one(tiny_engine.make("both"), orphan))
    assert engine._processes["prefill0"] is not old
    assert pages_open("self") == pages_open(engine._processes["decode0"].process.pid) == 0
    # The replacement process has other weights, so its pages are rejected.
    engine.wait_until_ready()
    engine.make_engine = tiny_engine.make
    before = engine.n_transferred
    assert_same(run_one(engine, following), run_one(tiny_engine.make("both"), following))
    assert (engine.n_transferred, engine.n_rejected_blocks) == (before + 1, unusable + 1)


def test_dead_decode_process_aborts_and_retries(engine: DisaggregatedEngine) -> None:
    decoder = engine._processes["decode0"].process
    engine.add(request("begun", LONG, max_tokens=3500))
    while not engine.step():
        pass
    os.kill(decoder.pid, signal.SIGSTOP)
    engine.add(request("not begun", LONG[:20]))
    os.kill(decoder.pid, signal.SIGKILL)
    got = drain(engine)
    assert got["begun"][-1].finish_reason == "abort"
    assert "killed by SIGKILL" in str(engine.errors.pop("begun"))
    assert len(tokens_of(got["not begun"])) == 12


def test_process_without_model_raises() -> None:
    broken = DisaggregatedEngine(tiny_engine.broken)
    with broken, pytest.raises(ProducerError, match="before it loaded its model"):
        broken.wait_until_ready()


def test_decode_process_runs_while_grammars_compile() -> None:
    """Requests with a grammar wait for a thread that compiles it; others run, an abort and an error reach their request."""
    engine = tiny_engine.make("decode")
    engine.token_bytes = [bytes([97 + n % 26]) for n in range(49)] + [b""]
    compiler, may_end = GrammarCompiler(engine.token_bytes, [49]), threading.Event()
    in_engine_thread = list[bool]()

    def compile_slowly(grammar: Grammar) -> Any:
        in_engine_thread.append(threading.current_thread() is threading.main_thread())
        assert in_engine_thread[-1] or may_end.wait(20)
        return compiler.compile(grammar)

    engine.compile_grammar = compile_slowly
    engine_side, worker_side = Channel.pair()
    worker = _DecodeWorker(worker_side, engine)
    grammars = {"spelt": Grammar(regex="ab{3}"), "wrong": Grammar(regex="("), "ended": Grammar(regex="c+")}
    for name, grammar in grammars.items():
        worker.handle(("write", request(name, LONG[:9], grammar=grammar, stop_ids=frozenset({49}))), None)
    worker.handle(("write", request("free", LONG[:9])), None)
    found: dict[str, list[Any]] = {}

    def step_until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not done() and time.monotonic() < deadline:
            worker.step()
            while engine_side.poll(0):
                (verb, *values), _ = engine_side.receive_with_fd()
                if verb == "refused":
                    found[values[0]] = [values[1]]
                for delta in values[0] if verb == "deltas" else ():
                    found.setdefault(delta.request_id, []).append(delta)

    step_until(lambda: "free" in found and not engine.busy)
    assert found.keys() == {"free"} and not any(in_engine_thread)
    worker.handle(("abort", "ended"), None)
    assert worker.poll_seconds  # so that the loop goes on without a message
    may_end.set()
    step_until(lambda: "spelt" in found and worker.poll_seconds is None)
    assert found.keys() == {"free", "spelt", "wrong"} and isinstance(found["wrong"][0], ConfigError)
    assert b"".join(delta.text for delta in found["spelt"]) == b"abbb"
    assert worker.poll_seconds is None and in_engine_thread.count(True) == 1
