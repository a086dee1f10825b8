"""Every kind of layer trains with the learner and generates with a KV cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.engine.support.no_cache import generate_without_cache
from tests.support.train.checkpoint_states import load_latest
from tests.support.train.model_shapes import EXPERTS, HEADS, disturbed, shape
from tests.support.train.pretraining import assert_close, assert_equal, assert_resume_is_exact, train, weights
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.engine import EngineConfig, SamplingParams
from whorl.engine.engine import Engine
from whorl.errors import ConfigError
from whorl.models import Transformer, load_model, make_model, save_model
from whorl.parallel.process_group import ProcessGroup
from whorl.train.config import OptimConfig, RoutingConfig
from whorl.train.lm.objective import LMObjective, param_optims
from whorl.train.metrics.moe_balance import MoEBalancer

MIXERS: dict[str, dict[str, Any]] = {
    "heads": HEADS,
    "window": {**HEADS, "window": 5, "smear": True},
    "latent": {"kind": "latent", "n_heads": 2, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 16},
    "linear": {"kind": "linear", "options": {"n_heads": 2}},
    "pointwise": {"kind": "pointwise", "options": {"n_heads": 2}},
    "mamba": {"kind": "mamba"},
    "gru": {"kind": "gru"},
    "lstm": {"kind": "lstm"},
    "rnn": {"kind": "rnn"},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"), alphabet="abcd")


@pytest.mark.parametrize("kind", [*MIXERS, "experts", "capped"])
def test_mixer_learns_saves_and_samples(kind: str, tokens: Path, tmp_path: Path) -> None:
    more = {"experts": {"experts": EXPERTS}, "capped": {"logit_softcap": 8.0, "learned_positions": True}}
    config = shape(MIXERS.get(kind, HEADS), **more.get(kind, {}))
    notes = Notes()
    model = train(job(tokens, model=config, steps=80, seq_len=32), tmp_path / "run", notes)
    # Letters come in pairs. A letter costs log 4 = 1.39 nats without context, 1.07 with the previous letter, and 0.69
    # with its position in the pair, which 80 steps learn in part.
    assert notes.evaluations[-1]["held_out_nll"] < 1.15 < math.log(4)
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model").eval()
    assert isinstance(again, Transformer) and again.config == config
    prompt, greedy = [5, 97, 97, 98], SamplingParams(temperature=0.0)
    (completion,) = Engine(again, EngineConfig.for_batch(1, 32)).generate([prompt], greedy, max_tokens=20)
    cached = completion.ids
    assert cached == [t.id for t in generate_without_cache(again, prompt, greedy, max_tokens=20)]
    letters = bytes(i for i in cached if i < 256)
    assert letters[:1] == b"b" and set(letters) <= set(b"abcd"), letters  # completes the pair


def test_moe_balance_equal_on_replicas_and_after_resume(tokens: Path, tmp_path: Path) -> None:
    notes, mixture = Notes(), shape(HEADS, experts=EXPERTS)
    wanted = job(tokens, model=mixture, steps=10, routing={"bias_update_rate": 0.01})
    undisturbed = assert_resume_is_exact(wanted, tmp_path, 4, notes)
    biases = [b for n, b in undisturbed.state_dict().items() if n.endswith("balance_bias")]
    assert len(biases) == 2 and all(b.abs().max() > 0.01 for b in biases)
    last = notes.steps[-1]
    assert last["moe/0/dropped_fraction"] == 0 and 0 <= last["moe/1/gini"] < 0.75
    assert last["moe/aux_loss"] >= 0.99
    assert sum(last[f"moe/0/load_fraction/{e}"] for e in range(4)) == pytest.approx(1)
    found = load_latest(tmp_path / "resumed")
    assert found is not None and "buffers/blocks.0.mlp.router.balance_bias" in found.tensors


def test_frozen_router_keeps_its_bits_and_resumes(tokens: Path, tmp_path: Path) -> None:
    def routers(steps: int, name: str, **routing: Any) -> dict[str, torch.Tensor]:
        base = {"model": shape(HEADS, experts=EXPERTS), "schedule": {"kind": "constant"}}
        model = train(job(tokens, **base, steps=steps, routing=routing), tmp_path / name)
        return {n: t.clone() for n, t in model.state_dict().items() if ".router." in n}

    frozen, early, never = routers(9, "a", freeze_router_step=4), routers(4, "b"), routers(9, "c")
    assert len(frozen) >= 2 and frozen.keys() == early.keys()
    for name, value in frozen.items():  # weights and balancing biases of step 4
        assert torch.equal(value, early[name]) and not torch.equal(value, never[name])
    wanted = job(tokens, model=shape(HEADS, experts=EXPERTS), steps=10, routing={"freeze_router_step": 3})
    assert_resume_is_exact(wanted, tmp_path / "resumed", 5, Notes())


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_expert_lr_scales_slow_or_stop_experts(optimizer: str, tokens: Path, tmp_path: Path) -> None:
    config = shape(HEADS, experts=EXPERTS)

    def trained(name: str, scales: Any) -> dict[str, torch.Tensor]:
        optim = {"optimizer": optimizer, "expert_lr_scales": scales}
        model = train(job(tokens, model=config, steps=5, optim=optim), tmp_path / name)
        return {n: t.clone() for n, t in model.state_dict().items() if ".experts." in n}

    before, one, plain = trained("zero", 0.0), trained("one", {"0": 0.0}), trained("plain", 1.0)
    for name, value in one.items():
        stopped = name.endswith(".0")
        assert torch.equal(value, before[name]) == stopped, name
        assert not torch.equal(plain[name], before[name])
    with pytest.raises(ConfigError, match="names expert 9"):
        trained("wrong", {9: 1.0})
    optim = OptimConfig(optimizer=optimizer, expert_lr_scales={1: 0.25})
    rates, usual = (param_optims(make_model(config), o) for o in (optim, OptimConfig(optimizer=optimizer)))
    for name, found in rates.items():
        scale = 0.25 if ".experts." in name and name.endswith(".1") else 1.0
        assert found.lr == scale * usual[name].lr


def test_moe_dropout_is_seeded_by_step(tokens: Path, tmp_path: Path) -> None:
    dropping = shape(HEADS, experts={**EXPERTS, "expert_dropout": 0.3, "token_dropout": 0.2})
    wanted, notes, again = job(tokens, model=dropping, steps=8, evaluations=4), Notes(), Notes()
    undisturbed = train(wanted, tmp_path / "a", notes)
    train(wanted, tmp_path / "b", again, stop_after=4, checkpoint_seconds=0.0)
    assert_equal(undisturbed, train(wanted, tmp_path / "b", again))
    assert notes.evaluations == again.evaluations  # validation drops nothing
    for change in ({"micro_batch_size": 3}, {"replicas": 2}):  # masks are functions of the row
        assert_close(undisturbed, train(wanted.model_copy(update=change), tmp_path / str(change)))
    without = wanted.model_copy(update={"model": shape(HEADS, experts=EXPERTS)})
    other = weights(train(without, tmp_path / "c"))
    assert any(not torch.equal(p, other[n]) for n, p in undisturbed.named_parameters())


@pytest.mark.parametrize("kind", MIXERS)
def test_lm_objective_separates_packed_documents(kind: str) -> None:
    """The loss of a packed row with segments equals the sum over its documents."""
    ids = torch.randint(0, 256, (1, 13), generator=torch.Generator().manual_seed(0))
    model = disturbed(make_model(shape(MIXERS[kind]), torch.Generator().manual_seed(0)), 0.1)
    moe = MoEBalancer(model, RoutingConfig(), ProcessGroup())
    loss = LMObjective(model, moe, z_loss=0.0, compile=False)
    alone = []
    for part in (ids[:, :7], ids[:, 6:]):  # 6 targets each
        mask = torch.ones(1, 6, dtype=torch.bool)
        alone.append({"tokens": part[:, :-1], "targets": part[:, 1:], "loss_mask": mask})
    packed = {name: torch.cat([part[name] for part in alone], dim=1) for name in alone[0]}
    packed["segment_ids"] = torch.tensor([[1] * 6 + [2] * 6])
    packed["positions"] = torch.tensor([[*range(6), *range(6)]])
    apart = sum(loss(part).total.item() for part in alone)
    assert loss(packed).total.item() == pytest.approx(apart, rel=1e-4)
