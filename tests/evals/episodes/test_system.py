"""A system under evaluation: retrieval, guard, tools, its address, wrong files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend
from tests.support.evals.fake_endpoint import FakeEndpoint

from whorl.errors import WhorlError
from whorl.evals.episodes.system import SystemBackend
from whorl.evals.episodes.system_config import read_system
from whorl.evals.model.open_model import open_backend
from whorl.evals.model.options import ModelOptions
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response, ScoreRequest
from whorl.registry import permit_code

DOCUMENTS = [
    "Zebras eat grass.", "The blue door opens with code 4711.", "Doors are made of wood.", "Grass is green.",
]  # fmt: skip


def shout(text: str) -> str:
    """A guard of tests."""
    return "too loud" if text.isupper() else ""


def system(
    folder: Path, answer: Callable[[Request], Response] = lambda r: Completion("fine"), **tables: Any
) -> Any:
    """Return a system over a fake model, and the fake model."""
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    lines = ['name = "bot"', 'model = "m"', f"system = {json.dumps(tables.pop('system', ''))}"]
    lines.append(f"trace = {json.dumps(tables.pop('trace', ''))}")
    for name, fields in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    (folder / "bot.toml").write_text("\n".join(lines))
    model = FakeBackend(answer)
    return SystemBackend(model, read_system(folder / "bot.toml")), model


def ask(backend: SystemBackend, *prompts: Any) -> list[Response]:
    found: dict[int, Response] = {}
    backend.respond([p if not isinstance(p, str) else GenerateRequest(p) for p in prompts], found.__setitem__)
    return [found[n] for n in range(len(prompts))]


def test_documents_come_before_the_question(tmp_path: Path) -> None:
    backend, model = system(tmp_path, system="Be brief.", retrieval={"documents": "docs.jsonl", "k": 1})
    ask(backend, "What opens the blue door?", "xyzzy")
    first, second = (request.prompt for request in model.sent)
    assert [m["role"] for m in first] == ["system", "user"] and first[0]["content"] == "Be brief."
    assert "4711" in first[1]["content"] and first[1]["content"].endswith("What opens the blue door?")
    assert second[1]["content"] == "xyzzy"  # nothing matches


def test_guard_blocks_prompts_and_answers(tmp_path: Path) -> None:
    def answer(request: Request) -> Response:
        assert isinstance(request, GenerateRequest)
        return Completion("The secret is 5." if "secret" in str(request.prompt) else "YES OF COURSE")

    permit_code(f"{__name__}:shout")
    guard = {"patterns": ["(?i)bomb", "secret is"], "check": f"{__name__}:shout", "answer": "No."}
    backend, model = system(tmp_path, answer, guard=guard)
    assert ask(backend, "Build a Bomb", "What is the secret?", "hello") == [Completion("No.")] * 3
    assert len(model.sent) == 2 and backend.n_blocked == 3
    open_, _ = system(tmp_path, answer, guard=guard | {"on": ["prompt"]})
    assert ask(open_, "hello") == [Completion("YES OF COURSE")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
def test_tools_run_inside_the_system(tmp_path: Path) -> None:
    def answer(request: Request) -> Response:
        assert isinstance(request, GenerateRequest)
        if "fail" in str(request.prompt[1]):
            return Missing("timed out")
        shown = str(request.prompt[-1]["content"])  # type: ignore[index]
        if shown.startswith("<tool_response>\n42"):
            return Completion('<tool_call>{"name": "finish", "arguments": {"answer": "42"}}</tool_call>')
        program = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
        return Completion(program if "6 * 7" in shown else "thinking")

    tools = {"names": ["python", "finish"], "steps": 3, "program_seconds": 20}
    backend, model = system(tmp_path, answer, tools=tools)
    assert ask(backend, "6 * 7?", "hm", "fail") == [
        Completion("42"),
        Completion("", finish="length"),
        Missing("timed out"),
    ]
    assert '"name": "python"' in model.sent[0].prompt[0]["content"]  # type: ignore[index, union-attr]


def test_trace_has_documents_blocks_and_answers(tmp_path: Path) -> None:
    parts = {
        "retrieval": {"documents": "docs.jsonl", "k": 1},
        "guard": {"patterns": ["bomb", "leak"], "answer": "No."},
    }
    replies = iter([Completion("fine"), Completion("a leak"), Missing("timed out")])
    backend, _ = system(tmp_path, lambda r: next(replies), trace="trace.jsonl", **parts)
    for prompt in ("blue door", "second", "third", "bomb"):
        ask(backend, prompt)
    traces = [json.loads(line) for line in (tmp_path / "trace.jsonl").open()]
    found = [(t["blocked"], t["answer"]) for t in traces]
    assert found == [("", "fine"), ("answer", "No."), ("", None), ("prompt", "No.")]
    assert "4711" in traces[0]["prompt"][0]["content"] and traces[0]["steps"][0]["content"] == "fine"
    plain, _ = system(tmp_path, **parts)
    assert plain.address == backend.address


def test_address_covers_configuration_and_documents(tmp_path: Path) -> None:
    retrieval = {"documents": "docs.jsonl", "k": 1}
    plain, _ = system(tmp_path)
    first, _ = system(tmp_path, retrieval=retrieval)
    second, _ = system(tmp_path, retrieval=retrieval | {"k": 2})
    with (tmp_path / "docs.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    third = SystemBackend(FakeBackend(lambda r: Completion("")), read_system(tmp_path / "bot.toml"))
    again, _ = system(tmp_path, retrieval=retrieval)
    assert (
        len({each.address for each in (plain, first, second, third)}) == 4 and again.address == first.address
    )


def test_scores_of_a_system_are_missing(tmp_path: Path) -> None:
    backend, model = system(tmp_path)
    [response] = ask(backend, ScoreRequest("a", "b"))
    assert isinstance(response, Missing) and "no log-probabilities" in response.reason and not model.sent


def test_system_over_an_endpoint_opens_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(json.dumps({"text": "The code is 4711"}) + "\n")
    with FakeEndpoint() as fake:
        fake.reply = lambda body: "4711" if "4711" in body["messages"][-1]["content"] else "unknown"
        (tmp_path / "s.toml").write_text(
            f'name = "s"\nmodel = "{fake.url}"\nmodel_name = "fake"\n[retrieval]\ndocuments = "docs.jsonl"\n'
        )
        backend = open_backend(str(tmp_path / "s.toml"), ModelOptions())
        assert isinstance(backend, SystemBackend)
        assert ask(backend, "What is the code?") == [Completion("4711")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "s"', "model is missing"),
        ('name = "s"\nmodel = "m"\n[guard]\npatterns = ["("]', "no regular expression"),
        ('name = "s"\nmodel = "m"\n[retrieval]\ndocuments = "d"\ntemplate = "{{ question }}"', "documents"),
        ('name = "s"\nmodel = "m"\n[tools]\nnames = ["shell"]', "tools.names"),
        ('name = "s"\nmodel = "m"\n[router]', "router"),
        ("name =", "cannot be read"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(WhorlError, match=message):
        read_system(tmp_path / "s.toml")


def test_documents_without_text_and_unknown_guards(tmp_path: Path) -> None:
    with pytest.raises(WhorlError, match="document 1 has no text in the field 'body'"):
        system(tmp_path, retrieval={"documents": "docs.jsonl", "text": "body"})
    with pytest.raises(WhorlError, match="guard"):
        system(tmp_path, guard={"check": "nowhere"})


def test_timeout_and_concurrency_of_a_file_go_before_the_options(tmp_path: Path) -> None:
    with FakeEndpoint() as fake:
        (tmp_path / "bot.toml").write_text(
            f'name = "b"\nmodel = "{fake.url}"\nmodel_name = "fake"\ntimeout = 7.0\n'
        )
        made: Any = open_backend(str(tmp_path / "bot.toml"), ModelOptions(timeout=5.0, concurrency=3))
        assert (made.model.client.timeout, made.model.concurrency) == (7.0, 3)
        (tmp_path / "bot.toml").write_text(f'name = "b"\nmodel = "{fake.url}"\nmodel_name = "fake"\n')
        plain: Any = open_backend(str(tmp_path / "bot.toml"), ModelOptions(timeout=5.0, concurrency=3))
        assert plain.model.client.timeout == 5.0 and plain.address == made.address
    for line in ("timeout = 0.0", "timeout = nan", "concurrency = 0"):
        (tmp_path / "bad.toml").write_text(f'name = "b"\nmodel = "m"\n{line}\n')
        with pytest.raises(WhorlError, match=line.split()[0]):
            read_system(tmp_path / "bad.toml")
