"""Arithmetic from random weights: what SFT and GRPO each add, over seeds.

    python bench/align/arithmetic.py [--seeds 5] [--quick] [--algorithms grpo,dr_grpo]

The stages are those of the recipe `align-arithmetic`. A randomly initialized decoder of 0.86 M parameters first trains
on worked solutions of two-digit sums and differences, and of three terms in sequence. Then it trains for three epochs
on texts of which nine in ten hold the answer only. It cannot compute such an answer without the digits in between. Then
GRPO trains with reward 1 for the correct number at the end and 0 otherwise. Results per seed: greedy accuracy on 300
held-out problems after each stage, seconds, and the largest log-probability difference between engine and trainer.

Two seeds run at a time, with one thread each. With several algorithms each one starts from the same SFT model. The mean
length of correct and incorrect completions is reported for the first and last tenth of its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke

BASE_PROBLEMS, SFT_PROBLEMS, STEPS, HELD_OUT = sized((20_000, 1_500, 80, 300), (40, 40, 1, 8))
GROUPS, GROUP_SIZE, COMPLETION = sized((32, 8, 80), (2, 4, 24))
# Expert iteration draws as many samples as the others, in ten batches, and takes more updates of each.
SETTINGS: dict[str, dict[str, Any]] = {
    "expert_iteration": {
        "steps": sized(10, 1), "prompts_per_step": sized(256, 2), "update": {"epochs": 2, "minibatches": sized(32, 1)}
    }
}  # fmt: skip


def pipeline(seed: int, algorithms: list[str], quick: bool) -> dict[str, Any]:
    """Run one seed in this process and return its results."""
    import torch

    from whorl.align.config import SFTConfig
    from whorl.align.data.arithmetic import ANSWER_PREFIX, Arithmetic
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.rl.config import RLConfig
    from whorl.align.rl.evaluation import evaluate_tasks
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import make_policy_model
    from whorl.align.stage.sft import fine_tune
    from whorl.models import make_model, whorl_decoder
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator, numpy_rng

    torch.set_num_threads(1)
    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    encoder, pad = TokenEncoder(tokenizer), tokenizer.pad_id
    source = Arithmetic(seed=seed, weights={1: 2.0, 2: 1.0, 5: 1.0}, digit_by_digit=True)
    shape = whorl_decoder(
        vocab_size=264,
        d_model=128,
        n_layers=4,
        mlp_hidden=384,
        n_heads=4,
        n_kv_heads=4,
        head_dim=32,
        ngram_buckets=512,
    )
    held_out = [source.task(p) for p in source.distinct(min(60, HELD_OUT) if quick else HELD_OUT)]
    result: dict[str, Any] = {"seed": seed, "solved": {}, "seconds": {}}
    base = make_model(shape, generator(seed, "weights"))
    network = make_policy_model(base, encoder, SFTConfig(), context_hint=256)

    def evaluate(stage: str) -> None:
        found = evaluate_tasks(network, encoder, held_out, max_tokens=COMPLETION, length=112)
        result["solved"][stage] = found.measure("passed").value

    def train(stage: str, texts: list[Any], lr_scale: float, epochs: float = 1.0) -> None:
        began = time.perf_counter()
        config = SFTConfig(
            lr_scale=lr_scale, data={"epochs": epochs, "seq_len": 256, "batch_size": 4}, seed=seed
        )
        fine_tune(network, texts, config, pad_id=pad)
        result["seconds"][stage] = time.perf_counter() - began
        evaluate(stage)

    evaluate("untrained")
    base_problems = source.problems(0, min(1_000, BASE_PROBLEMS) if quick else BASE_PROBLEMS)
    train(
        "base",
        [encoder.prompt_completion(source.prompt(p), source.solution(p)) for p in base_problems],
        0.7,
    )
    rng = numpy_rng(seed, "short")
    sft_problems = source.problems(10**6, min(200, SFT_PROBLEMS) if quick else SFT_PROBLEMS)
    completions = [
        f"{ANSWER_PREFIX}{p.answer}" if rng.random() < 0.9 else source.solution(p) for p in sft_problems
    ]
    train(
        "sft",
        [
            encoder.prompt_completion(source.prompt(p), s)
            for p, s in zip(sft_problems, completions, strict=True)
        ],
        0.15,
        3.0,
    )
    tasks = [source.task(p) for p in sft_problems]
    if smoke():  # a model this untrained solves nothing, and expert iteration needs an answer that passes
        tasks = [replace(task, verifier="format((?s:.*))") for task in tasks]
    sft_weights = {name: p.detach().clone() for name, p in network.model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for algorithm in algorithms:
            with torch.no_grad():
                for name, p in network.model.named_parameters():
                    p.copy_(sft_weights[name])
            usual = {
                "steps": min(4, STEPS) if quick else STEPS, "prompts_per_step": GROUPS, "group_size": GROUP_SIZE,
                "max_completion_tokens": COMPLETION, "max_seq_len": 112, "lr_scale": 0.05, "optimizer": "adamw",
            }  # fmt: skip
            config = RLConfig(algorithm=algorithm, seed=seed, **{**usual, **SETTINGS.get(algorithm, {})})
            worker = RolloutWorker(
                shape, "float32", Path(folder), tasks, GROUP_SIZE, COMPLETION, 112, 1.0,
                Curriculum([t.difficulty for t in tasks], rule="uniform"),
            )  # fmt: skip
            curve: list[dict[str, float]] = []
            began = time.perf_counter()
            train_policy(network, worker, config, callback=lambda s, m, e, to=curve: to.append(m))
            result["seconds"][algorithm] = time.perf_counter() - began
            evaluate(algorithm)
            tenth = max(1, len(curve) // 10)
            result[algorithm] = {
                "logprob_diff_max": max(m["logprob_diff_max"] for m in curve),
                "accuracy": [round(m["accuracy"], 3) for m in curve[::tenth]],
                **{
                    f"{name}/{when}": sum(m[f"completion_length/{name}"] for m in part) / tenth
                    for name in ("correct", "incorrect")
                    for when, part in (("first", curve[:tenth]), ("last", curve[-tenth:]))
                },
            }
    return result


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--algorithms", default="grpo")
        parser.add_argument("--one", type=int, help="run a single seed and print its results as JSON")

    given = parse(__doc__, arguments, smoke={"quick": True})
    if given.one is not None:
        print(json.dumps(pipeline(given.one, given.algorithms.split(","), given.quick)))
        return
    seeds = range(1 if given.quick else given.seeds)

    def run(seed: int) -> dict[str, Any]:
        if smoke():
            found = pipeline(seed, given.algorithms.split(","), given.quick)
        else:
            command = [sys.executable, __file__, "--one", str(seed), "--algorithms", given.algorithms]
            command += ["--quick"] if given.quick else []
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
        solved = ", ".join(f"{stage} {share:.1%}" for stage, share in found["solved"].items())
        print(f"seed {seed}: {solved}; {sum(found['seconds'].values()):.0f} s", flush=True)
        return found

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, seeds))
    for algorithm in given.algorithms.split(","):
        worst = min(f["solved"][algorithm] for f in found)
        start = max(f["solved"]["untrained"] for f in found)
        lengths = {
            key: sum(f[algorithm][key] for f in found) / len(found)
            for key in ("correct/first", "correct/last", "incorrect/first", "incorrect/last")
        }
        print(algorithm, "completion lengths", {key: round(value, 1) for key, value in lengths.items()})
        claim(
            f"held-out sums solved after SFT and {algorithm}, worst of {len(found)} seeds",
            ours=worst, peer=start, peer_name="untrained, best seed", unit="accuracy", ratio=worst, bar=0.9,
            ok=worst >= 0.9 and start <= 0.1,
            samples=found, quick=given.quick, variant="" if algorithm == "grpo" else algorithm,
        )  # fmt: skip


if __name__ == "__main__":
    main()
