"""The attack corpus against a real server: no internal error, no held event loop, nothing kept, the same text after it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import psutil
from bench.serve._attacks import KINDS, Target, attack
from bench.serve._traffic import Counts, wave
from tests.support.serve.live_server import Running, make_state, running

SEEDS = 6  # attacks of each kind
MAX_HOLD = 0.05  # seconds of the event loop's own computing
MAX_GROWTH = 150 << 20  # bytes; the client's memory is in it
CONTROL = {"model": "tiny", "prompt": "def f(", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def control(server: Running) -> Any:
    return server.post("/v1/completions", json=CONTROL, timeout=60).json()["choices"][0]["text"]


def test_attack_corpus_changes_nothing_for_others() -> None:
    target = Target("tiny", scale=0.1)
    assert len(KINDS) >= 60
    with running(make_state()) as server:
        text = control(server)
        asyncio.run(wave(server.port, ((kind, 0, attack(kind, 0, target)) for kind in KINDS)))
        gc.collect()
        gc.freeze()  # as in a server: a collection of all objects of the test suite would count as a hold
        before = psutil.Process().memory_info().rss
        server.in_loop(server.api.watchdog.reset)
        counts = Counts()
        for seed in range(1, SEEDS):
            attacks = ((kind, seed, attack(kind, seed, target)) for kind in KINDS)
            asyncio.run(wave(server.port, attacks, counts))
            assert control(server) == text, f"after the wave of seed {seed}"
        gc.unfreeze()
        assert counts.bad == []
        assert counts.tried == len(KINDS) * (SEEDS - 1)
        assert counts.refused > counts.tried / 2 and counts.answered > 0
        assert server.api.watchdog.longest_own < MAX_HOLD
        server.wait(server.api.worker.wait_drained())
        server.ask(lambda engine: engine.check_integrity())
        assert server.api.worker.streams == {} and server.api._limits_by_request == {}
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH
