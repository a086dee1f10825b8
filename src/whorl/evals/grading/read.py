"""Reader of verifiable tasks: a prompt or messages, the name of a grader, the answer.

{"prompt": "1+1=", "verifier": "numeric", "answer": "2"}
{"messages": [{"role": "user", "content": "1+1?"}], "verifier": "numeric", "answer": 2, "difficulty": 1.0}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whorl.data.forms import EXPECTED, unknown_form
from whorl.data.quarantine import BadRecordError, Quarantine
from whorl.data.record_fields import (
    check_turns,
    encodable_text,
    has_field,
    messages_of,
    number_field,
    source_and_id,
    template_fields,
    text_field,
    type_name,
)
from whorl.data.record_files import converted_records
from whorl.evals.grading.registry import parse_graders
from whorl.evals.grading.task import VerifiableTask


def read_tasks(path: Path, quarantine: Quarantine, *, split: str = "train") -> Iterator[VerifiableTask]:
    """Yield the tasks of a file or folder (`whorl.data.record_files`) in order; bad records go to the quarantine.

    split: of a folder with several. The default id is file and line.

    Raises:
        DataError: no record is good.
    """
    return converted_records(path, quarantine, split, to_task, EXPECTED)


def to_task(record: Mapping[str, Any]) -> VerifiableTask:
    """Convert a record with `prompt` or `messages`, `verifier`, `answer`, `difficulty`.

    Raises:
        BadRecordError: a field is missing or wrong. ConfigError: `verifier` is code that is not permitted.
    """
    if not (has_field(record, "verifier") and (has_field(record, "prompt") or has_field(record, "messages"))):
        raise unknown_form(record, "tasks")
    field = "prompt" if has_field(record, "prompt") else "messages"
    if field == "prompt" and has_field(record, "messages"):
        raise BadRecordError("bad_field", "messages", "given together with prompt")
    text = text_field(record, "prompt") if isinstance(record[field], str) and field == "prompt" else ""
    messages = () if text else messages_of(record[field], field)
    check_turns(messages, field)
    answer = record.get("answer", "")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise BadRecordError("bad_field", "answer", f"is {type_name(answer)}, not a text")
    encodable_text(answer, "answer")
    difficulty = number_field(record, "difficulty")
    verifier, name = text_field(record, "verifier"), source_and_id(record)[1]
    if "custom:" in verifier:
        parse_graders(verifier, f"task {name!r}: ")
    beside = template_fields(record, is_text=bool(text))
    return VerifiableTask(name, text, messages, verifier, answer, difficulty, **beside)
