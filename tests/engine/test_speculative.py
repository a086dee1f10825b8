"""Speculative decoding: drafts never change a token, and good drafts save steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.engine.parity import check, decoder, ids_of, prompt_requests, run
from tests.support.models.transformer_shapes import HEADS, made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine, Proposer
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.speculative import AdaptiveDraftLength, DraftModel, MultiTokenDraft, PromptLookup
from whorl.errors import ConfigError
from whorl.models.multi_token import MultiTokenPrediction

CONFIG = EngineConfig(block_size=4, max_num_seqs=4, max_model_len=90, max_num_batched_tokens=24)


def requests(temperature: float = 0.7) -> list[Request]:
    return prompt_requests(40, temperature=temperature)


class RandomProposer:
    """Proposes random drafts."""

    needs_hidden_states = False

    def propose(self, sequences: Any) -> None:
        for s in sequences:
            space = s.request.max_tokens - s.n_output - 1
            s.drafts = torch.randint(0, 50, (max(0, min(3, space)),)).tolist()

    def observe(self, sequence: Any, hidden: Any) -> None: ...
    def release(self, sequence: Any) -> None: ...


def proposers(model: Any) -> dict[str, Proposer]:
    heads = MultiTokenPrediction(32, 4, 4, generator=torch.Generator().manual_seed(0))
    other = decoder(n_layers=1)
    sizes = {"max_num_seqs": 4, "max_model_len": 90, "page_size": 4}
    return {
        "wrong": RandomProposer(),
        "lookup": PromptLookup(),
        "itself": DraftModel(model, 4, **sizes),
        "another": DraftModel(other, 4, **sizes),
        "ahead": MultiTokenDraft(heads, model.head_weight, 90),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("proposer_name", ["wrong", "lookup", "itself", "another", "ahead"])
@pytest.mark.parametrize("family", ["decoder", "transformer"])
def test_drafts_change_no_token(proposer_name: str, temperature: float, family: str) -> None:
    model = decoder() if family == "decoder" else made().eval()
    want = run(Engine(model, CONFIG), requests(temperature))
    engine = Engine(model, CONFIG, proposer=proposers(model)[proposer_name])
    got = run(engine, requests(temperature))
    assert ids_of(got) == ids_of(want)
    check(model, requests(temperature), got)
    assert engine.stats.drafted_tokens > 0
    if proposer_name == "itself":  # the same model with the same random numbers samples the same tokens
        assert engine.stats.accepted_tokens == engine.stats.drafted_tokens
        assert engine.stats.steps < steps_without(model, temperature)


def steps_without(model: Any, temperature: float) -> int:
    engine = Engine(model, CONFIG)
    run(engine, requests(temperature))
    return engine.stats.steps


def test_drafts_survive_preemption() -> None:
    model = decoder()
    want = run(Engine(model, CONFIG), requests())
    tight = CONFIG.model_copy(update={"kv_cache_tokens": 96})
    engine = Engine(
        model, tight, proposer=DraftModel(model, 4, max_num_seqs=4, max_model_len=90, page_size=4)
    )
    got = run(engine, requests())
    assert engine.stats.n_preemptions > 0
    assert ids_of(got) == ids_of(want)


def test_draft_tokens_follow_model_distribution() -> None:
    """Two tokens after a prompt, 2,000 times with and without drafts that are often accepted: chi-square test."""
    model = decoder(vocab_size=5)
    ids, n = (1, 2, 1, 2, 1, 2), 2000
    counts = []
    for proposer in (None, PromptLookup()):
        engine = Engine(
            model,
            CONFIG.model_copy(update={"max_num_seqs": 64, "max_num_batched_tokens": 512}),
            proposer=proposer,
        )
        offset = 0 if proposer is None else 10**6  # other random numbers, otherwise the tokens are identical
        requests_of_run = [
            Request(
                id=str(k),
                ids=ids,
                sampling=SamplingParams(temperature=1, top_p=1, seed=offset + k),
                max_tokens=4,
            )
            for k in range(n)
        ]
        out = run(engine, requests_of_run)
        found = torch.zeros(25)
        for tokens in out.values():
            found[tokens[2].id * 5 + tokens[3].id] += 1
        counts.append(found)
    total = counts[0] + counts[1]
    kept = total > 10
    chi_square = ((counts[0] - counts[1])[kept] ** 2 / total[kept]).sum()
    assert chi_square < 2.2 * kept.sum() + 10


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
    while draft_length.next_length(written) == 0:
        written += 1
        pause += 1
    assert 10 < pause < 20


def test_proposers_reject_unsuitable_models() -> None:
    windowed = made(mixers={"local": HEADS.model_copy(update={"window": 4})})
    with pytest.raises(ConfigError, match="full attention"):
        DraftModel(windowed)
    with pytest.raises(ConfigError, match="at least 2"):
        MultiTokenDraft(MultiTokenPrediction(32, 1, 4), torch.zeros(50, 32))
