"""Formats of alignment data: every format converts, every bad record is quarantined with reason, file, line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from whorl.align import data
from whorl.align.data import Conversation, Preference, Quarantine, UnpairedPreference, formats
from whorl.align.data.formats import to_conversation, to_preference, to_prompt_completion
from whorl.data.quarantine import REASONS, BadRecordError
from whorl.data.record_files import records
from whorl.errors import DataError
from whorl.evals.grading.read import read_tasks, to_task

U, A = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}
OTHER = {"role": "assistant", "content": "what?"}
PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
ASKED = "\n\nHuman: hi\n\nAssistant:"
to_unpaired = formats.to_unpaired_preference


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [U, A]},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]},
        {"instruction": "hello", "input": "", "output": "good day"},
        {"prompt": "hello", "completion": "good day"},
        {"prompt": [U], "completion": [A]},
        {"messages": [{**U, "content": PARTS}, A]},
        {"messages": [{**U, "name": None}, {**A, "tool_calls": None}], "prompt": None},
    ],
)
def test_to_conversation_accepts_every_format(record: dict[str, Any]) -> None:
    assert to_conversation(record) == Conversation((U, A))


def test_to_conversation_keeps_input_and_system() -> None:
    found = to_conversation({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert found.messages[0]["content"] == "Add.\n\n1 2"
    turns = [{"from": "human", "value": "hm?"}, {"from": "gpt", "value": "hm"}]
    told = to_conversation({"system": "Be kind.", "conversations": turns})
    assert [m["role"] for m in told.messages] == ["system", "user", "assistant"]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert to_conversation({"messages": [U, called]}).messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "p", "chosen": " a", "rejected": " b"}, ("p", " a", " b")),
        ({"prompt": "p", "chosen": "p a", "rejected": "p b"}, ("p", " a", " b")),
        ({"chosen": "The sky is dim.", "rejected": "The sky is dark."}, ("The sky is", " dim.", " dark.")),
        ({"chosen": f"{ASKED} I am", "rejected": f"{ASKED} I can"}, (ASKED, " I am", " I can")),
        ({"prompt": [U], "chosen": [A], "rejected": [OTHER]}, ((U,), (A,), (OTHER,))),
        ({"chosen": [U, A], "rejected": [U, OTHER]}, ((U,), (A,), (OTHER,))),
        ({"prompt": [U], "chosen": [U, A], "rejected": [U, OTHER]}, ((U,), (A,), (OTHER,))),
        ({"prompt": "hello", "chosen": [U, A], "rejected": [U, OTHER]}, ((U,), (A,), (OTHER,))),
        ({"prompt": "hello", "chosen": [A], "rejected": [OTHER]}, ((U,), (A,), (OTHER,))),
        ({"prompt": [U], "chosen": "good day", "rejected": "what?"}, ((U,), (A,), (OTHER,))),
        ({"prompt": None, "chosen": [U, A, U, A], "rejected": [U, A, U, OTHER]}, ((U, A, U), (A,), (OTHER,))),
    ],
)
def test_to_preference_accepts_every_format(record: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = to_preference(record)
    assert (found.prompt, found.chosen, found.rejected) == expected


def test_other_formats_are_converted() -> None:
    bad, good = ({"prompt": "p", "completion": "c"}, {"prompt": [U], "completion": [A]})
    assert to_unpaired({**bad, "label": False}) == UnpairedPreference("p", "c", False)
    assert to_unpaired({**good, "label": 1}) == UnpairedPreference((U,), (A,), True)
    pair = to_prompt_completion({"prompt": None, "completion": "c"})
    assert (pair.prompt, pair.completion) == ("", "c")
    task = to_task({"id": 7, "prompt": "1+1=", "verifier": "exact", "answer": 2, "difficulty": 3})
    assert (task.id, task.prompt, task.answer, task.difficulty) == ("7", "1+1=", "2", 3.0)
    assert to_task({"prompt": [U], "verifier": "numeric"}).messages == (U,)


@pytest.mark.parametrize(
    ("shape", "record", "reason", "field"),
    [
        (to_conversation, {"text": "hm"}, "unknown_shape", ""),
        (to_conversation, {"messages": []}, "empty", "messages"),
        (to_conversation, {"messages": "hm"}, "bad_field", "messages"),
        (to_conversation, {"messages": [U]}, "no_answer", ""),
        (to_conversation, {"messages": [U, {"role": "judge", "content": "x"}]}, "bad_role", "messages[1].role"),
        (to_conversation, {"messages": [{"role": "user"}, A]}, "bad_field", "messages[0].content"),
        (to_conversation, {"messages": [A, U, A]}, "bad_role", "messages[0].role"),
        (to_conversation, {"messages": [{**U, "role": "system"}, A]}, "bad_role", "messages[1].role"),
        (to_conversation, {"messages": [U, U, A]}, "bad_role", "messages[1].role"),
        (to_conversation, {"conversations": [U, A, A], "system": "s"}, "bad_role", "conversations[2].role"),
        (to_task, {"messages": [A], "verifier": "exact"}, "bad_role", "messages[0].role"),
        (to_conversation, {"prompt": [U, A], "completion": [A]}, "bad_role", "completion[0].role"),
        (to_conversation, {"prompt": [A], "completion": "x"}, "bad_role", "prompt[0].role"),
        (to_conversation, {"messages": [U, A], "tools": [{"name": "f"}]}, "bad_field", "tools[0].parameters"),
        (to_conversation, {"instruction": "Add."}, "unknown_shape", ""),
        (to_conversation, {"messages": [U, {**A, "content": " \n"}]}, "empty", "messages[1].content"),
        (to_conversation, {"messages": [{**U, "content": "\ud800"}, A]}, "invalid_utf8", "messages[0].content"),
        (to_conversation, {"instruction": "Add.", "output": ""}, "empty", "output"),
        (to_conversation, {"instruction": "Add.", "input": 3, "output": "x"}, "bad_field", "input"),
        (to_prompt_completion, {"prompt": "p"}, "unknown_shape", ""),
        (to_preference, {"prompt": "p", "chosen": "a"}, "unknown_shape", ""),
        (to_preference, {"prompt": "p", "chosen": "a", "rejected": "a"}, "identical", "rejected"),
        (to_preference, {"chosen": [U, A], "rejected": [U, A]}, "identical", "rejected"),
        (to_preference, {"chosen": [U, A, U, A], "rejected": [U, A]}, "no_answer", "rejected"),
        (to_preference, {"chosen": "left", "rejected": "right"}, "no_prompt", ""),
        (to_preference, {"prompt": "p", "chosen": "a", "rejected": 3}, "bad_field", "rejected"),
        (to_preference, {"prompt": "p", "chosen": "p", "rejected": "p b"}, "empty", "chosen"),
        (to_unpaired, {"prompt": "p", "completion": "c", "label": "yes"}, "bad_field", "label"),
        (to_task, {"prompt": "p"}, "unknown_shape", ""),
        (to_task, {"prompt": "p", "messages": [U], "verifier": "exact"}, "bad_field", "messages"),
    ],
)  # fmt: skip
def test_bad_record_has_reason_and_field(shape: Any, record: Any, reason: str, field: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        shape(record)
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_preference_rejects_invalid_fields() -> None:
    with pytest.raises(DataError, match="identical"):
        Preference("p", "a", "a")
    with pytest.raises(DataError, match="mixes"):
        Preference("p", (A,), (OTHER,))


@pytest.mark.parametrize(
    ("shape", "record", "words"),
    [
        (to_conversation, {"instruction": "i", "id": 1}, "nearest form: instruction and output, without output;"),
        (to_conversation, {"mesages": []}, "nearest form: messages, without messages (is it 'mesages'?)"),
        (to_conversation, {"q": 1, "a": 2}, "fields: q, a; expected messages; conversations; instruction and"),
        (to_conversation, {"chosen": "a", "rejected": "b", "prompt": "p"}, "these are fields of preferences"),
        (to_preference, {"prompt": "p", "chosen": "a"}, "prompt, chosen and rejected, without rejected"),
        (to_task, {"prompt": "p", "answer": 1}, "prompt and verifier, without verifier"),
    ],
)  # fmt: skip
def test_unknown_shape_names_the_nearest_form_and_the_page(shape: Any, record: Any, words: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        shape(record)
    assert words in str(caught.value) and str(caught.value).endswith("/data.md")


def test_order_of_turns_with_tools_and_systems_is_accepted() -> None:
    system, called = {"role": "system", "content": "s"}, {**A, "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "1"}
    messages = [system, U, called, result, result, A, system, U, A]
    assert len(to_conversation({"messages": messages}).messages) == len(messages)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats()
WORDS = st.sampled_from(["", " ", "user", "gpt", "a", "b\ud800"])
KEYS = st.sampled_from(["role", "content", "from", "value", "x"])
JSON = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "messages conversations instruction input output prompt completion chosen rejected label verifier answer"
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=5))
def test_any_record_converts_or_raises_bad_record(record: dict[str, Any]) -> None:
    for shape in (to_conversation, to_prompt_completion, to_preference, to_unpaired, to_task):
        try:
            found = shape(record)
        except BadRecordError as error:
            assert error.reason in REASONS
        else:
            json.dumps(found.__dict__).encode()


def test_empty_parameters_of_a_tool_are_kept() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for form in (tool, json.dumps(tool), {"name": "f", "parameters": "{}"}):
        assert to_conversation({"messages": [U, A], "tools": [form]}).tools == (tool,)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        (3, "tools"), ("{", "tools"), ([{}], "tools[0]"),
        ([{"name": "f", "parameters": "{"}], "tools[0].parameters"),
    ],
)  # fmt: skip
def test_wrong_tools_are_bad_records(tools: Any, field: str) -> None:
    with pytest.raises(BadRecordError) as found:
        to_conversation({"messages": [U, A], "tools": tools})
    assert found.value.field == field
    with pytest.raises(BadRecordError, match="only messages"):
        to_preference({"prompt": "p", "chosen": "a", "rejected": "b", "tools": TOOLS[:1]})


def test_quarantine_stores_file_line_and_field(tmp_path: Path) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    rows = [good, {**good, "rejected": "a"}, {**good, "chosen": 3}, [1], good, {**good, "rejected": "a"}]
    path = write(tmp_path / "some.jsonl", *rows)
    with path.open("ab") as stream:
        stream.write(b'\n{"prompt": \n\xff\xfe\n')
    quarantine = Quarantine(tmp_path / "quarantine.jsonl", max_kept=2)
    assert [p.id for p in data.preferences(path, quarantine)] == ["some.jsonl:1", "some.jsonl:5"]
    counts = {"accepted": 2, "identical": 2, "bad_json": 2, "bad_field": 1, "invalid_utf8": 1}
    assert quarantine.summary() == counts
    assert len(quarantine) == 6 and len(quarantine.rejected) == 2
    kept = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [k["line"] for k in kept] == [2, 3, 4, 6, 8, 9]
    assert kept[1]["file"] == str(path) and kept[1]["field"] == "chosen"
    assert "some.jsonl, line 2, field 'rejected'" in str(quarantine.rejected[0])


def test_same_records_from_every_file_type(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [U, {**A, "content": f"answer {i}"}]} for i in range(5)]
    plain = write(tmp_path / "a.jsonl", *rows).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    with pa.CompressedOutputStream(str(tmp_path / "c.jsonl.zst"), "zstd") as stream:
        stream.write(plain)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    (tmp_path / "e.json").write_text(json.dumps(rows))
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "alone", num_shards=2)
    datasets.DatasetDict({"train": made, "test": made.select([4])}).save_to_disk(tmp_path / "split")
    for place in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.json", "alone", "split"):
        quarantine = Quarantine()
        found = [list(c.messages) for c in data.conversations(tmp_path / place, quarantine)]
        assert found == [row["messages"] for row in rows] and not len(quarantine), place
    assert len(list(data.conversations(tmp_path / "split", Quarantine(), split="test"))) == 1
    with pytest.raises(DataError, match="no split 'valid'"):
        list(data.conversations(tmp_path / "split", Quarantine(), split="valid"))


CALLS = [{"city": "Oslo"}, {"a": 1, "b": 2}, {}, {"list": [1, None]}]
TOOLS = [
    {"name": "f", "parameters": {"type": "object", "properties": {name: {"type": "string"}}}}
    for name in "abc"
]


def test_fields_of_other_rows_are_absent_in_columnar_files(tmp_path: Path) -> None:
    """A struct column has every field of any row; a row of JSON has its own."""
    rows: list[dict[str, Any]] = [
        {
            "messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": call}}]}],
            "tools": [tool],
        }
        for call, tool in zip(CALLS, [*TOOLS, TOOLS[0]], strict=True)
    ]
    write(tmp_path / "a.jsonl", *rows)
    table = pa.Table.from_pylist([*rows, {"messages": None}])
    pq.write_table(table, tmp_path / "b.parquet")
    with pa.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as stream:
        stream.write_table(table)
    expected = [(c.messages, c.tools) for c in data.conversations(tmp_path / "a.jsonl", Quarantine())]
    for name in ("b.parquet", "c.arrow"):
        found = [(c.messages, c.tools) for c in data.conversations(tmp_path / name, Quarantine())]
        assert found == expected, name
        assert found[0][0][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    explicit = {"messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}]}
    (kept,) = data.conversations(write(tmp_path / "d.jsonl", explicit), Quarantine())
    assert kept.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": None}


LONG = b'{"a": "' + b"x" * 99 + b'"}'
LINES = st.sampled_from([b"", b" ", b"{}", b'{"a": 1}', b"[]", b"\xff", b"{", LONG])


@settings(suppress_health_check=list(HealthCheck))
@given(lines=st.lists(LINES | st.binary(max_size=9)))
@example(lines=[b"{\x00}"])
def test_every_line_is_record_or_rejected(tmp_path: Path, lines: list[bytes]) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    path = tmp_path / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = [(line, isinstance(r, dict)) for _, line, r in records(path, longest=50)]
    kept = [(n, line.strip()) for n, line in enumerate(lines, 1) if line and not line.isspace()]
    assert found == [(n, line != LONG and _is_object(line)) for n, line in kept]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode()), dict)
    except ValueError:
        return False


def test_readers_reject_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(read_tasks(tmp_path / "none.jsonl", Quarantine()))
    (tmp_path / "a.txt").write_text("a,b\n")
    with pytest.raises(DataError, match="no readable records"):
        list(read_tasks(tmp_path / "a.txt", Quarantine()))
    path = write(tmp_path / "j.jsonl", {"question": "x"})
    with pytest.raises(DataError, match=r"unknown_shape 1[\s\S]*j.jsonl, line 1"):
        list(data.unpaired(path, Quarantine()))
