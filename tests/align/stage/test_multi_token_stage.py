"""Multi-token heads as a stage: they learn to draft, a frozen trunk keeps its bits, resume, replicas."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.align.byte_model import decoder, sums
from tests.support.align.kill_at_step import check_replicas, check_resume
from tests.support.align.stage_inputs import MOE, SFT, train_sft, train_stage
from tests.support.configs import nested, updated

from whorl.align.config import MultiTokenConfig, SFTDataConfig, StageTrainConfig
from whorl.align.stage.multi_token import MultiTokenModel, MultiTokenTask
from whorl.align.stage.sft import fine_tune
from whorl.errors import DataError
from whorl.models import LanguageModel, make_model
from whorl.tracking.seeds import generator
from whorl.train.config import RunConfig

CONFIG = MultiTokenConfig(
    n_predict=3, mlp_hidden=32, data=SFTDataConfig(epochs=4, seq_len=48, batch_size=4),
    run=RunConfig(checkpoint_seconds=1e-9),
    train=StageTrainConfig(micro_batch_tokens=96),
)  # fmt: skip


def train(model: LanguageModel | None = None, texts: int = 60, rest: Any = None, **change: Any) -> Any:
    config = updated(CONFIG, **nested(**change))
    net = MultiTokenModel(model or decoder(), config)
    return train_stage(fine_tune, net, sums(texts), config, task_type=MultiTokenTask, **(rest or {}))


@pytest.mark.parametrize(("packing", "epochs"), [(True, 20), (False, 6)])
def test_heads_learn_and_a_frozen_trunk_keeps_its_bits(packing: bool, epochs: int) -> None:
    trunk = train_sft(SFT)[0].model
    before = {name: p.detach().clone() for name, p in trunk.named_parameters()}
    net, seen = train(trunk, packing=packing, epochs=epochs, lr_scale=3.0)
    for n in (2, 3):
        assert seen[-1][f"nll/{n}"] < 0.6 * seen[0][f"nll/{n}"] < math.log(10), n  # better than any digit
    assert all(torch.equal(p, before[name]) for name, p in net.model.named_parameters())
    begun = MultiTokenModel(decoder(), CONFIG).heads
    assert not any(torch.equal(p, q) for p, q in zip(net.heads.parameters(), begun.parameters(), strict=True))


def test_live_trunk_learns_its_own_loss_too() -> None:
    net, seen = train(train_trunk=True, lr_scale=0.5, epochs=12)
    assert seen[-1]["nll/0"] < 0.7 * seen[0]["nll/0"] and seen[-1]["nll/3"] < seen[0]["nll/3"]
    changed = [
        not torch.equal(p, q) for p, q in zip(net.model.parameters(), decoder().parameters(), strict=True)
    ]
    assert sum(changed) > 0.8 * len(changed)  # not every n-gram table has a row in 60 texts


@pytest.mark.parametrize("change", [{"train_trunk": True}, {"batch_tokens": 50}])
def test_resume_gives_same_bits_and_replicas_agree(change: dict[str, Any], tmp_path: Path) -> None:
    check_resume(lambda **rest: train(rest=rest, **change), tmp_path, kill=5)
    check_replicas(lambda n: train(run={"replicas": n}, epochs=1, **change))


def test_frozen_trunk_keeps_the_bias_of_its_experts() -> None:
    model = make_model(MOE, generator(0, "weights"))
    net, _ = train(model, epochs=1)
    assert not any(b.any() for name, b in net.model.state_dict().items() if "bias" in name)
    live, _ = train(make_model(MOE, generator(0, "weights")), epochs=1, train_trunk=True)
    assert any(b.any() for name, b in live.model.state_dict().items() if "bias" in name)


def test_multi_token_refuses_adapters_and_empty_data() -> None:
    with pytest.raises(ValidationError, match="lora"):
        MultiTokenConfig.model_validate({"model": {"lora": {"rank": 2}}})
    with pytest.raises(DataError, match="no examples"):
        partial(train, texts=0)()
