"""Answer extraction on the gold answers of BIG-Bench Hard and GSM8K (arXiv:2210.09261, arXiv:2110.14168).

Each gold answer is written in every form that a model may give, and scored. All must be right. Then the answers are
shuffled among the items of each task: the score must equal the share of items that got an equal answer by chance.

    python bench/evals/bbh_answers.py --save
    python bench/evals/bbh_answers.py --quick     # 80 items of each task, 2,000 of GSM8K

The data: bbh/*.json of suzgunmirac/BIG-Bench-Hard and gsm8k_*.jsonl of openai/grade-school-math, in the folder $WHORL_DATA
(default: ../shared/data).
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import claim, data_path, parse, sized

from whorl.evals.grading import grade_all
from whorl.evals.grading.final_answer import same_answer

BBH, GSM8K = "https://github.com/suzgunmirac/BIG-Bench-Hard", "https://github.com/openai/grade-school-math"
BACKSLASH = r"\\\1"
THOUGHT = (
    "Let's think step by step.\n1. First, I read the question again. Option (A) seems wrong, since 3 + 4 = 7.\n"
    "2. **Check:** the second one holds, so we can exclude 12 of them. No, not all. Yes or True would be too early.\n"
)


def bare_letter(gold: str) -> str:
    """Return the letter of an option, or the answer unchanged."""
    return gold[1] if len(gold) == 3 and gold[0] + gold[2] == "()" and gold[1].isupper() else gold


FORMS: dict[str, Callable[[str], str]] = {
    "as given": lambda gold: gold,
    "bare": bare_letter,
    "lower case": lambda gold: gold.lower() if len(gold) != 3 or gold[0] != "(" else gold,
    "(A)": lambda gold: f"({bare_letter(gold)})",
    "A.": lambda gold: f"{bare_letter(gold)}.",
    "the answer is": lambda gold: f"The answer is {gold}.",
    "the answer is, bare": lambda gold: f"the answer is {bare_letter(gold)}",
    "Answer:": lambda gold: f"Answer: {bare_letter(gold)}",
    "**Answer:**": lambda gold: f"**Answer:** {gold}",
    "bold": lambda gold: f"**{gold}**",
    "bold, bare": lambda gold: f"**{bare_letter(gold)}**",
    "the answer is, bold": lambda gold: f"So the answer is **{gold}**.",
    "boxed": lambda gold: f"Therefore $\\boxed{{{re.sub(r'([{}])', BACKSLASH, bare_letter(gold))}}}$.",
    "tags": lambda gold: f"<answer>{gold}</answer>",
    "####": lambda gold: f"{THOUGHT}#### {bare_letter(gold)}",
    "thought, the answer is": lambda gold: f"{THOUGHT}So the answer is {gold}.",
    "thought, bold": lambda gold: f"{THOUGHT}\n**{gold}**",
    "thought, last line": lambda gold: f"{THOUGHT}\n{gold}",
    "thought, final answer": lambda gold: f"{THOUGHT}\n**Final Answer**: {bare_letter(gold)}",
    "thought, heading": lambda gold: f"{THOUGHT}\n### Answer\n{gold}",
    "think tags": lambda gold: f"<think>The answer is (C). Hmm, no.</think>\n{gold}",
    "answer first": lambda gold: (
        f"The answer is {gold}. There are two reasons: the first is long, and (A) fails."
    ),
}


def bbh_tasks(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (task, gold answers)."""
    for path in sorted(folder.glob("*.json")):
        yield path.stem, [example["target"] for example in json.loads(path.read_text("utf-8"))["examples"]]


def gsm8k_golds(paths: list[Path]) -> list[str]:
    """Return the worked answers of both splits."""
    lines = [line for path in paths for line in path.open(encoding="utf-8")]
    return [json.loads(line)["answer"] for line in lines]


def shares(metric: str, golds: list[str], answers: list[str]) -> tuple[float, list[tuple[str, str, str]]]:
    """Return the share of right answers, and (gold, answer, reason) of the others."""
    results = grade_all(metric, golds, answers)
    wrong = [
        (gold, answer[-80:], f"{r.outcome}: {r.answer}")
        for gold, answer, r in zip(golds, answers, results, strict=True)
        if r.outcome != "right"
    ]
    return 1 - len(wrong) / len(golds), wrong


def main() -> int:
    """Print a table of tasks and forms, and the JSON lines."""
    args = parse(__doc__, quick={"quick": True})
    bbh = data_path("bbh", BBH)
    gsm8k = [data_path(f"gsm8k_{split}.jsonl", GSM8K) for split in ("test", "train")]
    rng = random.Random(0)
    lowest, tasks, gaps, chance_rows = 1.0, 0, [], []
    for task, golds in bbh_tasks(bbh):
        golds = golds[: sized(80 if args.quick else None, 20)]
        row = {}
        for form, write in FORMS.items():
            row[form], wrong = shares("exact", golds, [write(gold) for gold in golds])
            for gold, answer, reason in wrong[:3]:
                print(f"  {task}, {form}: gold {gold!r}, answer {answer!r}: {reason}")
        shuffled = rng.sample(golds, len(golds))
        equal = sum(same_answer(a, b) for a, b in zip(golds, shuffled, strict=True)) / len(golds)
        by_form = [shares("exact", golds, [write(a) for a in shuffled])[0] for write in FORMS.values()]
        gaps.append(round(max(abs(score - equal) for score in by_form), 9))
        chance_rows.append(
            {"task": task, "chance": round(equal, 4), "lowest": min(row.values()), "gap": gaps[-1]}
        )
        print(
            f"{task:<42} {len(golds):>4} items  lowest {min(row.values()):8.2%}  "
            f"shuffled {max(by_form):7.2%} at chance {equal:7.2%}"
        )
        lowest, tasks = min(lowest, *row.values()), tasks + 1
    claim(
        f"gold answers of {tasks} tasks in {len(FORMS)} forms: lowest share of right answers of a task and form",
        ours=lowest, peer=1.0, unit="share", ratio=lowest, bar=1.0, ok=lowest == 1.0 and tasks == 27,
        samples=chance_rows, variant="forms", quick=args.quick,
    )  # fmt: skip
    claim(
        "answers shuffled among the items of a task: largest difference to the share that is equal by chance",
        ours=max(gaps), peer=0.0, unit="share", ratio=max(gaps), bar=0.0, ok=max(gaps) == 0.0, variant="shuffled",
        quick=args.quick,
    )  # fmt: skip
    golds = gsm8k_golds(gsm8k)[: sized(2000 if args.quick else None, 50)]
    finals = [gold.rpartition("#### ")[2] for gold in golds]
    texts = {
        "as given": golds,
        **{form: [write(final) for final in finals] for form, write in FORMS.items()},
        "dollars": [f"{THOUGHT}She earns $18 - $3 = ${final}." for final in finals],
    }
    lowest = 1.0
    for form, answers in texts.items():
        score, wrong = shares("numeric", golds, answers)
        lowest = min(lowest, score)
        for gold, answer, reason in wrong[:3]:
            print(f"  GSM8K, {form}: gold {gold[-20:]!r}, answer {answer!r}: {reason}")
    claim(
        f"{len(golds)} gold answers of GSM8K in {len(texts)} forms: lowest share of right answers of a form",
        ours=lowest, peer=1.0, unit="share", ratio=lowest, bar=1.0, ok=lowest == 1.0, variant="gsm8k",
        quick=args.quick,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
