"""DPO, IPO, KTO, SimPO, ORPO and a reward model on a task with a known preference: win rates against the initial model.

    python bench/align/preferences.py [--seeds 5]
    python bench/align/preferences.py --quick    # DPO alone, one seed

The task: close all open brackets. A prompt opens 4 to 6 brackets of four kinds, `([<{`. The known preference counts the
faults of a completion: a bracket closed by one of another kind, one too many, or one that stays open. The initial model
is fine-tuned on careless texts, which close with the correct kind with probability 0.65, open another bracket, or stop
too early. Its win rate against itself is a half by construction, and is measured too. It completes 2,000 prompts twice.
The completion with fewer faults is preferred, ties are dropped, and the objectives train on these pairs. The win rate is
measured on 2,000 prompts that no stage used, one completion each at temperature 1; a tie counts half. The reward model
selects the best of four completions.

No training text is careful on purpose: every improvement comes from comparisons of the model's careless completions.
A seed takes about 20 s on one thread.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke

from whorl.align.config import PreferenceConfig, RewardConfig, SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.preference.dpo import train_preferences
from whorl.align.preference.pairs import PreferencePair, valid_pairs
from whorl.align.preference.reward_model import RewardModel, train_reward_model
from whorl.align.preference.reward_report import evaluate_reward_model
from whorl.align.stage.sft import fine_tune
from whorl.evals.model.sampling import (
    SampledCompletion,
    open_engine,
    policy_sampling,
    sample_completions,
)
from whorl.loop.known_preferences import CLOSE, OPEN, faults
from whorl.models import Transformer, whorl_decoder
from whorl.tokens.token_encoder import LengthFilter, TokenEncoder, concat
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator, numpy_rng

BAR = 0.8
HELD_OUT, SFT_PROMPTS, PAIR_PROMPTS = sized((2000, 16_000, 2000), (8, 64, 200))
LONGEST = 20
CORRECT, NEW, STOP = 0.65, 0.08, 0.04  # probabilities of the SFT texts
CONFIG = whorl_decoder(
    vocab_size=264, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=32, mlp_hidden=128, ngram_buckets=512,
)  # fmt: skip
# Overrides of each objective. All train on the same pairs, for two epochs unless overridden.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {}, "ipo": {}, "kto": {"data": {"batch_size": 128}}, "simpo": {}, "orpo": {"beta": 1.0, "data": {"epochs": 4.0}},
}  # fmt: skip


def careless(prompt: str, rng: np.random.Generator) -> str:
    """Return a completion with random faults."""
    opened, completion = list(prompt), ""
    while opened:
        drawn = rng.random()
        if drawn < STOP:
            break
        if drawn < STOP + NEW:
            opened.append(OPEN[rng.integers(4)])
            completion += opened[-1]
        else:
            correct = CLOSE[OPEN.index(opened.pop())]
            completion += correct if rng.random() < CORRECT else CLOSE[rng.integers(4)]
    return completion


class Contest:
    """One seed: prompts, the initial model, pairs of its completions, and its completions of held-out prompts."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.encoder = TokenEncoder(Tokenizer([bytes([i]) for i in range(256)]))
        self.pad_id = self.encoder.tokenizer.pad_id
        rng = numpy_rng(seed, "brackets")
        prompts = ["".join(p) for n in (4, 5, 6) for p in itertools.product(OPEN, repeat=n)]
        order = rng.permutation(prompts).tolist()
        self.held, self.known = order[:HELD_OUT], order[HELD_OUT:]
        sft_prompts = [str(p) for p in rng.choice(self.known, SFT_PROMPTS)]
        texts = [self.encoder.prompt_completion(p, careless(p, rng)) for p in sft_prompts]
        limit = LengthFilter(24)
        texts = limit.tokenize(texts, lambda text: text)
        began = time.perf_counter()
        net = self.network()
        sft = SFTConfig(lr_scale=1.0, data={"seq_len": 24, "packing": False, "batch_size": 32}, seed=seed)
        fine_tune(net, texts, sft, pad_id=self.pad_id)
        self.seconds = {"sft": time.perf_counter() - began}
        self.weights = {name: t.clone() for name, t in net.merged_weights().items()}
        self.base = self.faults(self.weights, "base")
        self.again = self.faults(self.weights, "again")
        began = time.perf_counter()
        pair_prompts = [str(p) for p in rng.choice(self.known, PAIR_PROMPTS, replace=False)]
        self.pairs, self.rejected = self.compare(pair_prompts, "pairs")
        self.seconds["pairs"] = time.perf_counter() - began

    def model(self, weights: dict[str, torch.Tensor] | None = None) -> Transformer:
        model = Transformer(CONFIG, generator(self.seed, "weights"))
        if weights is not None:
            model.load_state_dict({**model.state_dict(), **weights})
        return model

    def network(self, weights: dict[str, torch.Tensor] | None = None) -> PolicyModel:
        out = self.encoder.banned_ids(CONFIG.vocab_size)
        return PolicyModel(self.model(weights), banned_ids=out)

    def answers(
        self, weights: dict[str, torch.Tensor], prompts: list[str], name: str
    ) -> list[SampledCompletion]:
        engine = open_engine(
            self.model(weights).requires_grad_(False).eval(),
            (128, 40),
            self.encoder,
            with_text=False,
        )
        ids = [self.encoder.prompt(p) for p in prompts]
        seed = int(numpy_rng(self.seed, "answers", name).integers(1 << 60))
        return sample_completions(
            engine,
            ids,
            policy_sampling(1.0),
            max_tokens=LONGEST,
            stop_ids=self.encoder.stop_ids,
            seed=seed,
        )

    def count_faults(self, prompts: list[str], found: list[SampledCompletion]) -> np.ndarray:
        return np.array(
            [faults(p, self.encoder.decode(one.ids)) for p, one in zip(prompts, found, strict=True)]
        )

    def faults(self, weights: dict[str, torch.Tensor], name: str) -> np.ndarray:
        return self.count_faults(self.held, self.answers(weights, self.held, name))

    def compare(self, prompts: list[str], name: str) -> tuple[list[PreferencePair], dict[str, int]]:
        """Return pairs of completions of the initial model, the better one first, and counts of rejected pairs."""
        both = [p for p in prompts for _ in range(2)]
        found = self.answers(self.weights, both, name)
        count = self.count_faults(both, found)
        pairs, limit = [], LengthFilter(40)
        for g, p in enumerate(prompts):
            one, other = count[2 * g], count[2 * g + 1]
            if one == other:
                limit.reject("equal numbers of faults")
                continue
            texts = [concat(self.encoder.prompt(p), found[2 * g + i].ids) for i in (0, 1)]
            pairs.append(PreferencePair(*(texts if one < other else texts[::-1])))
        return valid_pairs(self.encoder, pairs, limit), limit.rejected

    def win(self, count: np.ndarray) -> float:
        """Return the win rate of completions with `count` faults against the initial model."""
        return float(np.mean((count < self.base) + 0.5 * (count == self.base)))

    def learn(self, objective: str) -> dict[str, Any]:
        net, seen = self.network(self.weights), list[dict[str, float]]()
        change = OBJECTIVES[objective]
        rows = {"epochs": 2.0, "batch_size": 64, "seq_len": 40, **change.get("data", {})}
        given = {"objective": objective, "lr_scale": 0.3, "seed": self.seed, **change, "data": rows}
        config = PreferenceConfig.model_validate(given)
        began = time.perf_counter()
        train_preferences(net, self.pairs, config, pad_id=self.pad_id, callback=lambda _, m: seen.append(m))
        seconds = time.perf_counter() - began
        count = self.faults(net.merged_weights(), objective)
        last = seen[-5:]
        mean = {
            name: float(np.mean([m[name] for m in last]))
            for name in ("rewards/margin", "rewards/accuracy", "logps/chosen")
        }
        return {
            "objective": objective, "seed": self.seed, "win": round(self.win(count), 4),
            "initial": round(self.win(self.again), 4), "faultless": round(float((count == 0).mean()), 4),
            "faultless_before": round(float((self.base == 0).mean()), 4), "pairs": len(self.pairs),
            "seconds": round(seconds, 1), "logps/chosen before": round(seen[0]["logps/chosen"], 3),
            **{name: round(value, 3) for name, value in mean.items()},
        }  # fmt: skip

    def reward(self) -> dict[str, Any]:
        """Train a reward model on the same pairs; return its accuracy on other pairs and its best-of-four win rate."""
        model = RewardModel(self.model(self.weights), seed=self.seed)
        config = RewardConfig(
            lr_scale=0.3, data={"epochs": 2, "batch_size": 64, "seq_len": 40}, seed=self.seed
        )
        began = time.perf_counter()
        train_reward_model(model, self.pairs, config, pad_id=self.pad_id)
        seconds = time.perf_counter() - began
        found = evaluate_reward_model(model, self.compare(self.held, "report")[0])
        print(found.table(), flush=True)
        prompts = [p for p in self.held for _ in range(4)]
        completions = self.answers(self.weights, prompts, "best of four")
        texts = [concat(self.encoder.prompt(p), one.ids) for p, one in zip(prompts, completions, strict=True)]
        best = model.score_examples(texts).view(-1, 4).argmax(1).numpy()
        count = self.count_faults(prompts, completions).reshape(-1, 4)
        return {
            "objective": "reward model, best of 4", "seed": self.seed, "seconds": round(seconds, 1),
            "win": round(self.win(count[np.arange(len(best)), best]), 4),
            "win_of_fewest_faults": round(self.win(count.min(1)), 4),
            "accuracy": round(found.accuracy, 4), "calibration_error": round(found.calibration.expected_error, 4),
        }  # fmt: skip


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--quick", action="store_true", help="DPO alone, one seed")

    a = parse(__doc__, arguments, smoke={"quick": True})
    torch.set_num_threads(1)
    rows, n = [], 1 if a.quick else a.seeds
    objectives = ["dpo"] if a.quick and not smoke() else list(OBJECTIVES)
    for seed in range(n):
        contest = Contest(seed)
        if seed == 0:
            print(f"rejected pairs: {contest.rejected}; {contest.seconds}", flush=True)
        for objective in objectives:
            rows.append(contest.learn(objective))
            print(rows[-1], flush=True)
        if len(objectives) > 1:
            rows.append(contest.reward())
            print(rows[-1], flush=True)
    print(
        "| objective | win rate of each seed | mean | log-probability of the chosen per token, before and after |"
    )
    print("|---" * 4 + "|")
    for objective in objectives:
        own = [row for row in rows if row["objective"] == objective]
        each = ", ".join(f"{row['win']:.1%}" for row in own)
        before, after = (
            float(np.mean([row[k] for row in own])) for k in ("logps/chosen before", "logps/chosen")
        )
        print(
            f"| {objective} | {each} | {np.mean([r['win'] for r in own]):.1%} | {before:.2f}, {after:.2f} |"
        )
    wins = [row["win"] for row in rows if row["objective"] == "dpo"]
    initial = [row["initial"] for row in rows if row["objective"] == "dpo"]
    claim(
        "win rate of DPO against its initial model, worst of the seeds", ours=min(wins),
        peer=round(float(np.mean(initial)), 4), peer_name="initial model", unit="win rate", ratio=min(wins), bar=BAR,
        ok=min(wins) >= BAR,
        samples=rows, quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
