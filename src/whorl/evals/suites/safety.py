"""The suites `safety` and `jailbreak`: harmful requests with harmless twins, plain and transformed.

They need no data. Their items are the package's own 30 pairs, too few to compare models. Another set with the same fields
is a task of the kind `generate` with these settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from whorl.evals.kinds.kind import EvalTask
from whorl.evals.safety import SafetyItem, built_in, transform_items
from whorl.evals.suites.suite import SuiteInputs
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

SETTINGS: dict[str, Any] = {
    "version": "1",
    "kind": "generate",
    "template": "{{ prompt }}",
    "chat": True,
    "gold": "expected",
    "data": {"cluster": "twin", "group": "group"},
    "generation": {"max_tokens": 256},
    "options": {"metric": "safety", "metric_fields": ["plain", "prompt", "transformation"]},
}


def safety_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return one task: harmful requests and their twins, by subject."""
    about = "harmful requests, and harmless ones that resemble them"
    return [_task("safety", about, built_in(), inputs.limit)]


def jailbreak_suite(inputs: SuiteInputs) -> list[EvalTask]:
    """Return one task: the same under each transformation, by transformation. The limit counts plain requests."""
    items = built_in()[: inputs.limit]
    about = "the same requests under transformations that try to break a refusal"
    return [_task("jailbreak", about, transform_items(items, seed=inputs.seed), None)]


def _task(name: str, about: str, items: Sequence[SafetyItem], limit: int | None) -> EvalTask:
    config = parse_task({"name": name, "about": about, **SETTINGS}, f"suite {name}")
    return make_task(config, [asdict(item) for item in items], limit=limit)
