"""Objectives against the loss code of TRL 1.16 on the same tensors: its methods called unbound, on small fakes.

Where the definitions agree, values and gradients agree to 1e-6. Differences:

- "grpo": TRL averages over all rows, also those without a token, and under accumulation averages micro-batch means.
  Whorl counts sequences with a token and divides once, so the split does not matter.
- Dr. GRPO: the same under accumulation. Rows without tokens count on both sides.
- "bnpo" is token aggregation within one micro-batch. "dapo" divides by the tokens of the whole batch, as Whorl does.
- Entropy bonus: TRL averages over tokens, Whorl follows the aggregation. They agree for token aggregation.
- Group advantages: both divide by the unbiased deviation plus 1e-4. For equal rewards TRL divides rounding by 1e-4,
  and Whorl returns 0.
- DPO: TRL 1.16 has no label smoothing in its sigmoid loss. "robust" is another objective (arXiv:2403.00409).
- IPO: TRL's is per token. KTO: TRL's reference point is of one micro-batch, here it is an argument.
- ORPO: the odds ratio agrees. TRL's SFT term averages over the tokens of the micro-batch, here over each completion, as
  printed.
- SimPO, the reward loss and the three divergences agree.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.nn.checks import assert_same_gradients
from torch import Tensor
from torch.testing import assert_close

from whorl.objectives.advantages.group_advantages import group_advantages
from whorl.objectives.distil import divergence
from whorl.objectives.llm_policy import PRESETS, CompletionTokens, PolicyLossConfig, policy_loss
from whorl.objectives.preference import PairLogProbs, dpo, ipo, kto, kto_kl, orpo, simpo
from whorl.objectives.reward import bradley_terry

pytest.importorskip("trl", minversion="1.16")

B, T = 6, 9
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def same(x: Any, **_: Any) -> Any:
    return x


GATHER = {"gather": same, "reduce": same, "gather_for_metrics": same}
ALONE = SimpleNamespace(num_processes=1, device=torch.device("cpu"), **GATHER)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Return rows [B, T] as in TRL: completions, right-padded; advantage [B]."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    log_prob = -3 * torch.rand(B, T, generator=g)
    behaviour, reference = log_prob + 0.3 * torch.randn(2, B, T, generator=g)
    return {
        "mask": (torch.arange(T) < lengths[:, None]).float(), "log_prob": log_prob.requires_grad_(),
        "behaviour": behaviour.detach(), "reference": reference.detach(), "advantage": torch.randn(B, generator=g),
        "entropy": torch.rand(B, T, generator=g).requires_grad_(),
    }  # fmt: skip


def trainer(**fields: Any) -> SimpleNamespace:
    """Return a fake trainer with the fields that all of TRL's losses read."""
    common = {"accelerator": ALONE, "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    counters = {"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    return SimpleNamespace(**{**common, **counters, **fields})


def trl_grpo(rows: dict[str, Tensor], method: PolicyLossConfig, loss_type: str) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    fake = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (rows["log_prob"], rows["entropy"], None),
        args=SimpleNamespace(delta=method.dual_clip, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=method.ratio,
        beta=method.kl_coef, loss_type=loss_type, epsilon_low=method.clip_low, epsilon_high=method.clip_high,
        use_vllm=False, current_gradient_accumulation_steps=1, max_completion_length=T,
        _entropy_bonus_enabled=method.entropy_coef > 0, entropy_coef=method.entropy_coef,
        use_adaptive_entropy=False, accelerator=SimpleNamespace(**vars(ALONE), sync_gradients=True),
    )  # fmt: skip
    ids = torch.zeros(B, T, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": rows["mask"],
        "advantages": rows["advantage"], "old_per_token_logps": rows["behaviour"],
        "ref_per_token_logps": rows["reference"], "num_items_in_batch": rows["mask"].sum(),
    }  # fmt: skip
    found: Tensor = GRPOTrainer._compute_loss(fake, None, inputs)
    return found


def ours(rows: dict[str, Tensor], method: PolicyLossConfig) -> Tensor:
    keep = rows["mask"].bool()
    sequence = torch.arange(B)[:, None].expand(-1, T)[keep]
    tokens = CompletionTokens(
        rows["log_prob"][keep], rows["behaviour"][keep], rows["advantage"][sequence], sequence, B,
        reference_log_prob=rows["reference"][keep], entropy=rows["entropy"][keep],
    )  # fmt: skip
    loss = policy_loss(tokens, method)
    return loss.total / loss.count


def agree(first: Tensor, second: Tensor, leaves: list[Tensor]) -> None:
    assert_close(first, second, atol=1e-6, rtol=1e-6)
    assert_same_gradients(first, second, leaves, allow_unused=True, atol=1e-6, rtol=1e-5)


GRPO = replace(PRESETS["grpo"], clip_low=0.2, clip_high=0.2)
POLICIES = [
    ("grpo", GRPO),
    ("grpo", replace(GRPO, dual_clip=1.3, kl_coef=0.0)),
    ("dr_grpo", replace(PRESETS["dr_grpo"], constant=float(T))),
    ("dr_grpo", replace(PRESETS["dr_grpo"], constant=float(T), kl_coef=0.5)),
    ("dapo", replace(PRESETS["dapo"], entropy_coef=0.1)),
    ("bnpo", replace(GRPO, aggregation="token")),
    ("grpo", replace(PRESETS["gspo"], clip_low=0.03, clip_high=0.04)),
]


@pytest.mark.parametrize(("loss_type", "method"), POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_matches_trl(loss_type: str, method: PolicyLossConfig, seed: int) -> None:
    rows = drawn(seed)
    agree(ours(rows, method), trl_grpo(rows, method, loss_type), [rows["log_prob"], rows["entropy"]])


def test_empty_rows_count_in_trl_only() -> None:
    rows = drawn()
    rows["mask"][0] = 0
    desired = trl_grpo(rows, GRPO, "grpo")
    agree(ours(rows, GRPO) * (B - 1) / B, desired, [rows["log_prob"]])
    constant = replace(PRESETS["dr_grpo"], constant=float(T))
    agree(ours(rows, constant), trl_grpo(rows, constant, "dr_grpo"), [rows["log_prob"]])


def test_group_advantages_match_trl() -> None:
    from trl.trainer.grpo_trainer import nanstd

    reward = torch.randn(12, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    grouped = reward.view(-1, 4)
    desired = (grouped - grouped.mean(1, keepdim=True)) / (nanstd(grouped, dim=1)[:, None] + 1e-4)
    found = group_advantages(reward, torch.arange(12) // 4, scale_rewards="unbiased", eps=1e-4).advantage
    assert_close(found, desired.flatten(), atol=1e-6, rtol=1e-6)
    of_batch = (grouped - grouped.mean(1, keepdim=True)) / (nanstd(reward) + 1e-4)  # scale_rewards="batch"
    found = group_advantages(
        reward, torch.arange(12) // 4, scale_rewards="unbiased", scale_over="batch", eps=1e-4
    ).advantage
    assert_close(found, of_batch.flatten(), atol=1e-6, rtol=1e-6)


def head_output(rows: dict[str, Tensor]) -> SimpleNamespace:
    """Return the output of TRL's fused head: zeros outside the loss."""
    entropy = rows["entropy"]
    log_probs, is_top1 = rows["log_prob"] * rows["mask"], rows["mask"].bool()
    return SimpleNamespace(log_probs=log_probs, entropy=entropy, mean_logits=entropy, is_top1=is_top1)


def a_preference(rows: dict[str, Tensor], **more: Any) -> tuple[SimpleNamespace, dict[str, Tensor], Tensor]:
    """Return (fake trainer, inputs, summed reference log-probabilities [B])."""
    reference = (rows["reference"] * rows["mask"]).sum(1)
    fake = trainer(precompute_ref_logps=True, beta=0.3, **more)
    ids = torch.zeros(B, T + 1, dtype=torch.int64)
    mask = torch.cat([torch.zeros(B, 1), rows["mask"]], 1)
    return fake, {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}, reference


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@pytest.mark.parametrize("seed", range(3))
def test_dpo_and_ipo_match_trl(kind: str, seed: int) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    rows = drawn(seed)
    options = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
    fake, inputs, reference = a_preference(rows, loss_types=[kind], loss_weights=[1.0], **options)
    refs = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference.chunk(2), strict=True))
    desired = DPOTrainer._compute_loss(fake, lambda **_: head_output(rows), {**inputs, **refs}, False)
    chosen, rejected = (rows["log_prob"] * rows["mask"]).sum(1).chunk(2)
    pairs = PairLogProbs(chosen, rejected, *reference.chunk(2), *rows["mask"].sum(1).chunk(2))
    loss = dpo(pairs, beta=0.3) if kind == "sigmoid" else ipo(pairs, beta=0.3, length_normalized=True)
    agree(loss.total / loss.count, desired, [rows["log_prob"]])
    if kind == "sigmoid":
        for name, metric in (("accuracies", "accuracy"), ("margins", "margin"), ("chosen", "chosen")):
            trl_value = fake._metrics["train"][f"rewards/{name}"][0]
            assert float(loss.metrics[f"rewards/{metric}"] / loss.count) == pytest.approx(trl_value, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_kto_matches_trl(seed: int) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    rows, mismatched = drawn(seed), torch.randn(2, B, generator=torch.Generator().manual_seed(seed))
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    options = {"calculate_KL": True, "loss_type": "kto", "_compute_kl_logps": lambda *_: mismatched[0]}
    fake, inputs, reference = a_preference(rows, **options, **weights)
    good = torch.tensor([True, False, True, True, False, False])
    more = {"label": good, "ref_logps": reference, "ref_KL_logps": mismatched[1]}
    desired = KTOTrainer._compute_loss(fake, lambda **_: head_output(rows), {**inputs, **more}, False)
    log_prob = (rows["log_prob"] * rows["mask"]).sum(1)
    loss = kto(log_prob, reference, good, kto_kl(*mismatched), beta=0.3, **weights)
    agree(loss.total / loss.count, desired, [rows["log_prob"]])


def test_orpo_and_simpo_match_trl() -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    rows = drawn()
    chosen, rejected = (rows["log_prob"] * rows["mask"]).sum(1).chunk(2)
    lengths = rows["mask"].sum(1).chunk(2)
    pairs = PairLogProbs(chosen, rejected, None, None, *lengths)
    means = chosen / lengths[0], rejected / lengths[1]
    desired = ORPOTrainer.odds_ratio_loss(trainer(beta=0.4), *means)[0]
    agree(orpo(pairs, weight=0.4).total + means[0].sum(), -desired.sum(), [rows["log_prob"]])
    fake = trainer(alpha=0.0, beta=2.0, simpo_gamma=0.7, loss_type="simpo", label_smoothing=0.0)
    desired = CPOTrainer.cpo_loss(fake, *means)[0].sum()
    agree(simpo(pairs, beta=2.0, gamma=0.7).total, desired, [rows["log_prob"]])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_matches_trl(beta: float) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 7, generator=g).requires_grad_()
    desired = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=beta, reduction="sum")
    kind: Any = {0.0: "forward", 1.0: "reverse"}.get(beta, "jensen")
    found = divergence(teacher.log_softmax(-1), student.log_softmax(-1), kind, beta).sum()
    agree(found, desired, [student])


def test_reward_model_matches_trl() -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    g = torch.Generator().manual_seed(0)
    scores, margin = torch.randn(8, generator=g).requires_grad_(), torch.rand(4, generator=g)
    fake = trainer(args=SimpleNamespace(center_rewards_coefficient=0.01))
    inputs = {"margin": margin, "attention_mask": torch.ones(8, 2)}
    desired = RewardTrainer.compute_loss(fake, lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    loss = bradley_terry(scores[:4], scores[4:], margin=margin, center_rewards_coef=0.01)
    agree(loss.total / loss.count, desired, [scores])
