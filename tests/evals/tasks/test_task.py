"""Tasks: templates, records, few-shot examples and the hash; wrong input is refused with task, setting and record."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import WhorlError
from whorl.evals.kinds.kind import EvalTask, Kind, Metric
from whorl.evals.model.requests import GenerateRequest
from whorl.evals.tasks.config import TaskConfig, parse_task, read_task_file
from whorl.evals.tasks.task import load_task, make_task
from whorl.registry import permit_code


class Echo(Kind):
    """A kind without checks, for tests."""

    metrics = {"score": Metric("a score")}  # noqa: RUF012

    def requests(self, item: Any) -> list[GenerateRequest]:
        return [GenerateRequest(self.prompt(item))]


RECORDS = [{"id": f"q{i}", "q": f"{i} + 1 =", "a": i + 1, "text": f"t{i // 2}"} for i in range(4)]
TRAIN = [{"id": f"x{i}", "q": f"{i} + 2 =", "a": i + 2, "text": ""} for i in range(3)]


@pytest.fixture(autouse=True)
def permitted() -> None:
    """Let the tasks of these tests name the class above."""
    permit_code(f"{__name__}:Echo")


def config(**fields: Any) -> TaskConfig:
    given = {"name": "sums", "kind": f"{__name__}:Echo", "template": "{{ q }}", "gold": "a"}
    return parse_task(given | fields, "test.toml")


def task(records: Any = RECORDS, train: Any = TRAIN, **fields: Any) -> EvalTask:
    return make_task(config(**fields), records, train)


def test_prompt_has_system_examples_and_item() -> None:
    made = task(system="Add.", examples=["x1", "x0"], data={"cluster": "text", "group": "'g'"})
    assert made.kind.prompt(made.items[0]) == "Add.\n\n1 + 2 = 3\n\n0 + 2 = 2\n\n0 + 1 ="
    assert (made.items[3].gold, made.items[3].cluster, made.items[3].group) == (4, "t1", "g")
    chat = task(system="Add.", examples=["x1"], chat=True).kind.prompt(made.items[0])
    assert isinstance(chat, tuple) and [m["role"] for m in chat] == ["system", "user", "assistant", "user"]
    assert chat[2]["content"] == "3"


def test_expressions_select_and_name_records() -> None:
    made = task(data={"where": "a > 2", "id": "'n' ~ a"})
    assert [item.id for item in made.items] == ["n3", "n4"]
    listed = task(choices="[q, text]").items[1]
    assert listed.choices == ("1 + 1 =", "t0")
    assert task(choices=["{{ q }}!", "no"]).items[1].choices == ("1 + 1 =!", "no")


def test_hash_covers_content_configuration_and_version() -> None:
    base = task()
    same = task(about="other words", data={"test": "elsewhere.jsonl"})
    assert base.hash == same.hash and len(base.hash) == 12
    changed = [
        task(version="2"), task(system="Add."), task([{**RECORDS[0], "a": 9}, *RECORDS[1:]]), task(RECORDS[:2]),
        task(examples=["x0"]),
    ]  # fmt: skip
    assert len({base.hash, *(each.hash for each in changed)}) == 1 + len(changed)
    assert (
        task(examples=["x0"]).hash == task(train=TRAIN[:1], examples=["x0"]).hash
    )  # unused records do not count


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"template": "Say yes."}, ["task sums: template names no field", "at least one of the fields a, id, q"]),
        ({"template": "{{ question }}"}, ["task sums: template names the field 'question'", "one of: a, id, q"]),
        ({"template": "{{ q "}, ["task sums: template cannot be parsed"]),
        ({"template": "{{ q.__class__.__mro__ }}"}, ["task sums: template fails on the record 'q0'", "__class__"]),
        ({"gold": "answer"}, ["task sums: gold names the field 'answer'"]),
        ({"gold": "a +"}, ["task sums: gold cannot be parsed"]),
        ({"choices": "q"}, ["item 'q0': choices are '0 + 1 ='", "a list of texts"]),
        ({"examples": ["q1"]}, ["few-shot example 'q1' is in the test split"]),
        ({"examples": ["y"]}, ["few-shot example 'y' is not in the training split", "x0, x1"]),
        ({"data": {"id": "text"}}, ["records 1 and 2 of the test split have the id 't0'"]),
        ({"data": {"where": "a > 100"}}, ["no records", "keeps none"]),
        ({"metrics": ["scores"]}, ["has no metric 'scores'", "did you mean 'score'"]),
        ({"options": {"forms": 1}}, ["options of the kind", "forms is no setting"]),
        ({"kind": "choice", "options": {"form": 1}}, ["form is no setting", "one of: forms,", "did you mean 'forms'"]),
        ({"kind": "generate", "options": {"metric": "exakt"}}, ["task sums: no grader 'exakt'", "did you mean 'exact'"]),
        ({"kind": "quiz"}, ["task sums: no kind of task 'quiz'", "choice"]),
        ({"name": "a b"}, ["test.toml: name is wrong", "letters, digits"]),
        ({"data": {"tset": "x"}}, ["test.toml: data.tset is no setting", "did you mean 'test'"]),
        ({"examples": ["x0", "x0"]}, ["few-shot example 'x0' is named twice"]),
        ({"templates": "x"}, ["test.toml: templates is no setting", "one of: name", "did you mean 'template'"]),
        ({"generation": {"top_p": 2}}, ["test.toml: generation.top_p is wrong"]),
    ],
)  # fmt: skip
def test_wrong_tasks_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WhorlError) as caught:
        made = task(**fields)
        made.kind.requests(made.items[0])
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_example_with_the_prompt_of_an_item_is_refused() -> None:
    with pytest.raises(WhorlError, match="'x0' is in the test split, as 'q2'"):
        task(train=[{"id": "x0", "q": RECORDS[2]["q"], "a": 0, "text": ""}], examples=["x0"])


def test_empty_and_reserved_records_are_refused() -> None:
    with pytest.raises(WhorlError, match="has no records"):
        task([])
    with pytest.raises(WhorlError, match="named 'item'"):
        task([{"q": "1", "a": 2, "item": 3}])


def test_task_file_reads_jsonl_json_and_parquet_alike(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    (tmp_path / "nested.json").write_text(json.dumps({"canary": "x", "examples": RECORDS}, indent=1))
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    text = f'name = "sums"\nkind = "{__name__}:Echo"\ntemplate = "{{{{ q }}}}"\ngold = "a"\n[data]\ntest = "a.jsonl"\n'
    (tmp_path / "sums.toml").write_text(text)
    base = load_task(tmp_path / "sums.toml")
    hashes = {
        load_task(tmp_path / "sums.toml", test=[str(tmp_path / f"a.{s}")]).hash
        for s in ("jsonl.gz", "json", "parquet")
    }
    assert hashes == {base.hash}
    nested = read_task_file(tmp_path / "sums.toml")
    nested = nested.model_copy(update={"data": nested.data.model_copy(update={"unnest": "examples"})})
    assert len(load_task(nested, test=[str(tmp_path / "nested.json")]).items) == 4
    assert len(load_task(tmp_path / "sums.toml", limit=3).items) == 3


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"q": "1", "a": 2}\n{"q": \n')
    for path, words in {
        "nothing.jsonl": "nothing.jsonl cannot be read: No such file",
        "bad.jsonl": "record 2, cannot be read",
        "bad.txt": "has no format of records",
    }.items():
        with pytest.raises(WhorlError, match=words):
            load_task(config(), test=[str(tmp_path / path)])
    with pytest.raises(WhorlError, match=r"task sums has no data"):
        load_task(config())
    with pytest.raises(WhorlError, match="no training split"):
        load_task(config(examples=["x0"]), test=[str(tmp_path / "bad.jsonl")])
    (tmp_path / "task.toml").write_text("name = ")
    with pytest.raises(WhorlError, match=r"task.toml cannot be read"):
        read_task_file(tmp_path / "task.toml")


@given(st.text(max_size=30), st.text(max_size=30))
def test_fields_are_never_read_as_templates(first: str, second: str) -> None:
    made = task([{"q": first + "{{ a }}{% if %}", "a": second}])
    assert made.kind.prompt(made.items[0]) == first + "{{ a }}{% if %}"
