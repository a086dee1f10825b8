"""A very small `cite-sources` from end to end: tasks with sources, a BPE of their texts, and the step `suite`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whorl.align.data.dataset_files import read_conversations
from whorl.errors import ConfigError
from whorl.recipes import load_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tracking.progress import Progress

SMALL = (
    "lessons.max_train=40", "lessons.max_test=4", "init_model.d_model=16", "init_model.n_layers=1",
    "init_model.n_heads=1", "init_model.mlp_hidden=16", "init_model.vocab_size=400", "answers.items=4",
    "sft.data.seq_len=640",
)  # fmt: skip


def test_recipe_measures_with_sources_and_without(tmp_path: Path) -> None:
    store = Store(tmp_path)
    done = run_recipe(load_recipe("cite-sources", sets=SMALL), store, Progress.silent()).artifacts
    talks = read_conversations(done["lessons"].path, "train")
    assert len(talks) == 40 and talks[0].messages[0]["content"].startswith("Answer from these sources")
    tokenizer = load_tokenizer(done["sft"].path)
    assert 380 < tokenizer.vocab_size <= 402 and done["sft"].summary["left_out"] == {}
    tasks = {task["task"]: task for task in done["answers"].summary["tasks"]}
    assert {*tasks} == {"cited-answers", "closed-book"}
    assert [f["metric"] for f in tasks["cited-answers"]["figures"]] == ["correct", "cited"]
    items = (done["answers"].path / "suite" / "items-cited-answers.jsonl").read_text().splitlines()
    assert len(items) == 4 and json.loads(items[0])["answers"]
    assert "closed-book: correct" in (done["report"].path / "report.html").read_text()


def test_vocabulary_without_tasks_is_an_error(tmp_path: Path) -> None:
    recipe = load_recipe("align-arithmetic", sets=("init_model.vocab_size=400",))
    with pytest.raises(ConfigError, match="vocab_size and the parent tasks belong together"):
        run_recipe(recipe, Store(tmp_path), Progress.silent(), until="init_model")
