"""Prefill and decode in processes of their own: the same tokens, and what happens when one of them dies."""

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
LONG = tuple(RNG.randrange(50) for _ in range(300))


def request(name: str, ids: tuple[int, ...] = LONG, **more: Any) -> Request:
    return Request(id=name, ids=ids, **{"max_tokens": 12, **more})


@pytest.fixture(scope="module")
def split() -> Iterator[DisaggregatedEngine]:
    with DisaggregatedEngine(tiny_engine.make, min_prefill_tokens=32) as both:
        both.wait_until_ready()
        yield both


def drain(engine: Any) -> dict[str, list[Delta]]:
    out: dict[str, list[Delta]] = {}
    while engine.busy:
        for delta in engine.step():
            out.setdefault(delta.request_id, []).append(delta)
    return out


def tokens(deltas: list[Delta]) -> list[Token]:
    return [t for d in deltas for t in d.tokens]


def pages_open(pid: int | str) -> int:
    """Blocks of pages that a process holds."""
    links = list(Path(f"/proc/{pid}/fd").iterdir()) if Path("/proc/self/fd").exists() else []
    found = 0
    for link in links:
        with suppress(FileNotFoundError):  # closed meanwhile
            found += "whorl-pages" in str(link.readlink())
    return found


def test_two_processes_write_what_one_engine_writes(split: DisaggregatedEngine) -> None:
    asked = [
        request("greedy", sampling=SamplingParams(temperature=0)),
        request("drawn", LONG[:150], sampling=SamplingParams(temperature=1.0, seed=3)),
        request("unseeded", (*LONG[:77], 1, 2, 3), sampling=SamplingParams(temperature=0.7)),
        request("short", (1, 2, 3)),
        request("scored", LONG[:60], prompt_log_probs=True),
    ]
    one = tiny_engine.make("both")
    for r in asked:
        one.add(r)
    want = drain(one)
    before = split.n_transferred
    for r in asked:
        split.add(r)
    got = drain(split)
    assert split.n_transferred - before == 3 and split.n_rejected_blocks == 0
    assert set(got) == {r.id for r in asked}
    for r in asked:
        a, b = tokens(got[r.id]), tokens(want[r.id])
        assert [t.id for t in a] == [t.id for t in b] and len(a) == 12
        assert all(abs(x.log_prob - y.log_prob) < 1e-4 for x, y in zip(a, b, strict=True))
        assert all(abs(x.raw_log_prob - y.raw_log_prob) < 1e-4 for x, y in zip(a, b, strict=True))
        assert got[r.id][-1].finish_reason == want[r.id][-1].finish_reason == "length"
    assert got["greedy"][0].cached_tokens == 0, (
        "what was computed a moment ago by the other half was not cached"
    )
    split.add(request("longer", (*LONG, *(4,) * 9)))
    assert drain(split)["longer"][0].cached_tokens == 296 and split.n_transferred - before == 3, (
        "little is missing: no hand-over"
    )


def test_an_answer_is_aborted_wherever_it_is(split: DisaggregatedEngine) -> None:
    prefill = split._processes["prefill0"].popen
    os.kill(prefill.pid, signal.SIGSTOP)
    split.add(request("reading", tuple(reversed(LONG))))
    assert split.abort("reading") and not split.abort("reading")
    assert [d.finish_reason for d in drain(split)["reading"]] == ["abort"]
    os.kill(prefill.pid, signal.SIGCONT)
    split.add(request("writing", LONG[::2], max_tokens=3000))
    while not split.step():
        pass
    assert split.abort("writing")
    assert drain(split)["writing"][-1].finish_reason == "abort"
    split.add(request("after", LONG[::2]))
    assert len(tokens(drain(split)["after"])) == 12


def test_what_an_engine_refuses_is_refused(split: DisaggregatedEngine) -> None:
    split.add(request("unknown id", (7, 99, *LONG)))
    split.add(request("too long", (1,) * 5000))
    assert [d.finish_reason for ds in drain(split).values() for d in ds] == ["abort", "abort"]
    for name, words in (("unknown id", "99 is no id"), ("too long", "5,000 tokens long")):
        error = split.errors.pop(name)
        assert isinstance(error, ConfigError) and words in str(error)


def test_a_prefill_process_that_dies_costs_nobody_an_answer_and_leaves_nothing(
    split: DisaggregatedEngine,
) -> None:
    unusable = split.n_rejected_blocks
    ids = tuple((x + 1) % 50 for x in LONG)
    old, split.make_engine = split._processes["prefill0"], tiny_engine.other_weights
    os.kill(old.popen.pid, signal.SIGSTOP)  # it will never read what it is sent
    split.add(request("orphan", ids, sampling=SamplingParams(temperature=0)))
    assert split._in_flight["orphan"].stage == "reading"
    os.kill(old.popen.pid, signal.SIGKILL)
    got = tokens(drain(split)["orphan"])
    one = tiny_engine.make("both")
    one.add(request("orphan", ids, sampling=SamplingParams(temperature=0)))
    assert [t.id for t in got] == [t.id for t in tokens(drain(one)["orphan"])]
    assert split._processes["prefill0"] is not old
    assert pages_open("self") == pages_open(split._processes["decode0"].popen.pid) == 0
    # The one started in its place has other weights: its pages are refused.
    ids = tuple((x + 2) % 50 for x in LONG)
    split.wait_until_ready()
    split.make_engine = tiny_engine.make
    before = split.n_transferred
    split.add(request("next", ids, sampling=SamplingParams(temperature=0)))
    got = tokens(drain(split)["next"])
    assert (split.n_transferred, split.n_rejected_blocks) == (before + 1, unusable + 1)
    one = tiny_engine.make("both")
    one.add(request("next", ids, sampling=SamplingParams(temperature=0)))
    assert [t.id for t in got] == [t.id for t in tokens(drain(one)["next"])]


def test_a_decoder_that_dies_ends_what_had_begun_and_starts_the_rest_anew(split: DisaggregatedEngine) -> None:
    decoder = split._processes["decode0"].popen
    split.add(request("begun", LONG, max_tokens=3500))
    while not split.step():
        pass
    os.kill(decoder.pid, signal.SIGSTOP)
    split.add(request("not begun", LONG[:20]))
    os.kill(decoder.pid, signal.SIGKILL)
    got = drain(split)
    assert got["begun"][-1].finish_reason == "abort" and "killed by SIGKILL" in str(split.errors.pop("begun"))
    assert len(tokens(got["not begun"])) == 12


def test_a_process_that_has_no_model_says_so() -> None:
    with (
        DisaggregatedEngine(tiny_engine.broken) as both,
        pytest.raises(ProducerError, match="before it loaded its model"),
    ):
        both.wait_until_ready()
