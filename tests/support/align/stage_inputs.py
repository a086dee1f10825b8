"""Small inputs of SFT, preference and reward-model stages, shared by the tests of stages, devices and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.align.byte_model import network, scribe, sums, tokenizer
from tests.support.align.kill_at_step import History, record
from tests.support.configs import nested
from tests.support.tiny import make_document, transformer_config
from whorl.align.config import PreferenceConfig, RewardConfig, SFTConfig, SFTDataConfig, StageTrainConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.pairs import PreferencePair
from whorl.align.stage.sft import fine_tune
from whorl.models.transformer_config import MoEConfig
from whorl.tokens.shards import write_shards
from whorl.train.config import RunConfig

PAD = tokenizer().pad_id
SFT = SFTConfig(
    lr_scale=0.5,
    data=SFTDataConfig(epochs=8, seq_len=48, batch_size=4),
    run=RunConfig(checkpoint_seconds=1e-9),
    train=StageTrainConfig(micro_batch_tokens=96),
)
PREFERENCE: dict[str, Any] = {"seq_len": 32, "lr_scale": 0.1, "optimizer": "adamw"}
MOE = transformer_config(mlp_hidden=32, experts=MoEConfig(n_experts=4, top_k=2, hidden=16, bias_balance=True))


def write_replay_tokens(folder: Path) -> Path:
    """Write the token set of 40 short documents into `folder`."""
    write_shards([make_document(f"x = {n}\n" * 20, n) for n in range(40)], tokenizer(), folder, "train")
    return folder


def train_stage(
    train: Any, net: Any, texts: Any, config: Any, *, kill: int = 0, at: Any = None, **rest: Any
) -> tuple[Any, History]:
    """Run a stage; return its network and the metrics of each step. `kill` and `at` as in `record`."""
    history, callback = record(kill, at)
    train(net, texts, config, pad_id=PAD, callback=callback, **rest)
    return net, history


def train_sft(config: SFTConfig, net: PolicyModel | None = None, **rest: Any) -> tuple[PolicyModel, History]:
    """Fine-tune on 60 sums. `rest` as in `train_stage`."""
    return train_stage(fine_tune, net or network(lora=config.model.lora), sums(60), config, **rest)


def preference_config(objective: str = "dpo", **change: Any) -> PreferenceConfig:
    return PreferenceConfig.model_validate(
        nested(**{"objective": objective, **PREFERENCE, "batch_size": 4, **change})
    )


def reward_config(**change: Any) -> RewardConfig:
    return RewardConfig.model_validate(nested(**{**PREFERENCE, "batch_size": 8, **change}))


def make_pair(prompt: str, good: str, bad: str) -> PreferencePair:
    write = scribe().prompt_completion
    return PreferencePair(write(prompt, good), write(prompt, bad))


def letter_pairs(n: int = 12, seed: int = 0) -> list[PreferencePair]:
    """Return pairs with prompts of letters; the chosen completion repeats the first letter."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(n):
        letters = "".join(draw.choice(list("abcdef"), draw.integers(1, 6)))
        good = letters[0] * int(draw.integers(1, 5))
        bad = "".join(draw.choice(list("uvwxyz"), draw.integers(1, 9)))
        found.append(make_pair(letters + ">", good, bad))
    return found


def density_pairs(n: int, seed: int = 0) -> list[PreferencePair]:
    """Return pairs; the better completion has more of the prompt's letter, at any length."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(n):
        letter, completions = str(draw.choice(list("abcd"))), []
        for share in (0.8, 0.2):
            size = int(draw.integers(3, 9))
            completions.append("".join(letter if draw.random() < share else "z" for _ in range(size)))
        good, bad = sorted(completions, key=lambda s: -s.count(letter) / len(s))
        if good.count(letter) * len(bad) > bad.count(letter) * len(good):
            found.append(make_pair(letter + ">", good, bad))
    return found


def assert_gradients_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare gradients up to the rounding of sums, relative to the largest one of each parameter."""
    for name, g in found.items():
        tolerance = 1e-5 * float(wanted[name].abs().max()) + 1e-6
        torch.testing.assert_close(g, wanted[name], rtol=1e-3, atol=tolerance)


def perturbed(net: PolicyModel, seed: int = 5, by: float = 0.03) -> PolicyModel:
    """Perturb the trained weights, so that policy and reference differ."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.requires_grad:
                p.add_((0.1 if "/b" in name else by) * torch.randn(p.shape, generator=draw))
    return net


def other_reference() -> PolicyModel:
    """Return a reference with lower log-probabilities, so that KTO's z is above 0."""
    return perturbed(network(), 7, 0.1)
