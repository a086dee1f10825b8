"""Names of older versions are refused with the new name; stores of older versions are never misread."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support.cli import refuse, succeed
from tests.support.recipes.align_steps import run_text

import whorl
from whorl.cli.jobs.report import report
from whorl.cli.models.eval_scaling import _reward_scorer
from whorl.errors import ConfigError
from whorl.recipes import load_recipe, parse_recipe, step_kinds, steps
from whorl.recipes.old_names import refuse_old_key
from whorl.recipes.renamed import KEYS, KINDS, METRICS, OPTIONS, ROLES, STEPS, VERBS
from whorl.recipes.steps.agents import AgentsConfig
from whorl.store import Store

CONFIG_MODULES = (
    "whorl.agents.config", "whorl.align.config", "whorl.align.rl.config", "whorl.corpus.config",
    "whorl.models.quantization.weights", "whorl.models.transformer_config", "whorl.plan.config",
    "whorl.train.checkpoint.remote", "whorl.train.config", "whorl.vision.config",
)  # fmt: skip
CHECKED_ELSEWHERE = {  # tables that another class validates
    "PlanConfig.model": "TransformerConfig",
    "PlanConfig.model.experts": "MoEConfig",
    "QuantizeConfig.scheme": "QuantizationConfig",
}


def config_classes() -> dict[str, type[BaseModel]]:
    """Return name -> configuration class of all rooms that recipes configure."""
    names = [module.name for module in pkgutil.walk_packages(steps.__path__, f"{steps.__name__}.")]
    return {
        name: value
        for module in map(importlib.import_module, (*CONFIG_MODULES, *names))
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseModel)
    }


def has_field(config: type[BaseModel], path: str) -> bool:
    """Whether a dotted path of fields exists, in the configuration itself or in one of its steps' subclasses."""
    first, _, rest = path.partition(".")
    if first not in config.model_fields:
        return False
    inner: Any = config.model_fields[first].annotation
    return not rest or has_field(inner, rest)


@pytest.mark.parametrize("table", KEYS)
def test_renamed_keys_exist_and_old_ones_do_not(table: str) -> None:
    fields = config_classes()[CHECKED_ELSEWHERE.get(table, table)].model_fields
    for old, new in KEYS[table].items():
        assert old not in fields, old
        for name in new.split(" and "):
            assert has_field(config_classes()[CHECKED_ELSEWHERE.get(table, table)], name), new


def test_changelog_lists_every_renamed_key() -> None:
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    for table, keys in KEYS.items():
        listed = ", ".join(f"`{old}` → `{new}`" for old, new in sorted(keys.items()))
        assert f"| `{table}` | {listed} |" in changelog, table


def test_renamed_steps_and_kinds_exist() -> None:
    kinds = step_kinds()
    assert set(STEPS.values()) <= set(kinds) and not set(STEPS) & set(kinds)
    made = {kind.output_kind for kind in kinds.values()}
    assert set(KINDS.values()) <= made and not set(KINDS) & made
    roles = {role for kind in kinds.values() for role in kind.parent_roles()}
    assert set(ROLES.values()) <= roles and not set(ROLES) & roles


@pytest.mark.parametrize(("old", "new"), STEPS.items())
def test_old_step_is_refused_with_new_name(old: str, new: str) -> None:
    for text in (f"[steps.{old}]", f'[steps.mine]\nuses = "{old}"'):
        with pytest.raises(ConfigError, match=f"the step `{old}` is now `{new}`"):
            parse_recipe(text, "r.toml")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rlvr.steps=2", "the step `rlvr` is now `rl`"),
        ("sft.length=64", "`sft.length` is now `sft.data.seq_len`"),
        ("rl.ahead.max_lag=2", "`rl.ahead.max_lag` is now `rl.async_rollout.max_policy_lag`"),
        ("rl.lora.layers=[]", "`rl.lora.layers` is now `rl.model.lora.target_modules`"),
        ("plan.optim.matrix_rate=0.1", "`plan.optim.matrix_rate` is now `plan.optim.lr_muon`"),
        ("plan.model.share_keys=2", "`plan.model.share_keys` is now `plan.model.kv_sharing_factor`"),
        ("sft.replicas=2", "`sft.replicas` is now `sft.run.replicas`"),
        ("sft.schedule.warmup=0.1", "`sft.schedule.warmup` is now `sft.train.schedule.warmup_ratio`"),
        ("sft.replay_fraction=0.5", "`sft.replay_fraction` is now `sft.data.replay_fraction`"),
        ("plan.batch_size=4", "`plan.batch_size` is now `plan.data.batch_size`"),
        ("evaluate.completions=64", "`evaluate.completions` is now `evaluate.items`"),
        ("rl.update_epochs=2", "`rl.update_epochs` is now `rl.update.epochs`"),
        ("pretrain.checkpoints.keep=3", "`pretrain.checkpoints.keep` is now `pretrain.run.checkpoints.keep`"),
        ("pretrain.watch.spike=9", "`pretrain.watch.spike` is now `pretrain.train.spike_guard.threshold`"),
    ],
)
def test_old_key_in_set_is_refused_with_new_name(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe("quickstart", sets=[setting])


def test_every_old_key_of_a_step_is_refused() -> None:
    for kind in step_kinds().values():
        for base in kind.config.__mro__:
            for old in KEYS.get(base.__name__, {}):
                with pytest.raises(ConfigError, match=rf"r\.toml:3: `mine\.{old}` is now `mine\."):
                    refuse_old_key("r.toml:3", "mine", kind.config, [old])


def test_old_parent_role_is_refused_with_new_name() -> None:
    text = '[steps.m]\nuses = "init_model"\n[steps.tasks]\n[steps.rl]\nparents = {model = "m", tasks = "tasks", judge = "m"}'
    with pytest.raises(ConfigError, match="the parent role `judge` of rl is now `reward_model`"):
        parse_recipe(text, "r.toml")


def test_old_until_is_refused_with_new_name() -> None:
    with pytest.raises(ConfigError, match="the step `rlvr` is now `rl`"):
        load_recipe("quickstart").with_ancestors("rlvr")


def test_old_agent_setting_is_refused_with_new_name() -> None:
    with pytest.raises(ConfigError, match=r"is now `.*n_steps`"):
        AgentsConfig(settings={"length": 5}).agent(0)


@pytest.mark.parametrize(("verb", "old"), [(verb, old) for verb in OPTIONS for old in OPTIONS[verb]])
def test_old_option_is_refused_with_new_name(
    verb: str, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    new = OPTIONS[verb][old]
    assert f"the option {old} is now {new}" in refuse(tmp_path, verb, "x", old, "1")
    shown = succeed(tmp_path, verb, "--help").output
    assert new in shown and f"{old} " not in shown


@pytest.mark.parametrize(("old", "new"), VERBS.items())
def test_old_verb_is_refused_with_new_name(old: str, new: str, tmp_path: Path) -> None:
    assert f"`whorl {old}` is now `whorl {new}`" in refuse(tmp_path, old)


def test_new_metric_names_are_written_somewhere() -> None:
    source = "".join(path.read_text() for path in Path(whorl.__file__).parent.rglob("*.py"))
    for new in (new for names in METRICS.values() for new in names.values()):
        last = [part for part in new.split("/") if not part.isupper()][-1]
        assert last in source, new


OLD = 'name = "old"\nsteps.sums = { uses = "tasks", source = "arithmetic", max_train = 4, max_test = 2 }'


def test_artifacts_of_old_step_are_remade(store: Store) -> None:
    """An address covers kind, step and keys, so that an artifact of an old name is another artifact."""
    recipe = parse_recipe(OLD, "old.toml")
    config = recipe.steps["sums"].config.model_dump(mode="json")
    back = {new: old for old, new in KEYS["SetConfig"].items()}
    addresses = set()
    for step, renamed in product(("tasks", "lessons"), (False, True)):
        keys = {back.get(key, key) if renamed else key: value for key, value in config.items()}
        name = f"old/{step}{renamed}"
        with store.build(kind="tasks", name=name, parents={}, config=keys, version=1, step=step) as build:
            (build.path / "tasks.train.jsonl").write_text("old\n")
        assert build.artifact is not None
        addresses.add(build.artifact.address)
    made = run_text(OLD.replace("= 4", "= 5"), store=store.root)["sums"]
    assert len(addresses) == 4 and made.address not in addresses
    assert "old\n" not in made.file("tasks.train.jsonl").read_text()


@pytest.mark.parametrize(
    "old",
    [{"rlvr": {"uses": "rlvr"}}, {"tune": {"uses": "sft", "length": 64}}, {"rl": {"kl": {"weight": 0.1}}}],
)
def test_report_refuses_run_of_older_version(store: Store, old: dict[str, Any]) -> None:
    folder = store.root / "runs" / "quickstart-1"
    folder.mkdir(parents=True)
    (folder / "steps.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"name": "quickstart", "steps": old}))
    with pytest.raises(ConfigError, match=r"(?s)older version: `.*` is now `.*`.*whorl run quickstart"):
        report(run=folder.name, out=store.root / "page.html", store=str(store.root))
    assert not (store.root / "page.html").exists()


def test_reward_artifact_of_older_version_is_refused(store: Store) -> None:
    with store.build(kind="reward", name="old/reward", parents={}, config={}, version=1) as build:
        (build.path / "reward.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"(?s)is of the kind reward\n.*a reward_model.*run its recipe again"
    ):
        _reward_scorer("old/reward", str(store.root), None)  # type: ignore[arg-type]
