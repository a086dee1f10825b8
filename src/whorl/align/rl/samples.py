"""Sample completions for people: a table of rollouts during training, and samples before and after a stage.

The table shows the best and the worst completion of a few tasks with their rewards. A stage keeps its completions of
the same held-out tasks, before and after training.
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
    """A prompt, a completion, and the verifier's result."""

    prompt: str
    answer: str
    reward: float
    passed: bool
    reason: str = ""


def make_samples(
    tasks: Sequence[VerifiableTask], completions: Sequence[str], verdicts: Sequence[Verdict], n: int = 8
) -> list[dict[str, object]]:
    """Return the first `n` samples as JSON."""
    found = [
        CompletionSample(_prompt_text(task), completion, verdict.reward, verdict.passed, verdict.reason)
        for task, completion, verdict in zip(tasks, completions, verdicts, strict=False)
    ]
    return [asdict(sample) for sample in found[:n]]


def rollout_table(
    example_tokenizer: ExampleTokenizer,
    tasks: Sequence[VerifiableTask],
    experience: Experience,
    group_size: int,
    rows: int = 3,
) -> str:
    """Return lines for the terminal: of `rows` tasks the best and the worst completion, with rewards."""
    reward = experience.reward.view(-1, group_size)
    spread = (reward.max(1).values - reward.min(1).values).sort(descending=True, stable=True).indices
    lines = []
    for g in spread[:rows].tolist():
        prompt = _one_line(_prompt_text(tasks[int(experience.task[g * group_size])]), 24)
        order = reward[g].argsort(descending=True, stable=True).tolist()
        for k in dict.fromkeys((order[0], order[-1])):
            row = g * group_size + k
            mask = experience.batch["loss_mask"][row]
            completion = example_tokenizer.decode(experience.batch["targets"][row][mask].tolist())
            mark = "+" if experience.passed[row] else "-"
            lines.append(
                f"    {mark} {float(reward[g, k]):5.2f}  {prompt:24}  {_one_line(completion, WIDTH)}"
            )
            prompt = ""
    return "\n".join(lines)


def _prompt_text(task: VerifiableTask) -> str:
    return task.prompt or str(task.messages[-1].get("content", ""))


def _one_line(text: str, width: int) -> str:
    """Return the text on one line; the end is kept if it is too long, because answers are at the end."""
    line = text.strip().replace("\n", " / ")
    return line if len(line) <= width else "..." + line[3 - width :]
