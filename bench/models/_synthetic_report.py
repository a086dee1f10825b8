"""Markdown tables from the results of `bench/models/synthetic_tasks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Runs = dict[str, dict[str, Any]]

ORDER = (
    "attention", "experts", "smeared", "convolved", "latent", "window 16", "pointwise", "pointwise, convolved", "linear",
    "linear, decay", "linear, convolved", "Mamba", "not selective", "GRU", "LSTM", "RNN",
)  # fmt: skip
NAMES = {"not selective": "Mamba, not selective", "experts": "8 experts, top 2", "attention": "attention"}


def seeds_of(runs: Runs, task: str, kind: str, how: str = "") -> list[dict[str, Any]]:
    """Results of all seeds of one kind, without tuning runs."""
    keys = [key for key in runs if key.startswith(f"{task}/{kind}/") and "/tuning/" not in key]
    return [runs[key] for key in sorted(keys) if key.endswith(how)]


def kinds_of(runs: Runs, task: str) -> list[str]:
    """Kinds with results, in the order of `ORDER`."""
    found = {k.split("/")[1] for k in runs if k.startswith(f"{task}/") and "/tuning/" not in k}
    return sorted(found, key=ORDER.index)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tables(runs: Runs) -> str:
    """Markdown tables: synthetic tasks, steps until induction heads form, text."""
    made_up = [_made_up(runs, t) for t in ("recall", "copying", "copying longer") if kinds_of(runs, t)]
    parts = [*made_up, _repetition(runs), _text(runs), _text(runs, "text longer", ("compute",))]
    return "\n\n".join(part for part in parts if part)


def _made_up(runs: Runs, task: str) -> str:
    lines: list[str] = []
    for kind in kinds_of(runs, task):
        found = seeds_of(runs, task, kind)
        sizes = list(found[0]["accuracy"])
        if not lines:
            unit = "pairs" if task == "recall" else "tokens"
            lines = [
                f"| {task}, share correct | rate | {' | '.join(f'{s} {unit}' for s in sizes)}, each seed | steps |",
                "|---" * (3 + len(sizes)) + "|",
            ]
        means = [f"{mean([f['accuracy'][s] for f in found]):.2f}" for s in sizes[:-1]]
        last = ", ".join(f"{f['accuracy'][sizes[-1]]:.2f}" for f in found)
        steps = ", ".join(str(f["reached"] or f"({f['steps']})") for f in found)
        lines.append(
            f"| {NAMES.get(kind, kind)} | {found[0]['rate']:g} | {' | '.join(means)} | {last} | {steps} |"
        )
    return "\n".join(lines)


def _repetition(runs: Runs) -> str:
    lines = [
        "| induction heads: steps until | rate | 50 % correct, each seed | 90 % | 99 % |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds_of(runs, "repetition"):
        found = seeds_of(runs, "repetition", kind)
        cells = [", ".join(str(first(f, share)) for f in found) for share in (0.5, 0.9, 0.99)]
        lines.append(f"| {NAMES.get(kind, kind)} | {found[0]['rate']:g} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def first(run: dict[str, Any], share: float) -> int | str:
    """The step of the first evaluation with at least this share correct."""
    reached = [n for n, x in enumerate(run["evaluations"], start=1) if x >= share]
    return reached[0] * run["every"] if reached else f"not in {run['steps']}"


def _text(runs: Runs, task: str = "text", ways: Sequence[str] = ("compute", "seconds")) -> str:
    head = f"| {task}, bits per character | rate | parameters (active) |"
    head += "".join(f" equal {how}, each seed | mean | steps | CPU s |" for how in ways)
    lines = [head, "|---" * (3 + 4 * len(ways)) + "|"]
    for kind in kinds_of(runs, task):
        all_found = [seeds_of(runs, task, kind, how) for how in ways]
        if not all(all_found):
            continue
        one = all_found[0][0]
        cells = [
            NAMES.get(kind, kind),
            f"{one['rate']:g}",
            f"{one['total'] / 1e3:,.0f} k ({one['active'] / 1e3:,.0f} k)",
        ]
        for found in all_found:
            bits = [f["bits"] for f in found]
            cells += [", ".join(f"{b:.3f}" for b in bits), f"**{mean(bits):.3f}**"]
            cells += [f"{mean([f[x] for f in found]):.0f}" for x in ("steps", "cpu_seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""
