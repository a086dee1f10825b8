"""Tables of `whorl eval` on standard output."""

from __future__ import annotations

from collections.abc import Sequence

from whorl.cli.text_table import print_table
from whorl.evals.figures import HEADS, figure_notes, figure_rows, outcome_lines
from whorl.evals.results import TaskResult
from whorl.evals.safety.table import HEADS as SAFETY_HEADS
from whorl.evals.safety.table import has_twins, safety_cells, safety_table
from whorl.evals.suites import SUITES, catalog


def print_results(results: Sequence[TaskResult], *, all_metrics: bool) -> None:
    """Print the figures of one model, with counts of outcomes and notes."""
    print_table(HEADS, figure_rows(results, all_metrics=all_metrics), left=("metric",))
    print("\n".join([*outcome_lines(results), *figure_notes(results)]) + "\n")
    for result in filter(lambda each: has_twins(each.items), results):
        print(f"{result.task}:")
        print_table(SAFETY_HEADS, safety_cells(safety_table(result.items)))
        print()


def print_list() -> None:
    """Print the ready tasks and suites."""
    rows = [[name, config.kind, config.about] for name, config in catalog().items()]
    print_table(("task", "kind", "about"), rows, left=("kind", "about"))
    print(f"suites: {', '.join(SUITES)}")
