"""Scores of a continuation: equal to the training forward, with the context from the cache."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from tests.support.engine import parity
from tests.support.engine.parity import FAMILIES, PROMPTS, config, decoder, drain, request

from whorl.engine.engine import Engine
from whorl.engine.request import Delta, Request
from whorl.errors import ConfigError
from whorl.models import LanguageModel

LONG = PROMPTS[5]  # 33 ids, pages of 4


def score(name: str, ids: list[int], start: int, **fields: object) -> Request:
    return request(name, ids, score_from=start, **fields)


def only_delta(deltas: list[Delta]) -> Delta:
    """The delta of a scored request: no token, and its scores at once."""
    [delta] = deltas
    assert delta.finish_reason == "length" and not delta.tokens and not delta.text
    return delta


def check(model: LanguageModel, one: Request, deltas: list[Delta]) -> Delta:
    delta, start = only_delta(deltas), one.score_from or 0
    want = parity.expected(model, list(one.ids), start)
    torch.testing.assert_close(torch.tensor(delta.prompt_log_probs), want, atol=1e-4, rtol=0)
    with torch.no_grad():
        best = model.logits(model(torch.tensor([one.ids])))[0].argmax(-1)[start - 1 : -1]
    assert delta.prompt_greedy == tuple((best == torch.tensor(one.ids[start:])).tolist())
    return delta


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_match_forward_cold_and_cached(family: str) -> None:
    model = FAMILIES[family]().eval()
    engine = Engine(model, config(max_num_batched_tokens=9))
    for turn in ("cold", "warm"):
        requests = [score(f"{turn} {start}", LONG, start) for start in (1, 7, 20, 32)]
        requests += [score(f"{turn} short {n}", PROMPTS[n], 1) for n in (1, 2)]
        found = drain(engine, [*requests, request(f"{turn} sampled", LONG, max_tokens=3)])
        for one in requests:
            check(model, one, found[one.id])
    assert engine.cache.groups[0].pool.n_used == 0


def test_context_comes_from_cache_up_to_first_scored_position() -> None:
    engine = Engine(decoder(), config(max_num_batched_tokens=64))
    assert only_delta(drain(engine, [score("first", LONG, 30)])["first"]).cached_tokens == 0
    cached = {
        start: drain(engine, [score("again", LONG, start)])["again"][0].cached_tokens
        for start in (1, 4, 5, 30, 32)
    }
    assert cached == {1: 0, 4: 0, 5: 4, 30: 28, 32: 28}
    assert drain(engine, [score("end", LONG[:29], 28)])["end"][0].cached_tokens == 24
    assert engine.stats.output_tokens == 0


def test_scores_survive_preemption() -> None:
    model = decoder()
    engine = Engine(model, config(kv_cache_tokens=48, max_num_batched_tokens=7, max_num_seqs=4))
    requests = [score(f"scored {n}", [n, *LONG], 2) for n in range(4)]
    found = drain(engine, [*requests, *(request(f"sampled {n}", LONG[n:], max_tokens=8) for n in range(3))])
    for one in requests:
        check(model, one, found[one.id])


def test_alternatives_are_the_most_likely_ids() -> None:
    model = decoder()
    one = score("one", LONG, 31, top_log_probs=3)
    delta = only_delta(drain(Engine(model, config()), [one, score("other", LONG, 5)])["one"])
    with torch.no_grad():
        best = model.logits(model(torch.tensor([LONG])))[0].log_softmax(-1)[30:-1].topk(3)
    assert [[i for i, _ in top] for top in delta.prompt_alternatives] == best.indices.tolist()
    torch.testing.assert_close(
        torch.tensor([[p for _, p in top] for top in delta.prompt_alternatives]),
        best.values,
        atol=1e-4,
        rtol=0,
    )


def test_scored_text_may_be_one_longer_than_the_model_reads() -> None:
    engine = Engine(
        decoder(), config(max_model_len=33, max_num_batched_tokens=64, block_size=3, kv_cache_tokens=33)
    )
    assert engine.max_positions == 33
    ids = [*LONG, 1]
    assert len(only_delta(drain(engine, [score("fits", ids, 1)])["fits"]).prompt_log_probs) == 33
    with pytest.raises(ConfigError, match="prompt has 35 tokens"):
        engine.add(score("long", [*ids, 2], 34))


def test_impossible_scores_are_rejected() -> None:
    with pytest.raises(ValidationError, match="score_from: at most 4"):
        score("none", [1, 2, 3, 4, 5], 5)
    with pytest.raises(ValidationError, match="score_from"):
        score("none", [1, 2, 3], 0)
    with pytest.raises(ValidationError, match="not with prompt_log_probs"):
        score("both", [1, 2, 3], 1, prompt_log_probs=True)
