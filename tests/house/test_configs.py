"""Every step is configured by few fields of its own; what steps share is a table with one owner."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from whorl.align.config import ModelConfig, SFTDataConfig
from whorl.recipes import step_kinds
from whorl.recipes.registry import StepKind
from whorl.train.config import DataConfig, RunConfig, TrainConfig

MAX_FIELDS = 20
SHARED: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "run": RunConfig,
    "train": TrainConfig,
}
# Fields of shared tables that no step has outside of them, whichever tables it has. A step that needs one embeds its table.
ONLY_IN_TABLES = {
    *SFTDataConfig.model_fields, *ModelConfig.model_fields, *RunConfig.model_fields, *TrainConfig.model_fields,
}  # fmt: skip
# Fields of the same name with another meaning: pairs, images and texts per step, rows of calibration, an embedder's choice
# of its machine, the planner's processes, the fields of a TransformerConfig, `deterministic` of steps without a model.
OTHER_MEANING = {
    "embedder": {"batch_size", "dtype"}, "image_classifier": {"batch_size"}, "clip": {"batch_size"},
    "captioner": {"batch_size"}, "text_classifier": {"batch_size"},
    "quantize": {"seq_len"}, "plan": {"model", "replicas", "deterministic"},
    "evaluate": {"deterministic"}, "study": {"deterministic"},
}  # fmt: skip


@pytest.mark.parametrize("kind", step_kinds().values(), ids=lambda kind: kind.name)
def test_step_has_at_most_twenty_fields(kind: StepKind) -> None:
    assert len(kind.config.model_fields) <= MAX_FIELDS, sorted(kind.config.model_fields)


@pytest.mark.parametrize("kind", step_kinds().values(), ids=lambda kind: kind.name)
def test_shared_fields_have_one_owner(kind: StepKind) -> None:
    """A field of a shared table is in that table only, and all of `run` is left out of the address."""
    fields, other = kind.config.model_fields, OTHER_MEANING.get(kind.name, set())
    for name in set(SHARED) & set(fields) - other:
        table = fields[name].annotation
        assert isinstance(table, type) and issubclass(table, SHARED[name])
        assert not set(table.model_fields) & set(fields)
    assert ONLY_IN_TABLES & set(fields) == other - set(SHARED)
    assert ("run" in fields) == ("run" in kind.not_hashed)
