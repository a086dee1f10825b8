"""How far apart sampler and trainer are in fp32, beside how far each is from the same network in fp64.

.venv/bin/python bench/align/logprob_parity.py [--steps 300] [--texts 2000] [--quick]

The models of `align_distil.py` (its student's and its teacher's shape), fine-tuned on worked sums until they are sure of
themselves. Each answers new sums at temperature 1; of every id that was sampled three log-probabilities are taken: the
engine's, with which it was drawn, the trainer's in fp32, and that of the same weights in fp64 by the definition. Where the
two in fp32 lie as far from fp64 as from each other, it is not that one of them is wrong: the position is one at which the
network makes much of little, and rounding of the seventh digit is all it takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim
from bench.align.distillation import ANSWERS, FORBIDDEN, LENGTH, SCRIBE, SHAPE, sums, taught, texts_of
from torch import Tensor

from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import policy_sampling, rollout_engine, sample_completions
from whorl.models import LanguageModel, make_model
from whorl.objectives.log_probs import token_log_probs_reference
from whorl.tracking.seeds import generator

WIDTHS = {"the student's": 64, "the teacher's": 128}


def apart(model: LanguageModel, n: int) -> dict[str, Tensor]:
    """Distances [ids] of what `model` says of the ids that an engine samples with it, in nats."""
    model.requires_grad_(False).eval()
    prompts = [SCRIBE.prompt(f"{p.expression}\n") for p in sums(5, n, held_out=True)]
    engine = rollout_engine(model, SCRIBE, sequences=64, max_length=LENGTH)
    found = sample_completions(
        engine, prompts, policy_sampling(1.0), max_tokens=ANSWERS, stop_ids=SCRIBE.stop_ids, seed=0
    )
    rows = [[*prompt, *one.ids] for prompt, one in zip(prompts, found, strict=True)]
    ids = torch.full((len(rows), max(map(len, rows))), -1)
    drawn = torch.zeros(ids.shape, dtype=torch.float64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for n_row, (row, one) in enumerate(zip(rows, found, strict=True)):
        own = slice(len(row) - len(one.ids), len(row))
        ids[n_row, : len(row)] = torch.tensor(row)
        drawn[n_row, own], mask[n_row, own] = torch.tensor(one.log_probs, dtype=torch.float64), True
    used = (ids[:, 1:] >= 0).long()
    ids, mask = ids.clamp(min=0), mask[:, 1:]
    part = {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask,
        "sequence": torch.where(used > 0, torch.arange(len(rows))[:, None], -1),
    }  # fmt: skip
    model.context_hint = LENGTH
    network = PolicyModel(model, banned_ids=FORBIDDEN)
    trainer = network.score(part)["log_prob"][mask].double()
    exact = make_model(model.config, torch.Generator(), torch.float64).double()
    exact.load_state_dict(model.state_dict())
    exact.context_hint = LENGTH
    with torch.no_grad():
        hidden = PolicyModel(exact).hidden(part)[mask]
        truth, _ = token_log_probs_reference(
            hidden, exact.head_weight, part["targets"][mask], softcap=exact.logit_softcap,
            banned_mask=network.banned_mask,
        )  # fmt: skip
    engine_said = drawn[:, 1:][mask]
    return {
        "engine and trainer": (engine_said - trainer).abs(),
        "engine and fp64": (engine_said - truth).abs(),
        "trainer and fp64": (trainer - truth).abs(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--texts", type=int, default=2000, help="answers to each model's new sums")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps, n = (20, 100) if given.quick else (given.steps, given.texts)
    worst: dict[str, float] = {}
    samples: list[Any] = []
    print("| model | ids | between | mean | 99.9 % are below | largest |\n|---|---|---|---|---|---|")
    for name, width in WIDTHS.items():
        shape = SHAPE.model_copy(update={"d_model": width, "head_dim": width // 4, "mlp_hidden": 3 * width})
        model = make_model(shape, generator(0, name))
        taught(model, texts_of(sums(1000, 7900)), steps, 0, rows=48)
        for pair, distance in apart(model, n).items():
            figures = [float(x) for x in (distance.mean(), distance.quantile(0.999), distance.max())]
            print(
                f"| {name} | {len(distance):,} | {pair} | " + " | ".join(f"{x:.1e}" for x in figures) + " |"
            )
            worst[pair] = max(worst.get(pair, 0.0), figures[-1])
            samples.append([name, pair, len(distance), *figures])
    ours, peer = worst["engine and trainer"], worst["trainer and fp64"]
    claim(
        "the largest distance between sampler and trainer in fp32; beside it the trainer's from fp64",
        ours=ours, peer=peer, unit="nats", ratio=ours / peer, bar=1e-4, ok=ours < 1e-4, samples=samples,
        quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
