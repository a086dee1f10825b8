"""`whorl eval-scaling`: curves, page and figures, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.cli import invoke

from whorl.align.config import RewardConfig
from whorl.align.preference.reward_model import RewardModel, save_reward_model
from whorl.models import Decoder, DecoderConfig, save_model
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer

NUMBERS = "0123456789\n#+= "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a random model, its tokenizer, and a reward model."""
    folder = tmp_path_factory.mktemp("home")
    words = Tokenizer([bytes([i]) for i in range(256)])
    shape = DecoderConfig(
        vocab_size=264, d_model=32, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=32, mlp_hidden=64, ngram_buckets=64
    )  # fmt: skip
    model = Decoder(shape, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    store = Store(folder / ".whorl")
    store.make_folders()
    with store.build(kind="reward_model", name="run/scorer", parents={}, config={}, version=1) as build:
        scorer = RewardModel(Decoder(shape, torch.Generator().manual_seed(2)))
        save_reward_model(scorer, build.path, config=RewardConfig(), trained_on={})
    for kind, name in (("model", "run/pretrain"), ("tokenizer", "run/tokenizer")):
        with store.build(kind=kind, name=name, parents={}, config={}, version=1) as build:
            if kind == "model":
                save_model(model, build.path)
            words.save(build.path)
    lines = [
        {"id": f"t{k}", "prompt": f"{k}+1=", "verifier": "format", "answer": ".*[0-9].*"} for k in range(5)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    question = {"question": "How many?", "answer": "Two and one.\n#### 3"}
    (folder / "gsm8k_test.jsonl").write_text(json.dumps(question) + "\n")
    return folder


def test_eval_scaling_prints_draws_and_stores_curves(home: Path) -> None:
    done = invoke(home, "eval-scaling", "pretrain", "--tasks", "tasks.jsonl", "--samples", 4, "--max-tokens", 12,
        "--budgets", "4,8",
        "--reward", "scorer", "--dtype", "float32", "--out", "page.html", "--json", "figures.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    figures = json.loads((home / "figures.json").read_text())
    assert (figures["n_tasks"], figures["samples"], figures["config"]["thinking_budgets"]) == (5, 4, [4, 8])
    assert set(figures["curves"]) == {
        "stopped",
        "continued",
        "majority_at_k",
        "pass_at_k",
        "max_log_prob",
        "best of n by scorer",
    }
    assert [p["compute"] for p in figures["curves"]["pass_at_k"]] == [1, 2, 4]
    assert figures["curves"]["pass_at_k"][-1]["accuracy"] > figures["curves"]["pass_at_k"][0]["accuracy"] > 0
    page = (home / "page.html").read_text()
    assert page.count('<polyline class="line c') == 2 * 6 and page.count('<polyline class="line b') == 2 * 12
    assert "&quot;c0&quot;" in page and "&quot;b0&quot;" not in page  # tooltips show curves, not bounds
    assert "run/pretrain" in page and "majority of n" in page and "http" not in page.replace("http-equiv", "")
    assert "5 tasks (tasks.jsonl), 4 samples each." in done.output and "majority of n" in done.output
    assert "skipped:" in done.output + str(done.stderr)
    again = invoke(home, "eval-scaling", "pretrain", "--tasks", "tasks.jsonl", "--samples", 4, "--max-tokens", 12,
        "--budgets", "4,8",
                  "--reward", "scorer", "--dtype", "float32", "--json", "again.json")  # fmt: skip
    assert again.exit_code == 0
    assert json.loads((home / "again.json").read_text()) == figures


def test_eval_scaling_on_arithmetic_and_gsm8k(home: Path) -> None:
    small = ("--samples", 2, "--max-tokens", 6)
    done = invoke(home, "eval-scaling", "pretrain", "-n", 3, "--level", 0, *small)
    assert done.exit_code == 0 and "3 tasks (arithmetic), 2 samples each." in done.output, done.output
    done = invoke(home, "eval-scaling", "pretrain", "--tasks", "gsm8k", "--data", ".", "--chat", *small)
    assert done.exit_code == 0 and "1 tasks (gsm8k)" in done.output, done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run/tokenizer"], "is a tokenizer"),
        (["pretrain", "--tasks", "nowhere.jsonl"], "there is no nowhere.jsonl"),
        (["pretrain", "--tasks", "gsm8k", "--data", "nowhere"], "with --data"),
        (["pretrain", "--budgets", "8,x"], "comma-separated numbers"),
        (["pretrain", "--budgets", "999"], "0 to max_completion_tokens = 128"),
        (["pretrain", "--level", 99], "unknown level 99"),
        (["pretrain", "--reward", "tokenizer"], "is a tokenizer"),
    ],
)
def test_eval_scaling_errors(home: Path, words: list[object], message: str) -> None:
    done = invoke(home, "eval-scaling", *words)
    assert done.exit_code != 0 and isinstance(done.exception, SystemExit), done.output
    assert message in done.output + str(done.stderr)


def test_verifier_failures_are_reported(home: Path) -> None:
    line = {"id": "t", "prompt": "1+1=", "verifier": "custom:no_such_module:f"}
    (home / "failing.jsonl").write_text(json.dumps(line) + "\n")
    done = invoke(home, "eval-scaling", "pretrain", "--tasks", "failing.jsonl", "--samples", 2, "--max-tokens", 4,
        "--dtype", "float32",
        "--out", "failing.html",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2 verifications failed and count as incorrect" in done.output
    assert (
        "ModuleNotFoundError" in done.output and "ModuleNotFoundError" in (home / "failing.html").read_text()
    )
