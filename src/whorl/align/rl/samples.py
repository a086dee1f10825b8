"""What a stage tells while it runs and leaves behind: a table of rollouts, and samples from before and after.

Figures say how much; only samples say what. So while a policy learns, a few of its newest answers stand on the screen with
their rewards, the best and the worst of each task among them, and a stage keeps its answers to the same held-out tasks from
before and after, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from whorl.align.model.example import Scribe
from whorl.align.rl.experience import Experience
from whorl.evals.verify.task import Task, Verdict

WIDTH = 62


@dataclass(frozen=True)
class Sample:
    """An answer: what was asked, what was said, and what the verifier said of it."""

    prompt: str
    answer: str
    reward: float
    passed: bool
    reason: str = ""


def samples(
    given: Sequence[Task], said: Sequence[str], verdicts: Sequence[Verdict], n: int = 8
) -> list[dict[str, object]]:
    """The first `n`, as JSON."""
    found = [
        Sample(_asked(task), words, verdict.reward, verdict.passed, verdict.reason)
        for task, words, verdict in zip(given, said, verdicts, strict=False)
    ]
    return [asdict(sample) for sample in found[:n]]


def rollout_table(
    scribe: Scribe, tasks: Sequence[Task], experience: Experience, answers: int, rows: int = 3
) -> str:
    """Lines for the screen: of `rows` tasks the best and the worst answer, with rewards and lengths."""
    reward = experience.reward.view(-1, answers)
    spread = (reward.max(1).values - reward.min(1).values).sort(descending=True, stable=True).indices
    lines = []
    for g in spread[:rows].tolist():
        asked = _line(_asked(tasks[int(experience.task[g * answers])]), 24)
        order = reward[g].argsort(descending=True, stable=True).tolist()
        for k in dict.fromkeys((order[0], order[-1])):
            row = g * answers + k
            mask = experience.part["loss_mask"][row]
            words = scribe.words(experience.part["targets"][row][mask].tolist())
            mark = "+" if experience.passed[row] else "-"
            lines.append(f"    {mark} {float(reward[g, k]):5.2f}  {asked:24}  {_line(words, WIDTH)}")
            asked = ""
    return "\n".join(lines)


def _asked(task: Task) -> str:
    return task.prompt or str(task.messages[-1].get("content", ""))


def _line(text: str, width: int) -> str:
    """On one line, its end kept where it is too long: that is where answers are."""
    flat = text.strip().replace("\n", " / ")
    return flat if len(flat) <= width else "..." + flat[3 - width :]
