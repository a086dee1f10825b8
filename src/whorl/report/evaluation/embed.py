"""Embed items in a page: columns for the list, and chunks of whole items that the browser unpacks when they are shown.

A page of 10,000 items has tens of megabytes of prompts, answers and log-probabilities. Each block is JSON, deflated
(RFC 1951) and written in base64 into a script element of type text/plain. The browser parses such an element in no time,
and no text of a model can end the element, because base64 has no `<`.

    task-0            {"ids", "lines", "groups", "group", "outcomes", "scores"}: one entry per item
    task-0-chunk-3    items 192 to 255: {"prompt", "gold", "sides": [{"answers", "reason", "scores", "details"} per model]}
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from whorl.evals.results import OUTCOMES, ItemResult

CHUNK_ITEMS = 64
LINE_CHARACTERS = 120  # of the prompt in the list
MAX_TOKENS = 4000  # of one item with log-probabilities
ABSENT = len(OUTCOMES)  # the outcome of an item that a model does not have


def pack(value: Any) -> str:
    """Return a value as base64 of deflated JSON. Numbers that JSON lacks become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    squeeze = zlib.compressobj(6, zlib.DEFLATED, -15)
    data = squeeze.compress(text.encode("utf-8", "backslashreplace")) + squeeze.flush()
    return base64.b64encode(data).decode()


def unpack(text: str) -> Any:
    """Return the value of `pack`, as the browser does."""
    return json.loads(zlib.decompress(base64.b64decode(text), -15))


def task_blocks(number: int, models: Sequence[Sequence[ItemResult]]) -> Iterator[tuple[str, str]]:
    """Yield (id of the element, packed text) of a task: its chunks, then its columns.

    models: the items of each model. Joined by id, they are in the order of the first model that has them.
    """
    places: dict[str, int] = {}
    merged: list[dict[str, Any]] = []
    for side, items in enumerate(models):
        for item in items:
            place = places.setdefault(item.item, len(merged))
            if place == len(merged):
                sides = [None] * len(models)
                merged.append({"id": item.item, "prompt": "", "gold": "", "group": "", "sides": sides})
            entry = merged[place]
            for name in ("prompt", "gold", "group"):
                entry[name] = entry[name] or getattr(item, name)
            entry["sides"][side] = _side(item)
    columns = _columns(merged, len(models))
    for chunk, start in enumerate(range(0, len(merged), CHUNK_ITEMS)):
        shown = [
            {k: entry[k] for k in ("prompt", "gold", "sides")}
            for entry in merged[start : start + CHUNK_ITEMS]
        ]
        yield f"task-{number}-chunk-{chunk}", pack(shown)
    yield f"task-{number}", pack(columns)


def _side(item: ItemResult) -> dict[str, Any]:
    """Return what one model did with an item."""
    details = dict(item.details)
    if details.get("tokens"):
        details = {name: value for name, value in details.items() if name not in ("token_ids", "log_probs")}
    if isinstance(tokens := details.get("tokens"), list) and len(tokens) > MAX_TOKENS:
        details["tokens"] = tokens[:MAX_TOKENS]
        details["tokens_left_out"] = len(tokens) - MAX_TOKENS
    return {
        "outcome": OUTCOMES.index(item.outcome),
        "answers": item.answers,
        "reason": item.reason,
        "scores": item.scores,
        "details": details,
    }


def _columns(entries: Sequence[dict[str, Any]], models: int) -> dict[str, Any]:
    groups = sorted({entry["group"] for entry in entries})
    code = {name: number for number, name in enumerate(groups)}
    sides = [[entry["sides"][side] for entry in entries] for side in range(models)]
    return {
        "ids": [entry["id"] for entry in entries],
        "lines": [_line(entry["prompt"]) for entry in entries],
        "groups": groups,
        "group": [code[entry["group"]] for entry in entries],
        "outcomes": [[ABSENT if side is None else side["outcome"] for side in column] for column in sides],
        "scores": [[_score(side) for side in column] for column in sides],
    }


def _line(prompt: str) -> str:
    """Return the last line of a prompt with text. A few-shot prompt starts with its examples and ends with the question."""
    lines = [line.strip() for line in prompt.splitlines() if len(line.strip()) > 12] or [prompt.strip()]
    return lines[-1][:LINE_CHARACTERS]


def _score(side: dict[str, Any] | None) -> float | None:
    """Return the first score, to four digits."""
    value = next(iter(side["scores"].values()), None) if side else None
    return float(f"{value:.4g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
