"""Environments of several turns: problems solved with a tool that the model cannot solve without, over seeds.

    python bench/align/tool_use.py [--seeds 5] [--environment calculator]
    python bench/align/tool_use.py --environment repair

`calculator`: products of two-digit numbers. In half of the texts the model calls the tool, in half it answers alone. Then
GRPO trains in the environment. Without the tool it sees as many direct answers, then GRPO trains on the verifier.

`repair`: a function adds a wrong constant, and the right one (1 to 9) is known only to its tests. The first attempt is
random. The output of the failing test determines the constant, and the model may try again (three attempts). In half of
the texts the second attempt is random, too. Without turns GRPO trains on one attempt.

The decoder starts from random weights. Both arms have equal weights, texts, steps and sizes. Results per seed: greedy
accuracy on held-out tasks after SFT and after GRPO, and the largest log-probability difference of engine and trainer.
Two seeds run at a time, with one thread each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke

TEXTS, EPOCHS, STEPS, HELD_OUT = sized((2_000, 3.0, 40, 100), (16, 1.0, 1, 4))
GROUPS, GROUP_SIZE = sized((8, 8), (2, 2))
ARMS = ("without", "with")
MARKERS = ["<|im_start|>", "<|im_end|>"]
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "calculator": {"name": "calculator", "max_turns": 3, "options": {"describe_tools": False}},
    "repair": {"name": "repair", "max_turns": 3},
}
LIMITS = {"calculator": (88, 224), "repair": (40, 384)}  # ids of a reply, ids of a rollout


def calculator_data(seed: int) -> tuple[dict[str, list[Any]], list[Any], list[Any]]:
    """Return (conversations of each arm, training tasks, held-out tasks)."""
    from whorl.align.data.arithmetic import ANSWER_PREFIX, Arithmetic
    from whorl.tracking.seeds import numpy_rng

    source, rng = Arithmetic(seed=seed, weights={8: 1.0}), numpy_rng(seed, "demonstrations")
    conversations: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    tasks = []
    for problem in source.problems(0, TEXTS):
        task = source.task(problem, chat=True)
        tasks.append(task)
        answer = {"role": "assistant", "content": f"{ANSWER_PREFIX}{problem.answer}"}
        call = {"name": "calculator", "arguments": {"expression": problem.expression}}
        calls = [
            {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
            {"role": "tool", "content": str(problem.answer)},
        ]
        conversations["without"].append([*task.messages, answer])
        conversations["with"].append([*task.messages, *(calls if rng.random() < 0.5 else []), answer])
    return conversations, tasks, [source.task(p, chat=True) for p in source.distinct(HELD_OUT)]


def repair_data(seed: int) -> tuple[dict[str, list[Any]], list[Any], list[Any]]:
    """Return (conversations of each arm, training tasks, held-out tasks); one task in ten is held out."""
    from whorl.evals.verify.task import VerifiableTask
    from whorl.tracking.seeds import derive, numpy_rng

    rng = numpy_rng(seed, "programs")

    def program(constant: int) -> str:
        return f"def f(a):\n    return a + {constant}\n"

    def guess(*wrong: int) -> int:
        return int(rng.choice([c for c in range(1, 10) if c not in wrong]))

    conversations: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    tasks, held_out = [], []
    while len(tasks) < TEXTS or len(held_out) < HELD_OUT:
        x, right = int(rng.integers(0, 10)), int(rng.integers(1, 10))
        broken = guess(right)
        tests = f'assert f({x}) == {x + right}, f"f({x}) is {{f({x})}}, not {x + right}"'
        task = VerifiableTask(
            f"repair-{x}-{broken}-{right}", messages=({"role": "user", "content": program(broken)},),
            verifier="unittest", answer=tests,
        )  # fmt: skip
        if derive(0, x, broken, right) % 10 == 0:
            held_out.append(task)
            continue
        tasks.append(task)
        tried, turns = [broken, guess(broken)], list(task.messages)
        for attempt in range(3):
            turns.append({"role": "assistant", "content": program(tried[-1])})
            if tried[-1] == right or attempt == 2:
                break
            failed = f"f({x}) is {x + tried[-1]}, not {x + right}"
            text = f"The tests fail. failed: the test source: AssertionError: {failed}"
            turns.append({"role": "user", "content": text})
            tried.append(right if rng.random() < 0.5 else guess(*tried))
        conversations["with"].append(turns)
        conversations["without"].append(turns[:2])
    return conversations, tasks[:TEXTS], held_out[:HELD_OUT]


def pipeline(seed: int, environment: str) -> dict[str, Any]:
    """Run one seed in this process and return its results."""
    import torch

    from whorl.align.config import RLConfig, SFTConfig
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.environments import EnvironmentConfig
    from whorl.align.model.example import ExampleTokenizer
    from whorl.align.rl.evaluation import evaluate_episodes
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import make_policy_model
    from whorl.align.stage.sft import fine_tune
    from whorl.models import DecoderConfig, make_model
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    torch.set_num_threads(1)
    tokenizer = Tokenizer([bytes([i]) for i in range(256)], special_tokens=MARKERS)
    example_tokenizer = ExampleTokenizer(tokenizer)
    shape = DecoderConfig(
        vocab_size=264, d_model=96, n_layers=4, mlp_hidden=256, n_heads=4, n_kv_heads=4, head_dim=24, ngram_buckets=512
    )  # fmt: skip
    data = calculator_data if environment == "calculator" else repair_data
    conversations, tasks, held_out = data(seed)
    reply, length = LIMITS[environment]
    result: dict[str, Any] = {"seed": seed}
    for arm in ARMS:
        used = EnvironmentConfig(**ENVIRONMENTS[environment]) if arm == "with" else None
        config = RLConfig(
            environment=used, steps=STEPS, prompts_per_step=GROUPS, group_size=GROUP_SIZE, lr_scale=0.05,
            max_completion_tokens=reply, max_seq_len=length, optimizer="adamw", seed=seed,
        )  # fmt: skip
        model = make_model(shape, generator(seed, "weights"))
        network = make_policy_model(model, example_tokenizer, SFTConfig(), context_hint=length)

        def accuracy(network: Any = network, config: RLConfig = config) -> float:
            _, verdicts = evaluate_episodes(network, example_tokenizer, held_out, config)
            return sum(v.passed for v in verdicts) / len(verdicts)

        began = time.perf_counter()
        sft = SFTConfig(lr_scale=0.7, epochs=EPOCHS, seq_len=length, batch_size=8, seed=seed)
        texts = [example_tokenizer.conversation(messages) for messages in conversations[arm]]
        fine_tune(network, texts, sft, pad_id=tokenizer.pad_id)
        result[arm] = {"sft": accuracy(), "sft_seconds": time.perf_counter() - began}
        began = time.perf_counter()
        curve: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            worker = RolloutWorker(
                shape, "float32", Path(folder), tasks, GROUP_SIZE, reply, length, 1.0, Curriculum([0.0] * len(tasks)),
                environment=used,
            )  # fmt: skip
            train_policy(network, worker, config, callback=lambda s, m, e, to=curve: to.append(m))
        result[arm] |= {"grpo_seconds": time.perf_counter() - began, "grpo": accuracy()}
        result[arm] |= {
            "logprob_diff_max": max(m["logprob_diff_max"] for m in curve),
            "accuracy": [round(m["accuracy"], 3) for m in curve[:: max(1, len(curve) // 8)]],
            **{name: curve[-1][name] for name in ("turns/mean", "env_errors") if name in curve[-1]},
        }
    return result


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--environment", choices=sorted(ENVIRONMENTS), default="calculator")
        parser.add_argument("--one", type=int, help="run a single seed and print its results as JSON")

    given = parse(__doc__, arguments, smoke={"seeds": 1})
    if given.one is not None:
        print(json.dumps(pipeline(given.one, given.environment)))
        return

    def run(seed: int) -> dict[str, Any]:
        if smoke():
            return pipeline(seed, given.environment)
        command = [sys.executable, __file__, "--one", str(seed), "--environment", given.environment]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        arms = "; ".join(f"{arm}: SFT {found[arm]['sft']:.0%}, GRPO {found[arm]['grpo']:.0%}" for arm in ARMS)
        print(f"seed {seed}: {arms}", flush=True)
        return found

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(given.seeds)))
    worst = min(f["with"]["grpo"] for f in found)
    best = max(f["without"]["grpo"] for f in found)
    claim(
        f"held-out tasks solved with the environment {given.environment}, worst of {len(found)} seeds",
        ours=worst, peer=best, peer_name="without, best seed", unit="accuracy", ratio=worst, bar=0.8,
        ok=worst >= 0.8 and best <= 0.3, samples=found, variant=given.environment,
    )  # fmt: skip


if __name__ == "__main__":
    main()
