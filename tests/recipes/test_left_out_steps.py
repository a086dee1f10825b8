"""Steps without anything to work on are left out with what needs them; a failed step is named on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from whorl.cli.jobs.report import report
from whorl.errors import ConfigError, DataError, NotApplicableError
from whorl.evals.prompts import first_prompt
from whorl.recipes import RunResult, StepContext, StepKind, parse_recipe, run_recipe, step_kinds
from whorl.recipes.recipe import load_recipe
from whorl.registry import require_extra
from whorl.report.blocks import Card
from whorl.store import Store
from whorl.tracking.progress import Progress

PROSE = ["The lighthouse keeper wrote a letter every evening, and he burnt it.\n", "Short.\n"]
PYTHON = ["import os\n\n\ndef f():\n    return os\n"]


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")

    problem: str = ""

    def check_installed(self, step: str) -> None:
        if self.problem == "package":
            require_extra(f"{step}.problem = package", "no_such_package", "mine")


def write(ctx: StepContext, config: Config) -> None:
    if config.problem == "data":
        raise NotApplicableError("the corpus has no Python function")
    if config.problem == "error":
        raise DataError("a file is damaged")
    (ctx.out / "text").write_text(ctx.name)
    ctx.report.cards.append(Card(label=f"Value of {ctx.name}", value="1"))


KINDS = {
    "texts": StepKind("texts", "texts", Config, {}, 1, "Texts.", write, None),
    "tasks": StepKind("tasks", "tasks", Config, {"texts": "texts"}, 1, "Tasks.", write, None),
    "model": StepKind(
        "model", "model", Config, {"texts": "texts", "tasks?": "tasks"}, 1, "Base.", write, None
    ),
    "tuned": StepKind(
        "tuned", "tuned", Config, {"model": "model", "tasks": "tasks"}, 1, "Tuned.", write, None
    ),
    "report": step_kinds()["report"],
}
RECIPE = """\
name = "r"
steps.texts = {}
steps.tasks = { parents = ["texts"] }
steps.model = { parents = ["texts", "tasks"] }
steps.tuned = { parents = ["model", "tasks"] }
steps.report = { parents = ["model", "tuned"] }
"""


def run(store: Store, *sets: str, until: str | None = None) -> RunResult:
    recipe = parse_recipe(RECIPE, "r.toml", sets=sets, kinds=KINDS)
    return run_recipe(recipe, store, Progress.silent(), until=until)


def test_run_leaves_out_what_the_data_do_not_allow(tmp_path: Path) -> None:
    done = run(Store(tmp_path), "tasks.problem=data")
    assert list(done.artifacts) == ["texts", "model", "report"]  # an optional parent is not needed
    log = (done.run.dir / "log.txt").read_text()
    assert "tasks: left out, and with it tuned: the corpus has no Python function" in log
    again = tmp_path / "again.html"
    report(run="r", out=again, store=str(tmp_path))
    for page in (done.artifacts["report"].file("report.html"), again):
        text = page.read_text()
        assert "Left out: <code>tasks</code>, <code>tuned</code>. The corpus has no Python function." in text
        assert "has not reached" not in text and "Value of model" in text


def test_step_that_was_asked_for_is_not_left_out(tmp_path: Path) -> None:
    for until in ("tasks", "tuned"):
        with pytest.raises(NotApplicableError):
            run(Store(tmp_path), "tasks.problem=data", until=until)


def test_page_names_the_failed_step_until_it_succeeds(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        run(Store(tmp_path), "tuned.problem=error")
    page = tmp_path / "page.html"
    report(run="r", out=page, store=str(tmp_path))
    assert "<code>tuned</code> failed: a file is damaged" in page.read_text()
    run(Store(tmp_path))
    run(Store(tmp_path), until="texts")  # a run of some steps keeps the records of the others
    report(run="r", out=page, store=str(tmp_path))
    assert "</code> failed" not in page.read_text() and "Value of tuned" in page.read_text()


def test_refused_run_leaves_no_folder_and_no_latest_run(tmp_path: Path) -> None:
    def folders() -> list[str]:
        return sorted(path.name for path in (tmp_path / "runs").iterdir())

    with pytest.raises(DataError):
        run(Store(tmp_path), "texts.problem=error")
    assert folders() == []
    kept = run(Store(tmp_path)).run.name
    with pytest.raises(DataError):
        run(Store(tmp_path), "tuned.problem=error")  # its parents are looked up
    assert folders() == [kept]
    report(run="r", out=tmp_path / "page.html", store=str(tmp_path))
    assert "Value of tuned" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["quickstart", "align-code"])
def test_packaged_recipes_look_for_tasks_before_training(name: str) -> None:
    recipe = load_recipe(name)
    order = list(recipe.steps)
    assert order.index("tasks") < order.index("plan")
    without = {*recipe.dependants("tasks"), *recipe.dependants("preferences")}
    assert {"sft", "rl"} <= without and not {"pretrain", "evaluate", "report"} & without


@pytest.mark.parametrize(
    ("texts", "prompt"),
    [
        (PYTHON, "def "), (PROSE, "The lighthouse keeper wrote a letter"), (["\n"], ""), ([], ""),
        (["#" * 70 + "\nName of the game\n" + "=" * 30], "Name of the game"), (["12+3=\n", "7-1="], "12+3="),
    ],
)  # fmt: skip
def test_sample_prompt_is_of_the_corpus(texts: list[str], prompt: str) -> None:
    assert first_prompt(texts) == prompt


def test_missing_package_of_a_later_step_is_named_before_any_work(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(
        ConfigError, match=r"tuned.problem = package needs the package no_such_package"
    ) as caught:
        run(store, "tuned.problem=package")
    assert "pip install 'whorl[mine]'" in str(caught.value) and not store.names()
    run(store, "tuned.problem=package", until="model")  # steps that are not part of the run need nothing


SETTINGS = [
    ("align-code", "rl", {"async_rollout.workers": "1", "async_rollout.backend": "ray"}, "ray"),
    ("align-code", "rl", {"environment": "openenv"}, "openenv"),
    ("align-code", "tasks", {"source": "reasoning_gym", "dataset": "x"}, "reasoning-gym"),
]


@pytest.mark.parametrize(("recipe", "name", "settings", "extra"), SETTINGS, ids=[s[3] for s in SETTINGS])
def test_settings_that_need_a_package(
    monkeypatch: pytest.MonkeyPatch, recipe: str, name: str, settings: dict[str, str], extra: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    loaded = load_recipe(recipe, sets=[f"{name}.{key}={value}" for key, value in settings.items()])
    config: Any = loaded.steps[name].config
    with pytest.raises(ConfigError, match=f"the extra '{extra}'"):
        config.check_installed(name)
