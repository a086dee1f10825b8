"""Runs as points of a law: parameters, data, FLOPs and loss; read from a CSV file, and checked before a fit."""

from __future__ import annotations

import csv
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whorl.errors import DataError, one_of, shorten
from whorl.plan.laws.law import effective_bytes

COLUMNS = {
    "parameters": "weights that are multiplied",
    "tokens": "seen in training; may be missing",
    "training_flops": "6 x parameters x tokens; may be missing instead",
    "loss": "held-out, nats per token; nan of a run that diverged",
    "unique_tokens": "of a corpus that is read more than once",
    "tokenizer": "the same in all rows",
    "split": "the same in all rows",
}
FEWEST, FEWEST_VALUES = 6, 3  # runs for five constants; different sizes, and different amounts of data
NEAR = 1.25  # values within this factor count as one
MIN_SPREAD = 0.1  # standard deviation of ln N and ln D across the line that fits them best


@dataclass(frozen=True)
class Points:
    """Runs: arrays of shape [n] of parameters, data, FLOPs and loss (of a diverged run nan), and a name of each run."""

    parameters: Any
    data: Any
    flops: Any
    loss: Any
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.loss)

    def where(self, mask: Any) -> Points:
        """Return the runs that a mask of shape [n] selects."""
        n, d, flops, loss, names = (
            each[mask] for each in (self.parameters, self.data, self.flops, self.loss, np.array(self.names))
        )
        return Points(n, d, flops, loss, tuple(map(str, names)))

    @property
    def finite(self) -> Any:
        """Mask of the runs that did not diverge."""
        return np.isfinite(self.loss)


def read_csv(path: Path) -> Points:
    """Read runs from a file with the columns of `COLUMNS`.

    Raises:
        DataError: the file cannot be read; a column is missing or unknown; a value is no positive number; or the losses are
            of several tokenizers or splits. It names line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            heads, *rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        what = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: {what}", expected="a CSV file of runs") from error
    for name in heads:
        if name not in COLUMNS:
            what, do = f"{path}: unknown column {shorten(repr(name))}", "rename the column, or remove it"
            raise DataError(what, expected=one_of(name, [*COLUMNS]), do=do)
    amount = "tokens" if "tokens" in heads else "training_flops"
    if missing := [name for name in ("parameters", amount, "loss") if name not in heads]:
        about = "; ".join(f"{name}: {about}" for name, about in COLUMNS.items())
        raise DataError(f"{path}: no column {', '.join(missing)} in its first line", expected=about)
    columns = {name: [row[i] if i < len(row) else "" for row in rows] for i, name in enumerate(heads)}
    for name in ("tokenizer", "split"):
        if len(counts := Counter(columns.pop(name, ()))) > 1:
            found = ", ".join(
                f"{label or 'none'} ({n} row{'s' * (n > 1)})" for label, n in counts.most_common(4)
            )
            raise DataError(
                f"{path}: losses of several {name}s cannot be compared: {found}", expected=f"one {name} in all rows",
                do="keep the rows of one, or give bits per byte of the same text without this column",
            )  # fmt: skip
    table = {
        name: np.array([_number(f"{path}, line {line}", name, text) for line, text in enumerate(texts, 2)])
        for name, texts in columns.items()
    }
    n = table["parameters"]
    tokens = table["tokens"] if "tokens" in table else table["training_flops"] / (6.0 * n)
    flops = table.get("training_flops", 6.0 * n * tokens)
    if "unique_tokens" in table:
        tokens = np.array([*map(effective_bytes, tokens, table["unique_tokens"])])
    return Points(n, tokens, flops, table["loss"], tuple(f"line {i + 2}" for i in range(len(n))))


def _number(place: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if name == "loss" and not math.isfinite(value):
        return math.nan
    if not 0 < value < math.inf:
        raise DataError(f"{place}: {name} is {shorten(repr(text))}", expected="a number above zero")
    return value


def check_points(points: Points) -> None:
    """Check that runs determine a law: enough of them, of several sizes and amounts of data that do not lie on one line.

    Raises:
        DataError: with the runs that are missing.
    """
    points = points.where(points.finite)
    sizes, amounts = len(groups(points.parameters)), len(groups(points.data))
    logs = np.log(np.stack([points.parameters, points.data]))
    spread = np.linalg.svd(logs - logs.mean(1, keepdims=True))[1][-1] if len(points) > 1 else 0.0
    if len(points) < FEWEST:
        problem = f"{len(points)} runs with a finite loss do not determine five constants"
    elif sizes < FEWEST_VALUES:
        problem = f"the runs have {sizes} different sizes, so the loss by size is unknown"
    elif amounts < FEWEST_VALUES:
        problem = f"the runs have {amounts} different amounts of data, so the loss by data is unknown"
    elif spread < MIN_SPREAD * math.sqrt(len(points)):
        problem = (
            "the runs lie on a line (data by a power of the size), so their losses have two explanations"
        )
    else:
        return
    raise DataError(
        problem, expected=f"at least {FEWEST} runs of {FEWEST_VALUES} sizes, each with several amounts of data",
        do=f"add runs such as: {missing_runs(points)}",
    )  # fmt: skip


def missing_runs(points: Points) -> str:
    """Return up to four runs, in words, that a grid of three sizes and three amounts of data lacks."""
    if not len(points):
        return "three sizes, a factor of two apart, each with three amounts of data"
    axes = []
    for values in (points.parameters, points.data):
        low, high = min(values.min(), values.max() / 4), values.max()
        axes.append((low, high, math.sqrt(low * high)))
    missing = [
        f"{n:.2g} parameters on {d:.2g} of data"
        for n in axes[0]
        for d in axes[1]
        if (np.hypot(np.log(points.parameters / n), np.log(points.data / d)) > math.log(2) / 2).all()
    ]
    return "; ".join(missing[:4]) or "other sizes at equal amounts of data"


def groups(values: Any) -> list[Any]:
    """Return the indices of values that are within NEAR of the lowest one of their group, by value."""
    found = list[list[int]]()
    for i in np.argsort(values):
        if found and values[i] <= NEAR * values[found[-1][0]]:
            found[-1].append(int(i))
        else:
            found.append([int(i)])
    return [np.array(group) for group in found]
