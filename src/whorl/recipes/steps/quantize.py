"""The step `quantize`: a model with low-bit weights; `whorl quantize` runs it.

The parents are the model and, for calibration, the token set that it was trained on. Calibration uses the training split,
since the evaluation split must not influence the model.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import open_token_set

if TYPE_CHECKING:
    from torch import Tensor

    from whorl.tokens.shards import TokenSet

BATCH_ROWS = 8


class QuantizeConfig(BaseModel):
    """Number format and calibration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # A `QuantizationConfig` as a dict: the class needs torch, and recipes are read without it.
    scheme: dict[str, Any] = Field(
        default={}, description="format, group_size, dynamic, rounding, head, ngram"
    )
    calibration_samples: int = Field(
        default=64, ge=1, description="rows of training text, for rounding = 'calibrated'"
    )
    seq_len: int = Field(default=512, ge=2, description="tokens per row")
    seed: int = Field(default=0, ge=0)

    @field_validator("scheme")
    @classmethod
    def _validate(cls, value: dict[str, Any]) -> dict[str, Any]:
        from whorl.models.compression.quantize import QuantizationConfig

        return QuantizationConfig.model_validate(value).model_dump()


@step("model", config=QuantizeConfig, parents={"model": "model", "tokens?": "tokens"})
def quantize(ctx: StepContext, config: QuantizeConfig) -> None:
    """Round the weight matrices of a model to few bits."""
    from whorl.models import load_model, save_model
    from whorl.models.compression.gptq import quantize_model
    from whorl.models.compression.quantize import QuantizationConfig
    from whorl.models.exchange.safetensors_io import TOKENIZER_FILES

    source, scheme = ctx.parents["model"], QuantizationConfig.model_validate(config.scheme)
    source.check()
    model = load_model(source.path)
    sizes = model.params()
    rows: list[Tensor] = []
    if scheme.rounding == "calibrated":
        if "tokens" not in ctx.parents:
            raise ConfigError(
                "rounding 'calibrated' needs text, but the step has no token set",
                expected="a parent that makes tokens, encoded with the model's own tokenizer",
            )
        length = min(config.seq_len, model.declared_length)
        rows = calibration_rows(open_token_set(ctx), config.calibration_samples, length, config.seed)
    with ctx.progress.task("Rounding", total=None, unit="matrices") as task:
        quantize_model(model, scheme, rows, task.advance)
    save_model(model, ctx.out)
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, ctx.out / name)
    before = source.files["model.safetensors"]["size"] if "model.safetensors" in source.files else None
    after = (ctx.out / "model.safetensors").stat().st_size
    headline = f"{scheme}: {after / 1e6:.1f} MB" + (f" instead of {before / 1e6:.1f}" if before else "")
    ctx.summary.update(params=sizes, scheme=scheme.model_dump(), bytes=after, headline=headline)


def calibration_rows(tokens: TokenSet, n: int, length: int, seed: int) -> list[Tensor]:
    """Return `n` rows of up to `length` ids, at positions of the training split drawn from `seed`, in small batches.

    Raises:
        DataError: the token set has no training split.
        ConfigError: the training split is empty.
    """
    import numpy as np
    import torch

    train = tokens.split("train")
    if not len(train):
        raise ConfigError(
            f"the training split of {tokens.folder} is empty", expected="text to calibrate with"
        )
    length = min(length, len(train))
    starts = np.random.default_rng(seed).integers(0, len(train) - length + 1, n).tolist()
    rows = [torch.from_numpy(train[start : start + length].astype(np.int64)) for start in starts]
    return [torch.stack(rows[at : at + BATCH_ROWS]) for at in range(0, n, BATCH_ROWS)]
