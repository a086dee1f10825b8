"""Every step is configured by few fields of its own; what steps share is a table with one owner."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from whorl.recipes import step_kinds
from whorl.recipes.registry import StepKind
from whorl.train.config import RunConfig, TrainConfig

MAX_FIELDS = 20
SHARED: dict[str, type[BaseModel]] = {"run": RunConfig, "train": TrainConfig}


@pytest.mark.parametrize("kind", step_kinds().values(), ids=lambda kind: kind.name)
def test_step_has_at_most_twenty_fields(kind: StepKind) -> None:
    assert len(kind.config.model_fields) <= MAX_FIELDS, sorted(kind.config.model_fields)


@pytest.mark.parametrize("kind", step_kinds().values(), ids=lambda kind: kind.name)
def test_shared_fields_have_one_owner(kind: StepKind) -> None:
    """A field of a shared table is not declared by the step as well, and all of `run` is left out of the address."""
    fields = kind.config.model_fields
    for name, shared in SHARED.items():
        if name in fields:
            table = fields[name].annotation
            assert isinstance(table, type) and issubclass(table, shared)
            assert not set(table.model_fields) & set(fields)
    assert ("run" in fields) == ("run" in kind.not_hashed)
