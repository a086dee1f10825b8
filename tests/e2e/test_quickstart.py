"""A small quickstart from source code to a report; after random kills it ends with the same weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 120
SMALL = [
    "curate.validation_bytes=40000", "curate.test_bytes=40000",
    f"plan.steps={STEPS}", "plan.d_model=64", "plan.n_layers=2", "plan.vocab_size=400", "plan.seq_len=128",
    "plan.ngram_buckets=4096", "plan.replicas=2", "plan.compile=false", "pretrain.checkpoint_seconds=0.4",
    "evaluate.completions=8", "evaluate.completion_tokens=40", "evaluate.samples=2", "evaluate.sample_tokens=20",
    "tasks.max_train=64", "tasks.max_test=8", "tasks.max_files=60", "tasks.max_prompt_bytes=160",
    "sft.seq_len=256", "sft.batch_size=4",
    "rl.steps=2", "rl.prompts_per_step=4", "rl.group_size=4", "rl.max_completion_tokens=24", "rl.max_seq_len=256",
]  # fmt: skip


def command(code: Path, store: Path, *more: str) -> list[str]:
    sets = [f'ingest.sources=["{code}"]', 'ingest.include=["*.py", "**/*.py"]', *SMALL]
    words = [word for value in sets for word in ("--set", value)]
    return [sys.executable, "-m", "whorl.cli", "run", "quickstart", "--store", str(store), *words, *more]


def checkpoint_steps(store: Path) -> list[int]:
    """Return the steps of complete checkpoints of running builds; a scratch folder may vanish while it is listed."""
    steps, scratch = [], store / "scratch"
    for folder in sorted(scratch.iterdir()) if scratch.exists() else []:
        with contextlib.suppress(FileNotFoundError):
            steps += [int(p.name[5:]) for p in folder.iterdir() if p.name.startswith("step-")]
    return steps


def weights(store: Path) -> str:
    from whorl.store import Store

    found = Store(store).open("quickstart/pretrain")
    return hashlib.sha256(found.file("model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(code: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    done = subprocess.run(command(code, store), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return store


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_quickstart_makes_evaluation_and_report(code: Path, undisturbed: Path) -> None:
    from whorl.store import Store

    store = Store(undisturbed)
    evaluation = json.loads(store.open("quickstart/evaluate").file("evaluation.json").read_text())
    # About 4 bits per byte untrained; a few seconds of training are enough.
    assert 1.0 < evaluation["bits_per_byte"] < 3.6
    assert {b["name"] for b in evaluation["baselines"]} >= {"xz -9e, one stream", "PPMd order 10, primed"}
    page = store.open("quickstart/report").file("report.html").read_text()
    assert f"{evaluation['bits_per_byte']:.3f}" in page and "<script src" not in page
    assert 'class="missing"' not in page and ">After pretraining</h2>" in page and 'class="pair"' in page
    assert "bytes per parameter: " in page and "stall" in page
    began = time.monotonic()
    again = subprocess.run(command(code, undisturbed), capture_output=True, text=True, timeout=60)
    assert again.stdout.count("looked up") == 11, again.stdout + again.stderr
    assert time.monotonic() - began < 15


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_randomly_killed_run_ends_with_same_weights(code: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Five kills of the trainer or of its process group, four of them during training (bench/train/chaos.py: fifty).

    All checkpoints of an attempt but the last are complete, so a kill costs at most one checkpoint interval.
    """
    rng, shared = random.Random(7), ["--set", "pretrain.checkpoint_seconds=0.05", "--until", "pretrain"]

    def newest() -> int:
        return max(checkpoint_steps(tmp_path), default=0)

    def logged_steps() -> list[int]:
        text = "".join(p.read_text() for p in tmp_path.glob("runs/*/log.txt"))
        return [int(step) for step in re.findall(r"checkpoint of step (\d+): stall", text)]

    kills, before, seen = 0, 0, 0
    for _ in range(40):
        process = subprocess.Popen(
            command(code, tmp_path, *shared),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + (rng.uniform(2.0, 5.0) if not kills else 120)
        while process.poll() is None and newest() <= before and time.monotonic() < deadline:
            time.sleep(0.002)
        if kills < 5:
            time.sleep(rng.uniform(0, 0.05))
            if process.poll() is None:
                (os.kill if kills % 2 else os.killpg)(process.pid, signal.SIGKILL)
                kills += 1
        output, _ = process.communicate(timeout=120)
        if before:  # no complete checkpoint was lost
            assert f"continues at step {before:,} of" in output, output
        if process.returncode == 0:
            break
        before = newest()
        new_steps, seen = logged_steps()[seen:], len(logged_steps())
        assert before >= max([0, *new_steps[:-1]]), (before, new_steps)
    assert process.returncode == 0 and kills == 5 and seen
    assert weights(tmp_path) == weights(undisturbed)


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_killed_streaming_run_ends_with_same_weights(code: Path, undisturbed: Path, tmp_path: Path) -> None:
    for number, folder in enumerate(sorted(p for p in code.iterdir() if p.is_dir())):
        texts = [p.read_text(errors="replace") for p in sorted(folder.rglob("*.py"))]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"part-{number}.jsonl").write_text(lines)
    stream = [
        "--set",
        f'pretrain.stream.sources=[{{files=["{tmp_path}/part-*.jsonl"]}}]',
        "--until",
        "pretrain",
    ]
    stores = [tmp_path / "whole", tmp_path / "killed"]
    for store in stores:  # the steps before training are done
        shutil.copytree(undisturbed, store)
    done = subprocess.run(command(code, stores[0], *stream), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    process = subprocess.Popen(
        command(code, stores[1], *stream), stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not checkpoint_steps(stores[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)  # only the trainer; its replica and tokenizer processes must exit
    process.wait()
    again = subprocess.run(command(code, stores[1], *stream), capture_output=True, text=True, timeout=200)
    assert again.returncode == 0 and "continues at step" in again.stdout, again.stdout + again.stderr
    assert weights(stores[1]) == weights(stores[0]) != weights(undisturbed)


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_sample_is_reproducible_with_seed(undisturbed: Path) -> None:
    def sample(*words: str) -> str:
        base = [
            sys.executable,
            "-m",
            "whorl.cli",
            "sample",
            "quickstart/pretrain",
            "def ",
            "--store",
            str(undisturbed),
        ]
        done = subprocess.run([*base, "-n", "30", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert sample("--seed", "1") == sample("--seed", "1") == sample("--seed", "1", "--no-cache")
    assert sample("--seed", "1") != sample("--seed", "2")
    assert sample("--seed", "1").startswith("def")
    stopped = sample("--seed", "1", "--stop", "e")
    assert "e" not in stopped[len("def ") :]


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_too_small_budget_is_refused_with_advice(code: Path, undisturbed: Path) -> None:
    words = [w for w in command(code, undisturbed) if not w.startswith(("plan.steps", "plan.d_model"))]
    at = [i for i, w in enumerate(words) if w == "--set" and (i + 1 == len(words) or words[i + 1] == "--set")]
    words = [w for i, w in enumerate(words) if i not in at]
    done = subprocess.run([*words, "--budget", "1s"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a budget of 1s buys" in done.stderr and "--budget" in done.stderr
