"""Errors of lists and tables have an example, which the setting accepts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from whorl.agents.methods.registration import parse_config
from whorl.errors import ConfigError, example_setting, fields_at
from whorl.evals.tasks.config import parse_task
from whorl.recipes import load_recipe
from whorl.recipes.registry import step_kinds


@pytest.mark.parametrize(
    ("recipe", "setting", "example"),
    [
        ("align-code", "rl.update.clip=9", "write a list: --set 'rl.update.clip=[0.2, 0.2]'"),
        ("quickstart", "ingest.sources=notes/", """write a list: --set 'ingest.sources=["notes/"]'"""),
        ("quickstart", "ingest.formats=3", """write a table: --set 'ingest.formats={ name = "text" }'"""),
        ("quickstart", "rl.update=3", "write a table: --set 'rl.update={ "),
        ("align-code", "rl.update.clip=[1]", "write a list: --set 'rl.update.clip=[0.2, 0.2]'"),
        ("align-arithmetic", "lessons.levels=3", "write a table: --set 'lessons.levels={ 1 = 0.2 }'"),
    ],
)
def test_error_of_a_recipe_has_an_example(recipe: str, setting: str, example: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, sets=[setting])
    assert example in caught.value.do


def test_errors_of_agents_and_tasks_have_an_example() -> None:
    with pytest.raises(ConfigError, match=r"such as \[1\]"):
        parse_config("ppo", "CartPole-v1", {"hidden": 64})
    with pytest.raises(ConfigError, match=r"(?s)metrics is wrong: 3.*, such as \[\"text\"\]"):
        parse_task({"name": "x", "kind": "choice", "template": "y", "metrics": 3}, "x.toml")


def test_single_values_and_contradictions_have_none() -> None:
    for setting in ("plan.steps=many", "rl.steps=0"):
        with pytest.raises(ConfigError) as caught:
            load_recipe("quickstart", sets=[setting])
        assert "write a" not in str(caught.value)
    assert not example_setting(step_kinds()["ingest"].config, {"loc": ("sources",), "type": "value_error"})


def test_fields_of_a_table_in_a_list() -> None:
    class Item(BaseModel):
        size: int

    class Whole(BaseModel):
        items: list[Item]

    assert list(fields_at(Whole, ("items", 0))) == ["size"]
    assert fields_at(Whole, ("items", 0, "size")) == fields_at(Whole, ("nothing",)) == {}


def all_fields(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in model.model_fields.items():
        yield (*path, name), field.annotation
        for option in (field.annotation, *get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, BaseModel) and len(path) < 3:
                yield from all_fields(option, (*path, name))


def test_every_example_has_the_type_of_its_setting() -> None:
    n_examples = 0
    for kind in step_kinds().values():
        for path, annotation in all_fields(kind.config):
            if example := example_setting(kind.config, {"loc": path, "type": "list_type"}):
                n_examples += 1
                value = tomllib.loads(f"value = {example}")["value"]
                try:
                    TypeAdapter(annotation).validate_python(value)
                except ValidationError as error:
                    types = {one["type"] for one in error.errors()}
                    assert types <= {"value_error", "string_pattern_mismatch"}, (
                        kind.name, path, example, error,
                    )  # fmt: skip
    assert n_examples > 50
