"""`whorl eval-scaling` as a user meets it: every curve, a page and figures; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from whorl.align.config import RewardConfig
from whorl.align.preference.reward_model import RewardModel, save_reward_model
from whorl.cli import build_app
from whorl.models import Decoder, DecoderConfig, save_model
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer

NUMBERS = "0123456789\n#+= "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a model that says nearly nothing but digits and signs, and its tokenizer alone."""
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
    with store.build(kind="reward", name="run/judge", parents={}, config={}, version=1) as build:
        judge = RewardModel(Decoder(shape, torch.Generator().manual_seed(2)))
        save_reward_model(judge, build.path, config=RewardConfig(), trained_on={})
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


def whorl(home: Path, *words: object) -> Result:
    with pytest.MonkeyPatch().context() as inside:
        inside.chdir(home)
        return CliRunner().invoke(build_app(), ["eval-scaling", *map(str, words)])


def test_every_curve_is_told_drawn_and_written(home: Path) -> None:
    done = whorl(
        home, "pretrain", "--tasks", "tasks.jsonl", "--samples", 4, "--max-tokens", 12, "--budgets", "4,8",
        "--reward", "judge", "--dtype", "float32", "--out", "page.html", "--json", "figures.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads((home / "figures.json").read_text())
    assert (told["tasks"], told["samples"], told["config"]["budgets"]) == (5, 4, [4, 8])
    assert set(told["curves"]) == {
        "stopped",
        "continued",
        "majority",
        "any",
        "likeliest",
        "best of n by judge",
    }
    assert [p["at"] for p in told["curves"]["any"]] == [1, 2, 4]
    assert told["curves"]["any"][-1]["accuracy"] > told["curves"]["any"][0]["accuracy"] > 0
    page = (home / "page.html").read_text()
    assert page.count('<polyline class="line c') == 2 * 6 and page.count('<polyline class="line b') == 2 * 12
    assert "&quot;c0&quot;" in page and "&quot;b0&quot;" not in page  # the pointer tells curves, no bounds
    assert "run/pretrain" in page and "majority of n" in page and "http" not in page.replace("http-equiv", "")
    assert "5 tasks (tasks.jsonl), 4 samples each." in done.output and "majority of n" in done.output
    assert "set aside" in done.output + str(done.stderr)
    again = whorl(home, "pretrain", "--tasks", "tasks.jsonl", "--samples", 4, "--max-tokens", 12, "--budgets", "4,8",
                  "--reward", "judge", "--dtype", "float32", "--json", "again.json")  # fmt: skip
    assert again.exit_code == 0
    assert json.loads((home / "again.json").read_text()) == told


def test_arithmetic_and_word_problems_are_asked(home: Path) -> None:
    small = ("--samples", 2, "--max-tokens", 6)
    done = whorl(home, "pretrain", "-n", 3, "--level", 0, *small)
    assert done.exit_code == 0 and "3 tasks (arithmetic), 2 samples each." in done.output, done.output
    done = whorl(home, "pretrain", "--tasks", "gsm8k", "--data", ".", "--chat", *small)
    assert done.exit_code == 0 and "1 tasks (gsm8k)" in done.output, done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run/tokenizer"], "is a tokenizer"),
        (["pretrain", "--tasks", "nowhere.jsonl"], "there is no nowhere.jsonl"),
        (["pretrain", "--tasks", "gsm8k", "--data", "nowhere"], "with --data"),
        (["pretrain", "--budgets", "8,x"], "numbers with commas"),
        (["pretrain", "--budgets", "999"], "0 to max_tokens = 128"),
        (["pretrain", "--level", 99], "unknown level 99"),
        (["pretrain", "--reward", "tokenizer"], "cannot read a reward model"),
    ],
)
def test_what_is_refused_says_why(home: Path, words: list[object], said: str) -> None:
    done = whorl(home, *words)
    assert done.exit_code != 0 and isinstance(done.exception, SystemExit), done.output
    assert said in done.output + str(done.stderr)


def test_a_verifier_that_fails_is_told_with_its_words(home: Path) -> None:
    line = {"id": "t", "prompt": "1+1=", "verifier": "custom:no_such_module:f"}
    (home / "failing.jsonl").write_text(json.dumps(line) + "\n")
    done = whorl(
        home, "pretrain", "--tasks", "failing.jsonl", "--samples", 2, "--max-tokens", 4, "--dtype", "float32",
        "--out", "failing.html",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2 verifications failed, and count as wrong" in done.output
    assert (
        "ModuleNotFoundError" in done.output and "ModuleNotFoundError" in (home / "failing.html").read_text()
    )
