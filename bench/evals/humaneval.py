"""HumanEval (arXiv:2107.03374) in the sandbox: solutions pass, and bodies replaced by `pass` pass none.

    python bench/evals/humaneval.py --save

All 164 canonical solutions are written as models answer: the body; the whole function in a fence, also within an
explanation; a body with a call and a cut definition behind it.

The data: human_eval.jsonl.gz of openai/human-eval, in the folder $WHORL_DATA (default: ../shared/data).
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from _run import claim, data_path, parse, sized

from whorl.evals.grading import grade_all
from whorl.sandbox import ResourceLimits, Sandbox


def main() -> int:
    """Print the shares by form and the JSON lines."""
    parse(__doc__)
    path = data_path("human_eval.jsonl.gz", "https://github.com/openai/human-eval (folder data)")
    tasks = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()][: sized(None, 10)]
    bodies = [task["canonical_solution"] for task in tasks]
    whole = [task["prompt"] + task["canonical_solution"] for task in tasks]
    forms = {
        "body": bodies,
        "fence": [f"```python\n{text}```" for text in whole],
        "explanation": [
            f"Here is it:\n\n```python\n{text}```\n\nCall it:\n```python\nprint(1)\n```\n" for text in whole
        ],
        "body, call, cut definition": [
            f"{body}\n\nprint(1)\n\ndef next_exercise(a, b):\n    return (a" for body in bodies
        ],
    }
    rows, lowest = [], 1.0
    with Sandbox(ResourceLimits(wall_seconds=20, cpu_seconds=20)) as sandbox:
        for form, texts in forms.items():
            began = time.perf_counter()
            graded = grade_all("program", tasks, texts, sandbox=sandbox)
            seconds = time.perf_counter() - began
            passed = sum(g.scores.get("passed", 0) for g in graded) / len(tasks)
            lowest = min(lowest, passed)
            rows.append({"form": form, "passed": passed, "seconds": round(seconds, 1)})
            print(f"{form:<28} {passed:7.2%} pass, {seconds:.1f} s")
            for task, one in zip(tasks, graded, strict=True):
                if one.outcome != "right":
                    print(f"  {task['task_id']}: {one.outcome}: {one.reason[:150]}")
        empty = grade_all("program", tasks, ["    pass\n"] * len(tasks), sandbox=sandbox)
    n_empty = sum(one.outcome == "right" for one in empty)
    print(f"{'pass':<28} {n_empty / len(tasks):7.2%} pass")
    claim(
        f"{len(tasks)} canonical solutions of HumanEval in {len(forms)} forms: lowest share of a form that passes",
        ours=lowest, peer=1.0, unit="share", ratio=lowest, bar=1.0, ok=lowest == 1.0, samples=rows,
    )  # fmt: skip
    claim(
        f"bodies of {len(tasks)} tasks of HumanEval replaced by `pass`: number that pass", ours=n_empty, peer=0,
        unit="programs", ratio=n_empty, bar=0, ok=n_empty == 0, variant="empty",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
