"""A short soak test: a full cache, bursts, aborts, shared prefixes; every output equals that of the request alone.

The long one is `bench/engine/soak.py`. The clock counts calls, so that every run is the same.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from tests.support.engine.parity import config, decoder, request, run_one
from tests.support.models.transformer_shapes import HEADS, made

from whorl.engine.engine import Engine
from whorl.engine.request import Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.models import LanguageModel
from whorl.models.transformer import Transformer

N_REQUESTS = 50


def windows() -> Transformer:
    near = HEADS.model_copy(update={"window": 12})
    return made(n_layers=2, mixers={"near": near, "full": HEADS}, max_length=96).eval()


def random_request(draw: random.Random, number: int, longest: int) -> Request:
    """Up to two thirds of `longest` are the prompt, the rest the output. Every second prompt begins as others do."""
    kind, n = draw.randrange(3), draw.randint(1, longest * 2 // 3)
    begin = [7 * kind + k % 11 for k in range(min(n, longest // 3))] if draw.random() < 0.5 else []
    sampling = draw.choice([SamplingParams(temperature=0), SamplingParams(seed=number, top_k=20)])
    fields = {"max_tokens": draw.randint(1, longest // 3), "priority": draw.randint(0, 2)}
    ids = (*begin, *draw.choices(range(50), k=n - len(begin)))
    return request(str(number), ids, sampling=sampling, client=draw.choice("ab"), **fields)


# Sizes of the longest request, the cache and a step
CASES = [(windows, (90, 156, 24)), (decoder, (90, 156, 24)), (decoder, (32, 40, 1)), (decoder, (32, 64, 5))]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_soak_matches_each_request_alone(model: Any, sizes: tuple[int, int, int], preemption: Any) -> None:
    longest, cache, step = sizes
    network: LanguageModel = model()
    ticks, numbers, draw = itertools.count(), itertools.count(), random.Random(5)
    limits = {"max_model_len": longest + 6, "kv_cache_tokens": cache, "max_num_batched_tokens": step}
    settings = config(max_num_seqs=6, preemption=preemption, **limits)
    engine = Engine(network, settings, clock=lambda: 1e-3 * next(ticks))
    requests: dict[str, Request] = {}
    tokens: dict[str, list[Token]] = {}
    ends: dict[str, str] = {}
    while len(requests) < N_REQUESTS or engine.busy:
        if len(requests) < N_REQUESTS and len(engine.sequences()) < 12:
            one = random_request(draw, next(numbers), longest)
            requests[one.id], tokens[one.id] = one, []
            engine.add(one)
        if draw.random() < 0.02 and engine.busy:
            engine.abort(draw.choice(engine.sequences()).request.id)
        for delta in engine.step():
            assert delta.request_id not in ends
            tokens[delta.request_id] += delta.tokens
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason
        engine.check_integrity()
    assert ends.keys() == requests.keys()
    assert "abort" in ends.values() and (engine.stats.n_preemptions > 5 or step < 24)
    assert all(group.pool.n_used == 0 for group in engine.cache.groups)
    alone = Engine(network, config(max_num_seqs=1, max_model_len=longest + 6, enable_prefix_caching=False))
    for name, one in requests.items():
        own, found = run_one(alone, one), tokens[name]
        assert [t.id for t in found] == [t.id for t in own[: len(found)]]
        assert len(found) == len(own) or ends[name] == "abort"
        # Up to rounding, which depends on the batch
        log_probs, expected = ([t.raw_log_prob for t in some] for some in (found, own[: len(found)]))
        torch.testing.assert_close(log_probs, expected, atol=2e-4, rtol=0)
