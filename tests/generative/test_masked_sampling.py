"""Sampling of masked diffusion: the engine equals a plain loop token by token, and follows the model's distribution."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from tests.support.train.model_shapes import HEADS, disturbed, shape

from whorl.engine import Engine, EngineConfig, SamplingParams
from whorl.engine.request import Grammar, Request
from whorl.engine.sampling.sampler import Sampler, SamplerRow
from whorl.engine.speculation.prompt_lookup import PromptLookup
from whorl.errors import ConfigError
from whorl.models import LanguageModel, make_model

MASK, LENGTH = 20, 64
BYTES = [bytes([97 + n]) for n in range(MASK)] + [b""]


def network(block: int | None, noise: float = 0.3, **more: Any) -> LanguageModel:
    made = shape(
        HEADS, vocab_size=MASK + 1, max_length=LENGTH, masked={"mask_id": MASK, "block": block}, **more
    )
    model: LanguageModel = disturbed(make_model(made, torch.Generator().manual_seed(0)), noise)
    return model.eval().requires_grad_(False)


def plain_loop(model: LanguageModel, request: Request) -> list[int]:
    """The ids of a request, by whole forwards without a cache."""
    block, sampling = model.config.masked.block, request.sampling
    ids, sampler = list(request.ids), Sampler(MASK + 1, [MASK])
    while (done := len(ids) - len(request.ids)) < request.max_tokens:
        n = block - len(ids) % block if block else request.max_tokens
        canvas, per_step = [MASK] * n, math.ceil(n / min(n, sampling.steps or n))
        while MASK in canvas:
            logits = model.logits(model(torch.tensor([ids + canvas + list(request.suffix)])))[0, len(ids) :]
            places = [k for k in range(n) if canvas[k] == MASK]
            rows = [SamplerRow(sampling, sampling.seed or 0, done + k + 1) for k in places]
            drawn = sampler(logits[places], rows)
            p = logits[:, :MASK].clone()
            p = torch.cat([p, torch.full((len(p), 1), -math.inf)], 1).softmax(-1)
            certain = p.amax(-1) if sampling.reveal == "confidence" else torch.special.entr(p).sum(-1).neg()
            for k in sorted(places, key=lambda k: (-float(certain[k]), k))[:per_step]:
                canvas[k] = drawn[places.index(k)].id
        for token in canvas:
            ids.append(token)
            if token in request.stop_ids or len(ids) - len(request.ids) == request.max_tokens:
                return ids[len(request.ids) :]
    return ids[len(request.ids) :]


def requests(whole: bool) -> list[Request]:
    rng, found = torch.Generator().manual_seed(3), []
    lengths = (1, 3, 4, 9, 16, 21, 12, 12)
    for n, length in enumerate(lengths):
        ids = torch.randint(0, MASK, (length,), generator=rng).tolist()
        if n == len(lengths) - 1:
            ids = list(found[-1].ids)  # its pages are found in the cache
        sampling = SamplingParams(
            temperature=(0, 0.7, 1)[n % 3], top_p=0.9, seed=n, steps=(None, 1, 2, 3)[n % 4],
            reveal=("confidence", "entropy")[n % 2],
        )  # fmt: skip
        suffix = (1, 2, 3) if whole and n % 2 else ()
        stop_ids = frozenset([7]) if n == 5 else frozenset()
        found.append(
            Request(id=str(n), ids=ids, sampling=sampling, max_tokens=7 + n, suffix=suffix, stop_ids=stop_ids)
        )
    return found


@pytest.mark.parametrize("block", [None, 4, 6])
@pytest.mark.parametrize(
    "sizes", [{}, {"kv_cache_tokens": 72}, {"max_num_batched_tokens": 12, "preemption": "swap"}]
)
def test_engine_equals_plain_loop_token_by_token(block: int | None, sizes: dict[str, Any]) -> None:
    model = network(block)
    config = EngineConfig(max_num_seqs=3, max_model_len=60, block_size=4, **sizes)
    engine = Engine(model, config, token_bytes=BYTES)
    given, found = requests(block is None), dict[str, list[int]]()
    for delta in engine.stream(given):
        if delta.tokens and block:  # a whole block at once, or the rest of one
            assert len(delta.tokens) <= block
        found.setdefault(delta.request_id, []).extend(token.id for token in delta.tokens)
        engine.check_integrity()
    assert found == {request.id: plain_loop(model, request) for request in given}
    if block == 4 and not sizes:
        assert engine.cache.hit_tokens > 0


def test_one_token_per_step_samples_the_distribution_of_the_network() -> None:
    model, n = network(None, 0.8), 3000
    engine = Engine(model, EngineConfig.for_batch(64, 8), token_bytes=BYTES)
    params = SamplingParams(temperature=1, top_p=1, seed=0)
    found = Counter(tuple(g.ids) for g in engine.generate([[1, 2, 3]] * n, params, max_tokens=2))

    def conditional(row: list[int]) -> torch.Tensor:
        return model.logits(model(torch.tensor([[1, 2, 3, *row]])))[0, 3:, :MASK].softmax(-1)

    first = conditional([MASK, MASK])
    at = int(first.amax(-1).argmax())  # the position that is revealed first
    expected = torch.zeros(MASK, MASK)
    for token in range(MASK):
        row = [MASK, MASK]
        row[at] = token
        rest = first[at, token] * conditional(row)[1 - at]
        expected.select(at, token).copy_(rest)
    counts = torch.tensor([[found[a, b] for b in range(MASK)] for a in range(MASK)]) / n
    assert (counts - expected).abs().sum() / 2 < 1.5 * float((expected * (1 - expected) / n).sqrt().sum()) / 2
    for axis in (0, 1):  # both marginals within four standard deviations
        p = expected.sum(axis)
        assert ((counts.sum(axis) - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-3).all()


def test_stop_strings_log_probs_and_length_hold_within_blocks() -> None:
    engine = Engine(network(4), EngineConfig.for_batch(1, 40), token_bytes=BYTES)
    params = SamplingParams(temperature=1, top_p=1, seed=2)
    (free,) = engine.generate([[1, 2]], params, max_tokens=13, top_log_probs=2)
    assert len(free.ids) == 13 and free.finish_reason == "length"
    assert all(t.log_prob <= 0 and len(t.alternatives) == 2 for t in free.tokens)
    word = free.text[5:7]
    (cut,) = engine.generate([[1, 2]], params, max_tokens=13, stop=[word])
    assert cut.text == free.text[: free.text.index(word)] and cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("block", "fields", "word"),
    [
        (4, {"grammar": Grammar(regex="a")}, "grammar"),
        (4, {"forced_prefix": b"a"}, "forced_prefix"),
        (4, {"ids": (1, 2), "score_from": 1}, "score_from"),
        (4, {"prompt_log_probs": True}, "prompt_log_probs"),
        (4, {"sampling": SamplingParams(repetition_penalty=1.1)}, "repetition_penalty"),
        (4, {"sampling": SamplingParams(presence_penalty=1)}, "presence_penalty"),
        (4, {"sampling": SamplingParams(frequency_penalty=1)}, "frequency_penalty"),
        (4, {"suffix": (1,)}, "suffix is set, which needs a model without blocks"),
        (0, {"suffix": (1,)}, "suffix is set, which needs a masked"),
        (0, {"sampling": SamplingParams(steps=2)}, "steps"),
        (0, {"sampling": SamplingParams(reveal="entropy")}, "reveal"),
    ],
)
def test_fields_of_the_other_kind_of_model_are_refused(block: int, fields: dict[str, Any], word: str) -> None:
    model = network(block) if block else make_model(shape(HEADS, vocab_size=MASK + 1)).eval()
    engine = Engine(
        model, EngineConfig.for_batch(1, 40), token_bytes=BYTES, compile_grammar=lambda grammar: None
    )
    with pytest.raises(ConfigError, match=word):
        engine.add(Request(**{"id": "a", "ids": (1,), **fields}))
    assert not engine.busy


def test_drafts_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafts"):
        Engine(network(4), proposer=PromptLookup(4))
