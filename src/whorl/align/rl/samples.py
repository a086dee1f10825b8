"""What a stage tells while it runs and leaves behind: a table of rollouts, and samples from before and after.

Figures say how much; only samples say what. So while a policy learns, a few of its newest answers stand on the screen with
their rewards, the best and the worst of each task among them, and a stage keeps its answers to the same held-out tasks from
before and after, side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from whorl.align.model.example import ExampleTokenizer
from whorl.align.rl.experience import Experience
from whorl.evals.verify.task import Verdict, VerifiableTask

WIDTH = 62


@dataclass(frozen=True)
class CompletionSample:
    """An answer: what was asked, what was said, and what the verifier said of it."""

    prompt: str
    answer: str
    reward: float
    passed: bool
    reason: str = ""


def make_samples(
    tasks: Sequence[VerifiableTask], completions: Sequence[str], verdicts: Sequence[Verdict], n: int = 8
) -> list[dict[str, object]]:
    """The first `n`, as JSON."""
    found = [
        CompletionSample(_prompt_text(task), words, verdict.reward, verdict.passed, verdict.reason)
        for task, words, verdict in zip(tasks, completions, verdicts, strict=False)
    ]
    return [asdict(sample) for sample in found[:n]]


def rollout_table(
    example_tokenizer: ExampleTokenizer,
    tasks: Sequence[VerifiableTask],
    experience: Experience,
    group_size: int,
    rows: int = 3,
) -> str:
    """Lines for the screen: of `rows` tasks the best and the worst answer, with rewards and lengths."""
    reward = experience.reward.view(-1, group_size)
    spread = (reward.max(1).values - reward.min(1).values).sort(descending=True, stable=True).indices
    lines = []
    for g in spread[:rows].tolist():
        asked = _one_line(_prompt_text(tasks[int(experience.task[g * group_size])]), 24)
        order = reward[g].argsort(descending=True, stable=True).tolist()
        for k in dict.fromkeys((order[0], order[-1])):
            row = g * group_size + k
            mask = experience.batch["loss_mask"][row]
            words = example_tokenizer.decode(experience.batch["targets"][row][mask].tolist())
            mark = "+" if experience.passed[row] else "-"
            lines.append(f"    {mark} {float(reward[g, k]):5.2f}  {asked:24}  {_one_line(words, WIDTH)}")
            asked = ""
    return "\n".join(lines)


def _prompt_text(task: VerifiableTask) -> str:
    return task.prompt or str(task.messages[-1].get("content", ""))


def _one_line(text: str, width: int) -> str:
    """On one line, its end kept where it is too long: that is where answers are."""
    flat = text.strip().replace("\n", " / ")
    return flat if len(flat) <= width else "..." + flat[3 - width :]
