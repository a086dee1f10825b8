"""Parameters of published models, ZeRO's published example; cache, checkpoint and files against what is allocated."""

from pathlib import Path

import pytest
import torch
from tests.support.models.transformer_shapes import KINDS, config, made
from tests.support.tiny import decoder_config

from whorl.engine import Engine, EngineConfig
from whorl.models import TransformerConfig, make_model
from whorl.models.activation_checkpointing import measure_activation_memory
from whorl.plan.accounting.model_cost import ModelCost, known_models, zero_bytes
from whorl.train.checkpoint.manager import CheckpointManager
from whorl.train.config import OptimConfig
from whorl.train.learner.learner import SharedState
from whorl.train.lm.objective import param_optims

PUBLISHED = {"gpt2": 124_439_808, "llama-3-8b": 8_030_261_248, "mixtral-8x7b": 46_702_792_704}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_equal_published_models(name: str, count: int) -> None:
    parts = ModelCost(known_models()[name]).parameters()
    total, active = parts.pop("total"), parts.pop("active")
    assert total == count == sum(parts.values())
    assert active == (12_879_925_248 if name == "mixtral-8x7b" else count)


def test_zero_shares_equal_the_published_example() -> None:
    gigabytes = [zero_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    assert [round(n, 1) for n in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def shapes() -> dict[str, TransformerConfig]:
    return {"decoder": decoder_config(), **{kind: config(**changes) for kind, changes in KINDS.items()}}


@pytest.mark.parametrize("kind", ["decoder", *KINDS])
def test_cache_bytes_equal_the_engines_pool(kind: str) -> None:
    for engine in (
        EngineConfig.for_batch(3, 50),
        EngineConfig(max_num_seqs=4, max_model_len=40, block_size=8, kv_cache_dtype="int8"),
    ):
        model = make_model(shapes()[kind], torch.Generator().manual_seed(0)).eval()
        pool = Engine(model, engine).runner.n_bytes
        assert ModelCost(shapes()[kind], "fp32").cache_bytes(engine) == pool


@pytest.mark.parametrize("kind", ["decoder", "gpt", "experts", "latent", "mamba"])
def test_checkpoint_bytes_equal_what_is_written(kind: str, tmp_path: Path) -> None:
    cost = ModelCost(shapes()[kind])
    model = make_model(cost.config, torch.Generator().manual_seed(0))
    shared = SharedState.allocate(model, param_optims(model, OptimConfig()))
    with CheckpointManager(tmp_path / "checkpoints", {}, seconds=0.0, thread=True) as manager:
        manager.save(1, shared.tensors(), {})
    [file] = tmp_path.glob("checkpoints/*/state.safetensors")
    assert cost.checkpoint_bytes() == file.stat().st_size


@pytest.mark.parametrize("kind", ["plain", "gpt", "latent"])
def test_activations_near_what_autograd_keeps(kind: str) -> None:
    rows, length = 2, 64
    measured = measure_activation_memory(made(n_layers=6, **KINDS[kind]), length).at_rows(rows)
    cost = ModelCost(config(n_layers=6, **KINDS[kind]), "fp32")
    every = cost.activation_bytes(rows, length, device="cpu")
    recomputed = cost.activation_bytes(rows, length, recompute=True, device="cpu")
    assert every == pytest.approx(measured.peak(0), rel=0.15)
    assert recomputed == pytest.approx(measured.peak(6), rel=0.2) and recomputed < 0.5 * every
