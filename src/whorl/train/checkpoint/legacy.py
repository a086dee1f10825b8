"""Upgrade checkpoints whose job or parameter names have changed since they were written (`models/legacy_config.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from whorl.models.legacy_config import has_former_decoder, upgrade_parameter_name, upgrade_transformer
from whorl.models.transformer_config import TransformerConfig
from whorl.train.checkpoint.format import Checkpoint


def upgrade_checkpoint(found: Checkpoint) -> Checkpoint:
    """Return the checkpoint under today's names; its job's model has every field of today's configuration."""
    tensors, metadata = found.tensors, dict(found.metadata)
    if has_former_decoder(tensors):
        tensors = {upgrade_parameter_name(name): t for name, t in tensors.items()}
    if isinstance(metadata.get("job"), Mapping):
        metadata["job"] = _upgrade_job(metadata["job"])
    return replace(found, tensors=tensors, metadata=metadata)


def _upgrade_job(job: Mapping[str, Any]) -> dict[str, Any]:
    model = job.get("model")
    if not isinstance(model, Mapping) or "d_model" not in model:
        return dict(job)
    try:
        config = TransformerConfig.model_validate(upgrade_transformer(model))
    except (ValidationError, TypeError):  # of another class of models: unchanged
        return dict(job)
    return {**job, "model": config.model_dump(mode="json")}
