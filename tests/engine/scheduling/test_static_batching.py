"""Static and dynamic batching: the engine's tokens, the start of a batch, and wasted positions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bench.engine.support.static_batching import StaticBatchEngine
from tests.support.engine.parity import config, request
from tests.support.tiny import make_transformer

from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.models.transformer import Transformer

VOCAB = 61


def model() -> Transformer:
    network = make_transformer(vocab_size=VOCAB, tie_embeddings=True).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            if p.dim() > 1:  # random weights, so that no two tokens are about equally likely
                p.copy_(torch.randn(p.shape, generator=draw) * 0.3)
    return network


def requests(n: int, sampling: SamplingParams, stop: bool = False) -> list[Request]:
    draw = random.Random(2)
    texts = [draw.choices(range(VOCAB), k=draw.randint(1, 12)) for _ in range(n)]
    fields: dict[str, Any] = {"sampling": sampling, "stop_ids": frozenset(range(30 if stop else 0))}
    return [request(f"r{k}", ids, max_tokens=draw.randint(1, 9), **fields) for k, ids in enumerate(texts)]


def outputs(batcher: Any, requests_to_run: list[Request]) -> dict[str, tuple[list[int], str | None]]:
    for one in requests_to_run:
        batcher.add(one)
    if isinstance(batcher, StaticBatchEngine):
        batcher.close()
    out: dict[str, tuple[list[int], str | None]] = {r.id: ([], None) for r in requests_to_run}
    while batcher.busy:
        for delta in batcher.step():
            ids, finish = out[delta.request_id]
            assert finish is None  # no delta after the last one
            out[delta.request_id] = (ids + [t.id for t in delta.tokens], delta.finish_reason)
    return out


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.7}, {"seed": 5, "top_k": 9}])
def test_static_batching_matches_engine(sampling: dict[str, Any], stop: bool) -> None:
    requests_to_run, network = requests(11, SamplingParams(**sampling), stop), model()
    expected = outputs(Engine(network, config(max_num_batched_tokens=512)), requests_to_run)
    for size in (1, 4, 20):
        assert outputs(StaticBatchEngine(network, size), requests_to_run) == expected


def test_static_batch_waits_until_full_or_timeout() -> None:
    now = [0.0]
    static = StaticBatchEngine(model(), 2, clock=lambda: now[0])
    dynamic = StaticBatchEngine(model(), 2, max_wait_seconds=3.0, clock=lambda: now[0])
    first, second, third = requests(3, SamplingParams(temperature=0))
    for batcher in (static, dynamic):
        batcher.add(first)
        assert batcher.step() == [] and batcher.busy
    now[0] = 2.9
    assert static.step() == [] and dynamic.step() == []
    now[0] = 3.0
    assert static.step() == []
    assert [d.request_id for d in dynamic.step()] == ["r0"]
    static.add(second)
    static.add(third)
    assert [d.request_id for d in static.step()] == ["r0", "r1"]
    seen: set[str] = set()
    while deltas := static.step():
        seen |= {d.request_id for d in deltas}
    assert "r2" not in seen and static.busy  # a late request waits for the next batch
    static.close()
    assert [d.request_id for d in static.step()] == ["r2"]


def test_static_batching_counts_wasted_positions() -> None:
    batcher = StaticBatchEngine(model(), 2)
    batcher.add(request("long", (1, 2, 3, 4), max_tokens=5))
    batcher.add(request("short", (1, 2), max_tokens=1))
    while batcher.busy:
        batcher.step()
    # A padded prefill of 2 x 4, then four steps of two rows.
    assert batcher.computed_positions == 2 * 4 + 4 * 2
    assert batcher.useful_positions == 6 + 4
