"""Operators of steps: FLOPs against the model's formula and torch's counter, bytes, and bounds."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.models import exchange_cases
from tests.support.models.transformer_shapes import KINDS, config, made
from torch.utils.flop_counter import FlopCounterMode

from whorl.models.exchange import read_config
from whorl.plan.accounting.devices import devices
from whorl.plan.accounting.model_cost import ModelCost, known_models
from whorl.plan.accounting.roofline import Operator, operators

CONFIGS = json.loads(Path(exchange_cases.__file__).with_name("published_configs.json").read_text())["text"]


@pytest.mark.parametrize("name", CONFIGS)
def test_training_operators_sum_to_the_formula(name: str) -> None:
    cost = ModelCost(read_config(CONFIGS[name]["config"], name))
    found = operators(cost, "training", 2, 256)
    assert sum(one.flops for one in found) == pytest.approx(512 * cost.model.flops_per_token(256), rel=1e-9)
    assert sum(cost.parameters().values()) > 0 and all(one.bytes > 0 for one in found)


@pytest.mark.parametrize("kind", ["plain", "gpt", "gemma", "post", "olmo", "experts", "latent"])
def test_flops_equal_torchs_counter(kind: str) -> None:
    model, ids = made(**KINDS[kind]), torch.randint(0, 50, (1, 48))
    for block in model.blocks:
        block.mixer.backend = "reference"  # torch does not count fused attention on a CPU
    with torch.no_grad():
        model.logits(model(ids))  # choices by timing run now, and are not counted
        with FlopCounterMode(display=False) as counter:
            model.logits(model(ids))
    found = operators(ModelCost(config(**KINDS[kind])), "training", 1, 48, masked=False)
    assert sum(one.flops for one in found) == 3 * counter.get_total_flops()


def test_decode_reads_weights_and_cache_once() -> None:
    cost, rows, length = ModelCost(known_models()["llama-3-8b"]), 4, 1000
    found = {one.name: one for one in operators(cost, "decode", rows, length)}
    kv = 2 * 2 * 8 * 128 * 32 * length * rows
    moved = 2 * 2 * rows * 32 * 128 * 32
    assert found["scores"].bytes == kv + moved
    weights = 2 * (cost.model.params()["total"] - 128_256 * 4096)
    assert kv + weights < sum(one.bytes for one in found.values()) < 1.01 * (kv + weights)
    assert found["mlp.up"].on(devices()["h100"], "bf16")["bound"] == "memory"


def test_few_tokens_read_few_experts() -> None:
    cost = ModelCost(known_models()["mixtral-8x7b"])
    one, many = (
        {o.name: o for o in operators(cost, "decode", rows, 10)}["mlp.experts.up"].bytes for rows in (1, 512)
    )
    assert many / one == pytest.approx(4, rel=0.06)  # 2 of 8 experts, then all


def test_bound_changes_at_the_ridge() -> None:
    h100 = devices()["h100"]
    ridge = 989.4e12 / 3.35e12
    for factor, bound in ((0.99, "memory"), (1.01, "compute")):
        one = Operator("x", "mlp", factor * ridge * 1e9, 1e9).on(h100, "bf16")
        assert one["bound"] == bound
        assert one["seconds"] == pytest.approx(1e9 / 3.35e12 * max(1.0, factor))
