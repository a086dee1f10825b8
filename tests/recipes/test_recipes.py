"""Recipes: validation errors with line numbers, runs by look-up, resume after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, DataError, StoreError
from whorl.machine import device_probe, identity, native_build
from whorl.machine.budget import BudgetText
from whorl.machine.device_probe import Measurement, choose
from whorl.machine.identity import CpuIdentity
from whorl.machine.kernel_choice import FORCE, forced_choices
from whorl.nn.cpu import library
from whorl.parallel import process_group
from whorl.recipes import RunResult, StepContext, StepKind, parse_recipe, run_recipe, runner, step_kinds
from whorl.recipes.recipe import Recipe, load_recipe
from whorl.recipes.registry import start_native_builds
from whorl.recipes.toml_lines import ready_recipes
from whorl.store import Store
from whorl.tracking.progress import Progress


class Sound(BaseModel):
    model_config = ConfigDict(extra="forbid")

    vowel: str = "a"


class Word(BaseModel):
    model_config = ConfigDict(extra="forbid")

    word: str = "a"
    times: int | None = Field(default=1, ge=1, description="repetitions of the word")
    rate: float = 0.5
    loud: bool = False
    tags: list[str] = []
    sound: Sound | None = None
    budget: BudgetText = "5m"


class Sentence(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fail: bool = False


calls: list[str] = []


def write_word(ctx: StepContext, config: Word) -> None:
    calls.append(ctx.name)
    (ctx.out / "text").write_text(config.word * (config.times or 0))
    ctx.summary["headline"] = f"{config.times} words"


def write_sentence(ctx: StepContext, config: Sentence) -> None:
    calls.append(ctx.name)
    if config.fail:
        raise DataError("the step failed")
    (ctx.out / "text").write_text(ctx.parents["subject"].file("text").read_text() + "!")


SPEED = Measurement({"float32": {"1": [1e9]}, "bfloat16": {"1": [1e9]}}, 1e9)
ROLES = {"subject": "word", "object?": "word"}
KINDS = {
    "noun": StepKind("noun", "word", Word, {}, 1, "Writes a word.", write_word, None),
    "verb": StepKind("verb", "sentence", Sentence, ROLES, 1, "Writes a sentence.", write_sentence, None),
    "loop": StepKind("loop", "word", Sentence, {"before": "word"}, 1, "Forms a cycle.", write_sentence, None),
}
GOOD = """\
name = "speech"
[steps.cat]
uses = "noun"
[steps.fish]
uses = "noun"
word = "f"
[steps.eats]
uses = "verb"
parents = ["cat", "fish"]
"""
ALONE = '[steps.a]\nuses = "verb"\nparents = []'


def parse(text: str, *sets: str, budget: str | None = None) -> Recipe:
    return parse_recipe(text, "r.toml", sets=sets, budget=budget, kinds=KINDS)


def run(text: str, store: Store, *sets: str, until: str | None = None) -> RunResult:
    calls.clear()
    return run_recipe(parse(text, *sets), store, Progress.silent(), until=until)


def test_recipe_assigns_parents_by_kind_or_role() -> None:
    recipe = parse(GOOD)
    assert list(recipe.steps) == ["cat", "fish", "eats"]
    assert recipe.steps["eats"].parents == {"subject": "cat", "object": "fish"}
    by_role = GOOD.replace('["cat", "fish"]', '{object = "cat", subject = "fish"}')
    assert parse(by_role).steps["eats"].parents == {"object": "cat", "subject": "fish"}
    assert parse(GOOD).to_json()["steps"]["cat"]["times"] == 1
    assert parse("\ufeff" + GOOD).to_json() == parse(GOOD).to_json()  # a byte-order mark


def test_steps_are_in_topological_order() -> None:
    text = '[steps.eats]\nuses = "verb"\nparents = ["cat"]\n[steps.cat]\nuses = "noun"\n'
    assert list(parse(text).steps) == ["cat", "eats"]


def loop(name: str, parent: str) -> str:
    return f'[steps.{name}]\nuses = "loop"\nparents = ["{parent}"]\n'


BAD = [
    ("name = \n", "r.toml: not TOML.*line 1"),
    ('nme = "x"\n' + GOOD, "r.toml:1: unknown key 'nme'.*did you mean 'name'"),
    ("name = 'x'", "r.toml:1: the recipe has no steps"),
    (GOOD.replace('"noun"', '"nown"', 1), "r.toml:3: unknown step 'nown'.*did you mean 'noun'"),
    (GOOD.replace("word =", "wrod ="), "r.toml:6: the step fish has no setting 'wrod'.*did you mean 'word'"),
    (GOOD.replace('word = "f"', "times = 0"), "r.toml:6: fish.times cannot be 0.*greater than or equal to 1"),
    (GOOD.replace('word = "f"', 'times = "x"'), "r.toml:6: fish.times cannot be 'x'.*integer.*repetitions"),
    (GOOD.replace('word = "f"', 'budget = "5"'), "r.toml:6: fish.budget cannot be '5'.*90s, 5m"),
    (GOOD.replace('"cat", "fish"', '"cta"'), "r.toml:9: the parent 'cta' of eats.*did you mean 'cat'"),
    (GOOD.replace('word = "f"', "rate = inf"), "r.toml:6: fish.rate cannot be inf.*finite"),
    (
        GOOD.replace('word = "f"', 'tags = "f"'),
        "r.toml:6: fish.tags cannot be 'f'.*write a list: --set 'fish.tags=",
    ),
    (GOOD.replace('word = "f"', "sound = {vwel = 1}"), "fish has no setting 'vwel'.*did you mean 'vowel'"),
    (GOOD.replace('word = "f"', 'budget = "0"'), "cannot be '0'.*expected: a time .* above zero$"),
    ('[steps.a]\nuses = "verb"\nparents = ["b"]', "the parent 'b' of a.*there is none"),
    (GOOD.replace("parents =", "# "), "r.toml:7: eats has no parent in the role 'subject'.*cat, fish"),
    (GOOD.replace('["cat", "fish"]', '"cat"'), "r.toml:9: the parents of eats are neither"),
    (GOOD.replace('["cat", "fish"]', '{sbject = "cat"}'), "r.toml:9: eats has no parent role 'sbject'"),
    (GOOD + '[steps.x]\nuses = "verb"\nparents = ["eats"]', "r.toml:12: x cannot use eats.*'sentence'"),
    (loop("a", "b") + loop("b", "a"), "r.toml:3: the parents form a cycle: a -> b -> a"),
    (loop("a", "a"), "form a cycle: a -> a"),
    ('steps = {"a b" = {uses = "noun"}}', "cannot be called 'a b'"),
    ('name = "a/b"\n[steps.noun]', "r.toml:1: the recipe cannot be called 'a/b'"),
    ("[steps]\nnoun = 3", "r.toml:2: the step noun is not a table"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_mistakes_are_refused_with_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse(text)


def test_set_values_are_typed() -> None:
    sets = ("cat.times=3", "cat.rate=1e-3", "cat.loud=true", 'cat.tags=["x", "y"]', "cat.word=12")
    recipe = parse(GOOD, *sets, "fish.word='a b'", "fish.times=none", budget="90s")
    cat, fish = recipe.steps["cat"].config, recipe.steps["fish"].config
    assert cat == Word(times=3, rate=1e-3, loud=True, tags=["x", "y"], word="12", budget="90s")
    assert fish == Word(word="a b", times=None, budget="90s")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (GOOD, {"sets": ["cat.times"]}, "not a setting.*step.field=value"),
        (GOOD, {"sets": ["times=3"]}, "not a setting"),
        (GOOD, {"sets": ["cta.times=3"]}, "no step 'cta'.*did you mean 'cat'"),
        (GOOD, {"sets": ["cat.tmes=3"]}, "no setting 'tmes'.*did you mean 'times'"),
        (GOOD, {"sets": ["cat.times=many"]}, "--set cat.times=many: cat.times cannot be 'many'.*integer"),
        (GOOD, {"sets": ["cat.times=0"]}, "--set cat.times=0: cat.times cannot be '0'.*greater"),
        (GOOD, {"sets": ["cat.tags=[1"]}, "--set cat.tags=.*list"),
        (GOOD, {"sets": ["cat.uses=verb"]}, "no setting 'uses'"),
        (GOOD, {"budget": "soon"}, "--budget soon: cat.budget cannot be 'soon'"),
        (
            GOOD,
            {"sets": ["kernels.atention=native"]},
            "--set kernels.atention=native names 'atention'.*'attention'",
        ),
        (
            GOOD,
            {"sets": ["kernels.attention="]},
            "--set kernels.attention= has attention = ''.*NAME=CANDIDATE",
        ),
        (GOOD + "[kernels]\nhead = 512", {}, "r.toml:11 has head = 512.*NAME=CANDIDATE"),
        ("kernels = 1\n" + GOOD, {}, "r.toml:1: kernels is not a table"),
        (ALONE, {"budget": "5m"}, "no step of this recipe takes a budget"),
        (ALONE, {"deterministic": True}, "--deterministic: no step of this recipe takes"),
    ],
)
def test_bad_flags_are_refused(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_recipe(text, "r.toml", kinds=KINDS, **options)


def test_kernels_are_forced_in_each_step_and_in_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[dict[str, str]]()

    def note(ctx: StepContext, config: Word) -> None:
        seen.append(forced_choices())
        write_word(ctx, config)

    monkeypatch.setitem(KINDS, "noun", replace(KINDS["noun"], function=note))
    monkeypatch.delenv(FORCE, raising=False)
    text = 'name = "k"\n[kernels]\nmlp = "torch"\n[steps.cat]\nuses = "noun"\n'
    result = run(
        text, Store(tmp_path), "kernels.engine_step=native, vectors, 2 threads", "kernels.mlp=native"
    )
    assert seen == [{"mlp": "native", "engine_step": "native, vectors, 2 threads"}] and forced_choices() == {}
    settings = json.loads((result.run.dir / "environment.json").read_text())["settings"]
    assert settings[FORCE] == "mlp=native,engine_step=native, vectors, 2 threads"
    again = run(text, Store(tmp_path)).artifacts["cat"]
    assert again.path == result.artifacts["cat"].path and len(seen) == 1


def test_small_budget_shrinks_all_sizes() -> None:
    usual = load_recipe("quickstart")
    small = load_recipe("quickstart", budget="20s", sets=["evaluate.items=50"])
    assert small.shrunk["rl.steps"] == small.steps["rl"].config.model_dump()["steps"] == 3  # 50 * 20 / 300
    assert small.shrunk["tasks.max_test"] == 16  # the minimum: 128 * 20 / 300 is 9
    assert small.steps["evaluate"].config.model_dump()["items"] == 50  # --set decides
    assert "steps" not in small.steps["plan"].config.model_fields_set
    for budget in ("5m", "1h", "1e12flops"):
        same = load_recipe("quickstart", budget=budget)
        assert not same.shrunk and same.steps["rl"] == usual.steps["rl"]
    assert load_recipe("quickstart", budget="20s").with_ancestors("plan").shrunk


def test_budget_that_cannot_work_is_refused_when_read() -> None:
    with pytest.raises(ConfigError, match=r"--budget 1s: plan.budget cannot be '1s'(.|\n)*at least 5s"):
        load_recipe("quickstart", budget="1s")


@pytest.mark.parametrize("order", [1, -1])
def test_long_chain_of_steps_is_refused(order: int) -> None:
    def chain(n: int) -> str:
        steps = [f'[steps.s{i}]\nuses = "noun"\nparents = {[f"s{i - 1}"] if i else []}' for i in range(n)]
        return "\n".join(steps[::order])

    kinds = {
        "noun": StepKind("noun", "noun", Word, {"noun?": "noun"}, 1, "Nouns.", lambda ctx, config: None, None)
    }
    assert list(parse_recipe(chain(200), "r.toml", kinds=kinds).steps) == [f"s{i}" for i in range(200)]
    with pytest.raises(ConfigError, match=r"s200 ends a chain of 201 steps(.|\n)*at most 200"):
        parse_recipe(chain(3000), "r.toml", kinds=kinds)


def test_deterministic_flag_refuses_time_budget() -> None:
    contradiction = r"(?s)the settings of plan contradict each other.*--budget 1e14flops"
    with pytest.raises(ConfigError, match=contradiction):
        load_recipe("quickstart", deterministic=True)
    steps = load_recipe("quickstart", budget="1e14flops", deterministic=True).to_json()["steps"]
    own = {step for step, table in steps.items() if table.get("deterministic")}
    inner = {step for step, table in steps.items() if table.get("train", {}).get("deterministic")}
    assert own == {"plan", "evaluate"} and inner == {"pretrain", "sft", "rl"}
    fields = [kind.config.model_fields for kind in step_kinds().values()]
    tables = [found["train"].annotation for found in fields if "train" in found]
    assert len(tables) >= 12 and all("deterministic" in table.model_fields for table in tables)
    assert not load_recipe("quickstart").to_json()["steps"]["pretrain"]["train"]["deterministic"]


def test_unknown_and_unreadable_recipes(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    names = ("quikstart", tmp_path / "none.toml", tmp_path / "bad.toml")
    for name, message in zip(names, ("did you mean 'quickstart'", "cannot be read", "UTF-8"), strict=True):
        with pytest.raises(ConfigError, match=message):
            load_recipe(str(name))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("plan.replicas=9999", "replicas is 9999, which does not divide data.batch_size"),
        ("plan.n_layers=100000", "less than or equal to 1000"),
        ("pretrain.seed=-1", "greater than or equal to 0"),
        ("rl.seed=-1", "greater than or equal to 0"),
        ("ingest.sources=['https://me:hunter2@host/a.txt']", "sources has a URL with a password"),
        ("ingest.sources=['s3://AKIA:hunter2@bucket/a']", "sources has a URL with a password"),
        ("ingest.sources=['https://host/a?X-Amz-Signature=hunter2']", "sources has a URL with a password"),
    ],
)
def test_impossible_numbers_are_refused_when_the_recipe_is_read(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe("quickstart", sets=[setting])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(ready_recipes()))
def test_packaged_recipes_are_valid(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.about


NO_DEFAULTS: dict[str, Any] = {  # step -> settings that every recipe gives
    "images": {"source": "digits"},
    "text_classifier": {"path": "reviews.jsonl"},
}


def test_every_step_has_help_and_defaults() -> None:
    for kind in step_kinds().values():
        assert kind.about.endswith("."), kind.name
        assert kind.config.model_config.get("extra") == "forbid", kind.name
        kind.config(**NO_DEFAULTS.get(kind.name, {}))  # the other defaults are valid


def test_changed_setting_reruns_only_affected_steps(store: Store) -> None:
    first = run(GOOD, store)
    assert calls == ["cat", "fish", "eats"]
    assert first.artifacts["eats"].file("text").read_text() == "a!"
    again = run(GOOD, store)
    assert calls == [] and again.run.dir == first.run.dir
    assert all(again.artifacts[step].address == first.artifacts[step].address for step in first.artifacts)
    other = run(GOOD, store, "fish.word=g")
    assert calls == ["fish", "eats"] and other.run.dir != first.run.dir
    assert store.open("speech/eats").address == other.artifacts["eats"].address


def test_until_runs_only_ancestors(store: Store) -> None:
    outcome = run(GOOD, store, until="fish")
    assert calls == ["fish"] and list(outcome.artifacts) == ["fish"]
    with pytest.raises(ConfigError, match="did you mean 'fish'"):
        run(GOOD, store, until="fsh")


def test_failed_step_keeps_earlier_artifacts(store: Store) -> None:
    with pytest.raises(DataError, match="the step failed"):
        run(GOOD, store, "eats.fail=true")
    assert set(store.names()) == {"speech/cat", "speech/fish"}
    run(GOOD, store)
    assert calls == ["eats"]


def test_run_writes_log_and_records(store: Store) -> None:
    outcome = run(GOOD, store)
    log = (outcome.run.dir / "log.txt").read_text()
    assert "[1/3] cat: Writes a word." in log and "1 words" in log
    run(GOOD, store)
    assert "[3/3] eats: looked up" in (outcome.run.dir / "log.txt").read_text()
    assert (outcome.run.dir / "environment.json").exists() and (outcome.run.dir / "steps.json").exists()


@pytest.mark.parametrize("flags", [(), ("avx512_bf16",), ("avx512_bf16", "amx_tile", "amx_bf16")])
def test_native_code_is_compiled_during_the_steps_before_training(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def start(sources: Iterable[native_build.Source], later: Iterable[native_build.Source] = ()) -> None:
        built.extend(f"{source.stem} {' '.join(options)}".rstrip() for source, options in sources)
        built.extend(f"later {source.stem}" for source, _ in later)

    monkeypatch.setattr(native_build, "start_builds", start)
    monkeypatch.delenv("WHORL_DTYPE", raising=False)
    monkeypatch.setattr(device_probe, "QUOTAS", ())
    monkeypatch.setattr(identity, "cpu_identity", lambda: CpuIdentity("a CPU", flags=flags))
    fp32 = "" if flags else f" {library.FP32}"
    training = [
        f"{name} {library.FLAGS[0]}{fp32 if name in library.PRODUCTS else ''}" for name in library.NAMES
    ]
    quickstart = load_recipe("quickstart", budget="1e14flops")
    deterministic = load_recipe("quickstart", budget="1e14flops", deterministic=True)
    for recipe, first, expected in (
        (quickstart, "ingest", [*training, "later native"]),
        (quickstart.with_ancestors("plan"), "ingest", training),
        (quickstart.with_ancestors("tasks"), "ingest", []),
        (quickstart, "plan", []),  # it measures the machine
        (deterministic, "curate", ["later native"]),
    ):
        built.clear()
        start_native_builds(first, {s.kind.name: s.config for s in recipe.steps.values()})
        assert built == expected
    quota = tmp_path / "cpu.max"
    quota.write_text("1000 1000")
    monkeypatch.setattr(device_probe, "QUOTAS", ((quota,),))
    if device_probe.usable_cores(quota=False) > 1:  # then an idle core is not free
        built.clear()
        start_native_builds("ingest", {s.kind.name: s.config for s in quickstart.steps.values()})
        assert built == ["native", *training]


def test_step_leaves_the_number_of_threads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would decide the last bits of the next step, and of the caller's own work."""
    before, used = torch.get_num_threads(), []

    def apply(ctx: StepContext, config: Sentence) -> None:
        choose(SPEED, threads=before + 1).apply()
        used.append(torch.get_num_threads())
        write_sentence(ctx, config)

    monkeypatch.setitem(KINDS, "verb", replace(KINDS["verb"], function=apply))
    for failure in (True, False):
        with pytest.raises(DataError) if failure else nullcontext():
            run(GOOD, store, f"eats.fail={str(failure).lower()}")
        assert used.pop() == before + 1 and torch.get_num_threads() == before


def test_unwritable_store_is_refused_before_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        run(GOOD, Store(tmp_path / "file"))
    assert calls == []


def test_replicas_belong_to_a_deterministic_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide the last bits; otherwise timing does too, so a step continues with another number."""

    def hashed(deterministic: bool, cores: int = 2, **run: int) -> object:
        monkeypatch.setattr(process_group, "usable_cores", lambda: cores)
        sets = [f"sft.run.{name}={value}" for name, value in run.items()]
        recipe = load_recipe("align-arithmetic", sets=sets, deterministic=deterministic)
        return runner._hashed_config(recipe.steps["sft"].kind, recipe.steps["sft"].config)

    assert hashed(False, replicas=1) == hashed(False, replicas=2) == hashed(False, 3)
    assert hashed(True, replicas=1) == hashed(True, 3, replicas=1) != hashed(True, replicas=2)
    assert hashed(True) == hashed(True) != hashed(True, 3)
