"""Sample completions for people: a table of rollouts during training, and samples before and after a stage.

The table shows the best and the worst completion of a few tasks, with their rewards and the reason of each. A stage
keeps its completions of the same held-out tasks, before and after training.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from whorl.align.rl.experience import Experience
from whorl.evals.grading import VerifiableTask, pass_criterion
from whorl.evals.results import ItemResult
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.progress import escape_controls

PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 300, 500  # shown of each, from its beginning


def make_samples(items: Sequence[ItemResult], n: int = 8) -> list[dict[str, object]]:
    """Return the first `n` samples as JSON: prompt, completion, and the verifier's result."""
    return [
        {"prompt": item.prompt, "answer": item.answers[0], "reward": item.scores["reward"],
         "passed": item.outcome == "right", "reason": item.reason}
        for item in items[:n]
    ]  # fmt: skip


def rollout_table(
    encoder: TokenEncoder,
    tasks: Sequence[VerifiableTask],
    experience: Experience,
    group_size: int,
    rows: int = 3,
) -> str:
    """Return lines for the terminal: of `rows` tasks the best and the worst completion, with rewards and their reasons."""
    reward = experience.reward.view(-1, group_size)
    spread = (reward.max(1).values - reward.min(1).values).sort(descending=True, stable=True).indices
    lines = []
    for g in spread[:rows].tolist():
        task = tasks[int(experience.task[g * group_size])]
        lines += ["    task", _indented(_prompt_text(task), PROMPT_CHARACTERS)]
        order = reward[g].argsort(descending=True, stable=True).tolist()
        for k in dict.fromkeys((order[0], order[-1])):
            row = g * group_size + k
            mask = experience.batch["loss_mask"][row]
            completion = encoder.decode(experience.batch["targets"][row][mask].tolist())
            passed = bool(experience.passed[row])
            reason = experience.reason[row] or ("passed" if passed else "not passed")
            if reason == "passed":
                reason += f": {pass_criterion([task])}"
            lines.append(f"    {'+' if passed else '-'} reward {float(reward[g, k]):.2f}, {reason}")
            lines.append(_indented(completion, COMPLETION_CHARACTERS))
    return "\n".join(lines)


def _prompt_text(task: VerifiableTask) -> str:
    return task.prompt or str(task.messages[-1].get("content", ""))


def _indented(text: str, most: int) -> str:
    """Return the lines of a text, indented, and control characters as escapes; if it is longer, `most` characters of it."""
    text = text.strip("\n")
    shown = text if len(text) <= most else f"{text[:most]} ... (the first {most} of {len(text):,} characters)"
    return textwrap.indent(escape_controls(shown), " " * 8, lambda line: True)
