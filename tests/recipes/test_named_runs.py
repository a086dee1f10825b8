"""Names and seeds of runs: artifacts by name, sweeps, the list of runs, comparison, removal."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict
from tests.support.cli import invoke, refuse, succeed

from whorl.errors import ConfigError, DataError, StoreError
from whorl.recipes import RunResult, StepContext, StepKind, parse_recipe, run_recipe, step_kinds
from whorl.recipes import recipe as recipe_module
from whorl.recipes.recipe import Recipe, load_recipe
from whorl.recipes.runs import matching_runs, read_runs, remove_run
from whorl.recipes.step_records import StepRecords, read_step_records
from whorl.recipes.sweep import figures_over_seeds, named, parse_seeds, seed_settings, training_seeds
from whorl.report.blocks import Card
from whorl.store import Store
from whorl.tracking.progress import Progress


class Data(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = "a"
    seed: int = 0


class Training(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rate: float = 0.5
    seed: int = 0
    broken: bool = False


made: list[str] = []
during: list[Callable[[], None]] = []  # called by the step that trains


def write_data(ctx: StepContext, config: Data) -> None:
    made.append(ctx.name)
    (ctx.out / "text").write_text(config.text)


def train(ctx: StepContext, config: Training) -> None:
    made.append(f"{ctx.name} {config.seed}")
    for call in during:
        call()
    if config.broken:
        raise DataError("the loss is not finite")
    (ctx.out / "weights").write_text(str(config.seed))
    accuracy = config.rate * 100 + config.seed
    ctx.report.cards.append(Card(label="Accuracy", value=f"{accuracy:.0f}\xa0%", number=accuracy))
    ctx.report.cards.append(Card(label="Speed", value="12", unit="tokens/s"))


KINDS = {
    "data": StepKind("data", "data", Data, {}, 1, "Data.", write_data, None),
    "train": StepKind("train", "model", Training, {"data": "data"}, 1, "Trains.", train, None),
    "report": step_kinds()["report"],
}
RECIPE = """\
name = "r"
steps.data = {}
steps.train = { parents = ["data"] }
steps.report = { parents = ["train"] }
"""


@pytest.fixture(autouse=True)
def fresh() -> None:
    made.clear()
    during.clear()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / ".whorl")


def recipe(*sets: str, name: str | None = None) -> Recipe:
    found = parse_recipe(RECIPE, "r.toml", sets=sets, kinds=KINDS)
    return found if name is None else named(found, name)


def run(store: Store, *sets: str, name: str | None = None, until: str | None = None) -> RunResult:
    return run_recipe(recipe(*sets, name=name), store, Progress.silent(), until=until)


def test_equal_settings_get_a_further_name(store: Store) -> None:
    first = run(store)
    assert made == ["data", "train 0"]
    other = run(store, name="small")
    assert made == ["data", "train 0"]
    names = store.names()
    assert names["small/train"] == names["r/train"] == first.artifacts["train"].address
    record = json.loads((other.run.dir / "config.json").read_text())
    assert (record["run"], record["name"], record["seeds"], record["changed"]) == ("small", "r", [0], [])
    small, plain = read_runs(store)
    assert (small.name, small.recipe, small.state, plain.name) == ("small", "r", "done", "r")


def test_newer_run_of_a_name_takes_the_names_and_both_are_listed(store: Store, tmp_path: Path) -> None:
    run(store, name="small")
    newer = run(store, "train.rate=0.25", name="small")
    assert store.names()["small/train"] == newer.artifacts["train"].address
    listed = succeed(tmp_path, "runs").stdout
    labels = [line.split()[0] for line in listed.splitlines()[1:]]
    assert labels == [record.folder.name for record in read_runs(store)] and len(labels) == 2
    assert "train.rate=0.25" in listed and "Accuracy 25\xa0%" in listed and "Speed" not in listed
    message = refuse(tmp_path, "runs", "--remove", "small", code=1)
    assert "several runs" in message and all(label in message for label in labels)


def test_gc_keeps_the_artifacts_of_a_run_until_it_is_removed(store: Store, tmp_path: Path) -> None:
    old = run(store, name="small")
    new = run(store, "train.rate=0.25", name="small")
    for result in (old, new):
        assert [store.find(artifact.address) is not None for artifact in result.artifacts.values()] == [
            True
        ] * 3
    assert store.gc(dry_run=False, recent_seconds=0) == []
    succeed(tmp_path, "runs", "--remove", old.run.name)
    freed = {garbage.path.name for garbage in store.gc(dry_run=False, recent_seconds=0)}
    assert freed == {old.artifacts["train"].address, old.artifacts["report"].address}
    assert (
        store.names()["small/data"] == new.artifacts["data"].address
    )  # the newer run has the same name for it
    assert store.verify() == [] and run(store, name="small").artifacts  # data are kept
    assert made.count("data") == 1


def test_removed_runs_of_one_name_leave_nothing(store: Store, tmp_path: Path) -> None:
    folders = [run(store, f"train.rate={rate}", name="small").run.name for rate in (0.5, 0.25)]
    succeed(tmp_path, "runs", "--remove", *folders, folders[0])
    assert store.names() == {} and read_runs(store) == []
    assert len(store.gc(dry_run=False, recent_seconds=0)) == 5 and store.artifacts() == []


def test_damaged_run_is_listed_and_gc_keeps_what_it_may_need(store: Store, tmp_path: Path) -> None:
    old = run(store, name="small")
    run(store, "train.rate=0.25", name="small")
    (old.run.dir / "steps.json").write_text('{"train": {"address"')
    (store.root / "runs" / "empty-12345678").mkdir()
    (store.root / "runs" / "list-12345678").mkdir()
    (store.root / "runs" / "list-12345678" / "config.json").write_text("[]")
    listed = succeed(tmp_path, "runs").stdout
    assert (
        "damaged: steps.json: " in listed
        and "damaged: config.json: No such file" in listed
        and "damaged: config.json: 'list' object has" in listed
    )
    assert f"whorl runs --remove {old.run.name}" in refuse(tmp_path, "gc", "--yes", code=1)
    assert "is damaged" in refuse(tmp_path, "report", old.run.name, code=1)
    succeed(tmp_path, "runs", "--remove", old.run.name, "empty", "list-12345678")
    assert [record.problem for record in read_runs(store)] == [""]
    assert len(store.gc(recent_seconds=0)) == 2


def test_states_of_runs(store: Store) -> None:
    states: list[list[str]] = []

    def look() -> None:
        found = [record for record in read_runs(store) if record.name == "full"]
        states.append([record.state for record in found])
        with pytest.raises(StoreError, match="is active"):
            remove_run(store, found[0])

    run(store, name="half", until="data")
    with pytest.raises(DataError):
        run(store, "data.text=b", "train.broken=true", name="broken")
    during.append(look)
    run(store, "train.rate=0.1", name="full")
    assert states == [["running"]]
    found = {record.name: record.state for record in read_runs(store)}
    assert found == {"half": "1 of 3 steps", "broken": "failed: train", "full": "done"}


def test_two_processes_of_one_run_keep_each_others_records(store: Store, tmp_path: Path) -> None:
    done = run(store)
    (tmp_path / "folder").mkdir()
    one, other = (StepRecords(tmp_path / "folder", recipe()) for _ in range(2))
    one.set_artifact("data", done.artifacts["data"], "made")
    other.set_artifact("data", done.artifacts["data"], "looked up")
    one.set_artifact("train", done.artifacts["train"], "made")
    other.set_artifact("report", done.artifacts["report"], "made")
    assert [*read_step_records(tmp_path / "folder")] == ["data", "train", "report"]
    one.close()
    other.set_artifact("report", done.artifacts["report"], "made")  # takes over the lock of the run
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"name": "r"}))
    (store.root / "runs" / "folder").symlink_to(tmp_path / "folder")
    assert matching_runs(store, "folder")[0].state == "running"
    other.close()


def test_list_reads_no_artifact(store: Store, tmp_path: Path) -> None:
    first = run(store)
    for number in range(30):
        shutil.copytree(first.run.dir, store.root / "runs" / f"copy-{number:08}")
    shutil.rmtree(store.root / "artifacts")
    assert succeed(tmp_path, "runs").stdout.count("Accuracy 50\xa0%") == 31


def test_comparison_shows_settings_and_figures_side_by_side(store: Store, tmp_path: Path) -> None:
    run(store)
    first = run(store, "train.rate=0.25", name="slow")
    run(store, "data.text=<b>", name="bold")
    printed = succeed(tmp_path, "runs", "slow", "r", "--page", "runs.html").stdout
    lines = [line.split() for line in printed.splitlines()]
    assert ["train.rate", "0.25", "0.5"] in lines and "data.text" not in printed
    assert ["train:", "Accuracy", "25", "%", "50", "%"] in lines
    assert ["train:", "Speed", "12", "tokens/s", "12", "tokens/s"] in lines
    assert "<td>train.rate</td>" in (tmp_path / "runs.html").read_text()
    assert "bold" in succeed(tmp_path, "runs", "r").stdout  # a recipe: all its runs
    succeed(tmp_path, "report", "slow", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Other runs of this recipe</h2>" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert "Other runs" in first.artifacts["report"].file("report.html").read_text()
    message = refuse(tmp_path, "runs", "slaw", code=1)
    assert "no run 'slaw'" in message and "did you mean 'slow'?" in message
    for option in ("--remove", "--page=x.html"):
        assert "need the name of a run" in refuse(tmp_path, "runs", option)


def test_empty_store_has_no_runs(tmp_path: Path) -> None:
    assert "whorl run quickstart" in succeed(tmp_path, "runs").stdout


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("3,7", [3, 7]), ("1", [0])])
def test_seeds_are_a_number_or_a_list(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["0", "-1", "", "x", "1.5", "3,3", "-1,2", "3,", "99999999999999", "1001"])
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a number of runs from 1 to 1,000"):
        parse_seeds(text)


def test_seed_belongs_to_steps_that_train() -> None:
    quickstart = load_recipe("quickstart", sets=["plan.seed=3"])
    assert training_seeds(quickstart) == {"pretrain": 3, "sft": 0, "rl": 0}
    assert seed_settings(quickstart, 3, ["sft.seed=1"]) == ["sft.seed=1", "rl.seed=3"]
    assert seed_settings(load_recipe("quickstart"), 0, []) == []  # so the run without --seeds is looked up
    assert set(training_seeds(load_recipe("caption-scenes"))) == {"clip", "captioner"} | {
        step.name for step in load_recipe("caption-scenes").steps.values() if step.kind.output_kind == "model"
    }
    with pytest.raises(ConfigError, match="no step of r trains with a seed"):
        seed_settings(recipe("train.seed=1"), 2, ["train.seed=1"])
    with pytest.raises(ConfigError, match="no step of curate-web trains"):
        seed_settings(load_recipe("curate-web"), 2, [])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipe; `whorl` has the kinds of steps of this file."""
    monkeypatch.setattr(recipe_module, "step_kinds", lambda: KINDS)
    (tmp_path / "r.toml").write_text(RECIPE)
    return tmp_path


def test_sweep_shares_data_and_continues_after_an_interruption(home: Path, store: Store) -> None:
    words = ("run", "r.toml", "--name", "mine", "--seeds", "3")
    succeed(home, "run", "r.toml")

    def stop_third() -> None:
        if made[-1] == "train 2":
            raise DataError("stopped")

    during.append(stop_third)
    assert "stopped" in invoke(home, *words).stderr
    assert made == ["data", "train 0", "train 1", "train 2"]
    during.clear()
    printed = succeed(home, *words).stdout
    assert made == ["data", "train 0", "train 1", "train 2", "train 2"]
    half = 4.302652729911275 / math.sqrt(3)  # Student's t of two degrees of freedom
    row = ["train:", "Accuracy", "3", "51.00", "%", f"{51 - half:.2f}", "%", "to", f"{51 + half:.2f}", "%"]
    assert row in [line.split() for line in printed.splitlines()] and "Speed" not in printed.splitlines()[-3]
    assert printed.endswith("next:   whorl runs mine-seed0 mine-seed1 mine-seed2\n")
    names = store.names()
    assert names["mine-seed0/train"] == names["r/train"] and names["mine-seed2/data"] == names["r/data"]
    listed = {record.name: (list(record.seeds), record.changed) for record in read_runs(store)}
    assert listed["mine-seed2"] == ([2], ["--set train.seed=2"]) and listed["mine-seed0"] == ([0], [])


def test_figures_over_seeds_handle_gaps(store: Store) -> None:
    results = [run(store, f"train.seed={seed}").artifacts for seed in (0, 1)]
    (row,) = figures_over_seeds([results[0], {"data": results[1]["data"]}, results[1]])
    assert row[:3] == ["train: Accuracy", "2", "50.50 %"]
    assert figures_over_seeds([results[0], results[0]]) == []  # no figure depends on the seed


@pytest.mark.parametrize("name", ["a/b", "", "-x", "x" * 101, "ä"])
def test_bad_name_is_refused_before_any_work(home: Path, name: str) -> None:
    assert "a run cannot be called that" in refuse(home, "run", "r.toml", f"--name={name}")
    assert made == [] and not (home / ".whorl").exists()


def test_url_store_removes_names(tmp_path: Path) -> None:
    store = Store("memory://runs", cache=tmp_path / "cache")
    done = run(store, until="data")
    remove_run(store, matching_runs(store, "r")[0])
    assert store.names() == {} and store.find(done.artifacts["data"].address) is not None
