"""Reward models: reading the last token, learning, storage, verdicts, and the report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.align.byte_model import decoder, scribe, tokenizer
from tests.support.align.stage_inputs import assert_gradients_close, density_pairs, reward_config, train_stage
from torch import Tensor

from whorl.align.config import LoRAConfig, RewardConfig
from whorl.align.preference import reward_model as rewards
from whorl.align.preference.pairs import PairBatches, PreferencePair
from whorl.align.preference.reward_model import RewardModel, save_reward_model, train_reward_model
from whorl.align.preference.reward_report import correlation, evaluate_reward_model, make_reward_report
from whorl.errors import CheckpointError, DataError
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.requests import Completion
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample

LORA = LoRAConfig(rank=2, alpha=4.0)


def texts_of(given: list[PreferencePair]) -> list[TokenizedExample]:
    return [text for pair in given for text in (pair.chosen, pair.rejected)]


def gradients(
    model: RewardModel, given: list[PreferencePair], settings: RewardConfig
) -> tuple[int, float, dict[str, Tensor]]:
    texts = [rewards.append_read_token(text) for text in texts_of(given)]
    units = PairBatches(texts, 2, settings, 0, "reward")
    task = rewards.RewardTask(model, settings, units, "")
    losses = [task.objective(part) for part in units.micro_batches(range(units.n_units), {})]
    for loss in losses:
        loss.total.backward()
    found = {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return len(losses), sum(float(loss.total.detach()) for loss in losses), found


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_step_independent_of_layout_and_split(lora: LoRAConfig | None) -> None:
    model, given = RewardModel(decoder(), lora=lora), density_pairs(12)
    with torch.no_grad():
        for p in model.factors.values():
            p.add_(0.1)  # an initial adapter is zero, and half of it has no gradient
    parts, total, expected = gradients(model, given, reward_config(train={"micro_batch_tokens": 100_000}))
    assert parts == 1
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == expected.keys() == model.param_optims(reward_config().optim()).keys()
    assert all(g.any() for g in expected.values()) and "model.head" not in trained
    for change in (
        {"train": {"micro_batch_tokens": 1}},
        {"packing": True},
        {"packing": True, "train": {"micro_batch_tokens": 60}},
    ):
        n, loss, found = gradients(model, given, reward_config(**change))
        assert loss == pytest.approx(total, rel=1e-5) and (n > 1 or "train" not in change)
        assert_gradients_close(found, expected)


def test_reward_reads_last_token() -> None:
    model, given = RewardModel(decoder(), seed=3), texts_of(density_pairs(10))
    with torch.no_grad():
        last = torch.stack([model.model(torch.from_numpy(text.ids)[None])[0, -1] for text in given])
        by_hand = last @ model.value.weight[0]
    scored = model.score_examples(given)
    torch.testing.assert_close(scored, by_hand, rtol=1e-4, atol=1e-5)
    cut = [TokenizedExample(text.ids[:-1], text.loss_mask[:-1]) for text in given]
    assert (model.score_examples(cut) != scored).all()  # the last id matters
    order = np.random.default_rng(0).permutation(len(given))
    shuffled = model.score_examples([given[n] for n in order])
    torch.testing.assert_close(shuffled, scored[order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_reward_model_learns_and_reloads(tmp_path: Path, lora: LoRAConfig | None) -> None:
    settings = reward_config(epochs=6, batch_size=16, lr_scale=1.0 if lora else 0.3)
    model, seen = train_stage(
        train_reward_model, RewardModel(decoder(), lora=lora), density_pairs(160), settings
    )
    held = density_pairs(80, seed=9)
    found = evaluate_reward_model(model, held)
    assert found.accuracy > 0.85, found.table()
    assert seen[-1]["rewards/margin"] > seen[0]["rewards/margin"] and seen[-1]["rewards/accuracy"] > 0.7
    save = partial(save_reward_model, model, config=settings, trained_on={"pairs": 160})
    save(tmp_path / "r", metrics=found.to_json())
    assert not (tmp_path / "r" / "tokenizer.json").exists()
    tokenizer(tmp_path)
    save(tmp_path / "t", base=tmp_path)
    assert TokenEncoder.load(tmp_path / "t").prompt("a>") == scribe().prompt("a>")
    again, record = rewards.load_reward_model(tmp_path / "r")
    before, after = (one.score_examples(texts_of(held)) for one in (model, again))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert record["trained_on"] == {"pairs": 160} and record["figures"]["accuracy"] == found.accuracy
    assert not any(p.requires_grad for p in again.parameters())


def test_load_rejects_missing_and_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read a reward model"):
        rewards.load_reward_model(tmp_path)
    for width in (32, 16):
        model = RewardModel(decoder(d_model=width))
        save_reward_model(model, tmp_path / str(width), config=reward_config(), trained_on={})
    (tmp_path / "16" / "reward.safetensors").rename(tmp_path / "32" / "reward.safetensors")
    with pytest.raises(CheckpointError, match="the width of the model"):
        rewards.load_reward_model(tmp_path / "32")


def test_verdicts_are_of_the_scores() -> None:
    model, writer = RewardModel(decoder(), seed=2), scribe()
    answers = ["x", "yy", "zzz", "", "yy"]
    texts = [writer.prompt_completion("a>", one) for one in answers]
    scored = model.score_examples(texts)
    tasks = [VerifiableTask(id=str(n), prompt="a>") for n in range(5)]
    verdicts = rewards.score_completions(model, writer, tasks, [Completion(one) for one in answers])
    assert [v.value for v in verdicts] == pytest.approx(torch.sigmoid(scored).tolist(), rel=1e-5)
    assert [v.passed for v in verdicts] == (scored > 0).tolist()
    model.model.max_positions = 8
    long = rewards.score_completions(model, writer, tasks[:2], [Completion("x" * 20), Completion("x")])
    assert long[0].value == 0 and long[0].reason.startswith("verifier") and long[1].value > 0
    with pytest.raises(DataError, match="2 completions"):
        rewards.score_completions(model, writer, tasks, [Completion("x"), Completion("y")])


def test_report_detects_length_bias() -> None:
    lengths = torch.randint(1, 30, (4000, 2), generator=torch.Generator().manual_seed(0))
    bias = make_reward_report(lengths.float(), lengths).length_bias
    assert (bias.reward_correlation, bias.margin_correlation) == pytest.approx((1.0, 1.0))
    assert (bias.accuracy_longer_chosen, bias.accuracy_shorter_chosen) == (1.0, 0.0)
    assert bias.model_longer_fraction == 1.0
    assert bias.n_longer + bias.n_shorter + int((lengths[:, 0] == lengths[:, 1]).sum()) == 4000


def test_report_detects_overconfidence() -> None:
    """Rewards that define the outcome are calibrated; four times larger they are overconfident, equally accurate."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (4000, 2), generator=draw)
    truth = torch.randn(4000, 2, generator=draw)
    chosen = torch.rand(4000, generator=draw) < torch.sigmoid(truth[:, 0] - truth[:, 1])
    honest = torch.where(chosen[:, None], truth, truth.flip(1))
    good, over = make_reward_report(honest, lengths), make_reward_report(4 * honest, lengths)
    assert good.calibration.expected_error < 0.03 < 0.15 < over.calibration.expected_error
    assert good.accuracy == over.accuracy and abs(good.length_bias.reward_correlation) < 0.05
    assert abs(good.length_bias.model_longer_fraction - 0.5) < 0.05
    json.dumps(over.to_json(), allow_nan=False)
    assert "calibration error" in over.table() and len(over.table().splitlines()) >= 8


def test_report_of_degenerate_pairs() -> None:
    same = make_reward_report(torch.zeros(3, 2), torch.ones(3, 2))
    assert same.accuracy == 0.5 and np.isnan(same.length_bias.model_longer_fraction)
    assert np.isnan(same.length_bias.reward_correlation)
    json.dumps(same.to_json(), allow_nan=False)
    assert "nan" not in same.table() and "no pair has completions of different length" in same.table()
    table = make_reward_report(torch.eye(2), torch.tensor([[3, 2], [2, 1]])).table()
    assert "nan" not in table and "50.0% of 2, where the shorter one was: - of 0" in table
    assert np.isnan(correlation(torch.ones(3), torch.arange(3.0)))
    with pytest.raises(DataError, match="no pairs"):
        evaluate_reward_model(RewardModel(decoder()), [])
