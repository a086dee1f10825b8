"""A very small `align-arithmetic` from end to end, and tasks from Python files."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from tests.support.recipes.align_steps import run_text

from whorl.align.stage.io import read_prompt_completions, read_tasks
from whorl.cli.jobs.report import report
from whorl.engine.cpu import runner
from whorl.errors import ConfigError, DataError, NotApplicableError
from whorl.evals.grading import grade_tasks
from whorl.machine import device_probe
from whorl.machine.device_probe import Measurement, choose
from whorl.models import load_model
from whorl.recipes import RunResult, load_recipe, run_recipe
from whorl.report.format import format_percent
from whorl.sandbox import Sandbox
from whorl.store import Store
from whorl.tracking.progress import Progress

# Sums of two digits with the answer alone: after a second of SFT some answers pass, so that rewards differ.
SMALL = (
    "lessons.max_train=300", "lessons.max_test=6", "lessons.levels={0 = 1.0}", "lessons.answer_only_fraction=1.0",
    "init_model.d_model=32", "init_model.n_layers=1", "init_model.n_heads=1", "init_model.mlp_hidden=32",
    "base.data.seq_len=96", "base.data.epochs=5",
    "manners.max_train=32", "manners.max_test=6", "manners.levels={0 = 1.0}", "sft.data.seq_len=96",
    "rl.steps=2", "rl.prompts_per_step=4", "rl.group_size=8", "rl.max_completion_tokens=12",
    "rl.max_seq_len=24", "rl.run.log_rollouts_every=1",
)  # fmt: skip
SAMPLE = {"prompt", "answer", "reward", "passed", "reason"}
CODE = '''\
"""Numbered {i}."""


def add_{i}(first, second):
    """The sum of two numbers, for {i}.

    >>> add_{i}(2, 3)
    5
    """
    total = first + second
    return total


def longest_{i}(words):
    """The longest of some words, by number {i}."""
    ordered = sorted(words, key=len)
    return ordered[-{i} - 1]


def between_{i}(low, value, high):
    """Whether a value lies within {i} of its bounds."""
    return low - {i} <= value <= high + {i}
'''


def run(store: Store, *sets: str, until: str | None = None) -> RunResult:
    recipe = load_recipe("align-arithmetic", sets=(*SMALL, *sets))
    return run_recipe(recipe, store, Progress.silent(), until=until)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def done(store: Store) -> RunResult:
    return run(store)


def log_of(outcome: RunResult) -> str:
    return (outcome.run.dir / "log.txt").read_text()


def test_stages_keep_model_lineage(store: Store, done: RunResult) -> None:
    found = store.lineage(done.artifacts["rl"])
    chain = [found["name"]]
    while found := found["parents"].get("model"):
        chain.append(found["name"])
    assert chain == [f"align-arithmetic/{name}" for name in ("rl", "sft", "base", "init_model")]
    models = ("init_model", "base", "sft", "rl")
    weights = {name: load_model(done.artifacts[name].path).state_dict() for name in models}

    def moved(before: str, after: str) -> bool:
        return any(not w.equal(weights[after][name]) for name, w in weights[before].items())

    assert moved("init_model", "base") and moved("base", "sft")
    # A group with equal rewards gives no gradient; any other group does.
    curve = json.loads(done.artifacts["rl"].file("curve.json").read_text())
    assert moved("sft", "rl") == any(record["zero_std_groups"] < 4 for record in curve)
    for name in ("base", "sft", "rl"):
        assert "tokenizer.json" in done.artifacts[name].files
    summary = done.artifacts["base"].summary
    assert summary["texts"] == 300 and not summary["left_out"]
    assert summary["final"]["nll"] < 1.5  # untrained: 5.5


def test_sft_measures_accuracy_before_and_after(store: Store, done: RunResult) -> None:
    measured = done.artifacts["sft"].summary["eval"]["after"]
    assert [*measured] == ["held_out_nll"]  # 96 ids do not fit a prompt and an answer of 96
    assert "no held-out task fits its prompt and sft.max_completion_tokens: 96" in log_of(done)
    assert re.search(r"Fine-tuning: (\d+) of \1 steps", log_of(done))
    found = run(store, "base.max_completion_tokens=12", "base.eval_tasks=4", until="base").artifacts["base"]
    before, after = (found.summary["eval"][when] for when in ("before", "after"))
    assert found.summary["tasks"] == {"test": 4} and before["accuracy_greedy"] == 0.0
    assert after["tasks"] == 4 and 0 <= after["accuracy_greedy"] <= 1
    accuracies = f"greedy accuracy on 4 held-out tasks 0% before, {after['accuracy_greedy']:.0%} after"
    assert accuracies in found.summary["headline"]
    written = found.file("report.json").read_text()
    assert (
        "Accuracy, greedy" in written and f'"after":"{format_percent(after["accuracy_greedy"])}"' in written
    )
    without = run(store, "base.eval_tasks=0", until="base").artifacts["base"].summary
    assert "tasks" not in without["eval"]["after"]


def test_rl_measures_accuracy_before_and_after(done: RunResult) -> None:
    artifact = done.artifacts["rl"]
    summary = artifact.summary
    criterion = "the number equals the expected one"
    assert summary["pass_criterion"] == criterion and f"a pass: {criterion}" in summary["headline"]
    assert f"a pass on held-out tasks: {criterion}" in log_of(done)
    assert criterion in artifact.file("report.json").read_text()
    assert summary["tasks"] == {"train": 32, "test": 6}
    for when in ("before", "after"):
        measured = summary["eval"][when]
        assert 0 <= measured["accuracy"] <= 1 and 0 <= measured["accuracy_greedy"] <= 1
    assert summary["bits_per_byte"] == {"before": None, "after": None}  # nothing was pretrained
    curve = json.loads(artifact.file("curve.json").read_text())
    assert [record["step"] for record in curve] == [1, 2]
    assert all(0 <= r["accuracy"] <= 1 and r["completion_length/mean"] <= 12 for r in curve)
    assert all(r["logprob_diff_max"] < 1e-4 for r in curve)
    samples = json.loads(artifact.file("samples.json").read_text())
    tasks = read_tasks(done.artifacts["manners"].path, "test")
    for when in ("before", "after"):
        assert [sample["prompt"] for sample in samples[when]] == [task.prompt for task in tasks]
        assert all(sample.keys() == SAMPLE for sample in samples[when])
        passed = sum(sample["passed"] for sample in samples[when]) / len(tasks)
        assert passed == pytest.approx(summary["eval"][when]["accuracy"])


def test_rl_logs_rollout_tables(done: RunResult) -> None:
    log = log_of(done)
    assert "    step 1: accuracy " in log
    assert "    step 2: accuracy " not in log  # the last step is covered by the samples
    tasks = re.findall(r"    task\n.* {8}(\S+)$", log, flags=re.M)
    prompts = {task.prompt.strip() for task in read_tasks(done.artifacts["manners"].path, "train")}
    assert tasks and {*tasks} <= prompts
    rewards = re.findall(r"    ([+-]) reward ([01])\.00, (\w+)", log)
    assert len(rewards) >= len(tasks)
    assert all((sign == "+") == (reward == "1") == (why == "passed") for sign, reward, why in rewards)


def test_report_shows_stages_of_whole_and_partial_run(store: Store, done: RunResult, tmp_path: Path) -> None:
    page = done.artifacts["report"].file("report.html").read_text()
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == ["result", "after_pretraining", "model", "time", "lineage", "environment"]
    assert 'class="missing"' not in page and page.count('<figure class="pair"') == 6
    steps = re.findall(r"<tr><td>(\w+)</td><td class=\"n\">", page)
    assert steps == ["lessons", "init_model", "base", "manners", "sft", "rl"]
    assert log_of(run(store)).split("align-arithmetic: ")[-1].count("looked up") == 7
    report(run="align-arithmetic", out=tmp_path / "again.html", store=str(store.root))
    again = (tmp_path / "again.html").read_text()
    assert again.count('<figure class="pair"') == 6 and "Bits per byte against" not in again
    half = run(store, "rl.steps=3", until="sft")
    report(run=str(half.run.dir), out=tmp_path / "half.html", store=str(store.root))
    page = (tmp_path / "half.html").read_text()
    assert "sft: loss</h3>" in page and "rl: accuracy</h3>" not in page and '<figure class="pair"' not in page


def test_deterministic_stages_ignore_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, dtype and the engine's path are measured on another day, in another store."""
    speeds = {"float32": {"1": [1e9], "2": [2e9]}, "bfloat16": {"1": [1e9], "2": [9e9]}}
    sets = ("lessons.max_train=32", "base.data.epochs=1", "manners.max_train=16", "rl.run.replicas=1")
    found = []
    for day, (dtype, threads) in enumerate((("bfloat16", 2), ("float32", 1))):
        machine = choose(Measurement(speeds, 1e9), dtype=dtype, threads=threads)
        monkeypatch.setattr(device_probe, "probe", lambda machine=machine: machine)
        monkeypatch.setattr(runner, "autotune", partial(pytest.fail, "timed"))
        recipe = load_recipe("align-arithmetic", sets=(*SMALL, *sets), deterministic=True)
        made = run_recipe(recipe, Store(tmp_path / str(day)), Progress.silent(), until="rl").artifacts
        found.append(
            {n: (made[n].address, made[n].file("model.safetensors").read_bytes()) for n in ("sft", "rl")}
        )
    assert found[0] == found[1]


def test_stages_refuse_too_short_sequences(store: Store, done: RunResult) -> None:
    with pytest.raises(DataError, match=r"(?s)no task fits.*at most 2 ids.*raise rl.max_seq_len"):
        run(store, "rl.max_seq_len=14")
    with pytest.raises(DataError, match=r"(?s)there are no examples"):
        run(store, "sft.data.seq_len=8")


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("align-arithmetic", "rl.algorithm=grop", "rl.algorithm cannot be 'grop'"),
        ("quickstart", "plan.d_model=16", r"plan.d_model cannot be '16'.*32.*heads"),
        ("align-arithmetic", "init_model.n_heads=128", r"\(128\) over n_heads \(128\) gives heads of 1"),
        ("align-arithmetic", "init_model.d_model=60", r"d_model \(60\) over n_heads \(4\) gives heads of 15"),
        ("experts", "plan.model.n_layer=2", "plan.*n_layer: Extra inputs are not permitted"),
        ("experts", "plan.model.experts.top_k=99", r"plan.*top_k \(99\) must be at most n_experts \(8\)"),
        ("experts", "plan.model.mixers.attention.head_dim=33", r"plan.*head_dim \(33\).* must be even"),
        ("experts", "plan.model.mixers.attention.n_kv_heads=7", r"plan.*n_heads \(3\) must be a multiple of n_kv_heads"),
    ],
)  # fmt: skip
def test_recipe_refuses_impossible_setting(recipe: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_recipe(recipe, sets=[setting])


MINED = """\
name = "mined"
steps.ingest = { sources = ["code"], include = ["**/*.py", "*.py"] }
steps.curate = { parents = ["ingest"], test_bytes = 1500, validation_bytes = 500 }
steps.tasks = { parents = ["ingest", "curate"], max_train = 12, max_test = 4 }
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """All texts of the files in the folder `code` of the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    texts = [CODE.format(i=i) for i in range(12)]
    for i, text in enumerate(texts):
        Path(f"code/part_{i}.py").write_text(text)
    return "\n".join(texts)


def test_tasks_from_python_files(code: str) -> None:
    artifact = run_text(MINED)["tasks"]
    found = {split: read_tasks(artifact.path, split) for split in ("train", "test")}
    assert artifact.summary["counts"] == {split: len(tasks) for split, tasks in found.items()}
    files = dict(re.findall(r"def (\w+_(\d+))\(", code))
    name = re.compile(r".*def (\w+)\(", re.DOTALL)
    sides = {split: {files[name.match(task.prompt)[1]] for task in found[split]} for split in found}
    assert found["test"] and not sides["train"] & sides["test"]  # no file in both splits
    # Tasks with doctests come first, all in the training split.
    kinds = [task.verifier for task in found["train"]]
    n = kinds.count("doctest")
    assert len(kinds) == 12 and 0 < n < 12 and kinds == ["doctest"] * n + ["compiles"] * (12 - n)
    assert {task.verifier for task in found["test"]} == {"compiles"}
    (log,) = Path("store").glob("runs/*/log.txt")
    assert f"{n} functions have examples (doctests): their tasks run them" in log.read_text()
    pairs = read_prompt_completions(artifact.path, "train")
    assert [pair.prompt for pair in pairs] == [task.prompt for task in found["train"]]
    with Sandbox() as sandbox:
        verdicts = grade_tasks(found["train"], [pair.completion for pair in pairs], sandbox)
        wrong = grade_tasks(found["train"][:1], ["    return None\n"], sandbox)
    assert all(verdict.passed for verdict in verdicts) and not wrong[0].passed


@pytest.mark.usefixtures("code")
def test_python_tasks_need_corpus_and_functions() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no parent 'documents'.*\"ingest\", \"curate\""):
        run_text("[steps.tasks]")
    with pytest.raises(
        NotApplicableError, match=r"(?s)no Python function for a train task.*tasks.max_prompt_bytes"
    ):
        run_text(MINED, "tasks.max_prompt_bytes=20")


@pytest.mark.usefixtures("code")
def test_python_tasks_from_records() -> None:
    texts = [CODE.format(i=i) for i in range(12)]
    lines = [json.dumps({"text": text}) for text in [*texts, "Some prose about def and class.\n" * 9]]
    Path("records.jsonl").write_text("\n".join(lines))
    mined = MINED.replace('["code"], include = ["**/*.py", "*.py"]', '["records.jsonl"]')
    counts = run_text(mined)["tasks"].summary["counts"]
    assert counts["train"] == 12 and counts["test"]
