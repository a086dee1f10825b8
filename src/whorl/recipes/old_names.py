"""Errors for names of older versions, from the tables in `renamed.py`."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from whorl.errors import ConfigError
from whorl.recipes.registry import step_kinds
from whorl.recipes.renamed import KEYS, STEPS


def current_path(config: type[BaseModel], path: Sequence[str]) -> str:
    """Return the dotted key `path` of a configuration with every renamed part replaced."""
    found = []
    model: type[BaseModel] | None = config
    tables = [base.__name__ for base in config.__mro__]
    for part in path:
        if model is None or part not in model.model_fields:
            part = next((KEYS[table][part] for table in tables if part in KEYS.get(table, {})), part)
        found.append(part)
        for name in part.split("."):  # a new name may lead into a table: `run.replicas`
            model = None if model is None else _nested_model(model, name)
            tables = [base.__name__ for base in model.__mro__] if model else [f"{tables[0]}.{name}"]
    return ".".join(found)


def refuse_old_key(where: str, step: str, config: type[BaseModel], path: Sequence[str]) -> None:
    """Raise ConfigError with the new name if a part of `path` was renamed."""
    new = current_path(config, path)
    if new != ".".join(path):
        raise ConfigError(f"{where}: `{step}.{'.'.join(path)}` is now `{step}.{new}`")


def leaf_paths(values: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value in nested tables."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaf_paths(value, (*prefix, key))
        else:
            yield (*prefix, key)


def refuse_old_run(name: str, recipe: Mapping[str, Any]) -> None:
    """Raise ConfigError if the recorded recipe of a run holds old names; its metrics have old names too.

    Args:
        recipe: `RUN/config.json`.
    """
    kinds = step_kinds()
    for step, table in recipe.get("steps", {}).items():
        uses = table.get("uses", step)
        old, new = uses, STEPS.get(uses, uses)
        if new == old and uses in kinds:
            values = {key: value for key, value in table.items() if key not in ("uses", "parents")}
            for path in leaf_paths(values):
                if (found := current_path(kinds[uses].config, path)) != ".".join(path):
                    old, new = f"{step}.{'.'.join(path)}", f"{step}.{found}"
                    break
        if new != old:
            raise ConfigError(
                f"the run {name} was recorded by an older version: `{old}` is now `{new}`",
                expected="a run of this version",
                do=f"run the recipe again: whorl run {recipe.get('name', 'RECIPE')}",
            )


def _nested_model(model: type[BaseModel], field: str) -> type[BaseModel] | None:
    """The configuration class of a field, also if it is optional."""
    info = model.model_fields.get(field)
    if info is None:
        return None
    for kind in (info.annotation, *typing.get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
