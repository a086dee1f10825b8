"""Calls of tools in text, runs over a folder, and budgets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.evals.agent.actions import TOOLS, Action, instructions, parse_action
from whorl.evals.agent.trajectory import AgentRun, RunBudget, clip, start_messages
from whorl.evals.model.requests import Completion, Missing
from whorl.sandbox import ProgramResult


def run(**given: Any) -> AgentRun:
    files = given.pop("files", {})
    return AgentRun(start_messages("system", "task", files), RunBudget(**given), files, list(TOOLS))


def last(one: AgentRun) -> str:
    return str(one.messages[-1]["content"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I run it.\n```python\nprint(1)\n```\n[python]\n1", ("python", "", "print(1)\n", True)),
        ("```write a b.txt \nline\n```", ("write", "a b.txt", "line\n", True)),
        ("```read x```\nno\n```list\n```", ("list", "", "", True)),
        ("````write doc.md\n```python\nx\n```\n````", ("write", "doc.md", "```python\nx\n```\n", True)),
        ("```json\n{}\n```\n```finish\ndone\n```\n```python\nx\n```", ("finish", "", "done\n", True)),
        ("```python\nprint(1)", ("python", "", "print(1)", False)),
        ("```Finish\n```", ("finish", "", "", True)),
        ("no call", None), ("```bash\nls\n```", None), ("```\nx\n```", None), ("", None), ("inline ```python x```", None),
    ],
)  # fmt: skip
def test_first_call_of_a_message_is_read(text: str, expected: tuple[str, str, str, bool] | None) -> None:
    found = parse_action(text, TOOLS)
    assert expected == (found and (found.tool, found.argument, found.content, found.closed))


@given(st.text(alphabet="`ab\n \tpythonfinish"))
def test_any_text_parses(text: str) -> None:
    found = parse_action(text, TOOLS)
    assert found is None or (found.tool in TOOLS and 0 < found.end <= len(text))


@given(st.text(), st.sampled_from(["write", "finish"]))
def test_content_of_a_block_comes_back(content: str, tool: str) -> None:
    lines = "".join(line + "\n" for line in content.split("\n") if "`" not in line and "\r" not in line)
    assert parse_action(f"before\n```{tool} p\n{lines}```", TOOLS) == Action(
        tool, "p", lines, True, len(f"before\n```{tool} p\n{lines}```")
    )


def test_file_tools_change_the_folder_and_show_it() -> None:
    one = run(files={"in.txt": b"old"})
    assert "Files in the folder: in.txt" in one.messages[1]["content"]
    for text, shown in (
        ("```list\n```", "in.txt  3 bytes"), ("```read in.txt\n```", "old"), ("```read no\n```", "There is no file 'no'"),
        ("```write out/a\nnew\n```", "Wrote 4 bytes"), ("```write ../a\nx\n```", "no path of a file"),
        ("```write out\nx\n```", "'out' is no path"), ("thinking", "no action"), ("```write\nx\n```", "no path"),
    ):  # fmt: skip
        assert one.receive(Completion(text)) is None
        assert shown in last(one), text
    assert one.files == {"in.txt": b"old", "out/a": b"new\n"} and one.errors == 5
    one.receive(Completion("All done.\n```finish\n42\n```\n```write late\nx\n```"))
    assert (one.ended, one.answer) == ("finished", "42") and "late" not in one.files
    assert last(one).endswith("42\n```")  # the text after the call is left out


def test_programs_get_and_return_the_folder() -> None:
    one = run(files={"a": b"1"})
    program = one.receive(Completion("```python\nprint(2)\n```"))
    assert (
        program is not None
        and program.source == "print(2)\n"
        and program.files == {"a": b"1"}
        and program.keep_files
    )
    one.observe(ProgramResult(True, "passed", "2\n", 0.5, files={"b": b"2"}))
    assert last(one) == "[python]\n2" and one.files == {"b": b"2"} and one.seconds == 0.5
    one.receive(Completion("```python\nbad\n```"))
    one.observe(ProgramResult(False, "raised: NameError: bad", "", 0.1))
    assert "NameError" in last(one) and one.files == {} and one.errors == 1
    assert [step.get("tool") for step in one.steps] == ["python", "python", "python", "python"]


def test_budgets_end_a_run() -> None:
    steps = run(steps=2)
    for _ in range(2):
        assert not steps.ended
        steps.receive(Completion("```list\n```"))
    assert steps.ended == "steps"
    tokens = run(tokens=10, message_tokens=6)
    assert tokens.request().max_tokens == 6
    tokens.receive(Completion("```list\n```", ids=(1,) * 6))
    assert tokens.request().max_tokens == 4
    tokens.receive(Completion("x" * 13))  # 13 bytes count as 4 tokens
    assert tokens.ended == "tokens"
    seconds = run(seconds=1.0)
    seconds.receive(Completion("```python\n```"))
    seconds.observe(ProgramResult(False, "time", "", 1.0))
    assert seconds.ended == "seconds"
    missing = run()
    missing.receive(Missing("timed out"))
    assert (missing.ended, missing.reason) == ("missing", "timed out")


def test_cut_messages_do_not_act() -> None:
    one = run()
    assert one.receive(Completion("```python\nprint(", finish="length")) is None
    assert "limit of tokens" in last(one)
    assert one.receive(Completion("```python\nprint(1)")) is not None  # a stop string may end the fence


def test_folder_has_a_limit_of_bytes() -> None:
    one = run(file_bytes=100)
    one.receive(Completion(f"```write a\n{'x' * 200}\n```"))
    assert "at most 100 bytes" in last(one) and one.files == {}


def test_long_results_lose_their_middle() -> None:
    shown = clip("a" * 500 + "b" * 500, 100)
    assert shown.startswith("a" * 50) and shown.endswith("b" * 50) and "900 characters" in shown
    assert clip("short", 100) == "short"


def test_instructions_name_only_the_given_tools() -> None:
    text = instructions(["python", "finish"], 7)
    assert "```python" in text and "```finish" in text and "```write" not in text and "7 messages" in text
    messages = start_messages(
        text, [{"role": "system", "content": "own"}, {"role": "user", "content": "t"}], {}
    )
    assert [m["role"] for m in messages] == ["system", "user"] and messages[0]["content"].endswith("own")
