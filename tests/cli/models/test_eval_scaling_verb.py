"""`whorl eval-scaling`: curves, page and figures, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cli import invoke, succeed
from tests.support.tiny import make_byte_tokenizer, make_decoder

from whorl.align.config import RewardConfig
from whorl.align.preference.reward_model import RewardModel, save_reward_model
from whorl.models import save_model
from whorl.store import Store


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a random model, its tokenizer, and a reward model."""
    folder = tmp_path_factory.mktemp("home")
    model, scorer = (make_decoder(seed, n_layers=1, n_heads=1, head_dim=32) for seed in (0, 2))
    store = Store(folder / ".whorl")
    store.make_folders()
    with store.build(kind="reward_model", name="run/scorer", parents={}, config={}, version=1) as build:
        save_reward_model(RewardModel(scorer), build.path, config=RewardConfig(), trained_on={})
    for kind, name in (("model", "run/pretrain"), ("tokenizer", "run/tokenizer")):
        with store.build(kind=kind, name=name, parents={}, config={}, version=1) as build:
            if kind == "model":
                save_model(model, build.path)
            make_byte_tokenizer().save(build.path)
    task = {"verifier": "format", "answer": ".*[0-9].*"}
    lines = [json.dumps({"id": f"t{k}", "prompt": f"{k}+1=", **task}) for k in range(5)]
    (folder / "tasks.jsonl").write_text("\n".join([*lines, "{broken\n"]))
    question = {"question": "How many?", "answer": "Two and one.\n#### 3"}
    (folder / "gsm8k_test.jsonl").write_text(json.dumps(question) + "\n")
    return folder


def test_eval_scaling_prints_draws_and_stores_curves(home: Path) -> None:
    words = ("eval-scaling", "pretrain", "--tasks", "tasks.jsonl", "--samples", 4, "--max-tokens", 12)
    words += ("--budgets", "4,8", "--reward", "scorer", "--dtype", "float32")
    done = succeed(home, *words, "--out", "page.html", "--json", "figures.json")
    figures = json.loads((home / "figures.json").read_text())
    assert (figures["n_tasks"], figures["samples"], figures["config"]["thinking_budgets"]) == (5, 4, [4, 8])
    sampled = {"majority_at_k", "pass_at_k", "max_log_prob", "best of n by scorer"}
    assert set(figures["curves"]) == {"stopped", "continued"} | sampled
    assert [p["compute"] for p in figures["curves"]["pass_at_k"]] == [1, 2, 4]
    assert figures["curves"]["pass_at_k"][-1]["accuracy"] > figures["curves"]["pass_at_k"][0]["accuracy"] > 0
    page = (home / "page.html").read_text()
    assert page.count('<polyline class="line c') == 2 * 6 and page.count('<polyline class="line b') == 2 * 12
    assert "&quot;c0&quot;" in page and "&quot;b0&quot;" not in page  # tooltips show curves, not bounds
    assert "run/pretrain" in page and "majority of n" in page and "http" not in page.replace("http-equiv", "")
    assert "5 tasks (tasks.jsonl), 4 samples each." in done.output and "majority of n" in done.output
    assert "skipped:" in done.output
    succeed(home, *words, "--json", "again.json")
    assert json.loads((home / "again.json").read_text()) == figures


def test_eval_scaling_on_arithmetic_and_gsm8k(home: Path) -> None:
    small = ("--samples", 2, "--max-tokens", 6)
    done = succeed(home, "eval-scaling", "pretrain", "-n", 3, "--level", 0, *small)
    assert "3 tasks (arithmetic), 2 samples each." in done.output
    done = succeed(home, "eval-scaling", "pretrain", "--tasks", "gsm8k", "--data", ".", "--chat", *small)
    assert "1 tasks (gsm8k)" in done.output
    for words in ((), ("--data", "gsm8k_test.jsonl")):  # the working directory; a file
        done = succeed(home, "eval-scaling", "pretrain", "--tasks", "gsm8k", "--chat", *words, *small)
        assert "1 tasks (gsm8k)" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run/tokenizer"], "is of the kind tokenizer"),
        (["pretrain", "--tasks", "nowhere.jsonl"], "there is no nowhere.jsonl"),
        (["pretrain", "--tasks", "gsm8k", "--data", "nowhere"], "--data FILE"),
        (["pretrain", "--budgets", "8,x"], "comma-separated numbers"),
        (["pretrain", "--budgets", "999"], "0 to max_completion_tokens = 128"),
        (["pretrain", "--level", 99], "unknown level 99"),
        (["pretrain", "--reward", "tokenizer"], "is of the kind tokenizer"),
    ],
)
def test_eval_scaling_errors(home: Path, words: list[object], message: str) -> None:
    done = invoke(home, "eval-scaling", *words)
    assert done.exit_code != 0 and isinstance(done.exception, SystemExit), done.output
    assert message in done.output + str(done.stderr)


def test_verifier_failures_are_reported(home: Path) -> None:
    line = {"id": "t", "prompt": "1+1=", "verifier": "custom:no_such_module:f"}
    (home / "failing.jsonl").write_text(json.dumps(line) + "\n")
    words = ("--tasks", "failing.jsonl", "--samples", 2, "--max-tokens", 4, "--dtype", "float32")
    refused = invoke(home, "eval-scaling", "pretrain", *words)
    assert (
        refused.exit_code == 2
        and "task 't': verifier 'custom:no_such_module:f' names the code" in refused.stderr
    )
    words = ("pretrain", *words, "--out")
    output = succeed(home, "--code", "no_such_module:f", "eval-scaling", *words, "failing.html").output
    assert "2 verifications failed and count as incorrect" in output and "ModuleNotFoundError" in output
    assert "ModuleNotFoundError" in (home / "failing.html").read_text()
