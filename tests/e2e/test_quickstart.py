"""A small quickstart from source code to a report; after random kills it ends with the same weights."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.cli import output_of, start_whorl, succeed, weights

from whorl.store import Store

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]
MODEL = "quickstart/pretrain"
SMALL = [
    "curate.validation_bytes=40000", "curate.test_bytes=40000",
    "plan.steps=60", "plan.d_model=64", "plan.n_layers=2", "plan.vocab_size=400", "plan.data.seq_len=128",
    "plan.ngram_buckets=4096", "plan.replicas=2", "plan.compile=false", "pretrain.run.checkpoint_seconds=0.4",
    "evaluate.items=8", "evaluate.samples=2", "evaluate.sample_tokens=20",
    "tasks.max_train=64", "tasks.max_test=8", "tasks.max_files=60", "tasks.max_prompt_bytes=160",
    "sft.data.seq_len=256", "sft.data.batch_size=4",
    "rl.steps=2", "rl.prompts_per_step=4", "rl.group_size=4", "rl.max_completion_tokens=24", "rl.max_seq_len=256",
]  # fmt: skip


def run_words(code: Path, store: Path, *more: object, sets: Sequence[str] = SMALL) -> tuple[object, ...]:
    """The words of `whorl run` for a small quickstart in `store`."""
    sources = (f'ingest.sources=["{code}"]', 'ingest.include=["*.py", "**/*.py"]')
    changes = [word for value in (*sources, *sets) for word in ("--set", value)]
    return ("run", "quickstart", "--store", store, *changes, *more)


def newest_checkpoint(store: Path) -> int:
    """The step of the newest complete checkpoint of a running build, or 0; scratch folders may vanish meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return max((int(path.name[5:]) for path in store.glob("scratch/*/step-*")), default=0)
    return 0


@pytest.fixture(scope="module")
def undisturbed(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    output_of(*run_words(code, store))
    return store


def test_quickstart_makes_evaluation_and_report(code: Path, undisturbed: Path) -> None:
    store = Store(undisturbed)
    evaluation = json.loads(store.open("quickstart/evaluate").file("evaluation.json").read_text())
    # About 4 bits per byte untrained; a few seconds of training are enough.
    assert 1.0 < evaluation["bits_per_byte"] < 3.6
    assert {b["name"] for b in evaluation["baselines"]} >= {"xz -9e, one stream", "PPMd order 10, primed"}
    written = [*undisturbed.glob("artifacts/*/*.json")]
    assert not [
        path.name for path in written if str(undisturbed) in path.read_text()
    ]  # nothing names the store's folder
    page = store.open("quickstart/report").file("report.html").read_text()
    assert f"{evaluation['bits_per_byte']:.3f}" in page and "<script src" not in page
    assert 'class="missing"' not in page and ">After pretraining</h2>" in page and 'class="pair"' in page
    assert "bytes per parameter: " in page and "stall" in page
    assert (
        ">Evaluation</h2>" in page
        and "own-continuation: acc" in page
        and "whole-files: bits_per_byte" in page
    )
    words = (
        "eval", "quickstart/evaluate", "--against", "quickstart/evaluate", "--out", undisturbed / "compared",
    )  # fmt: skip
    same = succeed(undisturbed, *words, "--store", undisturbed).stdout
    assert "not distinguishable" in same and "whole-files, bits_per_byte" in same
    assert succeed(undisturbed, *run_words(code, undisturbed)).stdout.count("looked up") == 11


def test_randomly_killed_run_ends_with_same_weights(code: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Two kills: of the process group while it starts, and of the trainer during training (bench/train/chaos.py: fifty).

    All checkpoints of an attempt but the last are complete, so a kill costs at most one checkpoint interval.
    """
    rng, shared = random.Random(7), ("--set", "pretrain.run.checkpoint_seconds=0.05", "--until", "pretrain")

    def logged_steps() -> list[int]:
        text = "".join(p.read_text() for p in tmp_path.glob("runs/*/log.txt"))
        return [int(step) for step in re.findall(r"checkpoint of step (\d+): stall", text)]

    kills, before, seen = 0, 0, 0
    for _ in range(40):
        process = start_whorl(*run_words(code, tmp_path, *shared), stderr=subprocess.STDOUT)
        end = time.monotonic() + (rng.uniform(2.0, 5.0) if not kills else 120)
        while process.poll() is None and newest_checkpoint(tmp_path) <= before and time.monotonic() < end:
            time.sleep(0.002)
        if kills < 2:
            time.sleep(rng.uniform(0, 0.05))
            if process.poll() is None:
                (os.kill if kills % 2 else os.killpg)(process.pid, signal.SIGKILL)
                kills += 1
        output, _ = process.communicate(timeout=120)
        if before:  # no complete checkpoint was lost
            assert f"continues at step {before:,} of" in output, output
        if process.returncode == 0:
            break
        before = newest_checkpoint(tmp_path)
        new_steps, seen = logged_steps()[seen:], len(logged_steps())
        assert before >= max([0, *new_steps[:-1]]), (before, new_steps)
    assert process.returncode == 0 and kills == 2 and seen
    assert weights(tmp_path, MODEL) == weights(undisturbed, MODEL)


def test_sample_is_reproducible_with_seed(undisturbed: Path) -> None:
    def sample(*words: object) -> str:
        base = ("sample", MODEL, "def ", "--store", undisturbed, "-n", 30)
        return succeed(undisturbed, *base, *words).stdout

    first = sample("--seed", 1)
    assert first.startswith("def") and first == sample("--seed", 1)
    assert first != sample("--seed", 2)
    assert "e" not in sample("--seed", 1, "--stop", "e")[len("def ") :]
