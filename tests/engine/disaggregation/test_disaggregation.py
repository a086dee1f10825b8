"""Disaggregated prefill and decode: equal tokens, and recovery when a process dies."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.engine import tiny_engine

from whorl.engine.request import Delta, Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, ProducerError
from whorl.serve.worker.disaggregated import DisaggregatedEngine

RNG = random.Random(0)
GREEDY = SamplingParams(temperature=0)
LONG = tuple(RNG.randrange(50) for _ in range(300))


def request(name: str, ids: tuple[int, ...] = LONG, **more: Any) -> Request:
    return Request(id=name, ids=ids, **{"max_tokens": 12, **more})


@pytest.fixture(scope="module")
def engine() -> Iterator[DisaggregatedEngine]:
    with DisaggregatedEngine(tiny_engine.make, min_prefill_tokens=32) as disaggregated:
        disaggregated.wait_until_ready()
        yield disaggregated


def drain(engine: Any) -> dict[str, list[Delta]]:
    out: dict[str, list[Delta]] = {}
    while engine.busy:
        for delta in engine.step():
            out.setdefault(delta.request_id, []).append(delta)
    return out


def tokens(deltas: list[Delta]) -> list[Token]:
    return [t for d in deltas for t in d.tokens]


def tokens_alone(request: Request) -> list[int]:
    """The token ids of one engine that runs this request only."""
    one = tiny_engine.make("both")
    one.add(request)
    return [t.id for t in tokens(drain(one)[request.id])]


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
        request("greedy", sampling=GREEDY),
        request("drawn", LONG[:150], sampling=SamplingParams(temperature=1.0, seed=3)),
        request("unseeded", (*LONG[:77], 1, 2, 3), sampling=SamplingParams(temperature=0.7)),
        request("short", (1, 2, 3)),
        request("scored", LONG[:60], prompt_log_probs=True),
    ]
    one = tiny_engine.make("both")
    for r in requests:
        one.add(r)
    want = drain(one)
    before = engine.n_transferred
    for r in requests:
        engine.add(r)
    got = drain(engine)
    assert engine.n_transferred - before == 3 and engine.n_rejected_blocks == 0
    assert set(got) == {r.id for r in requests}
    for r in requests:
        a, b = tokens(got[r.id]), tokens(want[r.id])
        assert [t.id for t in a] == [t.id for t in b] and len(a) == 12
        assert all(abs(x.log_prob - y.log_prob) < 1e-4 for x, y in zip(a, b, strict=True))
        assert all(abs(x.raw_log_prob - y.raw_log_prob) < 1e-4 for x, y in zip(a, b, strict=True))
        assert got[r.id][-1].finish_reason == want[r.id][-1].finish_reason == "length"
    assert got["greedy"][0].cached_tokens == 0, (
        "what was computed a moment ago by the other half was not cached"
    )
    engine.add(request("longer", (*LONG, *(4,) * 9)))
    assert drain(engine)["longer"][0].cached_tokens == 296 and engine.n_transferred - before == 3, (
        "little is missing: no hand-over"
    )


def test_abort_works_in_prefill_and_decode(engine: DisaggregatedEngine) -> None:
    prefill = engine._processes["prefill0"].popen
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
    engine.add(request("after", LONG[::2]))
    assert len(tokens(drain(engine)["after"])) == 12


def test_invalid_requests_end_with_their_error(engine: DisaggregatedEngine) -> None:
    engine.add(request("unknown id", (7, 99, *LONG)))
    engine.add(request("too long", (1,) * 5000))
    assert [d.finish_reason for ds in drain(engine).values() for d in ds] == ["abort", "abort"]
    for name, message in (("unknown id", "99 is not an id"), ("too long", "has 5,000 tokens")):
        error = engine.errors.pop(name)
        assert isinstance(error, ConfigError) and message in str(error)


def test_dead_prefill_process_is_replaced_without_loss(engine: DisaggregatedEngine) -> None:
    unusable = engine.n_rejected_blocks
    ids = tuple((x + 1) % 50 for x in LONG)
    old, engine.make_engine = engine._processes["prefill0"], tiny_engine.other_weights
    os.kill(old.popen.pid, signal.SIGSTOP)  # it never reads its messages
    engine.add(request("orphan", ids, sampling=GREEDY))
    assert engine._in_flight["orphan"].stage == "prefill"
    os.kill(old.popen.pid, signal.SIGKILL)
    got = tokens(drain(engine)["orphan"])
    assert [t.id for t in got] == tokens_alone(request("orphan", ids, sampling=GREEDY))
    assert engine._processes["prefill0"] is not old
    assert pages_open("self") == pages_open(engine._processes["decode0"].popen.pid) == 0
    # The replacement process has other weights, so its pages are rejected.
    ids = tuple((x + 2) % 50 for x in LONG)
    engine.wait_until_ready()
    engine.make_engine = tiny_engine.make
    before = engine.n_transferred
    engine.add(request("next", ids, sampling=GREEDY))
    got = tokens(drain(engine)["next"])
    assert (engine.n_transferred, engine.n_rejected_blocks) == (before + 1, unusable + 1)
    assert [t.id for t in got] == tokens_alone(request("next", ids, sampling=GREEDY))


def test_dead_decode_process_aborts_and_retries(engine: DisaggregatedEngine) -> None:
    decoder = engine._processes["decode0"].popen
    engine.add(request("begun", LONG, max_tokens=3500))
    while not engine.step():
        pass
    os.kill(decoder.pid, signal.SIGSTOP)
    engine.add(request("not begun", LONG[:20]))
    os.kill(decoder.pid, signal.SIGKILL)
    got = drain(engine)
    assert got["begun"][-1].finish_reason == "abort" and "killed by SIGKILL" in str(
        engine.errors.pop("begun")
    )
    assert len(tokens(got["not begun"])) == 12


def test_process_without_model_raises() -> None:
    with (
        DisaggregatedEngine(tiny_engine.broken) as disaggregated,
        pytest.raises(ProducerError, match="before it loaded its model"),
    ):
        disaggregated.wait_until_ready()
