"""Preferences from feedback: `preferences` with `source = "feedback"` and the parent `events`.

    [steps.preferences]
    source = "feedback"
    parents = ["events"]

The report has the share of votes of the most active raters, the raters' agreement, and the favour of the left position.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from whorl.errors import ConfigError, DataError
from whorl.recipes.registry import StepContext
from whorl.recipes.steps.align.data_config import PreferencesConfig
from whorl.report.blocks import Curve, Facts, Line

if TYPE_CHECKING:
    from pathlib import Path

    from whorl.loop.feedback_pairs import FeedbackExamples

MIN_PAIRS = 64  # with fewer, single answers are used if these are more
SHAPES = {"preferences": "pairs", "unpaired": "single answers with a label"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of the step `events`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def feedback_preferences(ctx: StepContext, config: PreferencesConfig) -> tuple[str, dict[str, list[Any]]]:
    """Return the shape of the examples, and those of each split; adds to the summary and the report.

    Raises:
        ConfigError: no parent `events`. DataError: no example for a split.
    """
    from whorl.align.data.dataset_files import write_dataset
    from whorl.align.data.formats import Preference, UnpairedPreference
    from whorl.loop.feedback_pairs import feedback_examples

    if "events" not in ctx.parents:
        raise ConfigError(f"{ctx.name} has no events", expected='parents = ["events"]')
    folder = ctx.parent_folder("events")
    found = feedback_examples(
        read_rows(folder / "completions.jsonl"), read_rows(folder / "feedback.jsonl"), config.min_confidence
    )
    n_pairs = sum(map(len, found.pairs.values()))
    few = n_pairs < MIN_PAIRS and found.singles > 2 * n_pairs
    shape = "unpaired" if few else config.shape
    kind: Any = Preference if shape == "preferences" else UnpairedPreference
    records = found.pairs if shape == "preferences" else found.labels
    made = {split: [kind(**record) for record in own] for split, own in records.items()}
    made = {"train": made["train"][: config.max_train], "test": made["test"][: config.max_test]}
    for split, own in made.items():
        if not own:
            raise DataError(
                f"the feedback gives no {SHAPES[shape]} to {split}: {n_pairs} pairs, {found.singles} single answers, "
                + "; ".join(f"{n} left out: {why}" for why, n in found.left_out.items()),
                do="collect more feedback, on more prompts (two answers to one prompt, or thumbs both up and down)",
            )
    if shape == "preferences":  # all held-out thumbs, for `compare`
        thumbs = [UnpairedPreference(**one) for one in found.labels["test"]]
        write_dataset(ctx.out, "unpaired", "test", thumbs)
    ctx.progress.log(f"    {n_pairs:,} pairs and {found.singles:,} single answers: {SHAPES[shape]} are used")
    ctx.summary.update(
        models=ctx.parents["events"].summary["models"], pairs=dict(found.kinds), singles=found.singles,
        left_out=dict(found.left_out),
    )  # fmt: skip
    if found.votes:
        _report(ctx, found)
    return shape, made


def _report(ctx: StepContext, found: FeedbackExamples) -> None:
    """Add the figures of the raters."""
    import numpy as np

    from whorl.tracking.inequality import gini, lorenz_curve

    votes = np.array([*found.votes.values()], np.float64)
    facts = {
        "raters": f"{len(votes):,}",
        "votes": f"{votes.sum():,.0f}",
        "Gini coefficient": f"{gini(votes):.2f}",
    }
    for name, ratings in found.ratings.items():
        if ratings.votes:
            mean = np.average([*ratings.agreement.values()], weights=[*ratings.votes.values()])
            facts[f"agreement, {name}"] = f"{mean:.0%}"
            if ratings.left is not None:
                facts["votes for the left answer"] = f"{ratings.left:.0%}"
    members, shares = lorenz_curve(votes.tolist())
    ctx.summary.update(gini=round(float(gini(votes)), 4), raters=len(votes))
    ctx.report.blocks += [
        Facts(section="Feedback", title="Raters", rows=[*facts.items()]),
        Curve(
            section="Feedback", title="Votes per rater", height=190, unit="share", x_label="share of the raters",
            note="Lorenz curve: the share of all votes that the least active raters have together.",
            lines=[Line(name="equal", x=[0, 1], y=[0, 1], style="faint"), Line(name="votes", x=members, y=shares)],
            label=f"Lorenz curve of votes; Gini coefficient {gini(votes):.2f}",
        ),
    ]  # fmt: skip
