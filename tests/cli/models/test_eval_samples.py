"""`whorl eval --samples` and `--budgets`: curves, page and figures, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cli import invoke, succeed
from tests.support.tiny import make_byte_tokenizer, make_decoder

from whorl.align.config import RewardConfig
from whorl.align.preference.reward_model import RewardModel, save_reward_model
from whorl.models import save_model
from whorl.store import Build, Store


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a random model, its tokenizer, and a reward model."""
    folder = tmp_path_factory.mktemp("home")
    model, scorer = (make_decoder(seed, n_layers=1, n_heads=1, head_dim=32) for seed in (0, 2))
    store = Store(folder / ".whorl")
    store.make_folders()
    with Build(store, kind="reward_model", name="run/scorer", parents={}, config={}, version=1) as build:
        save_reward_model(RewardModel(scorer), build.path, config=RewardConfig(), trained_on={})
        make_byte_tokenizer().save(build.path)
    for kind, name in (("model", "run/pretrain"), ("tokenizer", "run/tokenizer")):
        with Build(store, kind=kind, name=name, parents={}, config={}, version=1) as build:
            if kind == "model":
                save_model(model, build.path)
            make_byte_tokenizer().save(build.path)
    task = {"verifier": "format", "answer": ".*[0-9].*"}
    lines = [json.dumps({"id": f"t{k}", "prompt": f"{k}+1=", **task}) for k in range(5)]
    (folder / "tasks.jsonl").write_text("\n".join([*lines, "{broken\n"]))
    question = {"question": "How many?", "answer": "Two and one.\n#### 3"}
    (folder / "gsm8k_test.jsonl").write_text(json.dumps(question) + "\n")
    return folder


def figures(home: Path, folder: str) -> dict[str, dict[str, float]]:
    (task,) = json.loads((home / folder / "results.json").read_text())["tasks"]
    return {measure["metric"]: measure for measure in task["measures"]}


def test_samples_and_budgets_are_curves_of_the_page(home: Path) -> None:
    words = (
        "eval",
        "run/pretrain",
        "--task",
        "tasks.jsonl",
        "--samples",
        4,
        "--gen-kwargs",
        "max_gen_toks=12",
    )
    words += ("--budgets", "4,8", "--reward", "scorer")
    done = succeed(home, *words, "--out", "first")
    found = figures(home, "first")
    curves = {name.partition("@")[0] for name in found if "@" in name and "tokens" not in name}
    assert curves == {"pass", "majority", "best", "rewarded", "stopped", "continued"}
    assert [k for k in (1, 2, 4, 8) if f"majority@{k}" in found] == [1, 2, 4]
    assert found["pass@4"]["value"] > found["pass@1"]["value"] > 0
    page = (home / "first" / "page.html").read_text()
    assert page.count('<polyline class="line c') == 2 * 6 and page.count('<polyline class="line b') == 2 * 12
    assert "&quot;c0&quot;" in page and "&quot;b0&quot;" not in page  # tooltips show curves, not bounds
    assert "Accuracy over sampled tokens" in page and "majority@4" in done.output
    assert "Best without a verifier" in done.output and "skipped:" in done.output
    succeed(home, *words, "--out", "again", "--cache", "other.sqlite")
    assert figures(home, "again") == found


def test_arithmetic_and_conversations(home: Path) -> None:
    words = ("--samples", "1,2", "--gen-kwargs", "max_gen_toks=6", "--limit", 3)
    succeed(home, "eval", "run/pretrain", "--task", "arithmetic-0", *words, "--out", "sums")
    assert figures(home, "sums")["passed"]["n"] == 3
    gsm8k = ("--task", "gsm8k", "--data", "gsm8k_test.jsonl", "--apply-chat-template")
    succeed(home, "eval", "run/pretrain", *gsm8k, *words, "--out", "words")
    assert "majority@2" in figures(home, "words")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run/tokenizer", "--task", "arithmetic"], "run/tokenizer"),
        (["run/pretrain", "--task", "nowhere.jsonl"], "there is no"),
        (["run/pretrain", "--task", "arithmetic", "--budgets", "8,x"], "comma-separated numbers"),
        (["run/pretrain", "--task", "arithmetic", "--samples", "0"], "comma-separated numbers"),
        (["run/pretrain", "--task", "arithmetic", "--budgets", "999"], "0 to max_tokens = 128"),
        (["run/pretrain", "--task", "arithmetic-99"], "unknown level 99"),
        (["run/pretrain", "--task", "arithmetic", "--samples", "2", "--reward", "tokenizer"], "is of the kind tokenizer"),
        (["run/pretrain", "--task", "arithmetic", "--reward", "scorer"], "--reward chooses among samples"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(home: Path, words: list[object], message: str) -> None:
    done = invoke(home, "eval", *words)
    assert done.exit_code != 0 and isinstance(done.exception, SystemExit), done.output
    assert message in done.output + str(done.stderr)


def test_verifier_failures_are_reported(home: Path) -> None:
    line = {"id": "t", "prompt": "1+1=", "verifier": "custom:no_such_module:f"}
    (home / "failing.jsonl").write_text(json.dumps(line) + "\n")
    words = (
        "eval",
        "run/pretrain",
        "--task",
        "failing.jsonl",
        "--samples",
        2,
        "--gen-kwargs",
        "max_gen_toks=4",
    )
    refused = invoke(home, *words)
    assert refused.exit_code == 2 and "names the code" in refused.stderr
    done = invoke(home, "--code", "no_such_module:f", *words, "--out", "failing")
    assert done.exit_code != 0 and "ModuleNotFoundError" in done.output + str(done.stderr)
