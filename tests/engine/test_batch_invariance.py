"""Batch invariance: the same request and seed give bit-identical tokens and log-probabilities in any batch."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.engine.parity import config, decoder, request, run, run_one
from tests.support.models.transformer_shapes import made

from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculation.prompt_lookup import PromptLookup
from whorl.errors import ConfigError

CONFIG = config(max_num_seqs=6, max_num_batched_tokens=24, batch_invariant=True)
REQUEST = request("asked", range(1, 22), sampling=SamplingParams(seed=7), max_tokens=20)
MODELS = {"decoder": decoder, "transformer": made, "bf16": lambda: made(torch.bfloat16)}


def other_requests(rng: random.Random, n: int) -> list[Request]:
    made = []
    for k in range(n):
        ids = REQUEST.ids[: rng.randint(1, 20)] + tuple(rng.choices(range(50), k=rng.randint(1, 9)))
        made.append(request(str(k), ids, sampling=SamplingParams(seed=k), max_tokens=rng.randint(1, 12)))
    return made


@pytest.mark.parametrize("family", MODELS)
def test_batch_invariant_tokens_are_bit_identical(family: str) -> None:
    model = MODELS[family]().eval()
    alone = run_one(Engine(model, CONFIG), REQUEST)
    for seed in range(3):
        rng = random.Random(seed)
        cache, step = rng.choice([64, 90, 400]), rng.choice([4, 9, 64])
        sizes = {"kv_cache_tokens": cache, "max_num_batched_tokens": step}
        engine = Engine(model, CONFIG.model_copy(update=sizes))
        neighbors, at = other_requests(rng, 10), rng.randint(0, 10)
        assert run(engine, [*neighbors[:at], REQUEST, *neighbors[at:]])["asked"] == alone
        # With a cached prompt
        assert run_one(engine, REQUEST.model_copy(update={"id": "again"})) == alone
    fast = Engine(model, CONFIG.model_copy(update={"batch_invariant": False}))
    tokens = run(fast, [*other_requests(random.Random(0), 10), REQUEST])["asked"]
    assert [t.id for t in tokens][:3] == [t.id for t in alone][:3]


def test_batch_invariant_rejects_drafts() -> None:
    with pytest.raises(ConfigError, match="batch_invariant is set together with"):
        Engine(decoder(), CONFIG, proposer=PromptLookup())
