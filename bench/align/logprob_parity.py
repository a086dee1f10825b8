"""Log-probability difference between engine and trainer in fp32, against their differences from fp64.

    python bench/align/logprob_parity.py [--steps 300] [--texts 2000] [--quick]

The models have the shapes of `distillation.py` (student and teacher). They are fine-tuned on worked sums until their
predictions are confident. Each answers new sums at temperature 1. Every sampled id has three log-probabilities: the
engine's, the trainer's in fp32, and that of the same weights in fp64 by the definition. If both fp32 values differ from
fp64 as much as from each other, neither implementation is wrong. The network amplifies small inputs at that position,
and rounding in the seventh digit explains the difference.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse, sized
from bench.align.distillation import (
    BANNED,
    ENCODER,
    LENGTH,
    MAX_COMPLETION,
    TEACHER_TEXTS,
    fine_tuned,
    shape_of,
    sums,
    texts_of,
)
from torch import Tensor

from whorl.align.model.policy_model import PolicyModel
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.models import LanguageModel, make_model
from whorl.objectives.log_probs import token_log_probs_reference
from whorl.tracking.seeds import generator

WIDTHS = {"student": 64, "teacher": 128}


def differences(model: LanguageModel, n: int) -> dict[str, Tensor]:
    """Return absolute differences [ids] of log-probabilities of sampled ids, in nats, by pair of implementations."""
    model.requires_grad_(False).eval()
    prompts = [ENCODER.prompt(f"{p.expression}\n") for p in sums(5, n, held_out=True)]
    engine = open_engine(model, (64, LENGTH), ENCODER, with_text=False)
    found = sample_completions(
        engine,
        prompts,
        policy_sampling(1.0),
        max_tokens=MAX_COMPLETION,
        stop_ids=ENCODER.stop_ids,
        seed=0,
    )
    rows = [[*prompt, *one.ids] for prompt, one in zip(prompts, found, strict=True)]
    ids = torch.full((len(rows), max(map(len, rows))), -1)
    engine_log_prob = torch.zeros(ids.shape, dtype=torch.float64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for n_row, (row, one) in enumerate(zip(rows, found, strict=True)):
        own = slice(len(row) - len(one.ids), len(row))
        ids[n_row, : len(row)] = torch.tensor(row)
        engine_log_prob[n_row, own], mask[n_row, own] = torch.tensor(one.log_probs, dtype=torch.float64), True
    used = (ids[:, 1:] >= 0).long()
    ids, mask = ids.clamp(min=0), mask[:, 1:]
    part = {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask,
        "sequence": torch.where(used > 0, torch.arange(len(rows))[:, None], -1),
    }  # fmt: skip
    model.context_hint = LENGTH
    network = PolicyModel(model, banned_ids=BANNED)
    trainer = network.score(part)["log_prob"][mask].double()
    exact = make_model(model.config, torch.Generator(), torch.float64).double()
    exact.load_state_dict(model.state_dict())
    exact.context_hint = LENGTH
    with torch.no_grad():
        hidden = PolicyModel(exact).hidden(part)[mask]
        exact_log_prob, _ = token_log_probs_reference(
            hidden, exact.head_weight, part["targets"][mask], softcap=exact.logit_softcap,
            banned_mask=network.banned_mask,
        )  # fmt: skip
    sampled_log_prob = engine_log_prob[:, 1:][mask]
    return {
        "engine and trainer": (sampled_log_prob - trainer).abs(),
        "engine and fp64": (sampled_log_prob - exact_log_prob).abs(),
        "trainer and fp64": (trainer - exact_log_prob).abs(),
    }


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=300)
        parser.add_argument("--texts", type=int, default=2000, help="completions of each model")
        parser.add_argument("--quick", action="store_true")

    given = parse(__doc__, arguments, smoke={"quick": True})
    torch.set_num_threads(1)
    steps, n = sized((20, 100), (2, 4)) if given.quick else (given.steps, given.texts)
    worst: dict[str, float] = {}
    samples: list[Any] = []
    print("| model | ids | pair | mean | 99.9th percentile | maximum |\n|---|---|---|---|---|---|")
    for name, width in WIDTHS.items():
        shape = shape_of(width)
        model = make_model(shape, generator(0, name))
        fine_tuned(model, texts_of(sums(1000, TEACHER_TEXTS)), steps, 0, rows=48)
        for pair, distance in differences(model, n).items():
            figures = [float(x) for x in (distance.mean(), distance.quantile(0.999), distance.max())]
            print(
                f"| {name} | {len(distance):,} | {pair} | " + " | ".join(f"{x:.1e}" for x in figures) + " |"
            )
            worst[pair] = max(worst.get(pair, 0.0), figures[-1])
            samples.append([name, pair, len(distance), *figures])
    ours, peer = worst["engine and trainer"], worst["trainer and fp64"]
    claim(
        "largest log-probability difference between engine and trainer in fp32",
        ours=ours, peer=peer, peer_name="trainer and fp64", unit="nats", ratio=ours / peer, bar=1e-4, ok=ours < 1e-4,
        samples=samples,
        quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
