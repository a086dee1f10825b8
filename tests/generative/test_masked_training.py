"""Masked diffusion in pretraining: the split of a batch, resume, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import decoder_config
from tests.support.train.model_shapes import HEADS, shape
from tests.support.train.pretraining import assert_close, assert_resume_is_exact, raw_text, train
from tests.support.train.tiny import job, make_tokens

from whorl.errors import ConfigError
from whorl.models import load_model, make_model, save_model
from whorl.models.transformer_config import TransformerConfig, masked_decoder
from whorl.train.job import Job

MASK = 300


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def masked_job(tokens: Path, block: int | None, **change: Any) -> Job:
    model = masked_decoder(decoder_config(vocab_size=300, ngram_buckets=256), MASK, block, 32)
    return job(tokens, **{"model": model, "objective": "masked", "steps": 4, "evaluations": 1, **change})


@pytest.mark.parametrize("block", [None, 4])
def test_masks_do_not_depend_on_micro_batches_ranks_or_resume(
    tokens: Path, tmp_path: Path, block: int | None
) -> None:
    wanted = masked_job(tokens, block)
    whole = assert_resume_is_exact(wanted, tmp_path / "a", 2)
    assert_close(whole, train(wanted.model_copy(update={"micro_batch_size": 2}), tmp_path / "parts"))
    if block:  # two ranks, whose rows of a token set and of raw text are distributed differently
        assert_close(whole, train(wanted.model_copy(update={"replicas": 2}), tmp_path / "ranks"))
        return
    streamed = masked_job(tokens, block, stream=raw_text(tokens, tmp_path))
    alone = train(streamed, tmp_path / "stream")
    assert_close(alone, train(streamed.model_copy(update={"replicas": 2}), tmp_path / "streams"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixers": {"m": {"kind": "mamba"}}}, "mixer 'm' is 'mamba', which is causal"),
        ({"mixers": {"m": {"kind": "linear"}}}, "mixer 'm' is 'linear', which is causal"),
        ({"mixers": {"m": {**HEADS, "smear": True}}}, "masked excludes mixers.m.smear = True"),
        ({"ngram": {}}, "masked excludes ngram"),
        ({"masked": {"mask_id": 300}}, "masked excludes mask_id .300.; the network has 300 ids"),
        ({"masked": {"mask_id": 1, "block": 1}}, "greater than or equal to 2"),
    ],
)
def test_networks_that_read_in_one_direction_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TransformerConfig.model_validate({**dict(shape(HEADS)), "masked": {"mask_id": 299}, **fields})


def test_model_is_saved_with_its_mask_and_loaded_by_name_only(tmp_path: Path) -> None:
    model = make_model(shape(HEADS, masked={"mask_id": 299, "block": 4}), torch.Generator().manual_seed(0))
    save_model(model, tmp_path)
    with pytest.raises(ConfigError, match=r"is a masked diffusion model .masked = .*299[\s\S]*whorl sample"):
        load_model(tmp_path)
    loaded = load_model(tmp_path, masked=True)
    assert loaded.config == model.config
    with pytest.raises(ValueError, match=r"objective .'next_token'. and model.masked"):
        Job.model_validate({"tokens": "x", "model": model.config, "seq_len": 8, "batch_size": 1, "steps": 1})
