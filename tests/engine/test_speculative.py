"""Speculative decoding: drafts never change a token, and good drafts save steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.engine.parity import check, config, decoder, ids_of, prompt_requests, run
from tests.support.models.transformer_shapes import HEADS, made

from whorl.engine.engine import Engine
from whorl.engine.speculation.prompt_lookup import AdaptiveDraftLength, PromptLookup
from whorl.engine.speculation.proposers import DraftModel, MultiTokenDraft
from whorl.errors import ConfigError
from whorl.models.multi_token import MultiTokenPrediction

CONFIG = config(max_model_len=90, max_num_batched_tokens=24)


class RandomProposer:
    """Proposes random drafts."""

    needs_hidden_states = False

    def propose(self, sequences: Any) -> None:
        for s in sequences:
            space = s.request.max_tokens - s.n_output - 1
            s.drafts = torch.randint(0, 50, (max(0, min(3, space)),)).tolist()

    def observe(self, sequence: Any, hidden: Any) -> None: ...
    def release(self, sequence: Any) -> None: ...


def draft_model(model: Any) -> DraftModel:
    return DraftModel(model, 4, max_num_seqs=4, max_model_len=90, page_size=4)


def multi_token_draft(model: Any) -> MultiTokenDraft:
    heads = MultiTokenPrediction(32, 4, 4, generator=torch.Generator().manual_seed(0))
    return MultiTokenDraft(heads, model.head_weight, 90)


PROPOSERS: dict[str, Any] = {
    "wrong": lambda model: RandomProposer(),
    "lookup": lambda model: PromptLookup(),
    "itself": draft_model,
    "another": lambda model: draft_model(decoder(n_layers=1)),
    "ahead": multi_token_draft,
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("family", [decoder, made])
def test_drafts_change_no_token(family: Any, proposer: str, temperature: float) -> None:
    model, requests = family().eval(), prompt_requests(40, temperature=temperature)
    plain = Engine(model, CONFIG)
    want = run(plain, requests)
    engine = Engine(model, CONFIG, proposer=PROPOSERS[proposer](model))
    got = run(engine, requests)
    assert ids_of(got) == ids_of(want)
    check(model, requests, got)
    assert engine.stats.drafted_tokens > 0
    if proposer == "itself":  # the same model with the same random numbers samples the same tokens
        assert engine.stats.accepted_tokens == engine.stats.drafted_tokens
        assert engine.stats.steps < plain.stats.steps


@pytest.mark.parametrize("proposer", [draft_model, multi_token_draft])
def test_drafts_follow_a_preempted_sequence(proposer: Any) -> None:
    model, requests = decoder(), prompt_requests(40, temperature=0.7)
    want = run(Engine(model, CONFIG), requests)
    tight = CONFIG.model_copy(update={"kv_cache_tokens": 96})
    engine = Engine(model, tight, proposer=proposer(model))
    assert ids_of(run(engine, requests)) == ids_of(want)
    assert engine.stats.n_preemptions > 0 and engine.stats.drafted_tokens > 0


@pytest.mark.parametrize("limit", [{"kv_cache_tokens": 44}, {"max_num_seqs": 1}, {"max_model_len": 30}])
def test_draft_model_without_space_pauses(limit: dict[str, int]) -> None:
    model, requests = decoder(), prompt_requests(40, temperature=0.7)
    sizes = {"max_num_seqs": 4, "max_model_len": 90, "page_size": 4}
    engine = Engine(model, CONFIG, proposer=DraftModel(model, 4, **{**sizes, **limit}))
    assert ids_of(run(engine, requests)) == ids_of(run(Engine(model, CONFIG), requests))
    assert engine.stats.accepted_tokens == engine.stats.drafted_tokens > 0
    assert engine.stats.draft_seconds > 0 and engine.stats.acceptance_rate == 1.0


def test_adaptive_draft_length_grows_and_pauses() -> None:
    draft_length, written = AdaptiveDraftLength(8), 0
    for want in (2, 4, 8, 8):
        assert draft_length.next_length(written) == want
        draft_length.n_proposed = want
        written += want + 1
    draft_length.n_proposed, written = 8, draft_length.last_n_output
    for want in (4, 2, 1, 0):
        written += 1
        assert draft_length.next_length(written) == want
        draft_length.n_proposed = want
    pause = 0
    while draft_length.next_length(written + pause) == 0:
        pause += 1
    assert 10 < pause < 20


def test_proposers_reject_unsuitable_models() -> None:
    windowed = made(mixers={"local": HEADS.model_copy(update={"window": 4})})
    with pytest.raises(ConfigError, match="full attention"):
        DraftModel(windowed)
    with pytest.raises(ConfigError, match="at least 2"):
        MultiTokenDraft(MultiTokenPrediction(32, 1, 4), torch.zeros(50, 32))
