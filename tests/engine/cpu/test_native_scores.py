"""Scores by the native step: those of the training forward, whether a step only scores or also samples."""

from __future__ import annotations

import pytest
import torch
from tests.support.compiler import needs_compiler
from tests.support.engine import parity
from tests.support.engine.cpu import llama
from tests.support.engine.parity import PROMPTS, config, drain, request

from whorl.engine.cpu import runner as native_runner
from whorl.engine.cpu.runner import NativeRunner
from whorl.engine.engine import Engine

pytestmark = needs_compiler


@pytest.mark.parametrize("most_logits", [1 << 24, 0])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("invariant", [False, True])
def test_native_scores_match_forward(
    most_logits: int, k: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=native")
    monkeypatch.setattr(native_runner, "MOST_LOGITS", most_logits)
    model = llama()
    engine = Engine(model, config(max_num_batched_tokens=16, batch_invariant=invariant))
    assert isinstance(engine.runner, NativeRunner) and engine.runner.use_native
    texts = [[i % model.config.vocab_size for i in ids] for ids in PROMPTS if len(ids) > 3]
    found = {}
    for sampled in (False, True):
        requests = [
            request(f"{sampled} {n}", ids, score_from=len(ids) // 2, top_log_probs=k)
            for n, ids in enumerate(texts)
        ]
        also = [request("sampled", texts[0], max_tokens=4)] if sampled else []
        found |= drain(engine, [*requests, *also])
        for one in requests:
            [delta] = found[one.id]
            start = one.score_from or 0
            want = parity.expected(model, list(one.ids), start)
            torch.testing.assert_close(torch.tensor(delta.prompt_log_probs), want, atol=1e-4, rtol=0)
            with torch.no_grad():
                of_all = model.logits(model(torch.tensor([one.ids])))[0].log_softmax(-1)[start - 1 : -1]
            assert delta.prompt_greedy == tuple((of_all.argmax(-1) == torch.tensor(one.ids[start:])).tolist())
            if k:
                tops = [[i for i, _ in top] for top in delta.prompt_alternatives]
                assert tops == of_all.topk(k).indices.tolist()
    if invariant:
        for n in range(len(texts)):
            assert found[f"False {n}"][0].prompt_log_probs == found[f"True {n}"][0].prompt_log_probs
