"""Prompt log-probabilities: in batches with decoding requests, and with a cached prefix."""

from __future__ import annotations

import torch
from tests.support.engine.parity import GREEDY, PROMPTS, check, decoder, drain, run

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request

CONFIG = EngineConfig(block_size=4, max_num_seqs=6, max_model_len=60, max_num_batched_tokens=9)


def scores(engine: Engine, ids: tuple[int, ...], name: str) -> torch.Tensor:
    engine.add(Request(id=name, ids=ids, sampling=GREEDY, max_tokens=2, prompt_log_probs=True))
    (found,) = [d.prompt_log_probs for d in drain(engine)[name] if d.prompt_log_probs]
    return torch.tensor(found)


def test_scored_prompts_do_not_change_other_requests() -> None:
    model = decoder()
    requests = [
        Request(id=str(n), ids=tuple(p), sampling=GREEDY, max_tokens=9, prompt_log_probs=n in (2, 4, 5))
        for n, p in enumerate(PROMPTS)
    ]
    check(model, requests, run(Engine(model, CONFIG), requests))


def test_cached_prompt_is_scored_from_the_start() -> None:
    engine, ids = Engine(decoder(), CONFIG), tuple(PROMPTS[5])
    first = scores(engine, ids, "first")
    assert len(first) == len(ids) - 1
    torch.testing.assert_close(scores(engine, ids, "again"), first, atol=1e-5, rtol=0)
    assert engine.cache.hit_tokens == 0
