"""Small inputs of SFT, preference and reward-model stages, shared by the tests of stages, devices and replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.align.byte_model import network, scribe, sums, tokenizer
from tests.support.align.kill_at_step import Killed
from whorl.align.config import PreferenceConfig, RewardConfig, SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.pairs import PreferencePair
from whorl.align.stage.sft import fine_tune
from whorl.models.transformer_config import AttentionConfig, MoEConfig, TransformerConfig
from whorl.tokens.shards import write_shards

SFT = SFTConfig(
    lr_scale=0.5, epochs=8, seq_len=48, batch_size=4, checkpoint_seconds=1e-9, micro_batch_tokens=96
)
PREFERENCE: dict[str, Any] = {"seq_len": 32, "lr_scale": 0.1, "optimizer": "adamw"}
MOE = TransformerConfig(
    vocab_size=264, d_model=32, n_layers=2, mlp_hidden=32, max_length=64,
    mixers={"full": AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16)},
    experts=MoEConfig(n_experts=4, top_k=2, hidden=16, bias_balance=True),
)  # fmt: skip


class StoredDocument(NamedTuple):
    id: str
    source: str
    path: str
    offset: int
    text: str


def write_replay_tokens(folder: Path) -> Path:
    """Write the token set of 40 short documents into `folder`."""
    documents = [StoredDocument(f"{n}", "test", f"{n}.txt", 0, f"x = {n}\n" * 20) for n in range(40)]
    write_shards(documents, tokenizer(), folder, "train")  # type: ignore[arg-type]
    return folder


def train_sft(
    config: SFTConfig,
    net: PolicyModel | None = None,
    *,
    kill: int = 0,
    at: Callable[[int], None] = lambda step: None,
    **rest: Any,
) -> tuple[PolicyModel, list[dict[str, float]]]:
    """Fine-tune on 60 sums; return the network and the metrics of each step. kill: step that raises `Killed`."""
    net, history = net or network(lora=config.lora), []

    def callback(step: int, metrics: dict[str, float]) -> None:
        history.append(metrics)
        at(step)
        if step == kill:
            raise Killed

    fine_tune(net, sums(60), config, pad_id=tokenizer().pad_id, callback=callback, **rest)
    return net, history


def preference_config(objective: str = "dpo", **change: Any) -> PreferenceConfig:
    return PreferenceConfig.model_validate({"objective": objective, **PREFERENCE, "batch_size": 4, **change})


def reward_config(**change: Any) -> RewardConfig:
    return RewardConfig.model_validate({**PREFERENCE, "batch_size": 8, **change})


def make_pair(prompt: str, good: str, bad: str) -> PreferencePair:
    write = scribe().prompt_completion
    return PreferencePair(write(prompt, good), write(prompt, bad))


def letter_pairs(n: int = 12, seed: int = 0) -> list[PreferencePair]:
    """Return pairs with prompts of letters; the chosen completion repeats the first letter."""
    draw, found = np.random.default_rng(seed), []
    for _ in range(n):
        letters = "".join(draw.choice(list("abcdef"), draw.integers(1, 6)))
        good = letters[0] * int(draw.integers(1, 5))
        found.append(
            make_pair(letters + ">", good, "".join(draw.choice(list("uvwxyz"), draw.integers(1, 9))))
        )
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


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return whether all parameters have equal bits."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
