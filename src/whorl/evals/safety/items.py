"""Items of a safety set: harmful requests and their harmless twins, which resemble them.

A model that refuses everything is safe and useless. So each harmful request has a twin with the same words or form that a
model should answer, and one table has both failures: compliance with the first, over-refusal of the second.

Records, as JSON lines, with the metric `refusal` and these fields:

    {"id": "lock-harmful", "prompt": "...", "expected": "refusal", "group": "homonyms", "twin": "lock"}
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from whorl.errors import DataError
from whorl.evals.safety.twins import TWINS

XSTEST_GROUPS = {
    "contrast_discr": "discrimination",
    "nons_group_real_discr": "discrimination",
    "real_group_nons_discr": "discrimination",
    "contrast_privacy": "privacy",
    "privacy_public": "privacy",
    "privacy_fictional": "privacy",
}


@dataclass(frozen=True)
class SafetyItem:
    """A request.

    Attributes:
        expected: "answer" or "refusal".
        group: subject, shared by twins.
        twin: equal for items that belong together; intervals cluster by it.
        transformation: "" or the name of the one that was applied.
        plain: the request before the transformation; "" if none was applied.
    """

    id: str
    prompt: str
    expected: str
    group: str = ""
    twin: str = ""
    transformation: str = ""
    plain: str = ""


def built_in() -> list[SafetyItem]:
    """Return the twins of this package. They need no data, and are too few for more than a first look."""
    items = []
    for name, group, harmful, harmless in TWINS:
        items.append(SafetyItem(f"{name}-harmful", harmful, "refusal", group, name))
        items.append(SafetyItem(f"{name}-harmless", harmless, "answer", group, name))
    return items


def read_xstest(path: str | Path) -> list[SafetyItem]:
    """Return the prompts of XSTest (arXiv:2308.01263), from its table of prompts or of completions.

    Types that begin with "contrast_" are harmful. The five harmful and five harmless types of equal name share a group; so
    do those on discrimination and privacy. XSTest pairs types and not prompts, so each item is a cluster.

    Raises:
        DataError: the file is missing, lacks the columns, or has two prompts of one id.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", expected="xstest_prompts.csv or a table of completions"
        ) from error
    items: dict[str, SafetyItem] = {}
    for number, row in enumerate(rows, start=2):
        if not all(row.get(column) for column in ("id", "type", "prompt")):
            raise DataError(
                f"{path}, line {number}: no id, type or prompt", expected="the columns id, type, prompt"
            )
        kind, prompt = row["type"], row["prompt"].strip()
        if row["id"] in items and items[row["id"]].prompt != prompt:
            raise DataError(
                f"{path}, line {number}: id {row['id']} has two prompts", expected="one prompt for each id"
            )
        expected = "refusal" if kind.startswith("contrast_") else "answer"
        group = XSTEST_GROUPS.get(kind, kind.removeprefix("contrast_"))
        items[row["id"]] = SafetyItem(row["id"], prompt, expected, group, row["id"])
    if not items:
        raise DataError(f"{path} has no prompt", expected="one on each line after the first")
    return list(items.values())


def write_items(path: str | Path, items: Iterable[SafetyItem]) -> int:
    """Write items as JSON lines for a task, and return their number."""
    lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items]
    Path(path).write_text("".join(lines), "utf-8")
    return len(lines)
