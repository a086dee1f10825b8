"""Tasks of lm-evaluation-harness: prompts, choices and gold answers; keys without counterpart are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from whorl.errors import WhorlError
from whorl.evals.grading import get_grader
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.requests import GenerateRequest, ScoreRequest, TextRequest
from whorl.evals.suites.suite import read_any_task
from whorl.evals.tasks.task import load_task

RECORDS = [
    {"q": f"{k}+1", "c": [str(k), str(k + 1)], "a": 1, "t": str(k + 1), "id": f"r{k}"} for k in range(4)
]
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "Q: {{q}}\nA:", "doc_to_choice": "{{c}}", "doc_to_target": "a",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
GENERATE = {
    "output_type": "generate_until", "doc_to_text": "q", "doc_to_target": "{{t}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 9},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def write(folder: Path, fields: dict[str, Any]) -> Path:
    for name, some in (("test", RECORDS[:2]), ("train", RECORDS[2:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in some))
    files = {"test": "test.jsonl", "train": "train.jsonl"}
    content = {"task": "t", "dataset_path": "json", "dataset_kwargs": {"data_files": files}, **fields}
    path = folder / "t.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return path


def read(folder: Path, fields: dict[str, Any]) -> EvalTask:
    return load_task(read_any_task(str(write(folder, fields))))


def test_choices_follow_the_prompt_after_the_delimiter(tmp_path: Path) -> None:
    task = read(tmp_path, CHOICE | {"metadata": {"version": 2.0}})
    requests = task.kind.requests(task.items[0])
    assert requests[:2] == [ScoreRequest("Q: 0+1\nA:", " 0"), ScoreRequest("Q: 0+1\nA:", " 1")]
    assert len(requests) == 2
    more = read(tmp_path, CHOICE | {"metric_list": [{"metric": "acc_mutual_info"}]})
    assert ScoreRequest("", " 0") in more.kind.requests(more.items[0])
    assert (task.items[0].gold, task.config.version, task.config.metrics) == (1, "2.0", ("acc", "acc_norm"))


def test_first_examples_of_the_training_split_follow_the_description(tmp_path: Path) -> None:
    shots = {"num_fewshot": 2, "fewshot_config": {"sampler": "first_n"}, "training_split": "train"}
    task = read(tmp_path, CHOICE | shots | {"description": "Sums.\n\n"})
    prompt = task.kind.prompt(task.items[0])
    assert prompt == "Sums.\n\nQ: 2+1\nA: 3\n\nQ: 3+1\nA: 4\n\nQ: 0+1\nA:"
    zero = read(tmp_path, CHOICE | {"description": "Sums: "})
    assert zero.kind.prompt(zero.items[0]) == "Sums: Q: 0+1\nA:"
    bare = read(tmp_path, CHOICE | shots | {"description": "Sums: "})  # nothing is added behind it
    assert bare.kind.prompt(bare.items[0]) == "Sums: Q: 2+1\nA: 3\n\nQ: 3+1\nA: 4\n\nQ: 0+1\nA:"


def test_texts_continuations_and_answers(tmp_path: Path) -> None:
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
    task = read(tmp_path, rolling | {"metric_list": [{"metric": "bits_per_byte"}]})
    [request] = task.kind.requests(task.items[0])  # windows of the model's length without overlap
    assert isinstance(request, TextRequest) and request.text == "0+1" and request.score_bos
    assert request.window == request.stride > 1e6
    last = {"output_type": "loglikelihood", "doc_to_text": "{{q}} =", "doc_to_target": "t"}
    task = read(tmp_path, last | {"metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]})
    assert task.kind.requests(task.items[0]) == [ScoreRequest("0+1 =", "1")]
    task = read(tmp_path, GENERATE)
    assert task.kind.requests(task.items[0]) == [GenerateRequest("0+1", 9, ("\n",))]
    assert task.items[0].gold == "1" and task.config.metrics == ("exact_strict",)


def test_delimiter_is_part_of_examples_and_not_of_the_continuation(tmp_path: Path) -> None:
    shots = {"num_fewshot": 1, "fewshot_config": {"sampler": "first_n"}, "training_split": "train"}
    last = {"output_type": "loglikelihood", "doc_to_text": "{{q}} =", "doc_to_target": "t"}
    task = read(tmp_path, last | shots)
    assert task.kind.requests(task.items[0]) == [ScoreRequest("2+1 = 3\n\n0+1 =", "1")]


@pytest.mark.parametrize(("filters", "right"), [([], 0.0), ([{"function": "remove_whitespace"}], 1.0)])
def test_white_space_counts_unless_a_filter_removes_it(
    tmp_path: Path, filters: list[Any], right: float
) -> None:
    steps = [{"name": "f", "filter": [*filters, {"function": "take_first"}]}]
    options = read(tmp_path, GENERATE | {"filter_list": steps}).kind.options.metric_options
    graded = get_grader("exact", options)("1", " 1", **options)
    assert graded.scores["exact_strict"] == right


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"process_docs": "x"}, "the key 'process_docs' has no counterpart"),
        ({"output_type": "greedy_until"}, "output_type is 'greedy_until'"),
        ({"dataset_path": "ai2_arc"}, "dataset_path is 'ai2_arc'"),
        ({"test_split": "dev"}, "data_files with the split 'dev'"),
        ({"num_fewshot": 2}, "has few-shot examples but no training split"),
        ({"num_fewshot": 2, "training_split": "dev"}, "data_files with the few-shot split 'dev'"),
        ({"fewshot_config": {"sampler": "balanced"}}, "fewshot_config is"),
        (GENERATE | {"generation_kwargs": {"num_beams": 4}}, "generation_kwargs has the key 'num_beams'"),
        ({"repeats": 3}, "repeats is 3"),
        ({"metric_list": [{"metric": "f1"}]}, "the metric 'f1', which has no counterpart"),
        (
            {"metric_list": [{"metric": "acc", "ignore_case": True}]},
            "the key 'ignore_case' has no counterpart",
        ),
        ({"doc_to_text": "{{nothing}}"}, "names the field 'nothing', which no record has"),
        ({"doc_to_text": "Q:"}, "names no field of the records"),
        ({"doc_to_choice": None}, "doc_to_choice is None"),
        ({"filter_list": [{"filter": [{"function": "regex"}]}]}, "filter_list is"),
        ({"filter_list": ["strict"]}, "filter_list is ['strict']"),
        ({"filter_list": [{"filter": "take_first"}]}, "filter_list is"),
        ({"metric_list": ["acc"]}, "metric_list is ['acc']"),
        ({"dataset_kwargs": ["test.jsonl"]}, "dataset_kwargs is ['test.jsonl']"),
        ({"num_fewshot": "five"}, "num_fewshot is 'five'"),
        ({"repeats": 1.5}, "repeats is 1.5"),
        ({"generation_kwargs": {"max_gen_toks": "many"}}, "generation_kwargs.max_gen_toks is 'many'"),
        ({"generation_kwargs": {"until": 3}}, "generation_kwargs.until is 3"),
        ({"metadata": "1.0"}, "metadata is '1.0'"),
    ],
)
def test_keys_that_change_a_score_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(WhorlError) as caught:
        read(tmp_path, CHOICE | fields)
    assert words in str(caught.value)


def test_functions_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, CHOICE)
    path.write_text(path.read_text().replace("doc_to_target: a", "doc_to_target: !function utils.target"))
    with pytest.raises(WhorlError, match=r"'doc_to_target' as the Python function 'utils.target'"):
        read_any_task(str(path))
    path.write_text("a: [")
    with pytest.raises(WhorlError, match="cannot be read"):
        read_any_task(str(path))
    path.write_text("- a")
    with pytest.raises(WhorlError, match="holds list"):
        read_any_task(str(path))
