"""The recipe `asynchronous` at tiny size: both measures, the page, and wrong settings."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import refuse, succeed
from tests.support.recipes.align_steps import write_code

from whorl.store import Store

TINY = {
    "ingest.sources": '["code"]', "plan.steps": 4, "plan.d_model": 32, "plan.n_layers": 1, "plan.vocab_size": 300,
    "plan.ngram_buckets": 64, "plan.data.seq_len": 32, "plan.data.batch_size": 4, "curate.validation_bytes": 2000,
    "curate.test_bytes": 2000, "curate.near_duplicates": '"keep"',
    "asynchronous.methods": '["bounded"]', "asynchronous.slowdown": 2,
}  # fmt: skip


def options(**more: object) -> list[str]:
    return [word for name, value in {**TINY, **more}.items() for word in ("--set", f"{name}={value}")]


def test_asynchronous_trains_twice_and_writes_a_page(tmp_path: Path) -> None:
    write_code(tmp_path / "code")
    for change, words in (
        ({"asynchronous.workers": 3}, "a divisor, such as 2 and 4"),
        ({"asynchronous.methods": '["mirror"]'}, "'mirror' is no method"),
    ):
        assert words in refuse(tmp_path, "run", "asynchronous", *options(**change))
    shown = succeed(tmp_path, "run", "asynchronous", *options(), "--store", "store").output
    assert "bounded       equal time" in shown
    store = Store(tmp_path / "store")
    runs = json.loads(store.open("asynchronous/asynchronous").file("methods.json").read_text())
    tokens, timed = (runs[measure]["bounded"] for measure in ("tokens", "seconds"))
    assert tokens["steps"] == 8 and len(timed["curve"]) > 1 and timed["seconds"] >= tokens["seconds"]
    page = store.open("asynchronous/report").file("report.html").read_text()
    for words in ("bits per byte at equal time", "Versions behind", "Workers wait"):
        assert words in page
