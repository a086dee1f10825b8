"""The folder of agents: calls of tools, files, programs, and budgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from whorl.evals.episodes.environment import Reply, Turn
from whorl.evals.episodes.folder import FolderEnv, FolderOptions, FolderTask, clip
from whorl.sandbox import Program, ProgramResult


class Programs:
    """Services that return given results, and keep the programs."""

    def __init__(self, results: Sequence[ProgramResult] = ()) -> None:
        self.results, self.sent = list(results), list[Program]()

    async def run(self, program: Program) -> ProgramResult:
        self.sent.append(program)
        return self.results.pop(0)


def env_of(services: Any = None, files: Any = (), **options: Any) -> FolderEnv:
    env = FolderEnv(services or Programs(), FolderOptions(**options))
    env.prompt = env.reset(FolderTask("t", prompt="task", files=dict(files)))  # type: ignore[attr-defined]
    return env


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(env: FolderEnv, text: str, finished: bool = True, ids: Sequence[int] = ()) -> Turn:
    return asyncio.run(env.step([], Reply(text, ids, finish="stop" if finished else "length")))


def shown(turn: Turn) -> str:
    return str(turn.messages[0]["content"])


@given(st.text() | st.text(alphabet='<tool_call>{"name": }/'))
def test_any_text_is_answered(text: str) -> None:
    turn = step(env_of(), text)
    assert not turn.done and "contains no call" in shown(turn)


@given(st.text())
def test_content_of_a_call_comes_back(content: str) -> None:
    env = env_of()
    step(env, call("write", path="p", content=content))
    assert env.files == {"p": content.encode("utf-8", "replace")}


def test_file_tools_change_the_folder_and_show_it() -> None:
    env = env_of(files={"in.txt": b"old"})
    assert "Files in the folder: in.txt" in env.prompt[1]["content"]  # type: ignore[attr-defined]
    for text, result in (
        (call("list"), "in.txt  3 bytes"), (call("read", path="in.txt"), "old"),
        (call("read", path="no"), "There is no file 'no'"), (call("write", path="out/a", content="new\n"), "Wrote 4 bytes"),
        (call("write", path="../a", content="x"), "no path of a file"), (call("write", path="out", content="x"), "'out' is"),
        ("thinking", "contains no call"), (call("write", path="x"), "expected the texts path, content"),
        (call("write", path=1, content="x"), "wrong arguments"), (call("shell"), "no function 'shell'"),
    ):  # fmt: skip
        turn = step(env, text)
        assert shown(turn).startswith("<tool_response>\n") and result in shown(turn) and not turn.done, text
    assert env.files == {"in.txt": b"old", "out/a": b"new\n"} and env.errors == 7


def test_calls_of_a_reply_run_in_order_until_finish() -> None:
    env = env_of()
    first = step(env, call("write", path="a", content="1") + "\n" + call("read", path="a"))
    assert shown(first).count("<tool_response>") == 2 and shown(first).endswith("\n1\n</tool_response>")
    last = step(env, f"Done. {call('finish', answer='42 ')} {call('write', path='late', content='x')}")
    assert last.done and (env.ended, env.answer) == ("finished", "42") and "late" not in env.files
    assert [(s["role"], s.get("tool")) for s in env.steps] == [
        ("model", "write"), ("tool", "write"), ("tool", "read"), ("model", "finish"),
    ]  # fmt: skip


def test_programs_get_and_return_the_folder() -> None:
    good = ProgramResult(True, "passed", "2\n", 0.5, files={"b": b"2"})
    services = Programs([good, ProgramResult(False, "raised: NameError: bad", "", 0.1)])
    env = env_of(services, files={"a": b"1"})
    assert shown(step(env, call("python", code="print(2)"))) == "<tool_response>\n2\n</tool_response>"
    (program,) = services.sent
    assert program.source == "print(2)" and program.files == {"a": b"1"} and program.keep_files
    assert env.files == {"b": b"2"} and env.seconds == 0.5
    assert "NameError" in shown(step(env, call("python", code="bad")))
    assert env.files == {} and env.errors == 1


def test_budgets_end_a_run() -> None:
    steps = env_of(steps=2)
    assert not step(steps, call("list")).truncated
    assert step(steps, call("list")).truncated and steps.ended == "steps"
    tokens = env_of(tokens=10)
    assert tokens.max_tokens == 10
    step(tokens, call("list"), ids=(1,) * 6)
    assert tokens.max_tokens == 4
    assert step(tokens, "x" * 13).truncated and tokens.ended == "tokens"  # 13 bytes count as 4 tokens
    seconds = env_of(Programs([ProgramResult(False, "time", "", 1.0)]), seconds=1.0)
    assert step(seconds, call("python", code="")).truncated and seconds.ended == "seconds"


def test_cut_messages_do_not_act() -> None:
    env = env_of()
    assert "limit of tokens cut" in shown(step(env, call("python", code="print(1)")[:40], finished=False))
    whole = call("write", path="a", content="x").removesuffix("</tool_call>")  # a stop string may end it
    assert "Wrote 1 bytes" in shown(step(env, whole, finished=False))


def test_folder_has_a_limit_of_bytes() -> None:
    env = env_of(file_bytes=100)
    assert "at most 100 bytes" in shown(step(env, call("write", path="a", content="x" * 200)))
    assert env.files == {}


def test_long_results_lose_their_middle() -> None:
    text = clip("a" * 500 + "b" * 500, 100)
    assert text.startswith("a" * 50) and text.endswith("b" * 50) and "900 characters" in text
    assert clip("short", 100) == "short"


def test_instructions_name_only_the_given_tools() -> None:
    env = FolderEnv(SimpleNamespace(), FolderOptions(tools=("python", "finish"), steps=7))  # type: ignore[arg-type]
    given = ({"role": "system", "content": "own"}, {"role": "user", "content": "t"})
    first, second = env.reset(FolderTask("t", messages=given))
    text = first["content"]
    assert '"name": "python"' in text and '"name": "finish"' in text and '"name": "write"' not in text
    assert "7 messages" in text and text.endswith("own") and second == given[1]
