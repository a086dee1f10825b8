"""On-policy distillation against off-policy at equal compute: what a student of a quarter of the size gets of its teacher.

    .venv/bin/python bench/align/distillation.py [--seeds 5] [--folder DIR] [--seconds 110] [--controls] [--quick]

The task is adding two numbers of three digits, worked in columns ("7+5+1=13"), by problems of `align/data/arithmetic.py`; a
mistake in one column is one in the answer. The teacher (0.66 M weights in its blocks and head) is fine-tuned from nothing on
7,900 texts, once for all seeds. The student has half its width, so a quarter of the products, and knows what 280 steps of
fine-tuning on the 300 texts of its seed taught it. From there

    on-policy      forward KL on its own answers to other problems, for which nobody has written a solution
    off-policy     forward KL on the 300 texts
    with --controls:
    same prompts   on-policy as above, on the prompts of the 300 texts alone
    teacher's      off-policy, forward KL, on the teacher's own answers to the same other problems

Compute is counted in products: 3 forwards of the student a position that it learns from, one forward of the teacher a
position that it scores or writes, one forward of the student a token that it samples or reads before. The on-policy student
takes its steps first; the others are given as many as cost at least the same. Seconds of one thread are told beside.
The figure is held-out accuracy, greedy, over the teacher's. What is found is kept in DIR, and after `--seconds` the same
command goes on. `--quick` walks through a few steps, in which nothing is learnt: ok then says that parity held.

Read with the controls, or be misled: what helps is problems that are new. On-policy distillation has them for nothing,
since a prompt needs no solution; on the same prompts it was behind, and a teacher that writes the solutions to the new
ones brought its student as far. `ok` asks for every seed to be ahead, and for parity below 1e-4, which the largest of
200,000 ids a seed may miss where logits are large.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim

from whorl.align.config import DistilConfig, SFTConfig, StudentConfig
from whorl.align.data.arithmetic import ANSWER_PREFIX, Arithmetic, ArithmeticProblem
from whorl.align.distillation.student import make_student
from whorl.align.distillation.teacher import LiveTeacher, sample_teacher_completions
from whorl.align.distillation.train import train_student
from whorl.align.model.example import ExampleTokenizer, TokenizedExample
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import banned_ids, rollout_engine, sample_completions
from whorl.align.stage.sft import fine_tune
from whorl.engine.sampling_params import SamplingParams
from whorl.models import DecoderConfig, LanguageModel, load_model, make_model, save_model
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator

TOKENIZER = Tokenizer([bytes([i]) for i in range(256)])
SCRIBE = ExampleTokenizer(TOKENIZER)
VOCAB, LENGTH, BATCH, ANSWERS = 264, 96, 32, 48
FORBIDDEN = frozenset(banned_ids(SCRIBE, VOCAB, len(TOKENIZER.token_bytes)))
SHAPE = DecoderConfig(
    vocab_size=VOCAB,
    d_model=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    head_dim=32,
    mlp_hidden=384,
    ngram_orders=(),
)
BASE = "on-policy"
ARMS: dict[str, tuple[float, str, str]] = {  # share of its own, divergence, whose texts or prompts
    BASE: (1.0, "forward", "others"),
    "off-policy": (0.0, "forward", "given"),
}
CONTROLS: dict[str, tuple[float, str, str]] = {
    "on-policy, same prompts": (1.0, "forward", "given"),
    "off-policy, teacher's answers": (0.0, "forward", "teacher"),
}


def in_columns(problem: ArithmeticProblem) -> str:
    """The sum worked out digit by digit, from the right, with what is carried."""
    a, b = problem.expression.split("+")
    lines, carried = [], 0
    for x, y in zip(reversed(a), reversed(b), strict=True):
        lines.append(f"{x}+{y}+{carried}={int(x) + int(y) + carried}")
        carried = (int(x) + int(y) + carried) // 10
    return "\n".join([*lines, f"{ANSWER_PREFIX}{problem.answer}"])


def sums(seed: int, n: int, *, held_out: bool = False) -> list[ArithmeticProblem]:
    source = Arithmetic(seed=seed, weights={3: 1.0})
    found = source.distinct(n * 5 // 2 + 40) if held_out else source.problems(0, n * 5 // 2 + 40)
    return [p for p in found if "+" in p.expression][:n]


def texts_of(problems: Sequence[ArithmeticProblem]) -> list[TokenizedExample]:
    return [SCRIBE.prompt_completion(f"{p.expression}\n", in_columns(p)) for p in problems]


def accuracy(model: LanguageModel, n: int) -> float:
    """Of held-out sums, greedily."""
    shape = make_model(model.config).requires_grad_(False).eval()
    shape.load_state_dict(model.state_dict())
    problems = sums(99, n, held_out=True)
    prompts = [SCRIBE.prompt(f"{p.expression}\n") for p in problems]
    engine = rollout_engine(shape, SCRIBE, sequences=64, max_length=LENGTH)
    found = sample_completions(
        engine, prompts, SamplingParams(temperature=0), max_tokens=ANSWERS, stop_ids=SCRIBE.stop_ids, seed=0
    )
    said = [SCRIBE.decode(one.ids).rpartition(ANSWER_PREFIX)[2] for one in found]
    return statistics.mean(s == str(p.answer) for s, p in zip(said, problems, strict=True))


def taught(
    model: LanguageModel, texts: Sequence[TokenizedExample], steps: int, seed: int, rows: int = BATCH
) -> LanguageModel:
    """Fine-tuned in place for so many steps."""
    config = SFTConfig(
        lr_scale=1.0, epochs=steps * rows / len(texts), seq_len=LENGTH, batch_size=rows, packing=False, seed=seed,
        dtype="float32",
    )  # fmt: skip
    fine_tune(PolicyModel(model), texts, config, pad_id=TOKENIZER.pad_id)
    return model


def arm(
    student: LanguageModel, teacher: LanguageModel, texts: Sequence[TokenizedExample], seed: int, own: float, kind: Any,
    steps: int,
) -> tuple[LanguageModel, dict[str, float]]:  # fmt: skip
    """A copy of the student, distilled; what it cost."""
    model = make_model(student.config)
    model.load_state_dict(student.state_dict())
    forward = [m.flops_per_token(LENGTH // 2) / 3 for m in (student, teacher)]
    spent = {"products": 0.0, "parity": 0.0}
    prompt = statistics.mean(text.prompt_length for text in texts)

    def observe(step: int, metrics: dict[str, float]) -> None:
        read = metrics.get("sampled", 0.0) + BATCH * own * prompt
        spent["products"] += metrics["positions"] * (3 * forward[0] + forward[1]) + read * forward[0]
        spent["parity"] = max(spent["parity"], metrics.get("parity", 0.0))

    config = DistilConfig(
        lr_scale=1.0, divergence=kind, on_policy_fraction=own, max_completion_tokens=ANSWERS, epochs=steps * BATCH / len(texts), seq_len=LENGTH,
        batch_size=BATCH, packing=False, seed=seed, dtype="float32",
    )  # fmt: skip
    began = time.process_time()
    train_student(
        PolicyModel(model, banned_ids=FORBIDDEN), LiveTeacher(teacher), texts, config, example_tokenizer=SCRIBE,
        pad_id=TOKENIZER.pad_id, callback=observe,
    )  # fmt: skip
    return model, {**spent, "seconds": time.process_time() - began, "steps": steps}


def one_seed(
    teacher: LanguageModel, seed: int, arms: dict[str, Any], quick: bool, folder: Path, found: dict[str, Any]
) -> Iterator[None]:
    """Fills `found`, from what is there already; yields whenever it is worth keeping."""
    first, held_out = (6, 40) if quick else (160, 250)
    texts, home = texts_of(sums(seed, 300)), folder / f"student-{seed}{'-quick' * quick}"
    if "start" not in found:
        student = make_student(
            teacher, StudentConfig(width_multiplier=0.5), generator=generator(seed, "student")
        )
        save_model(taught(student, texts, 6 if quick else 280, seed), home)
        found["start"] = {"accuracy": accuracy(student, held_out)}
        yield
    student = load_model(home, to_train=True)
    others = texts_of(sums(seed + 500, 20 if quick else 4000))
    for name, (own, kind, whose) in arms.items():
        if name in found:
            continue
        steps, words = first, texts if whose == "given" else others
        if name != BASE:
            once = arm(student, teacher, words, seed, own, kind, 3)[1]["products"] / 3
            steps = math.ceil(found[BASE]["products"] / once)
        began = time.process_time()
        if whose == "teacher":
            prompts = [text.ids[: text.prompt_length].tolist() for text in others[: steps * BATCH]]
            words, _ = sample_teacher_completions(
                teacher, SCRIBE, prompts, length=LENGTH, max_tokens=ANSWERS, seed=seed
            )
        wrote = time.process_time() - began
        model, cost = arm(student, teacher, words, seed, own, kind, steps)
        cost["seconds"] += wrote if whose == "teacher" else 0.0
        found[name] = {"accuracy": accuracy(model, held_out), **cost}
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.folder or Path(tempfile.mkdtemp())
    began = time.monotonic()
    home = folder / ("teacher-quick" if given.quick else "teacher")
    if not (home / "model.safetensors").exists():
        made = make_model(SHAPE, generator(0, "teacher"))
        taught(made, texts_of(sums(1000, 7900)), 20 if given.quick else 250, 0, rows=48)
        save_model(made, home)
    teacher = load_model(home)
    best = accuracy(teacher, 40 if given.quick else 250)
    print(f"the teacher solves {best:.1%} of held-out sums", flush=True)
    path = folder / ("distil-quick.json" if given.quick else "distil.json")
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    arms = {**ARMS, **(CONTROLS if given.controls else {})}
    seeds = [str(seed) for seed in range(1 if given.quick else given.seeds)]
    for seed in seeds:
        here = results.setdefault(seed, {})
        for _ in one_seed(teacher, int(seed), arms, given.quick, folder, here):
            path.write_text(json.dumps(results, indent=1))
            name = list(here)[-1]
            print(f"seed {seed}, {name}: {here[name]['accuracy']:.1%}", flush=True)
            if given.seconds and time.monotonic() - began > given.seconds:
                print("the same command goes on")
                return
    print(
        "| student | accuracy, mean (least to most) | of the teacher's | products, 1e12 | s | steps |\n"
        + "|---" * 6
        + "|"
    )
    share: dict[str, list[float]] = {}
    for name in ("start", *arms):
        rows = [results[seed][name] for seed in seeds]
        right = [r["accuracy"] for r in rows]
        share[name] = [a / max(best, 1e-9) for a in right]
        cost = [statistics.mean(r.get(k, 0.0) for r in rows) for k in ("products", "seconds", "steps")]
        print(
            f"| {name} | {statistics.mean(right):.1%} ({min(right):.1%} to {max(right):.1%}) "
            f"| {statistics.mean(share[name]):.1%} | {cost[0] / 1e12:.2f} | {cost[1]:.1f} | {cost[2]:.0f} |"
        )
    ours, peer = share[BASE], share["off-policy"]
    ahead = all(a > b for a, b in zip(ours, peer, strict=True))
    parity = max(results[seed][BASE]["parity"] for seed in seeds)
    claim(
        "accuracy of a student of a quarter of its teacher's size: on-policy against off-policy, equal products",
        ours=statistics.mean(ours), peer=statistics.mean(peer), unit="of the teacher's accuracy",
        ratio=statistics.mean(ours) / max(statistics.mean(peer), 1e-9), bar=1.0, ok=parity < 1e-4 and (ahead or given.quick),
        samples=[results[seed] for seed in seeds], quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
