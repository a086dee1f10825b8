"""Copies of configurations with other values."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

from whorl.align.config import ModelConfig, SFTDataConfig

TABLES = {
    name: table for table, c in (("data", SFTDataConfig), ("model", ModelConfig)) for name in c.model_fields
}
Config = TypeVar("Config", bound=BaseModel)


def nested(**settings: Any) -> dict[str, Any]:
    """Return settings of a stage by table: `nested(seq_len=8, seed=1)` is {"data": {"seq_len": 8}, "seed": 1}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        (found.setdefault(TABLES[name], {}) if name in TABLES else found)[name] = value
    return found


def updated(config: Config, **changes: Any) -> Config:
    """Return a copy with other values, which are not validated; a dictionary changes fields of a nested configuration."""
    values = {
        name: updated(inner, **value)
        if isinstance(value, dict) and isinstance(inner := getattr(config, name), BaseModel)
        else value
        for name, value in changes.items()
    }
    return config.model_copy(update=values)
