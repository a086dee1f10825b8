"""Fine-tuning: learning, bitwise resume, replay, adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.align.byte_model import network, sums, tokenizer
from tests.support.align.kill_at_step import Killed
from tests.support.align.stage_inputs import SFT, same_weights, train_sft, write_replay_tokens

from whorl.align.config import LoRAConfig
from whorl.align.stage.io import load_stage_model, save_stage_model
from whorl.align.stage.sft import fine_tune
from whorl.errors import ConfigError, DataError


@pytest.mark.parametrize("packing", [True, False])
def test_fine_tune_lowers_loss_of_all_parameters(packing: bool) -> None:
    net, seen = train_sft(SFT.model_copy(update={"packing": packing, "batch_size": 4 if packing else 16}))
    assert seen[-1]["nll"] < 0.6 * seen[0]["nll"]
    begun = dict(network().named_parameters())
    assert all(not torch.equal(p, begun[n]) for n, p in net.named_parameters() if "memory" not in n)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_resume_gives_same_bits(lora: LoRAConfig | None, tmp_path: Path) -> None:
    settings = SFT.model_copy(update={"lora": lora})
    whole, _ = train_sft(settings)
    messages: list[str] = []
    with pytest.raises(Killed):
        train_sft(settings, checkpoint_dir=tmp_path, kill=20)
    again, seen = train_sft(settings, checkpoint_dir=tmp_path, log=messages.append)
    assert messages and messages[0].startswith("continues at step ")
    assert len(seen) < 40  # it did not start again from step 0
    assert same_weights(whole, again)


def test_replay_adds_pretraining_rows(tmp_path: Path) -> None:
    write_replay_tokens(tmp_path)
    settings = SFT.model_copy(update={"replay_fraction": 0.5})
    _, seen = train_sft(settings, replay_data=tmp_path)
    assert seen[0]["loss_tokens"] > 2 * 40


def test_fine_tune_rejects_missing_data() -> None:
    with pytest.raises(DataError, match="no examples"):
        fine_tune(network(), [], SFT, pad_id=0)
    with pytest.raises(DataError, match="pretraining token set"):
        fine_tune(network(), sums(3), SFT.model_copy(update={"replay_fraction": 0.5}), pad_id=0)


def test_replay_keeps_one_row_of_each_kind(tmp_path: Path) -> None:
    write_replay_tokens(tmp_path)
    for share in (0.02, 0.97):
        _, seen = train_sft(
            SFT.model_copy(update={"replay_fraction": share, "epochs": 1}), replay_data=tmp_path
        )
        assert seen[0]["loss_tokens"] > 48  # a row of pretraining is full
    with pytest.raises(ConfigError, match="batch_size"):
        train_sft(SFT.model_copy(update={"replay_fraction": 0.5, "batch_size": 1}), replay_data=tmp_path)


def test_separate_adapter_is_merged_by_next_stage(tmp_path: Path) -> None:
    settings = SFT.model_copy(
        update={"lora": LoRAConfig(rank=2, merge=False), "dtype": "float32", "epochs": 1}
    )
    net, _ = train_sft(settings)
    policy = {name: p.clone() for name, p in net.merged_weights().items()}
    before = tmp_path / "before"
    before.mkdir()
    tokenizer(before)
    save_stage_model(net, before, tmp_path / "out")
    machine = SimpleNamespace(torch_dtype=torch.float32, device="cpu")
    read = load_stage_model(tmp_path / "out", settings, machine)  # type: ignore[arg-type]
    for name, p in read.named_parameters():
        torch.testing.assert_close(p, policy[name])
