"""Task files of lm-evaluation-harness: what a score depends on is equal, or an error names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whorl.errors import ConfigError
from whorl.evals.model.requests import GenerateRequest, ScoreRequest, TextRequest
from whorl.evals.suites.suite import TaskSources, load_tasks
from whorl.evals.tasks.task import EvalTask

RECORD = {
    "id": "1",
    "question": "What?",
    "options": ["a", "b"],
    "label": 1,
    "answer": "yes",
    "text": "A text.",
}


def load(folder: Path, **fields: Any) -> EvalTask:
    """The task of a file with `fields`, over one record and one example."""
    (folder / "test.jsonl").write_text(json.dumps(RECORD))
    (folder / "train.jsonl").write_text(json.dumps({**RECORD, "id": "e", "question": "Example?"}))
    files = {"test": str(folder / "test.jsonl"), "train": str(folder / "train.jsonl")}
    data = {
        "dataset_path": "json",
        "test_split": "test",
        "training_split": "train",
        "dataset_kwargs": {"data_files": files},
    }
    task = {"task": "t", **data, "doc_to_text": "{{question}}", **fields}
    (folder / "task.yaml").write_text(json.dumps(task))
    [made] = load_tasks([str(folder / "task.yaml")], TaskSources())
    return made


def requests(task: EvalTask) -> list[Any]:
    return list(task.kind.requests(task.items[0]))


def test_continuation_has_no_delimiter_and_examples_have_one(tmp_path: Path) -> None:
    shots = {"num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}}
    task = load(tmp_path, output_type="loglikelihood", doc_to_target="{{answer}}", **shots)
    assert requests(task) == [ScoreRequest("Example? yes\n\nWhat?", "yes")]


def test_whole_text_is_read_in_windows_without_overlap(tmp_path: Path) -> None:
    task = load(tmp_path, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
    [request] = requests(task)
    assert isinstance(request, TextRequest) and request.text == "A text." and request.score_bos
    assert request.window == request.stride > 1e6


@pytest.mark.parametrize("metric", ["acc", "acc_mutual_info"])
def test_choices_without_question_only_for_the_metric_that_needs_them(tmp_path: Path, metric: str) -> None:
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{options}}", "doc_to_target": "{{label}}"}
    sent = requests(load(tmp_path, **choice, metric_list=[{"metric": metric}]))
    alone = [ScoreRequest("", " a"), ScoreRequest("", " b")]
    assert sent[:2] == [ScoreRequest("What?", " a"), ScoreRequest("What?", " b")]
    assert sent[2:] == (alone if metric == "acc_mutual_info" else [])


@pytest.mark.parametrize(("filters", "right"), [([], 0.0), ([{"function": "remove_whitespace"}], 1.0)])
def test_white_space_counts_unless_a_filter_removes_it(
    tmp_path: Path, filters: list[Any], right: float
) -> None:
    steps = [{"name": "f", "filter": [*filters, {"function": "take_first"}]}]
    task = load(tmp_path, output_type="generate_until", doc_to_target="{{answer}}", filter_list=steps)
    assert isinstance(requests(task)[0], GenerateRequest)
    options = task.kind.options
    from whorl.evals.metrics import get_metric

    graded = get_metric("exact", options.metric_options)("yes", " yes", **options.metric_options)
    assert graded.scores["exact_strict"] == right


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"filter_list": [{"filter": [{"function": "regex", "regex_pattern": "x"}]}]}, "filter_list is"),
        (
            {"metric_list": [{"metric": "exact_match", "ignore_case": True}]},
            "exact_match: the key 'ignore_case'",
        ),
        ({"process_docs": "f"}, "the key 'process_docs'"),
    ],
)
def test_setting_without_counterpart_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, output_type="generate_until", doc_to_target="{{answer}}", **fields)
