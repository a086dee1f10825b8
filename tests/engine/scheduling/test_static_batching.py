"""Static and dynamic batching: the engine's tokens, the start of a batch, and wasted positions."""

from __future__ import annotations

import random

import pytest
import torch
from bench.engine.support.static_batching import StaticBatchEngine
from tests.support.engine.parity import decoder

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

VOCAB = 61


def model(**fields: object) -> Transformer:
    heads = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16)
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, mixers={"full": heads}, mlp_hidden=64, tie_embeddings=True
    )
    network = Transformer(config, torch.Generator().manual_seed(0)).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            if p.dim() > 1:  # random weights, so that no two tokens are about equally likely
                p.copy_(torch.randn(p.shape, generator=draw) * 0.3)
    return network


def requests(n: int, sampling: SamplingParams, stop: bool = False) -> list[Request]:
    draw = random.Random(2)
    return [
        Request(
            id=f"r{k}", ids=tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))), sampling=sampling,
            max_tokens=draw.randint(1, 9), stop_ids=frozenset(range(30)) if stop else frozenset(),
        )
        for k in range(n)
    ]  # fmt: skip


def outputs(
    batcher: Engine | StaticBatchEngine, requests_to_run: list[Request]
) -> dict[str, tuple[list[int], str | None]]:
    for request in requests_to_run:
        batcher.add(request)
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
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0), SamplingParams(temperature=0.7), SamplingParams(seed=5, top_k=9)],
)
def test_static_batching_matches_engine(sampling: SamplingParams, stop: bool) -> None:
    requests_to_run, network = requests(11, sampling, stop), model()
    expected = outputs(
        Engine(network, EngineConfig(max_num_seqs=4, max_model_len=64, block_size=4)), requests_to_run
    )
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
    dynamic.add(second)
    static.add(third)
    assert [d.request_id for d in static.step()] == ["r0", "r1"]
    seen: set[str] = set()
    while deltas := static.step():
        seen |= {d.request_id for d in deltas}
    assert "r2" not in seen and static.busy  # a late request waits for the next batch
    static.close()
    assert [d.request_id for d in static.step()] == ["r2"]


def test_static_batching_counts_wasted_positions() -> None:
    network = model()
    batcher = StaticBatchEngine(network, 2)
    batcher.add(Request(id="long", ids=(1, 2, 3, 4), max_tokens=5))
    batcher.add(Request(id="short", ids=(1, 2), max_tokens=1))
    while batcher.busy:
        batcher.step()
    # A padded prefill of 2 x 4, then four steps of two rows.
    assert batcher.computed_positions == 2 * 4 + 4 * 2
    assert batcher.useful_positions == 6 + 4


def test_static_batching_rejects_decoder() -> None:
    with pytest.raises(ConfigError, match="Decoder"):
        StaticBatchEngine(decoder(), 2)
