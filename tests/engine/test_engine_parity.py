"""The engine against the training forward: every family, with random chunks, batches, preemptions and cached prefixes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.engine.parity import (
    FAMILIES,
    GREEDY,
    PROMPTS,
    check,
    decoder,
    ids_of,
    prompt_requests,
    run,
)

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the torch runner; `test_native_step.py` compares the native step."""
    monkeypatch.setenv("WHORL_NATIVE", "0")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_matches_training_forward(family: str, preemption: Any) -> None:
    model = FAMILIES[family]()
    config = EngineConfig(
        block_size=4,
        max_num_seqs=4,
        max_model_len=60,
        kv_cache_tokens=72,
        max_num_batched_tokens=7,
        preemption=preemption,
    )
    engine = Engine(model, config)
    requests = prompt_requests(9, temperature=0)
    check(model, requests, run(engine, requests))
    assert engine.cache.groups[0].pool.n_used == 0
    engine = Engine(model, config.model_copy(update={"kv_cache_tokens": 600}))
    run(engine, requests)
    again = [r.model_copy(update={"id": f"again {r.id}"}) for r in requests]  # with cached prompts
    check(model, again, run(engine, again))
    if not engine.runner.has_recurrent_layers:
        assert engine.cache.hit_tokens > 0


def test_preemption_does_not_change_tokens() -> None:
    model = decoder()
    roomy = EngineConfig(block_size=4, max_num_seqs=6, max_model_len=60, max_num_batched_tokens=64)
    want = run(Engine(model, roomy), prompt_requests(20))
    for preemption, budget in itertools.product(("recompute", "swap"), (3, 16)):
        tight = roomy.model_copy(
            update={"kv_cache_tokens": 60, "preemption": preemption, "max_num_batched_tokens": budget}
        )
        engine = Engine(model, tight)
        got = run(engine, prompt_requests(20))
        assert engine.stats.n_preemptions > 0
        assert ids_of(got) == ids_of(want)


def test_rows_beyond_trained_length_match_forward() -> None:
    model = decoder(trained_length=16)
    ids = tuple(PROMPTS[5])
    engine = Engine(model, EngineConfig(block_size=4, max_num_seqs=2, max_model_len=60))
    tokens = run(engine, [Request(id="far", ids=ids, sampling=GREEDY, max_tokens=9)])["far"]
    whole = [*ids, *(t.id for t in tokens)]
    with torch.no_grad():
        log_probs = model.logits(model(torch.tensor([whole]), state=model.new_state(1, 60)))[0].log_softmax(
            -1
        )
    want = [float(log_probs[len(ids) - 1 + k, t.id]) for k, t in enumerate(tokens)]
    torch.testing.assert_close(
        torch.tensor([t.raw_log_prob for t in tokens]), torch.tensor(want), atol=1e-4, rtol=0
    )
