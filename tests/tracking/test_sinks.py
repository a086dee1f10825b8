"""External metrics sinks, tested with fake packages; failures never stop a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from whorl.errors import ConfigError
from whorl.recipes.recipe import parse_recipe
from whorl.tracking.run import Run
from whorl.tracking.sinks import SafeSinks, parse_loggers

FAKE = """
calls = []
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def call(*arguments, **named):
        calls.append((name, arguments, named))
    return call
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake packages `wandb` and `trackio` that record every call."""
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(FAKE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def calls(name: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    heard = list(sys.modules[name].calls)
    sys.modules[name].calls.clear()
    return heard


def a_run(folder: Path, *texts: str, **tables: Any) -> tuple[Run, SafeSinks]:
    sinks = SafeSinks(parse_loggers(texts, tables), print)
    return Run(folder, config={"name": "mine", "steps": {}}, tensorboard=False, sinks=sinks), sinks


def test_wandb_receives_records_per_step_axis(fakes: Path, tmp_path: Path) -> None:
    run, sinks = a_run(tmp_path / "run", "wandb:entity=us", wandb={"tags": ["small"]})
    assert "wandb" not in sys.modules  # imported with the first record
    with run.metrics("pretrain") as log:
        log.write(1, {"nll": 4.0, "sample": "def f"})
        log.write(2, {"nll": 3.0})
    sinks.close()
    init, axis, first, second, finish = calls("wandb")
    assert init[0] == "init" and init[2]["project"] == "mine" and init[2]["config"]["name"] == "mine"
    assert init[2]["entity"] == "us" and init[2]["tags"] == ["small"] and init[2]["resume"] == "allow"
    assert axis == ("define_metric", ("pretrain/*",), {"step_metric": "pretrain/step"})
    assert first[1] == ({"pretrain/nll": 4.0, "pretrain/sample": "def f", "pretrain/step": 1},)
    assert second == ("log", ({"pretrain/nll": 3.0, "pretrain/step": 2},), {})
    assert finish[0] == "finish"

    again, _ = a_run(tmp_path / "run", "wandb")
    again.metrics("pretrain", resume_at=2).write(2, {"nll": 3.0})
    assert calls("wandb")[0][2]["id"] == init[2]["id"]  # the same run folder continues its curves
    other, _ = a_run(tmp_path / "elsewhere" / "run", "wandb")
    other.metrics("pretrain").write(1, {"nll": 3.0})
    assert calls("wandb")[0][2]["id"] != init[2]["id"]


def test_trackio_receives_numbers(fakes: Path, tmp_path: Path) -> None:
    run, sinks = a_run(tmp_path / "run", "trackio:project=other")
    with run.metrics("pretrain") as log:
        log.write(1, {"nll": 4.0, "sample": "def f"})
        log.write(1, {"sample": "def g"})
    sinks.close()
    init, first, finish = calls("trackio")
    assert init[2]["project"] == "other" and init[2]["name"].startswith("run-") and "id" not in init[2]
    assert first == ("log", ({"pretrain/nll": 4.0},), {"step": 1})
    assert finish[0] == "finish"


def test_sink_not_imported_without_records(fakes: Path, tmp_path: Path) -> None:
    _, sinks = a_run(tmp_path / "run", "wandb")
    sinks.close()
    assert "wandb" not in sys.modules


class Broken:
    name = "broken"

    def __init__(self, works_after: int) -> None:
        self.heard, self.works_after = 0, works_after

    def start(self, folder: Path, config: Mapping[str, Any]) -> None: ...
    def end_step(self, step_name: str) -> None: ...
    def close(self) -> None: ...

    def write(self, step_name: str, step: int, values: Mapping[str, float | str]) -> None:
        self.heard += 1
        if self.heard <= self.works_after:
            raise ConnectionError("no route")


@pytest.mark.parametrize(
    ("works_after", "heard", "words"), [(99, 5, ["no route", "is disabled"]), (3, 20, ["no route"])]
)
def test_failing_sink_is_disabled_unless_it_recovers(
    tmp_path: Path, works_after: int, heard: int, words: list[str]
) -> None:
    messages, broken = list[str](), Broken(works_after)
    run = Run(tmp_path, tensorboard=False, sinks=SafeSinks([broken], messages.append))
    with run.metrics("pretrain") as log:
        for step in range(20):
            log.write(step, {"nll": 1.0})
    assert broken.heard == heard
    assert all(word in message for word, message in zip(words, messages, strict=True))
    assert len(list(run.read_metrics("pretrain"))) == 20  # the folder is complete


def test_parse_loggers_invalid_raises(fakes: Path) -> None:
    with pytest.raises(ConfigError, match="wandb"):
        parse_loggers(["wand"])
    with pytest.raises(ConfigError, match=r"\[log.wand\]: no such logger"):
        parse_loggers([], {"wand": {}})
    with pytest.raises(ConfigError, match="invalid option"):
        parse_loggers(["wandb:project"])
    (fakes / "trackio.py").unlink()
    sys.path_importer_cache.clear()
    if not any("trackio" in str(p) for p in sys.modules):
        with pytest.raises(ConfigError, match="pip install trackio"):
            parse_loggers(["trackio"])


def test_sinks_import_nothing_by_default() -> None:
    code = "import sys, whorl.tracking.run, whorl.recipes\nfrom whorl.tracking.sinks import parse_loggers\n"
    code += "assert parse_loggers([]) == []\n"
    code += "print([m for m in ('wandb', 'trackio', 'rich', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_recipe_log_table_keeps_address() -> None:
    text = 'name = "tiny"\n[steps.ingest]\nsources = ["notes"]\n'
    logged = text + '[log.wandb]\nproject = "p"\n'
    plain, with_log = (parse_recipe(each, "t.toml") for each in (text, logged))
    assert with_log.log == {"wandb": {"project": "p"}} and plain.to_json() == with_log.to_json()
    assert with_log.with_ancestors("ingest").log == with_log.log
    with pytest.raises(ConfigError, match="log"):
        parse_recipe('log = "wandb"\n' + text, "t.toml")
