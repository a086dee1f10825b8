"""Probes of forgetting and exposure bias: zero where there is no effect, and equal to slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from studies.probes.exposure import policy_exposure
from studies.probes.forgetting import forgetting, held_out_bits
from studies.probes.greedy_answers import GreedyAnswers
from tests.support.align.byte_model import VOCAB, decoder, network, scribe, sums, tokenizer

from whorl.align.config import LoRAConfig, SFTConfig
from whorl.align.model.policy_model import PolicyModel, frozen_reference
from whorl.align.stage.sft import fine_tune
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.models import Transformer
from whorl.tokens.token_encoder import TokenizedExample

PROSE = ["the cat sat on the mat", "rain falls, and falls", "a" * 70]
PLACES = 12


def train(net: PolicyModel, examples: list[TokenizedExample], **settings: int) -> None:
    fine_tune(net, examples, SFTConfig(lr_scale=1.0, data=settings), pad_id=tokenizer().pad_id)


def sampled(net: PolicyModel, prompts: list[list[int]], temperature: float = 1.0) -> list[list[int]]:
    engine = open_engine(net.eval_copy(), (64, 64), scribe(), with_text=False)
    options = {"max_tokens": PLACES, "stop_ids": scribe().stop_ids, "seed": 1}
    return [c.ids for c in sample_completions(engine, prompts, policy_sampling(temperature), **options)]


def test_forgetting_is_zero_without_training() -> None:
    net = network()
    idle = forgetting(net.model, tokenizer(), PROSE, lambda: None)
    assert idle.before == idle.after and idle.cost == 0
    train(net, [scribe().prompt_completion("", text) for text in PROSE], epochs=30, seq_len=128)
    prose = forgetting(net.model, tokenizer(), PROSE, lambda: train(net, sums(40), epochs=3, seq_len=48))
    assert prose.before < 0.8 * idle.before
    assert prose.cost == prose.after / prose.before - 1 > 0.1


def draw_adapter(net: PolicyModel, std: float) -> None:
    for factor in net.factors.values():
        torch.nn.init.normal_(factor, 0, std, generator=torch.Generator().manual_seed(1))


def test_held_out_bits_match_loss_with_adapter() -> None:
    net = network(lora=LoRAConfig(rank=2))
    draw_adapter(net, 0.3)
    net.train()
    bits = held_out_bits(net.model, tokenizer(), PROSE)
    assert net.training
    assert bits == pytest.approx(held_out_bits(net.eval_copy(), tokenizer(), PROSE), rel=1e-5)
    assert abs(bits / held_out_bits(network().model, tokenizer(), PROSE) - 1) > 0.01
    nats = 0.0
    for text in PROSE:
        ids = torch.tensor([[256, *text.encode(), 257]])
        logits = net.model.logits(net.model(ids[:, :-1]))[0].detach()
        nats -= float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum())
    assert bits == pytest.approx(nats / np.log(2) / sum(map(len, PROSE)), rel=1e-5)


def sharpen(model: Transformer) -> Transformer:
    """Return the model with sharper probabilities: an untrained one is almost uniform."""
    with torch.no_grad():
        model.head_weight.mul_(6.0)
    return model


def test_exposure_gap_zero_for_source_model() -> None:
    out = scribe().banned_ids(VOCAB)
    net = PolicyModel(sharpen(decoder()), banned_ids=out)
    prompts = [scribe().prompt(chr(97 + n % 26)) for n in range(120)]
    data = sampled(net, prompts)
    options = {"pad_id": tokenizer().pad_id, "n_positions": PLACES, "bin_size": 4, "seed": 7}
    same = policy_exposure(net, scribe(), prompts, data, **options).by_model
    assert same.start.tolist() == [0, 4, 8] and same.n_data[0] > 350
    assert np.abs(same.gap).max() < 0.12 and abs(same.drift) < 0.2  # standard errors are about 0.03
    hot = policy_exposure(net, scribe(), prompts, sampled(net, prompts, 4.0), **options).by_model
    assert (hot.gap < -0.2).all()
    # For the model that produced the data, samples of another model are less likely.
    other = PolicyModel(sharpen(decoder(seed=3)), banned_ids=out)
    judge = frozen_reference(sharpen(decoder()), net)
    output = policy_exposure(other, scribe(), prompts, data, evaluator=judge, **options).by_evaluator
    assert output is not None and (output.gap > 0.1).all()


def test_exposure_counts_positions_from_prompt() -> None:
    net = network()
    prompts = [scribe().prompt(p) for p in ("a", "bcd", "ef")]
    data = [[*b"xy"], [*b"xyzuvw"], []]
    got = policy_exposure(net, scribe(), prompts, data, pad_id=0, n_positions=4, bin_size=1).by_model
    assert got.n_data.tolist() == [2, 2, 1, 1]
    ids = torch.tensor([[*prompts[1], *data[1]]])
    logits = net.model.logits(net.model(ids)).masked_fill(net.banned_mask, -torch.inf)[0].log_softmax(-1)
    at = len(prompts[1]) - 1
    for place in (2, 3):
        want = -float(logits[at + place, data[1][place]].detach())
        assert got.data_nll[place] == pytest.approx(want, abs=1e-5)


def test_greedy_answers_use_current_merged_weights() -> None:
    net = network(lora=LoRAConfig(rank=4))
    asker = GreedyAnswers(net, scribe(), ["1+2=", [{"role": "user", "content": "who?"}]], max_tokens=6)
    before = asker(net)
    draw_adapter(net, 1.0)
    after = asker(net)
    assert after != before
    ids = scribe().prompt("1+2=")
    for _ in range(6):  # slow reference, with the hooks
        logits = net.model.logits(net.model(torch.tensor([ids])))[0, -1]
        ids.append(int(logits.masked_fill(net.banned_mask, -torch.inf).argmax()))
        if ids[-1] in scribe().stop_ids:
            break
    assert after[0] == scribe().decode(ids[len(scribe().prompt("1+2=")) :])
