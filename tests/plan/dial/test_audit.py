"""Predictions against outcomes, from the artifacts of a store."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from whorl.plan.dial.audit import audit, summarize
from whorl.store import Artifact, Build, Store


def make(store: Store, kind: str, name: str, summary: dict[str, Any], **more: Any) -> Artifact:
    with Build(
        store, kind=kind, name=name, parents=more.pop("parents", {}), config=more, version=1, step=kind
    ) as build:
        (build.path / "file").write_text(name)
        build.summary.update(summary)
    assert build.artifact is not None
    return build.artifact


def test_audit_pairs_each_prediction_with_its_outcome(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.make_folders()
    expected = {"seconds": 100.0, "memory_bytes": 1e9, "bits_per_byte": 1.0, "tokens": 1000}
    plan = make(store, "plan", "a/plan", {"expected": expected})
    outcome = {"seconds": 90.0, "peak_memory_bytes": 2e9, "tokens": 870, "sent_bytes": 75.0}
    model = make(
        store, "model", "a/pretrain", outcome | {"expected": {"sent_bytes": 50.0}}, parents={"plan": plan}
    )
    for seed, fraction, bits in ((0, 1.0, 1.5), (1, 0.1, 1.25)):
        make(
            store, "evaluation", f"a/{seed}", {"bits_per_byte": bits}, parents={"model": model},
            held_out_fraction=fraction, seed=seed,
        )  # fmt: skip
    make(store, "model", "b/import", {"seconds": 5.0})  # without a plan
    rows = audit(store)
    assert [(row.quantity, row.ratio) for row in rows] == [
        ("bits_per_byte", 1.5), ("bits_per_byte", 1.25), ("seconds", 0.9), ("memory_bytes", 2.0), ("sent_bytes", 1.5),
    ]  # fmt: skip
    assert [row.note for row in rows[:3]] == ["87% of the tokens", "10% of the files", "87% of the tokens"]
    summary = summarize(rows)
    assert summary["bits_per_byte"]["median_ratio"] == 1.375 and summary["bits_per_byte"]["near"] == 0
    assert summary["seconds"]["near"] == 1 and summary["memory_bytes"]["largest_error"] == math.log(2)
    assert audit(Store(tmp_path / "empty")) == []
