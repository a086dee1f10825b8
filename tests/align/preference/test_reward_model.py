"""Reward models: reading the last token, learning, storage, verdicts, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.align.byte_model import decoder, scribe, tokenizer
from tests.support.align.kill_at_step import Killed, kill_at
from tests.support.align.stage_inputs import density_pairs, reward_config
from torch import Tensor
from torch.nn import functional as F

from whorl.align.config import LoRAConfig, RewardConfig
from whorl.align.model.example import TokenizedExample
from whorl.align.preference.pairs import PairBatches, PreferencePair
from whorl.align.preference.reward_model import (
    RewardModel,
    append_read_token,
    load_reward_model,
    reward_objective,
    save_reward_model,
    score_completions,
    train_reward_model,
)
from whorl.align.preference.reward_report import correlation, evaluate_reward_model, make_reward_report
from whorl.align.stage.io import load_example_tokenizer
from whorl.errors import CheckpointError, DataError
from whorl.evals.verify.task import VerifiableTask

PAD = 0
LORA = LoRAConfig(rank=2, alpha=4.0)


def texts_of(given: list[PreferencePair]) -> list[TokenizedExample]:
    return [text for pair in given for text in (pair.chosen, pair.rejected)]


def gradients(
    model: RewardModel, given: list[PreferencePair], settings: RewardConfig
) -> tuple[int, float, dict[str, Tensor]]:
    units = PairBatches([append_read_token(text) for text in texts_of(given)], 2, settings, PAD, "reward")
    losses = [
        reward_objective(settings, model)(part) for part in units.micro_batches(range(units.n_units), {})
    ]
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
    parts, total, expected = gradients(model, given, reward_config(micro_batch_tokens=100_000))
    assert parts == 1
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == expected.keys() == model.param_optims(reward_config().optim()).keys()
    assert all(g.any() for g in expected.values()) and "model.head" not in trained
    for change in ({"micro_batch_tokens": 1}, {"packing": True}, {"packing": True, "micro_batch_tokens": 60}):
        n, loss, found = gradients(model, given, reward_config(**change))
        assert loss == pytest.approx(total, rel=1e-5) and (n > 1 or "micro_batch_tokens" not in change)
        for name, g in found.items():
            torch.testing.assert_close(
                g, expected[name], rtol=1e-3, atol=1e-5 * float(expected[name].abs().max()) + 1e-6
            )


def test_reward_reads_last_token() -> None:
    model, given = RewardModel(decoder(), seed=3), texts_of(density_pairs(10))
    by_hand = [
        F.linear(model.model(torch.from_numpy(text.ids)[None])[0, -1].detach(), model.value.weight.detach())
        for text in given
    ]
    scored = model.score_examples(given)
    torch.testing.assert_close(scored, torch.cat(by_hand), rtol=1e-4, atol=1e-5)
    cut = [TokenizedExample(text.ids[:-1], text.loss_mask[:-1]) for text in given]
    assert (model.score_examples(cut) != scored).all()  # the last id matters
    order = np.random.default_rng(0).permutation(len(given))
    torch.testing.assert_close(
        model.score_examples([given[n] for n in order]), scored[order], rtol=1e-4, atol=1e-5
    )


def test_resume_gives_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, given = reward_config(epochs=2, optimizer="muon"), density_pairs(24)
    whole = train_reward_model(RewardModel(decoder()), given, settings, pad_id=PAD).state_dict()
    observe = kill_at(3, monkeypatch)
    with pytest.raises(Killed):
        train_reward_model(
            RewardModel(decoder()), given, settings, pad_id=PAD, checkpoint_dir=tmp_path, callback=observe
        )
    messages: list[str] = []
    again = RewardModel(decoder(seed=1), seed=1)
    train_reward_model(again, given, settings, pad_id=PAD, checkpoint_dir=tmp_path, log=messages.append)
    assert any("continues at step 2 of" in line for line in messages)
    for name, t in again.state_dict().items():
        if name != "model.head":  # of another seed, and unused
            assert torch.equal(t, whole[name]), name


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_reward_model_learns_and_reloads(tmp_path: Path, lora: LoRAConfig | None) -> None:
    model, seen = RewardModel(decoder(), lora=lora), list[dict[str, float]]()
    settings = reward_config(epochs=6, batch_size=16, lr_scale=1.0 if lora else 0.3)
    train_reward_model(model, density_pairs(160), settings, pad_id=PAD, callback=lambda _, m: seen.append(m))
    held = density_pairs(80, seed=9)
    found = evaluate_reward_model(model, held)
    assert found.accuracy > 0.85, found.table()
    assert seen[-1]["rewards/margin"] > seen[0]["rewards/margin"] and seen[-1]["rewards/accuracy"] > 0.7
    save_reward_model(
        model, tmp_path / "r", config=settings, trained_on={"pairs": 160}, metrics=found.to_json()
    )
    assert not (tmp_path / "r" / "tokenizer.json").exists()
    tokenizer(tmp_path)
    save_reward_model(model, tmp_path / "t", config=settings, trained_on={}, base=tmp_path)
    assert load_example_tokenizer(tmp_path / "t").prompt("a>") == scribe().prompt("a>")
    again, record = load_reward_model(tmp_path / "r")
    torch.testing.assert_close(
        again.score_examples(texts_of(held)), model.score_examples(texts_of(held)), rtol=1e-4, atol=1e-5
    )
    assert record["trained_on"] == {"pairs": 160} and record["figures"]["accuracy"] == found.accuracy
    assert not any(p.requires_grad for p in again.parameters())


def test_load_rejects_missing_and_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read a reward model"):
        load_reward_model(tmp_path)
    save_reward_model(RewardModel(decoder()), tmp_path / "a", config=reward_config(), trained_on={})
    save_reward_model(RewardModel(decoder(d_model=16)), tmp_path / "b", config=reward_config(), trained_on={})
    (tmp_path / "a" / "reward.safetensors").write_bytes((tmp_path / "b" / "reward.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="the width of the model"):
        load_reward_model(tmp_path / "a")


def test_best_indices_and_verdicts() -> None:
    model, writer = RewardModel(decoder(), seed=2), scribe()
    answers = ["x", "yy", "zzz", "", "yy"]
    texts = [writer.prompt_completion("a>", one) for one in answers]
    scored = model.score_examples(texts)
    assert model.best_indices([texts, texts[:1], texts[2:4]]) == [
        int(scored.argmax()),
        0,
        int(scored[2:4].argmax()),
    ]
    with pytest.raises(DataError, match="a group is empty"):
        model.best_indices([texts, []])
    tasks = [VerifiableTask(id=str(n), prompt="a>") for n in range(5)]
    verdicts = score_completions(model, writer, tasks, answers)
    assert [v.reward for v in verdicts] == pytest.approx(torch.sigmoid(scored).tolist(), rel=1e-5)
    assert [v.passed for v in verdicts] == (scored > 0).tolist()
    model.model.max_positions = 8
    long = score_completions(model, writer, tasks[:2], ["x" * 20, "x"])
    assert long[0].reward == 0 and long[0].reason.startswith("verifier") and long[1].reward > 0
    with pytest.raises(DataError, match="2 completions"):
        score_completions(model, writer, tasks, ["x", "y"])


def test_report_detects_length_bias_and_overconfidence() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (4000, 2), generator=draw)
    counts = make_reward_report(lengths.float(), lengths)
    assert counts.length_bias.reward_correlation == pytest.approx(
        1.0
    ) and counts.length_bias.margin_correlation == pytest.approx(1.0)
    assert (
        counts.length_bias.accuracy_longer_chosen,
        counts.length_bias.accuracy_shorter_chosen,
        counts.length_bias.model_longer_fraction,
    ) == (1.0, 0.0, 1.0)
    assert (
        counts.length_bias.n_longer
        + counts.length_bias.n_shorter
        + int((lengths[:, 0] == lengths[:, 1]).sum())
        == 4000
    )
    # Rewards that define the outcome are calibrated; four times larger they are overconfident and equally accurate.
    truth = torch.randn(4000, 2, generator=draw)
    chosen = torch.rand(4000, generator=draw) < torch.sigmoid(truth[:, 0] - truth[:, 1])
    honest = torch.where(chosen[:, None], truth, truth.flip(1))
    good, overconfident = make_reward_report(honest, lengths), make_reward_report(4 * honest, lengths)
    assert (
        good.calibration.expected_error < 0.03 < 0.15 < overconfident.calibration.expected_error
        and good.accuracy == overconfident.accuracy
    )
    assert (
        abs(good.length_bias.reward_correlation) < 0.05
        and abs(good.length_bias.model_longer_fraction - 0.5) < 0.05
    )
    json.dumps(overconfident.to_json(), allow_nan=False)
    assert "calibration error" in overconfident.table() and len(overconfident.table().splitlines()) >= 8
    same = make_reward_report(torch.zeros(3, 2), torch.ones(3, 2))
    assert (
        same.accuracy == 0.5
        and np.isnan(same.length_bias.model_longer_fraction)
        and np.isnan(same.length_bias.reward_correlation)
    )
    json.dumps(same.to_json(), allow_nan=False)
    assert "nan" not in same.table() and "no pair has completions of different length" in same.table()
    one_way = make_reward_report(
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3, 2], [2, 1]])
    ).table()
    assert "nan" not in one_way and "50.0% of 2, where the shorter one was: - of 0" in one_way
    assert np.isnan(correlation(torch.ones(3), torch.arange(3.0)))
    with pytest.raises(DataError, match="no pairs"):
        evaluate_reward_model(RewardModel(decoder()), [])
