"""The examples of docs/data.md are records that the readers of the steps accept."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.docs.test_docs import ROOT

from whorl.align.data import read
from whorl.corpus import IngestConfig, ingest
from whorl.corpus.links import GoodLinks
from whorl.data.forms import FORMS
from whorl.data.labelled import read_labelled
from whorl.data.quarantine import Quarantine
from whorl.data.record_files import records
from whorl.evals.grading import read_tasks
from whorl.evals.tasks.task import load_task
from whorl.loadtest.workload import read_prompts
from whorl.tracking.progress import Progress
from whorl.vision.config import ImagesConfig
from whorl.vision.sources import make_splits

CATALOG = ROOT / "src" / "whorl" / "evals" / "catalog"


def examples() -> Iterator[tuple[str, str, str]]:
    """Language, kind and lines of each block."""
    for block in (ROOT / "docs" / "data.md").read_text("utf-8").split("\n```")[1:]:
        head, _, body = block.partition("\n")
        if head:  # else the end of one
            language, _, kind = head.partition(" ")
            yield language, kind, body + "\n"


def texts(path: Path, quarantine: Quarantine) -> int:
    summary = ingest(IngestConfig(sources=[str(path)]), path.parent / "out", Progress.silent())
    return int(summary["documents"])


def images(path: Path, quarantine: Quarantine) -> int:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("one", "two", "three")):
        shades = np.full((8, 8, 3), 80 * number, np.uint8)
        image.fromarray(shades).save(path.parent / f"{name}.png")
    make_splits(ImagesConfig(path=str(path), size=8, test_fraction=0.4), quarantine)
    return quarantine.accepted


def count(reader: Callable[..., Iterator[Any]]) -> Callable[[Path, Quarantine], int]:
    return lambda path, quarantine: len(list(reader(path, quarantine)))


READERS: dict[str, Callable[[Path, Quarantine], int]] = {
    "texts": texts,
    "links": lambda path, quarantine: len(GoodLinks([str(path)], 3)),
    "conversations": count(read.conversations),
    "pairs": count(read.pairs),
    "tasks": count(read_tasks),
    "preferences": count(read.preferences),
    "unpaired": count(read.unpaired),
    "labelled": lambda path, quarantine: len(read_labelled(path, "text", "label", quarantine)),
    "images": images,
    "items": lambda path, quarantine: len(load_task(CATALOG / "gsm8k.toml", test=[str(path)]).items),
    "prompts": lambda path, quarantine: len(read_prompts(path)),
}


@pytest.mark.parametrize(("language", "kind", "body"), list(examples()), ids=lambda value: str(value)[:14])
def test_examples_are_read_by_the_step(language: str, kind: str, body: str, tmp_path: Path) -> None:
    path = tmp_path / f"example.{'csv' if language == 'csv' else 'jsonl'}"
    path.write_text(body, encoding="utf-8")
    n_records = len(list(csv.reader(io.StringIO(body)))) - 1 if language == "csv" else body.count("\n")
    quarantine = Quarantine()
    assert READERS[kind](path, quarantine) == n_records > 0 and not len(quarantine)


def test_every_form_has_an_example(tmp_path: Path) -> None:
    fields: dict[str, list[set[str]]] = {kind: [] for kind in FORMS}
    for language, kind, body in examples():
        path = tmp_path / f"example.{'csv' if language == 'csv' else 'jsonl'}"
        path.write_text(body, encoding="utf-8")
        fields.get(kind, []).extend(set(record) for _, _, record in records(path) if isinstance(record, dict))
    for kind, forms in FORMS.items():
        for form in forms:
            assert any(found >= set(form) for found in fields[kind]), f"{kind}: {form}"
