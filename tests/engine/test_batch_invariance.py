"""Batch invariance: the same request and seed give bit-identical tokens and log-probabilities in any batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.support.engine.parity import decoder, run
from tests.support.models.transformer_shapes import made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request, Token
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculative import PromptLookup
from whorl.errors import ConfigError

CONFIG = EngineConfig(
    block_size=4, max_num_seqs=6, max_model_len=64, max_num_batched_tokens=24, batch_invariant=True
)
REQUEST = Request(id="asked", ids=tuple(range(1, 22)), sampling=SamplingParams(seed=7), max_tokens=20)


def other_requests(rng: random.Random, n: int) -> list[Request]:
    made = []
    for k in range(n):
        ids = REQUEST.ids[: rng.randint(1, 20)] + tuple(rng.choices(range(50), k=rng.randint(1, 9)))
        made.append(
            Request(id=str(k), ids=ids, sampling=SamplingParams(seed=k), max_tokens=rng.randint(1, 12))
        )
    return made


@pytest.mark.parametrize("family", ["decoder", "transformer", "bf16"])
def test_batch_invariant_tokens_are_bit_identical(family: str) -> None:
    model: Any = (
        decoder()
        if family == "decoder"
        else made(torch.bfloat16 if family == "bf16" else torch.float32).eval()
    )
    alone: list[Token] = run(Engine(model, CONFIG), [REQUEST])["asked"]
    for seed in range(6):
        rng = random.Random(seed)
        tight = {
            "kv_cache_tokens": rng.choice([64, 90, 400]),
            "max_num_batched_tokens": rng.choice([4, 9, 64]),
        }
        engine = Engine(model, CONFIG.model_copy(update=tight))
        neighbors = other_requests(rng, 10)
        at = rng.randint(0, 10)
        assert run(engine, [*neighbors[:at], REQUEST, *neighbors[at:]])["asked"] == alone
        again = REQUEST.model_copy(update={"id": "again"})
        assert run(engine, [again])["again"] == alone  # with a cached prompt


def test_batch_invariant_rejects_drafts() -> None:
    model = made(torch.bfloat16).eval()
    engine = Engine(model, CONFIG.model_copy(update={"batch_invariant": False}))
    tokens = run(engine, [*other_requests(random.Random(0), 10), REQUEST])["asked"]
    assert [t.id for t in tokens][:3] == [t.id for t in run(Engine(model, CONFIG), [REQUEST])["asked"]][:3]
    with pytest.raises(ConfigError, match="batch_invariant is set together with"):
        Engine(model, CONFIG, proposer=PromptLookup())
