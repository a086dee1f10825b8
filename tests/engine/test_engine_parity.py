"""The engine against the training forward: every family, with random chunks, batches, preemptions and cached prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.engine import parity
from tests.support.engine.parity import FAMILIES, PROMPTS, check, config, decoder, request, run

from whorl.engine.engine import Engine
from whorl.errors import ConfigError
from whorl.nn.mixer import CacheSpec


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the torch runner; `test_native_step.py` compares the native step."""
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_matches_training_forward(family: str, preemption: Any) -> None:
    model = FAMILIES[family]()
    tight = config(max_model_len=60, kv_cache_tokens=72, max_num_batched_tokens=7, preemption=preemption)
    engine = Engine(model, tight)
    requests = parity.prompt_requests(9, temperature=0)
    check(model, requests, run(engine, requests))
    assert engine.cache.groups[0].pool.n_used == 0
    engine = Engine(model, tight.model_copy(update={"kv_cache_tokens": 600}))
    run(engine, requests)
    again = [r.model_copy(update={"id": f"again {r.id}"}) for r in requests]  # with cached prompts
    check(model, again, run(engine, again))
    if not engine.runner.has_recurrent_layers:
        assert engine.cache.hit_tokens > 0


def test_outside_mixer_is_served_in_pages_of_its_window() -> None:
    runner = Engine(FAMILIES["own cache, windows"](), config()).runner
    assert runner.windows == [None, 5] and not runner.has_recurrent_layers
    near, far, _ = runner.layers
    assert {name: list(t.shape[1:]) for name, t in near.pools.items()} == {"key": [4, 6], "value": [4, 32]}
    assert near.n_bytes < far.n_bytes  # a window keeps its newest pages only


def test_unknown_cache_spec_is_refused() -> None:
    model: Any = FAMILIES["own cache"]()
    model.blocks[1].mixer.cache_spec = CacheSpec
    with pytest.raises(ConfigError, match="cache_spec of AdditiveAttention returns CacheSpec"):
        Engine(model, config())


def test_rows_beyond_trained_length_match_forward() -> None:
    model, far = decoder(trained_length=16), request("far", PROMPTS[5], max_tokens=9)
    tokens = run(Engine(model, config(max_num_seqs=2, max_model_len=60)), [far])["far"]
    whole = torch.tensor([*far.ids, *(t.id for t in tokens)])
    with torch.no_grad():
        log_probs = model.logits(model(whole[None], state=model.new_state(1, 60)))[0].log_softmax(-1)
    want = log_probs[len(far.ids) - 1 : -1].gather(-1, whole[len(far.ids) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor([t.raw_log_prob for t in tokens]), want, atol=1e-4, rtol=0)


def test_prompt_log_probs_match_forward() -> None:
    """In batches with decoding requests. A cached prompt is scored from the start."""
    model = decoder()
    engine = Engine(model, config(max_num_seqs=6, max_num_batched_tokens=9))
    for turn in ("first", "again"):
        requests = [request(f"{turn} {n}", ids, prompt_log_probs=n > 1) for n, ids in enumerate(PROMPTS)]
        found = parity.drain(engine, requests)
        check(model, requests, {name: parity.tokens_of(deltas) for name, deltas in found.items()})
        for one in requests:
            scores = [torch.tensor(d.prompt_log_probs) for d in found[one.id] if d.prompt_log_probs]
            want = [parity.expected(model, list(one.ids), 1)] if one.prompt_log_probs else []
            torch.testing.assert_close(scores, want, atol=1e-4, rtol=0)
            assert not (one.prompt_log_probs and found[one.id][0].cached_tokens)
