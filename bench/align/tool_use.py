"""Environments of several turns: problems solved with a tool that the model cannot solve without, over seeds.

    python bench/align/tool_use.py [--seeds 5] [--environment calculator]
    python bench/align/tool_use.py --environment repair

`calculator`: products of two-digit numbers. In half of the texts the model calls the tool, in half it answers alone. Then
GRPO trains in the environment. Without the tool it sees as many direct answers, then GRPO trains on the verifier.

`repair`: a program returns two wrong constants, and the right ones are known only to its tests. The first attempt is
random. Each failing test prints one right constant, so a repair needs three attempts. In a quarter of the texts an attempt
ignores the output. Without turns GRPO trains on one attempt. The decoder first learns to copy digits and programs, as
any pretrained model can; without that some seeds do not learn to read the output.

The decoder starts from random weights. Both arms have equal weights, texts, steps and sizes. Results per seed: greedy
accuracy on held-out tasks after SFT and after GRPO, and the largest log-probability difference of engine and trainer.
The claim also needs that difference below 1e-3, and no text of the environment in the loss.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized, smoke

QUICK = "--quick" in sys.argv
HELD_OUT = sized(20 if QUICK else 100, 4)
# Texts, epochs of SFT, steps of GRPO.
SIZES = {
    "calculator": sized((300, 1.0, 4) if QUICK else (2_000, 3.0, 40), (16, 1.0, 1)),
    "repair": sized((200, 1.0, 2) if QUICK else (1_200, 3.0, 16), (16, 1.0, 1)),
}
FOLLOWED = 0.75  # share of the attempts in the texts of `repair` that use the output
COPIES = {"calculator": 0, "repair": sized(400 if QUICK else 4_000, 16)}  # texts of the copying stage
GROUPS, GROUP_SIZE = sized((8, 8), (2, 2))
ARMS = ("without", "with")
MARKERS = ["<|im_start|>", "<|im_end|>"]
# Words of the conversations, so that rows of `repair` are short; all else is bytes.
WORDS = {
    "calculator": "",
    "repair": "def|return|The| tests| fail|failed|the| test| source|AssertionError|is|not|user|assistant",
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "calculator": {"name": "calculator", "max_turns": 3, "options": {"describe_tools": False}},
    "repair": {"name": "repair", "max_turns": 3},
}
LIMITS = {"calculator": (88, 224), "repair": (24, 200)}  # ids of a reply, ids of a rollout


def calculator_data(seed: int, n_texts: int) -> tuple[dict[str, list[Any]], list[Any], list[Any]]:
    """Return (conversations of each arm, training tasks, held-out tasks)."""
    from whorl.align.data.arithmetic import ANSWER_PREFIX, Arithmetic
    from whorl.tracking.seeds import numpy_rng

    source, rng = Arithmetic(seed=seed, weights={8: 1.0}), numpy_rng(seed, "demonstrations")
    conversations: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    tasks = []
    for problem in source.problems(0, n_texts):
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


def program_text(name: str, values: list[int]) -> str:
    return f"def {name}(a): return {values}[a]"


def is_held_out(values: list[int]) -> bool:
    """Return whether a pair of right constants is held out: one in ten."""
    from whorl.tracking.seeds import derive

    return derive(0, *values) % 10 == 0


def copying(seed: int, n_texts: int) -> list[Any]:
    """Return conversations in which the reply repeats the request: 2 to 20 digits, or a program of `repair`."""
    from whorl.tracking.seeds import numpy_rng

    rng, conversations = numpy_rng(seed, "copies"), []
    for n in range(n_texts):
        digits = [int(digit) for digit in rng.integers(10, size=int(rng.integers(2, 21)))]
        is_program = n % 2 and not is_held_out(digits[:2])
        text = program_text(chr(97 + n % 26), digits[:2]) if is_program else "".join(map(str, digits))
        conversations.append([{"role": role, "content": text} for role in ("user", "assistant")])
    return conversations


def repair_data(seed: int, n_texts: int) -> tuple[dict[str, list[Any]], list[Any], list[Any]]:
    """Return (conversations of each arm, training tasks, held-out tasks); one pair of constants in ten is held out."""
    from whorl.evals.grading.task import VerifiableTask
    from whorl.tracking.seeds import numpy_rng

    rng = numpy_rng(seed, "programs")

    def guess(*wrong: int) -> int:
        return int(rng.choice([c for c in range(10) if c not in wrong]))

    conversations: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    tasks, held_out = [], []
    while len(tasks) < n_texts or len(held_out) < HELD_OUT:
        name, right = chr(97 + int(rng.integers(26))), [guess(), guess()]
        broken = [guess(value) for value in right]
        tests = [
            f'assert {name}({n}) == {c}, f"{name}({n}) is {{{name}({n})}}, not {c}"'
            for n, c in enumerate(right)
        ]
        task = VerifiableTask(
            f"repair-{name}-{broken}-{right}", messages=({"role": "user", "content": program_text(name, broken)},),
            verifier="unittest", answer="\n".join(tests),
        )  # fmt: skip
        if is_held_out(right):
            held_out.append(task)
            continue
        tasks.append(task)
        tried, turns = [guess(value) for value in broken], list(task.messages)
        for attempt in range(3):
            turns.append({"role": "assistant", "content": program_text(name, tried)})
            wrong = next((n for n in range(2) if tried[n] != right[n]), None)
            if wrong is None or attempt == 2:
                break
            failed = f"AssertionError: {name}({wrong}) is {tried[wrong]}, not {right[wrong]}"
            text = f"The tests fail. failed: the test source: {failed}"
            turns.append({"role": "user", "content": text})
            tried = list(tried)
            tried[wrong] = right[wrong] if rng.random() < FOLLOWED else guess(tried[wrong])
        conversations["with"].append(turns)
        conversations["without"].append(turns[:2])
    return conversations, tasks[:n_texts], held_out[:HELD_OUT]


def pipeline(seed: int, environment: str) -> dict[str, Any]:
    """Run one seed in this process and return its results."""
    import torch

    from whorl.align.config import SFTConfig
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.environments import EnvironmentConfig
    from whorl.align.rl.config import RLConfig
    from whorl.align.rl.evaluation import evaluate_tasks
    from whorl.align.rl.rollout import RolloutWorker
    from whorl.align.rl.train import train_policy
    from whorl.align.stage.io import make_policy_model
    from whorl.align.stage.sft import fine_tune
    from whorl.models import make_model, whorl_decoder
    from whorl.tokens.token_encoder import TokenEncoder
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    torch.set_num_threads(1)
    words = WORDS[environment].encode().split(b"|")
    merges = dict.fromkeys(word[:n] for word in words for n in range(2, len(word) + 1))
    tokenizer = Tokenizer([bytes([i]) for i in range(256)] + [*merges], special_tokens=MARKERS)
    encoder = TokenEncoder(tokenizer)
    shape = whorl_decoder(
        vocab_size=-(-tokenizer.vocab_size // 8) * 8,
        d_model=96, n_layers=4, mlp_hidden=256, n_heads=4, n_kv_heads=4, head_dim=24, ngram_buckets=512
    )  # fmt: skip
    data = calculator_data if environment == "calculator" else repair_data
    n_texts, epochs, steps = SIZES[environment]
    conversations, tasks, held_out = data(seed, n_texts)
    copies = [encoder.conversation(messages) for messages in copying(seed, COPIES[environment])]
    reply, length = LIMITS[environment]
    result: dict[str, Any] = {"seed": seed}
    for arm in ARMS:
        used = EnvironmentConfig(**ENVIRONMENTS[environment]) if arm == "with" else None
        config = RLConfig(
            environment=used, steps=steps, prompts_per_step=GROUPS, group_size=GROUP_SIZE, lr_scale=0.05,
            max_completion_tokens=reply, max_seq_len=length, optimizer="adamw", seed=seed,
        )  # fmt: skip
        model = make_model(shape, generator(seed, "weights"))
        network = make_policy_model(model, encoder, SFTConfig(), context_hint=length)

        def accuracy(turns: int | None = None, network: Any = network, environment: Any = used) -> float:
            if turns is not None and environment is not None:
                environment = environment.model_copy(update={"max_turns": turns})
            found = evaluate_tasks(
                network, encoder, held_out, max_tokens=reply, length=length, seed=seed, environment=environment
            )  # fmt: skip
            return found.measure("passed").value

        began = time.perf_counter()
        sft = SFTConfig(lr_scale=0.7, data={"epochs": epochs, "seq_len": length, "batch_size": 8}, seed=seed)
        if copies:
            once = sft.model_copy(update={"data": sft.data.model_copy(update={"epochs": 1.0})})
            fine_tune(network, copies, once, pad_id=tokenizer.pad_id)
        texts = [encoder.conversation(messages) for messages in conversations[arm]]
        fine_tune(network, texts, sft, pad_id=tokenizer.pad_id)
        result[arm] = {"sft": accuracy(), "sft_seconds": time.perf_counter() - began}
        print(f"seed {seed}, {arm}: SFT {result[arm]}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        curve: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(Path(folder))
            worker = RolloutWorker(
                shape, "float32", Path(folder), tasks, GROUP_SIZE, reply, length, 1.0, Curriculum([0.0] * len(tasks)),
                environment=used,
            )  # fmt: skip
            train_policy(network, worker, config, callback=partial(note, curve, tokenizer))
        result[arm] |= {"grpo_seconds": time.perf_counter() - began, "grpo": accuracy()}
        result[arm] |= {
            "logprob_diff_max": max(m["logprob_diff_max"] for m in curve),
            "rows_with_environment_text": sum(m["rows_with_environment_text"] for m in curve),
            "accuracy": [round(m["accuracy"], 3) for m in curve[:: max(1, len(curve) // 8)]],
            **{name: curve[-1][name] for name in ("turns/mean", "env_errors") if name in curve[-1]},
        }
        if used is not None:
            result[arm]["solved_by_turns"] = [accuracy(turns) for turns in range(1, used.max_turns + 1)]
        print(f"seed {seed}, {arm}: {result[arm]}", file=sys.stderr, flush=True)
    return result


def note(
    curve: list[dict[str, float]], tokenizer: Any, step: int, metrics: dict[str, float], rollouts: Any
) -> None:
    """Append the metrics of a step, and the number of rows whose trained ids contain a header of another role."""
    rows = 0
    for targets, mask in zip(rollouts.batch["targets"], rollouts.batch["loss_mask"], strict=True):
        text = tokenizer.decode(targets[mask].tolist())
        rows += any(header in text for header in (b"user\n", b"tool\n", b"The tests fail"))
    curve.append({**metrics, "rows_with_environment_text": float(rows)})


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--environment", choices=sorted(ENVIRONMENTS), default="calculator")
        parser.add_argument(
            "--jobs", type=int, default=2, help="seeds that run at a time, with one thread each"
        )
        parser.add_argument("--one", type=int, help="run a single seed and print its results as JSON")

    given = parse(__doc__, arguments, quick={"seeds": 1})
    if given.one is not None:
        print(json.dumps(pipeline(given.one, given.environment)))
        return

    def run(seed: int) -> dict[str, Any]:
        if smoke():
            return pipeline(seed, given.environment)
        command = [sys.executable, __file__, "--one", str(seed), "--environment", given.environment]
        command += ["--quick"] * QUICK
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        arms = "; ".join(f"{arm}: SFT {found[arm]['sft']:.0%}, GRPO {found[arm]['grpo']:.0%}" for arm in ARMS)
        print(f"seed {seed}: {arms}", flush=True)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(run, range(given.seeds)))
    worst = min(f["with"]["grpo"] for f in found)
    best = max(f["without"]["grpo"] for f in found)
    arms = [f[arm] for f in found for arm in ARMS]
    exact = max(a["logprob_diff_max"] for a in arms) < 1e-3 and not any(
        a["rows_with_environment_text"] for a in arms
    )
    claim(
        f"held-out tasks solved with the environment {given.environment}, worst of {len(found)} seeds",
        ours=worst, peer=best, peer_name="without, best seed", unit="accuracy", ratio=worst, bar=0.8,
        ok=worst >= 0.8 and best <= 0.3 and exact, samples=found, variant=given.environment, quick=QUICK,
    )  # fmt: skip


if __name__ == "__main__":
    main()
