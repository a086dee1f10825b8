"""Records, task files, system files and model folders name no code; a recipe or a command line permits it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tests.support.cli import refuse, succeed
from tests.support.evals.backend import by_text
from tests.support.tiny import make_transformer

from whorl.align.stage.io import read_tasks
from whorl.errors import WhorlError
from whorl.evals.episodes.system import SystemBackend
from whorl.evals.episodes.system_config import read_system
from whorl.evals.grading import VerifiableTask, grade_tasks
from whorl.evals.runner import evaluate
from whorl.evals.suites.suite import SuiteInputs, load_suite
from whorl.evals.tasks.config import parse_task, read_task_file
from whorl.evals.tasks.task import load_task, make_task
from whorl.models.serialization import load_model, save_model
from whorl.recipes import parse_recipe
from whorl.tokens.template_source import compile_template

PLANTED = "planted:run"
VERIFIER = f"custom:{PLANTED}"
RECORD = {"id": "r7", "prompt": "1+1=", "answer": "2", "verifier": f"0.5 exact + 0.5 {VERIFIER}"}
ITEMS = {
    "name": "v", "kind": "generate", "template": "{{ prompt }}", "gold": "answer",
    "options": {"verifier": "{{ verifier }}"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that leaves a file `ran` when it is imported."""
    (tmp_path / "planted.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(gold, text):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(RECORD) + "\n")
    (tmp_path / "tasks.train.jsonl").write_text(json.dumps(RECORD) + "\n")
    return tmp_path


def task_of(**fields: Any) -> Any:
    return make_task(parse_task({**ITEMS, **fields}, "v.toml"), [{**RECORD, "verifier": VERIFIER}])


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def open_model(folder: Path) -> Any:
    save_model(make_transformer(), folder)
    fields = json.loads((folder / "config.json").read_text())
    shape = fields["transformer"]
    shape["mixers"] = {name: {"kind": PLANTED, "options": {}} for name in shape["mixers"]}
    written(folder / "config.json", json.dumps(fields))
    return load_model(folder)


def open_suite(folder: Path) -> Any:
    written(folder / "t.toml", 'name="t"\nkind="generate"\ntemplate="{{ prompt }}"\ngold="answer"\n')
    suite = f'name="s"\n[[tasks]]\ntask="t.toml"\ntest="tasks.jsonl"\nset={{kind="{PLANTED}"}}\n'
    return load_suite(str(written(folder / "s.toml", suite)), SuiteInputs())


def open_system(folder: Path) -> Any:
    text = f'name="bot"\nmodel="m"\n[guard]\ncheck="{PLANTED}"\n'
    return SystemBackend(by_text(lambda _: ""), read_system(written(folder / "system.toml", text)))


def open_task_file(folder: Path) -> Any:
    text = f'name="f"\nkind="{PLANTED}"\ntemplate="{{{{ prompt }}}}"\n[data]\ntest="tasks.jsonl"\n'
    return load_task(read_task_file(written(folder / "f.toml", text)))


ENTRANCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "task": (lambda _: grade_tasks([VerifiableTask("t3", "?", verifier=VERIFIER)], [""]), "task 't3'"),
    "file of the step tasks": (lambda folder: read_tasks(folder, "train"), "task 'r7'"),
    "item": (lambda _: task_of(), "task v, item 'r7'"),
    "template": (
        lambda _: task_of(options={"verifier": "{{ 'cus' ~ 'tom:planted:run' }}"}),
        "task v, item 'r7'",
    ),
    "metric of a task": (
        lambda _: task_of(kind="generate", options={"metric": VERIFIER}),
        "task v: options.metric",
    ),
    "kind of a task file": (open_task_file, "task f: kind"),
    "suite file": (open_suite, "task t: kind"),
    "system": (open_system, "system bot: guard.check"),
    "model folder": (open_model, "/"),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_data_that_name_code_are_refused(entrance: str, folder: Path) -> None:
    read, name = ENTRANCES[entrance]
    with pytest.raises(WhorlError) as error:
        read(folder)
    assert str(error.value).startswith(name)
    assert f"names the code '{PLANTED}'" in str(error.value)
    assert f"whorl --code {PLANTED}" in str(error.value) and not (folder / "ran").exists()


def test_step_tasks_and_verb_refuse_a_record(folder: Path) -> None:
    """The step refuses the record; the recipe that names its function accepts it, and so does --code."""
    recipe = 'name="r"\n[steps.tasks]\nsource="files"\nshape="tasks"\npath="tasks.jsonl"\ntest_path="tasks.jsonl"\n'
    written(folder / "r.toml", recipe)
    assert "task 'r7': verifier" in refuse(folder, "run", "r.toml") and not (folder / "ran").exists()
    succeed(folder, "--code", PLANTED, "run", "r.toml")
    verdict = grade_tasks([VerifiableTask("t", "?", verifier=VERIFIER)], [""])[0]
    assert verdict.passed and (folder / "ran").exists()
    (folder / "ran").unlink()
    assert "names no code" in refuse(folder, "--code", "planted", "ls")


def test_recipe_names_code_for_its_data(folder: Path) -> None:
    text = (
        'name="r"\ncode=["planted:run"]\n[steps.tasks]\nsource="files"\nshape="tasks"\npath="tasks.jsonl"\n'
    )
    assert list(parse_recipe(text, "r.toml").code) == [PLANTED]
    formats = '[steps.ingest]\nsources=["x"]\nformats={".f"="planted:run"}\n'
    assert list(parse_recipe(formats, "m.toml").code) == [PLANTED]
    with pytest.raises(WhorlError, match=r"r\.toml:2: code is \['planted'\]"):
        parse_recipe(text.replace("planted:run", "planted"), "r.toml")


def test_own_suites_need_no_permission(folder: Path) -> None:
    own = VerifiableTask("g", "?", verifier="reasoning_gym")
    assert "names the code" not in grade_tasks([own], [""])[0].reason
    answers = by_text(lambda _: "2")
    plain = make_task(parse_task(ITEMS, "v.toml"), [{**RECORD, "verifier": "exact"}])
    assert evaluate(answers, [plain])[0].outcomes == {"right": 1}


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('x').read() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_reach_no_internals(attack: str, folder: Path) -> None:
    with pytest.raises(WhorlError):
        task_of(template=attack + "{{ prompt }}")
    with pytest.raises((WhorlError, TemplateError)):
        compile_template(attack).render(messages=[{"role": "user", "content": "a"}])
