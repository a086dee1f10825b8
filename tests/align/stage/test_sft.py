"""Fine-tuning: it learns what is asked, goes on to the same bits after a kill, and mixes pretraining in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tests.support.align.byte_model import network, sums, tokenizer

from whorl.align.config import LoRAConfig, SFTConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.io import load_stage_model, save_stage_model
from whorl.align.stage.sft import fine_tune
from whorl.errors import ConfigError, DataError
from whorl.tokens.shards import write_shards

SETTINGS = SFTConfig(
    lr_scale=0.5, epochs=8, seq_len=48, batch_size=4, checkpoint_seconds=1e-9, micro_batch_tokens=96
)


class Killed(Exception):
    pass


class Written(NamedTuple):
    id: str
    source: str
    path: str
    offset: int
    text: str


def train(settings: SFTConfig, **options: object) -> tuple[PolicyModel, list[dict[str, float]]]:
    net, seen = network(lora=settings.lora), []

    def observe(step: int, metrics: dict[str, float]) -> None:
        seen.append(metrics)
        if step == options.get("kill"):
            raise Killed

    rest = {k: v for k, v in options.items() if k != "kill"}
    fine_tune(net, sums(60), settings, pad_id=tokenizer().pad_id, callback=observe, **rest)  # type: ignore[arg-type]
    return net, seen


@pytest.mark.parametrize("packing", [True, False])
def test_fine_tune_lowers_loss_of_all_parameters(packing: bool) -> None:
    net, seen = train(SETTINGS.model_copy(update={"packing": packing, "batch_size": 4 if packing else 16}))
    assert seen[-1]["nll"] < 0.6 * seen[0]["nll"]
    begun = dict(network().named_parameters())
    assert all(not torch.equal(p, begun[n]) for n, p in net.named_parameters() if "memory" not in n)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_resume_gives_same_bits(lora: LoRAConfig | None, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"lora": lora})
    whole, _ = train(settings)
    said: list[str] = []
    with pytest.raises(Killed):
        train(settings, checkpoint_dir=tmp_path, kill=20)
    again, seen = train(settings, checkpoint_dir=tmp_path, log=said.append)
    assert said and said[0].startswith("continues at step ")
    assert len(seen) < 40  # it did not begin anew
    for (name, p), q in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_replay_adds_pretraining_rows(tmp_path: Path) -> None:
    words = tokenizer()
    documents = [Written(f"{n}", "test", f"{n}.txt", 0, f"x = {n}\n" * 20) for n in range(40)]
    write_shards(documents, words, tmp_path, "train")  # type: ignore[arg-type]  # as good as a Document
    settings = SETTINGS.model_copy(update={"replay_fraction": 0.5})
    _, seen = train(settings, replay_data=tmp_path)
    assert seen[0]["loss_tokens"] > 2 * 40


def test_fine_tune_rejects_missing_data() -> None:
    with pytest.raises(DataError, match="no examples"):
        fine_tune(network(), [], SETTINGS, pad_id=0)
    with pytest.raises(DataError, match="pretraining token set"):
        fine_tune(network(), sums(3), SETTINGS.model_copy(update={"replay_fraction": 0.5}), pad_id=0)


def test_replay_keeps_one_row_of_each_kind(tmp_path: Path) -> None:
    words = tokenizer()
    documents = [Written(f"{n}", "test", f"{n}.txt", 0, f"x = {n}\n" * 20) for n in range(40)]
    write_shards(documents, words, tmp_path, "train")  # type: ignore[arg-type]  # as good as a Document
    for share in (0.02, 0.97):
        _, seen = train(SETTINGS.model_copy(update={"replay_fraction": share, "epochs": 1}), replay_data=tmp_path)
        assert seen[0]["loss_tokens"] > 48  # a row of pretraining is full
    with pytest.raises(ConfigError, match="batch_size"):
        train(SETTINGS.model_copy(update={"replay_fraction": 0.5, "batch_size": 1}), replay_data=tmp_path)


def test_separate_adapter_is_merged_by_next_stage(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(
        update={"lora": LoRAConfig(rank=2, merge=False), "dtype": "float32", "epochs": 1}
    )
    net, _ = train(settings)
    policy = {name: p.clone() for name, p in net.merged_weights().items()}
    before = tmp_path / "before"
    before.mkdir()
    tokenizer(before)
    save_stage_model(net, before, tmp_path / "out")
    machine = SimpleNamespace(torch_dtype=torch.float32, device="cpu")
    read = load_stage_model(tmp_path / "out", settings, machine)  # type: ignore[arg-type]
    for name, p in read.named_parameters():
        torch.testing.assert_close(p, policy[name])
