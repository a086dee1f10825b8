"""Copies of configurations with other values."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

Config = TypeVar("Config", bound=BaseModel)


def updated(config: Config, **changes: Any) -> Config:
    """Return a copy with other values, which are not validated; a dictionary changes fields of a nested configuration."""
    values = {
        name: updated(inner, **value)
        if isinstance(value, dict) and isinstance(inner := getattr(config, name), BaseModel)
        else value
        for name, value in changes.items()
    }
    return config.model_copy(update=values)
