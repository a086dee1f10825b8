"""`whorl eval`: tables, stored responses, comparison in words, errors."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from tests.support.cli import invoke, refuse, succeed
from tests.support.evals.fake_endpoint import FakeEndpoint
from tests.support.tiny import make_byte_tokenizer, make_decoder

from whorl.corpus.documents import Document
from whorl.evals.results_io import load_results
from whorl.models import save_model
from whorl.store import Build, Store
from whorl.tokens.shards import write_shards

QUIZ = """
name = "quiz"
kind = "choice"
template = "{{ q }}"
choices = "c"
gold = "a"
[data]
test = "quiz.jsonl"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two random models, and a task of 30 items."""
    folder = tmp_path_factory.mktemp("home")
    store = Store(folder / ".whorl")
    store.make_folders()
    for seed, name in ((0, "run/first"), (1, "run/second")):
        model = make_decoder(seed, n_layers=1, n_heads=1, head_dim=32)
        with Build(store, kind="model", name=name, parents={}, config={"seed": seed}, version=1) as build:
            save_model(model, build.path)
            make_byte_tokenizer().save(build.path)
    records = [{"q": f"{k} + {k} =", "c": [str(2 * k), str(2 * k + 1)], "a": 0} for k in range(30)]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "quiz.toml").write_text(QUIZ)
    (folder / "suite.toml").write_text('name = "s"\n[[tasks]]\ntask = "quiz.toml"\nlimit = 7\n')
    return folder


def test_eval_stores_responses_and_prints_figures(home: Path) -> None:
    words = ("eval", "run/first", "--task", "quiz.toml", "--out", "one")
    done = succeed(home, *words)
    result = load_results(home / "one")[0]
    assert result.hash in done.output and "95 % interval" in done.output and "acc_norm" in done.output
    assert len(result.items) == 30 and (result.requests, result.cached) == (120, 0)
    first = result.items[0]
    assert "".join(text for text, _ in first.details["tokens"]) == f" {first.answers[0]}"
    cost = json.loads((home / "one" / "results.json").read_text())["cost"]
    assert cost["seconds"] > 0 and cost["tokens_per_second"] > 0 and cost["memory_bytes"] > 1e6
    succeed(home, *words)  # no request reaches the model: the cost is that of the first run
    assert json.loads((home / "one" / "results.json").read_text())["cost"] == cost
    again = succeed(home, "eval", "run/first", "--task", "quiz.toml", "--out", "two", "--all")
    second = load_results(home / "two")[0]
    assert (second.requests, second.cached) == (120, 120) and second.items == result.items
    assert "quiz" in (home / "two" / "page.html").read_text()
    assert "log_score" in again.output and "log_score" not in done.output


def test_eval_against_says_which_is_better(home: Path) -> None:
    done = succeed(
        home, "eval", "run/first", "--task", "quiz.toml", "--against", "run/second", "--out", "both"
    )
    lines = done.output.replace("\n", " ")
    assert "run/first" in lines and "run/second" in lines
    assert any(words in lines for words in ("is better", "not distinguishable"))
    assert "interval -" in lines and "30 items" in lines
    # The folders of results compare without a model.
    same = succeed(home, "eval", "both/a", "--against", "both/a", "--out", "same").output.replace("\n", " ")
    assert "not distinguishable" in same


def test_artifacts_of_evaluate_compare_without_a_model(home: Path) -> None:
    succeed(home, "eval", "run/first", "--task", "quiz.toml", "--out", "kept")
    with Build(
        Store(home / ".whorl"), kind="evaluation", name="run/evaluate", parents={}, config={}, version=1
    ) as build:
        shutil.copytree(home / "kept", build.path / "suite")
    done = succeed(
        home, "eval", "run/evaluate", "--against", "run/second", "--task", "quiz.toml", "--out", "c"
    )
    assert "run/second" in done.output and "30 items" in done.output


def test_eval_reads_a_suite_file_and_lists_tasks(home: Path) -> None:
    succeed(home, "eval", "run/first", "--suite", "suite.toml", "--out", "suite")
    assert len(load_results(home / "suite")[0].items) == 7
    listed = succeed(home, "eval", "--list").output
    assert "mmlu-pro" in listed and "arc-agi" in listed
    rows = {line.split()[0]: line.split()[1:6] for line in listed.splitlines() if line[:1].isalpha()}
    assert rows["safety"] == ["1", "60", "60", "1", "15,360"] and rows["probes"][:3] == [
        "7", "3,500", "14,000",
    ]  # fmt: skip
    assert rows["own"] == ["-"] * 5 and "held-out documents" in listed


def test_wrong_words_are_refused(home: Path) -> None:
    assert "no model is given" in refuse(home, "eval")
    assert "no task is given" in refuse(home, "eval", "run/first")
    assert "no task 'arcc'" in refuse(home, "eval", "run/first", "--task", "arcc")
    assert "no suite 'ownn'" in refuse(home, "eval", "run/first", "--suite", "ownn")
    assert "task arc has no data" in refuse(home, "eval", "run/first", "--task", "arc")
    assert "two tasks have the name 'quiz'" in refuse(
        home, "eval", "run/first", "--task", "quiz.toml", "--suite", "suite.toml"
    )
    assert "--model-name" in refuse(home, "eval", "http://127.0.0.1:1/v1", "--task", "quiz.toml")
    assert "which is not evaluated" in refuse(
        home, "eval", "run/first", "--task", "quiz.toml", "--data", "other=quiz.jsonl"
    )


def test_errors_come_before_the_work(home: Path) -> None:
    words = ("eval", "run/first", "--task", "quiz.toml", "--out", "early")
    assert "no artifact 'run/thrid'" in refuse(home, *words, "--against", "run/thrid", code=1)
    assert "--against-name" in refuse(home, *words, "--against", "http://127.0.0.1:1/v1")
    with Build(
        Store(home / ".whorl"), kind="selection", name="run/curate", parents={}, config={}, version=1
    ) as build:
        (build.path / "empty").touch()
    assert "run/curate is of the kind selection" in refuse(home, *words, "--against", "run/curate")
    assert not (home / "early").exists()
    for out in ("quiz.toml", "quiz.toml/inside"):
        assert "quiz.toml is a file, so no results" in refuse(home, *words[:-1], out)


def test_suite_own_needs_a_corpus(home: Path) -> None:
    folder = Store(home / ".whorl").open("run/first").path  # a folder has no lineage
    message = refuse(home, "eval", folder, "--suite", "own", "--out", "own")
    assert "so it has no corpus" in message and "--corpus" in message


def test_tasks_of_one_model_alone_are_named(home: Path) -> None:
    (home / "more.toml").write_text(QUIZ.replace('"quiz"', '"more"'))
    tasks = ("--task", "quiz.toml", "--task", "more.toml")
    succeed(home, "eval", "run/first", *tasks, "--out", "two-tasks")
    words = ("eval", "two-tasks", "--against", "run/second", "--task", "quiz.toml", "--out", "alone")
    done = succeed(home, *words).output.replace("\n", " ")
    assert "Not compared: more (only run/first)." in done
    assert "two-tasks has earlier results, so --suite and --task do not apply to it" in done


def test_eval_with_a_judge_at_an_endpoint(home: Path) -> None:
    lines = ['name = "pairs"', 'kind = "judge"', 'template = "{{ q }}"', "[data]", 'test = "pairs.jsonl"']
    (home / "pairs.toml").write_text(
        "\n".join([*lines, "[options]", 'baseline = "other"', "length_probes = 2"])
    )
    (home / "pairs.jsonl").write_text(
        "".join(json.dumps({"q": f"q{k}", "other": "a"}) + "\n" for k in range(4))
    )
    with FakeEndpoint() as fake:
        fake.reply = lambda body: "[[A]]" if "messages" in body else "an answer"
        words = ("eval", fake.url, "--model-name", "fake", "--task", "pairs.toml", "--out", "judged")
        assert "--judge" in refuse(home, *words)
        assert not fake.bodies  # no request before the error
        assert "--judge-name" in refuse(home, *words, "--judge", fake.url)
        done = succeed(home, *words, "--judge", fake.url, "--judge-name", "fake")
    assert "win_rate_lc" in done.output and "prefers the first answer in 100.0 %" in done.output.replace(
        "\n", " "
    )
    assert load_results(home / "judged")[0].measure("win_rate").value == 0.5
    assert "position_bias" in (home / "judged" / "page.html").read_text()


def test_contamination_is_searched_in_the_tokens_of_the_lineage(home: Path) -> None:
    store, tokenizer = Store(home / ".whorl"), make_byte_tokenizer()
    records = [{"q": " ".join(f"{w}{k}" for w in "abcdefghij"), "c": ["yes", "no"], "a": 0} for k in range(9)]
    (home / "long.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    text = f"Before. {records[4]['q'].upper()}! {records[7]['q']} after."
    with Build(store, kind="tokenizer", name="run/tok", parents={}, config={}, version=1) as build:
        tokenizer.save(build.path)
    parents = {"tokenizer": store.open("run/tok")}
    with Build(store, kind="tokens", name="run/tokens", parents=parents, config={}, version=1) as build:
        write_shards(
            [Document("d", "s", "leak.txt", None, 0, text, len(text), None)], tokenizer, build.path, "train"
        )
    parents["tokens"] = store.open("run/tokens")
    with Build(store, kind="model", name="run/trained", parents=parents, config={}, version=1) as build:
        save_model(make_decoder(3, n_layers=1, n_heads=1, head_dim=32), build.path)
        tokenizer.save(build.path)
    words = ("--task", "quiz.toml", "--data", "long.jsonl", "--contamination", "--out", "lineage")
    done = succeed(home, "eval", "run/trained", *words)
    assert "acc clean" in done.output and "2 of 9 items were found in the training tokens" in done.output
    found = {i.item: i.details.get("contamination") for i in load_results(home / "lineage")[0].items}
    assert {name for name, place in found.items() if place} == {"5", "8"}
    assert found["5"] == {"place": "run/tokens: leak.txt", "score": 1.0}
    assert "has no training tokens among its ancestors" in refuse(home, "eval", "run/first", *words)


GENERATE = """
name = "echo"
kind = "generate"
template = "{{ q }}"
gold = "a"
[data]
test = "echo.jsonl"
"""


def test_run_without_any_answer_fails_and_names_the_cause(home: Path) -> None:
    (home / "echo.toml").write_text(GENERATE)
    (home / "echo.jsonl").write_text(
        "".join(json.dumps({"q": f"say {k}", "a": str(k)}) + "\n" for k in range(3))
    )
    with FakeEndpoint() as fake:
        words = ("eval", fake.url, "--model-name", "fake", "--task", "echo.toml", "--out", "none")
        fake.always = "too long"
        message = refuse(home, *words, code=1).replace("\n", " ")
        assert (
            "fake was not evaluated: all 3 items have no score: status 400: the context is 5 tokens"
            in message
        )
        assert (home / "none" / "page.html").is_file()
        refuse(home, *words, "--against", "run/first", code=1)
        fake.always, fake.faults["/v1/completions"] = "", ["too long"]
        done = succeed(home, *words).output  # one of three is missing
        assert "1 item has no score" in done and "between 66.7% and 100.0%" in done


def test_model_with_nan_weights_is_not_evaluated(home: Path) -> None:
    model = make_decoder(0, n_layers=1, n_heads=1, head_dim=32)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    (home / "nan").mkdir()
    save_model(model, home / "nan")
    make_byte_tokenizer().save(home / "nan")
    lines = ['name = "text"', 'kind = "likelihood"', 'template = "{{ q }}"', "[data]", 'test = "quiz.jsonl"']
    (home / "text.toml").write_text("\n".join(lines))
    done = invoke(home, "eval", "nan", "--task", "text.toml", "--out", "nan-text")
    lines = done.output.replace("\n", " ")
    assert done.exit_code == 1 and "nan was not evaluated: all 30 items have no score" in lines
    assert "text: 30 items have no score     the model returned NaN log-probabilities" in lines


def test_timeout_and_concurrency_reach_the_endpoint(home: Path) -> None:
    (home / "echo.toml").write_text(GENERATE)
    (home / "echo.jsonl").write_text(json.dumps({"q": "say late", "a": "late"}) + "\n")
    with FakeEndpoint() as fake:
        words = ("eval", fake.url, "--model-name", "fake", "--task", "echo.toml", "--out", "slow")
        fake.faults["/v1/completions"] = ["hangs"]
        began = time.monotonic()
        succeed(home, *words, "--timeout", "0.2", "--concurrency", "1", "--cache", "slow.sqlite")
        assert time.monotonic() - began < 10 and len(fake.bodies) == 2  # the second attempt is answered
    for value in ("0", "-1", "nan", "inf"):
        assert "--timeout is" in refuse(home, *words, "--timeout", value)
    refuse(home, *words, "--concurrency", "0")
