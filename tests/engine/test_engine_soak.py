"""A short soak test: a full cache, bursts, aborts, shared prefixes; every output equals that of the request alone.

The long one is `bench/engine/soak.py`. The clock counts calls, so that every run is the same.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from tests.support.engine.parity import decoder, run
from tests.support.models.transformer_shapes import made

from whorl.engine.engine import Engine, EngineConfig
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.models import LanguageModel
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig

VOCAB, LONGEST = 50, 96


def windows() -> Transformer:
    near = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16, window=12)
    mixers = {"near": near, "full": near.model_copy(update={"window": None})}
    return made(n_layers=2, mixers=mixers, max_length=LONGEST).eval()


def random_request(draw: random.Random, number: int) -> Request:
    kind, n = draw.randrange(3), draw.randint(1, 60)
    begin = [7 * kind + k % 11 for k in range(min(n, 32))] if draw.random() < 0.5 else []
    ids = (*begin, *(draw.randrange(VOCAB) for _ in range(n - len(begin))))
    sampling = draw.choice([SamplingParams(temperature=0), SamplingParams(seed=number, top_k=20)])
    return Request(id=str(number), ids=ids, sampling=sampling, max_tokens=draw.randint(1, 30))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("model", [windows, decoder])
def test_soak_loses_and_mixes_up_nothing(model: Any, preemption: Any) -> None:
    network: LanguageModel = model()
    ticks = itertools.count()
    config = EngineConfig(
        block_size=4,
        max_num_seqs=6,
        max_model_len=LONGEST,
        kv_cache_tokens=LONGEST + 60,
        max_num_batched_tokens=24,
        preemption=preemption,
    )
    engine = Engine(network, config, clock=lambda: 1e-3 * next(ticks))
    draw, numbers = random.Random(5), itertools.count()
    requests: dict[str, Request] = {}
    tokens: dict[str, list[Any]] = {}
    ends: dict[str, str] = {}
    while len(requests) < 50 or engine.busy:
        if len(requests) < 50 and len(engine.sequences()) < 12:
            request = random_request(draw, next(numbers))
            requests[request.id], tokens[request.id] = request, []
            engine.add(request)
        if draw.random() < 0.01 and engine.busy:
            engine.abort(draw.choice(engine.sequences()).request.id)
        for delta in engine.step():
            assert delta.request_id not in ends
            tokens[delta.request_id] += delta.tokens
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason
        engine.check_integrity()
    assert ends.keys() == requests.keys()
    assert engine.stats.n_preemptions > 5 and "abort" in ends.values()
    assert all(group.pool.n_used == 0 for group in engine.cache.groups)
    mixed_up = []
    for name, request in requests.items():
        alone = Engine(
            network, EngineConfig(max_num_seqs=1, max_model_len=LONGEST, enable_prefix_caching=False)
        )
        own = run(alone, [request])[name]
        found = tokens[name]
        if [t.id for t in found] != [t.id for t in own][: len(found)]:
            mixed_up.append(name)
        elif found:
            # Up to rounding, which depends on the batch
            log_probs, expected = ([t.raw_log_prob for t in some] for some in (found, own[: len(found)]))
            torch.testing.assert_close(log_probs, expected, atol=2e-4, rtol=0)
    assert not mixed_up
