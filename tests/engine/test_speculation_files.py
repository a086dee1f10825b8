"""Speculation from files: draft models and heads of a folder, their errors, and the measurement."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine.parity import config, decoder

from whorl.engine.engine import Engine
from whorl.engine.speculation.load import Speculation, make_proposer
from whorl.engine.speculation.measure import measure_folder, measure_speculation
from whorl.engine.speculation.prompt_lookup import PromptLookup
from whorl.engine.speculation.proposers import DraftModel, MultiTokenDraft
from whorl.errors import CheckpointError, ConfigError
from whorl.machine.device_probe import probe
from whorl.models import save_model
from whorl.models.multi_token import WEIGHTS_FILE, MultiTokenPrediction, load_multi_token, save_multi_token

MACHINE = dataclasses.replace(probe(), device="cpu", dtype="float32")
CONFIG = config(max_model_len=60)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def saved(folder: Path, **changes: Any) -> Path:
    save_model(decoder(**changes), folder)
    return folder


def proposer(folder: Path, speculation: Speculation) -> Any:
    model = decoder()
    draft = speculation.load_draft(model, MACHINE, 1)
    return make_proposer(speculation, folder, model, draft, CONFIG, [])


def test_each_kind_is_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    heads = MultiTokenPrediction(32, 3, 2, generator=torch.Generator().manual_seed(0))
    save_multi_token(heads, folder)
    assert proposer(folder, Speculation()) is None
    assert isinstance(proposer(folder, Speculation(prompt_lookup=True)), PromptLookup)
    draft = proposer(folder, Speculation(draft=saved(tmp_path / "draft", n_layers=1), max_drafts=2))
    assert isinstance(draft, DraftModel) and draft.max_drafts == 2
    ahead = proposer(folder, Speculation(multi_token=True))
    assert isinstance(ahead, MultiTokenDraft) and ahead.max_drafts == 2
    hidden = torch.randn(1, 5, 32)
    output = torch.randn(50, 32)
    assert torch.equal(ahead.heads.draft(hidden, output), heads.draft(hidden, output))


def test_impossible_drafts_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path / "model")
    with pytest.raises(ConfigError, match="prompt lookup and multi-token heads"):
        Speculation(prompt_lookup=True, multi_token=True)
    with pytest.raises(ConfigError, match="nothing drafts"):
        Speculation(max_drafts=3)
    with pytest.raises(ConfigError, match="has no multi-token heads"):
        proposer(folder, Speculation(multi_token=True))
    with pytest.raises(ConfigError, match="has 40 ids, and the model 50"):
        proposer(folder, Speculation(draft=saved(tmp_path / "other", vocab_size=40)))
    with caplog.at_level(logging.WARNING, "whorl.engine"):
        proposer(folder, Speculation(draft=saved(tmp_path / "large", n_layers=3)))
    assert "drafts cost more than they save" in caplog.text
    save_multi_token(MultiTokenPrediction(16, 3, 2), folder)
    with pytest.raises(ConfigError, match="have width 16"):
        proposer(folder, Speculation(multi_token=True))
    (folder / WEIGHTS_FILE).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="multi-token heads"):
        load_multi_token(folder)


def test_measurement_of_the_model_as_its_own_draft(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    found = measure_folder(
        folder, Speculation(draft=folder), PROMPTS, machine=MACHINE, banned_ids=[0], max_tokens=24
    )
    assert found.acceptance_rate == 1.0 and found.equal == 1.0 and found.tokens_per_step > 2
    assert found.tokens_per_second > 0 and 0 < found.draft_seconds_fraction < 1
    plain = Engine(decoder(), CONFIG)
    without = measure_speculation(plain, Engine(decoder(), CONFIG), PROMPTS, max_tokens=8)
    assert without.acceptance_rate == 0.0 and without.tokens_per_step == pytest.approx(1.0)
