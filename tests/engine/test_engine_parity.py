"""The engine against the training forward: every family, over random chunks, batches, preemptions and found prefixes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.models import Decoder, DecoderConfig, LanguageModel

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from test_transformer import KINDS, made

GREEDY = SamplingParams(temperature=0)
G = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(0, 50, (n,), generator=G).tolist() for n in (1, 2, 5, 9, 17, 33)]


def decoder(**changes: Any) -> Decoder:
    shape = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    config = DecoderConfig(**{**shape, "mlp_hidden": 40, "ngram_buckets": 64, **changes})
    model = Decoder(config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.15)
    return model.eval()


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference; `test_native.py` holds the native step to the same."""
    monkeypatch.setenv("WHORL_NATIVE", "0")


FAMILIES = {
    **{kind: lambda kind=kind: made(**KINDS[kind]).eval() for kind in KINDS},
    "decoder": decoder,
    "decoder without memory": lambda: decoder(ngram_orders=(), smear_keys=False, tie_embeddings=True),
}


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Any]]:
    """All tokens of all requests, with the books checked at every step."""
    for request in requests:
        engine.add(request)
    out: dict[str, list[Any]] = {r.id: [] for r in requests}
    for _ in range(2000):
        if not engine.busy:
            return out
        for delta in engine.step():
            out[delta.request_id] += delta.tokens
        engine.check_integrity()
    raise AssertionError("the engine does not end")


@torch.no_grad()
def expected(model: LanguageModel, ids: list[int], n_prompt: int) -> torch.Tensor:
    """Log-probabilities that the training forward gives to what follows the prompt."""
    log_probs = model.logits(model(torch.tensor([ids])))[0].log_softmax(-1)
    targets = torch.tensor(ids[n_prompt:])
    return log_probs[n_prompt - 1 : -1].gather(-1, targets[:, None])[:, 0]


def check(model: LanguageModel, requests: list[Request], out: dict[str, list[Any]]) -> None:
    for request in requests:
        tokens = out[request.id]
        assert len(tokens) == request.max_tokens
        want = expected(model, [*request.ids, *(t.id for t in tokens)], len(request.ids))
        got = torch.tensor([t.raw_log_prob for t in tokens])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_says_what_the_training_forward_says(family: str, preemption: Any) -> None:
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
    requests = [
        Request(id=str(n), ids=tuple(p), sampling=GREEDY, max_tokens=9) for n, p in enumerate(PROMPTS)
    ]
    check(model, requests, run(engine, requests))
    assert engine.cache.groups[0].pool.n_used == 0
    engine = Engine(model, config.model_copy(update={"cache_tokens": 600}))
    run(engine, requests)
    again = [r.model_copy(update={"id": f"again {r.id}"}) for r in requests]  # now their prompts are known
    check(model, again, run(engine, again))
    if not engine.runner.has_recurrent_layers:
        assert engine.cache.hit_tokens > 0


def test_preemption_happens_and_changes_nothing() -> None:
    model = decoder()
    roomy = EngineConfig(block_size=4, max_num_seqs=6, max_model_len=60, max_num_batched_tokens=64)
    want = run(Engine(model, roomy), _six())
    for preemption, budget in itertools.product(("recompute", "swap"), (3, 16)):
        tight = roomy.model_copy(
            update={"cache_tokens": 60, "preemption": preemption, "token_budget": budget}
        )
        engine = Engine(model, tight)
        got = run(engine, _six())
        assert engine.stats.n_preemptions > 0
        assert {k: [t.id for t in v] for k, v in got.items()} == {
            k: [t.id for t in v] for k, v in want.items()
        }


def _six() -> list[Request]:
    return [
        Request(id=str(n), ids=tuple(p), sampling=SamplingParams(seed=n), max_tokens=20)
        for n, p in enumerate(PROMPTS)
    ]


def test_rows_longer_than_those_of_training_are_turned_as_a_row_of_that_room_is() -> None:
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
