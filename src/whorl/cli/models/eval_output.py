"""Tables of `whorl eval` on standard output."""

from __future__ import annotations

from collections.abc import Sequence

from whorl.cli.text_table import print_table
from whorl.errors import NotApplicableError, WhorlError
from whorl.evals.figures import HEADS, figure_notes, figure_rows, outcome_lines
from whorl.evals.results import TaskResult
from whorl.evals.safety.table import HEADS as SAFETY_HEADS
from whorl.evals.safety.table import has_twins, safety_cells, safety_table
from whorl.evals.suites import SUITES, SuiteInputs, catalog, load_suite
from whorl.evals.suites.cost import suite_cost
from whorl.evals.suites.suite import ABOUT


def print_results(results: Sequence[TaskResult], *, all_metrics: bool) -> None:
    """Print the figures of one model, with counts of outcomes and notes."""
    print_table(HEADS, figure_rows(results, all_metrics=all_metrics), left=("metric",))
    print("\n".join([*outcome_lines(results), *figure_notes(results)]) + "\n")
    for result in filter(lambda each: has_twins(each.items), results):
        print(f"{result.task}:")
        print_table(SAFETY_HEADS, safety_cells(safety_table(result.items)))
        print()


def print_list(inputs: SuiteInputs) -> None:
    """Print the ready tasks, and the suites with the number of their items and of what they send to a model."""
    rows = [[name, config.kind, config.about] for name, config in catalog().items()]
    print_table(("task", "kind", "about"), rows, left=("kind", "about"))
    print()
    print_table(
        ("suite", "tasks", "items", "requests", "kB read", "tokens generated", "about"),
        [_row(name, inputs) for name in SUITES], left=("about",),
    )  # fmt: skip
    print(
        "A task takes its data from --data. The suite own has the items of a model's corpus: whorl eval MODEL --list."
    )
    print(
        "kB read: without beginnings that stay in the cache. Tokens generated: the most that answers may have."
    )


def _row(suite: str, inputs: SuiteInputs) -> list[str]:
    try:
        cost = suite_cost(load_suite(suite, inputs))
    except NotApplicableError:  # no documents are given
        return [suite, *"-----", ABOUT[suite]]
    except WhorlError as error:  # no package, or no corpus
        return [suite, *"-----", f"{ABOUT[suite]} ({error.what})"]
    numbers = (cost.tasks, cost.items, cost.requests, cost.read_bytes // 1000, cost.generated_tokens)
    return [suite, *(f"{number:,}" for number in numbers), ABOUT[suite]]
