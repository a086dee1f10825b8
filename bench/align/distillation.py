"""On-policy against off-policy distillation at equal compute, into a student of a quarter of the teacher's size.

    python bench/align/distillation.py [--seeds 5] [--folder DIR] [--seconds 110] [--controls] [--quick]

The task is the sum of two numbers of three digits, computed in columns ("7+5+1=13"), on problems of
`align/data/arithmetic.py`. A wrong column makes the answer wrong. The teacher has 0.66 M weights in its blocks and head.
It is trained from random weights on 7,900 texts, once for all seeds. The student has half its width, so a quarter of its
products. It is first fine-tuned for 280 steps on the 300 texts of its seed. From there:

    on-policy      forward KL on the student's completions of other problems, which need no written solution
    off-policy     forward KL on the 300 texts
    with --controls:
    same prompts   on-policy as above, on the prompts of the 300 texts only
    teacher's      off-policy, forward KL, on the teacher's completions of the same other problems

Compute is counted in products. A trained position costs three forward passes of the student. A position that the
teacher scores or writes costs one forward pass of the teacher. A token that the student samples or prefills costs one
forward pass of the student. The on-policy student runs its steps first, and each other arm gets the number of steps
that costs at least as much. CPU seconds of one thread are printed too. The result is greedy held-out accuracy divided
by the teacher's. Results are stored in DIR. After `--seconds` the script stops, and the same command continues.
`--quick` runs a few steps, which train nothing; `ok` then checks only the log-probability difference.

The controls limit the interpretation: the gain comes from new problems. On-policy distillation gets them without cost,
because a prompt needs no solution. On the same prompts it was worse, and a teacher that writes solutions of the new
problems trained its student as well. `ok` requires that on-policy is better in every seed, and that the engine's and
the trainer's log-probabilities differ by less than 1e-4. The largest of 200,000 tokens per seed may exceed that where
logits are large.
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
from bench._run import claim, parse, sized

from whorl.align.config import DistilConfig, SFTConfig, StudentConfig
from whorl.align.data.arithmetic import ANSWER_PREFIX, Arithmetic, ArithmeticProblem
from whorl.align.distillation.student import make_student
from whorl.align.distillation.teacher import LiveTeacher, sample_teacher_completions
from whorl.align.distillation.train import train_student
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.sft import fine_tune
from whorl.engine.sampling_params import SamplingParams
from whorl.evals.model.sampling import open_engine, sample_completions
from whorl.models import LanguageModel, TransformerConfig, load_model, make_model, save_model, whorl_decoder
from whorl.tokens.token_encoder import TokenEncoder, TokenizedExample
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator

TOKENIZER = Tokenizer([bytes([i]) for i in range(256)])
ENCODER = TokenEncoder(TOKENIZER)
VOCAB, LENGTH, BATCH, MAX_COMPLETION = 264, 96, *sized((32, 48), (4, 16))
TEACHER_TEXTS, STUDENT_TEXTS, QUICK_HELD_OUT, TIMING_STEPS = sized((7900, 300, 40, 3), (40, 20, 6, 1))
BANNED = frozenset(ENCODER.banned_ids(VOCAB))


def shape_of(width: int) -> TransformerConfig:
    """A decoder of four layers and four heads."""
    sizes = {"vocab_size": VOCAB, "d_model": width, "n_layers": 4, "mlp_hidden": 3 * width}
    return whorl_decoder(**sizes, n_heads=4, n_kv_heads=4, head_dim=width // 4, ngram_orders=())


BASE = "on-policy"
ARMS: dict[str, tuple[float, str, str]] = {  # on_policy_fraction, divergence, source of texts or prompts
    BASE: (1.0, "forward", "others"),
    "off-policy": (0.0, "forward", "given"),
}
CONTROLS: dict[str, tuple[float, str, str]] = {
    "on-policy, same prompts": (1.0, "forward", "given"),
    "off-policy, teacher's answers": (0.0, "forward", "teacher"),
}


def in_columns(problem: ArithmeticProblem) -> str:
    """Return the solution digit by digit, from the right, with carries."""
    a, b = problem.expression.split("+")
    lines, carry = [], 0
    for x, y in zip(reversed(a), reversed(b), strict=True):
        lines.append(f"{x}+{y}+{carry}={int(x) + int(y) + carry}")
        carry = (int(x) + int(y) + carry) // 10
    return "\n".join([*lines, f"{ANSWER_PREFIX}{problem.answer}"])


def sums(seed: int, n: int, *, held_out: bool = False) -> list[ArithmeticProblem]:
    source = Arithmetic(seed=seed, weights={3: 1.0})
    found = source.distinct(n * 5 // 2 + 40) if held_out else source.problems(0, n * 5 // 2 + 40)
    return [p for p in found if "+" in p.expression][:n]


def texts_of(problems: Sequence[ArithmeticProblem]) -> list[TokenizedExample]:
    return [ENCODER.prompt_completion(f"{p.expression}\n", in_columns(p)) for p in problems]


def accuracy(model: LanguageModel, n: int) -> float:
    """Return the greedy accuracy on `n` held-out sums."""
    copy = make_model(model.config).requires_grad_(False).eval()
    copy.load_state_dict(model.state_dict())
    problems = sums(99, n, held_out=True)
    prompts = [ENCODER.prompt(f"{p.expression}\n") for p in problems]
    engine = open_engine(copy, (64, LENGTH), ENCODER, with_text=False)
    found = sample_completions(
        engine,
        prompts,
        SamplingParams(temperature=0),
        max_tokens=MAX_COMPLETION,
        stop_ids=ENCODER.stop_ids,
        seed=0,
    )
    answers = [ENCODER.decode(one.ids).rpartition(ANSWER_PREFIX)[2] for one in found]
    return statistics.mean(s == str(p.answer) for s, p in zip(answers, problems, strict=True))


def fine_tuned(
    model: LanguageModel, texts: Sequence[TokenizedExample], steps: int, seed: int, rows: int = BATCH
) -> LanguageModel:
    """Fine-tune `model` in place for `steps` steps and return it."""
    config = SFTConfig(
        lr_scale=1.0, seed=seed, model={"dtype": "float32"},
        data={"epochs": steps * rows / len(texts), "seq_len": LENGTH, "batch_size": rows, "packing": False},
    )  # fmt: skip
    fine_tune(PolicyModel(model), texts, config, pad_id=TOKENIZER.pad_id)
    return model


def arm(
    student: LanguageModel, teacher: LanguageModel, texts: Sequence[TokenizedExample], seed: int, fraction: float,
    divergence: Any, steps: int,
) -> tuple[LanguageModel, dict[str, float]]:  # fmt: skip
    """Return a distilled copy of the student, and its cost."""
    model = make_model(student.config)
    model.load_state_dict(student.state_dict())
    forward = [m.flops_per_token(LENGTH // 2) / 3 for m in (student, teacher)]
    spent = {"products": 0.0, "logprob_diff_max": 0.0}
    prompt = statistics.mean(text.prompt_length for text in texts)

    def observe(step: int, metrics: dict[str, float]) -> None:
        read = metrics.get("on_policy_tokens", 0.0) + BATCH * fraction * prompt
        spent["products"] += metrics["positions"] * (3 * forward[0] + forward[1]) + read * forward[0]
        spent["logprob_diff_max"] = max(spent["logprob_diff_max"], metrics.get("logprob_diff_max", 0.0))

    config = DistilConfig(
        lr_scale=1.0, divergence=divergence, on_policy_fraction=fraction, max_completion_tokens=MAX_COMPLETION,
        data={"epochs": steps * BATCH / len(texts), "seq_len": LENGTH, "batch_size": BATCH, "packing": False},
        seed=seed, model={"dtype": "float32"},
    )  # fmt: skip
    began = time.process_time()
    train_student(
        PolicyModel(model, banned_ids=BANNED), LiveTeacher(teacher), texts, config, encoder=ENCODER,
        pad_id=TOKENIZER.pad_id, callback=observe,
    )  # fmt: skip
    return model, {**spent, "seconds": time.process_time() - began, "steps": steps}


def one_seed(
    teacher: LanguageModel, seed: int, arms: dict[str, Any], quick: bool, folder: Path, found: dict[str, Any]
) -> Iterator[None]:
    """Fill the missing entries of `found`; yield after each one, so that the caller can save it."""
    first, held_out = (sized(6, 2), QUICK_HELD_OUT) if quick else (160, 250)
    texts, home = texts_of(sums(seed, STUDENT_TEXTS)), folder / f"student-{seed}{'-quick' * quick}"
    if "start" not in found:
        student = make_student(
            teacher, StudentConfig(width_multiplier=0.5), generator=generator(seed, "student")
        )
        save_model(fine_tuned(student, texts, sized(6, 2) if quick else 280, seed), home)
        found["start"] = {"accuracy": accuracy(student, held_out)}
        yield
    student = load_model(home, to_train=True)
    others = texts_of(sums(seed + 500, 20 if quick else 4000))
    for name, (fraction, divergence, source) in arms.items():
        if name in found:
            continue
        steps, examples = first, texts if source == "given" else others
        if name != BASE:
            timing = arm(student, teacher, examples, seed, fraction, divergence, TIMING_STEPS)[1]
            steps = math.ceil(found[BASE]["products"] * TIMING_STEPS / timing["products"])
        began = time.process_time()
        if source == "teacher":
            prompts = [text.ids[: text.prompt_length].tolist() for text in others[: steps * BATCH]]
            examples, _ = sample_teacher_completions(
                teacher, ENCODER, prompts, length=LENGTH, max_tokens=MAX_COMPLETION, seed=seed
            )
        sampling_seconds = time.process_time() - began
        model, cost = arm(student, teacher, examples, seed, fraction, divergence, steps)
        cost["seconds"] += sampling_seconds if source == "teacher" else 0.0
        found[name] = {"accuracy": accuracy(model, held_out), **cost}
        yield


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument(
            "--folder", type=Path, help="keeps models and results, so that a run can be resumed"
        )
        parser.add_argument("--seconds", type=float, default=0.0, help="stop after this time")
        parser.add_argument("--controls", action="store_true")
        parser.add_argument("--quick", action="store_true")

    given = parse(__doc__, arguments, smoke={"quick": True, "controls": True, "folder": None})
    torch.set_num_threads(1)
    folder = given.folder or Path(tempfile.mkdtemp())
    began = time.monotonic()
    home = folder / ("teacher-quick" if given.quick else "teacher")
    if not (home / "model.safetensors").exists():
        made = make_model(shape_of(128), generator(0, "teacher"))
        fine_tuned(
            made, texts_of(sums(1000, TEACHER_TEXTS)), sized(20, 2) if given.quick else 250, 0, rows=48
        )
        save_model(made, home)
    teacher = load_model(home)
    best = accuracy(teacher, QUICK_HELD_OUT if given.quick else 250)
    print(f"accuracy of the teacher on held-out sums: {best:.1%}", flush=True)
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
                print("stopped after --seconds; the same command continues")
                return
    print(
        "| student | accuracy, mean (minimum to maximum) | fraction of the teacher's | products, 1e12 | s | steps |\n"
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
    difference = max(results[seed][BASE]["logprob_diff_max"] for seed in seeds)
    claim(
        "accuracy of a student of a quarter of its teacher's size, relative to the teacher: on-policy distillation",
        ours=statistics.mean(ours), peer=statistics.mean(peer), peer_name="off-policy, equal FLOPs", unit="fraction",
        ratio=statistics.mean(ours) / max(statistics.mean(peer), 1e-9), bar=1.0,
        ok=difference < 1e-4 and (ahead or given.quick),
        samples=[results[seed] for seed in seeds], quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
