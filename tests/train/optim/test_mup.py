"""muP: the change of activations over a few steps is independent of the width."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.train.pretraining import weights
from tests.support.train.tiny import job

from whorl.errors import ConfigError
from whorl.models import LanguageModel, TransformerConfig, make_model, whorl_decoder
from whorl.nn import Linear
from whorl.objectives.next_token import next_token
from whorl.plan.config import PlanConfig
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.learner import Learner
from whorl.train.learner.update import MicroBatch, Update
from whorl.train.lm.build import build_model
from whorl.train.lm.objective import param_optims
from whorl.train.optim import mup

WIDTHS = (64, 256)
VOCAB = 64


def built(shape: str, width: int) -> LanguageModel:
    heads = {"n_heads": width // 32, "n_kv_heads": width // 32, "head_dim": 32}
    base = {"vocab_size": VOCAB, "d_model": width, "n_layers": 2, "mlp_hidden": 2 * width}
    if shape == "decoder":
        config = whorl_decoder(**base, **heads, ngram_orders=())
    else:
        config = TransformerConfig.model_validate({**base, "mixers": {"m": heads}})
    return make_model(config, generator(0, "weights"), torch.float32)


def moved(shape: str, width: int, optim: OptimConfig, steps: int = 4) -> dict[str, float]:
    """RMS change of each linear layer's output and of the logits after `steps` steps."""
    model = built(shape, width)
    mup.scale_head_init(model, optim)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (4, 33), generator=g)
    messages: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda _m, _i, out, name=name: messages.update({name: out.detach()}))

    def look() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            messages["logits"] = model.logits(model(ids[:, :-1]))
        return dict(messages)

    def objective(part: MicroBatch):  # type: ignore[no-untyped-def]
        hidden, due = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        return next_token(hidden, model.head_weight, due, torch.ones_like(due, dtype=torch.bool))

    update = Update(objective, param_optims(model, optim), betas=(0.8, 0.95), eps=1e-10)
    learner, before = Learner(model, [update]), look()
    for _ in range(steps):
        learner.updates[0].accumulate(objective({}))
        learner.updates[0].step(1.0)
    after = look()
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def growth(shape: str, **optim: object) -> dict[str, float]:
    """The exponent e of size ~ width^e, between the two widths."""
    found = [moved(shape, w, OptimConfig.model_validate(optim)) for w in WIDTHS]
    ratio = math.log(WIDTHS[1] / WIDTHS[0])
    return {n: math.log(found[1][n] / found[0][n]) / ratio for n in found[0]}


def test_mup_keeps_activation_change_constant_with_width() -> None:
    for shape in ("decoder", "llama"):
        with_it = growth(shape, optimizer="adamw", mup_base_width=64)
        assert max(with_it.values()) < 0.2, with_it
        assert min(with_it.values()) > -0.6, with_it
        without = growth(shape, optimizer="adamw")
        assert without["logits"] > 0.5
        assert sum(e > 0.45 for n, e in without.items() if n.endswith((".out", ".down"))) >= 3, without


def test_mup_with_muon_changes_only_head() -> None:
    for shape in ("decoder", "llama"):
        plain, with_it = growth(shape), growth(shape, mup_base_width=64)
        assert plain.pop("logits") > 0.5 and abs(with_it.pop("logits")) < 0.2
        assert max(map(abs, [*plain.values(), *with_it.values()])) < 0.25


def test_mup_at_base_width_changes_nothing() -> None:
    model = built("decoder", 64)
    before = model.head_weight.clone()
    mup.scale_head_init(model, OptimConfig(mup_base_width=64))
    assert torch.equal(model.head_weight, before)
    for matrices in ("muon", "adamw"):
        there = param_optims(model, OptimConfig.model_validate({"optimizer": matrices, "mup_base_width": 64}))
        assert there == param_optims(model, OptimConfig.model_validate({"optimizer": matrices}))


def test_mup_keeps_lr_times_decay_and_scalar_rates() -> None:
    optim = OptimConfig(optimizer="adamw", mup_base_width=64, weight_decay=0.1)
    narrow, wide = (param_optims(built("decoder", w), optim) for w in (64, 256))
    matrix = {n for n, t in narrow.items() if t.decay_scale}
    assert "head" in matrix and "embedding" not in matrix and "blocks.0.mixer.temperature" not in matrix
    for name, t in narrow.items():
        assert wide[name].lr == pytest.approx(t.lr / 4 if name in matrix else t.lr)
        assert wide[name].lr * wide[name].decay_scale == pytest.approx(t.lr * t.decay_scale)


def test_mup_scales_initial_head_with_width(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plain, scaled = (build_model(job(tmp_path, optim=OptimConfig(mup_base_width=b))) for b in (None, 8))
    others = weights(scaled)
    assert torch.equal(others.pop("head"), plain.head_weight / 4)  # the tiny decoder has width 32
    assert all(torch.equal(p, plain.get_parameter(n)) for n, p in others.items())


def test_mup_tied_head_raises() -> None:
    shape = {"d_model": 32, "n_layers": 1, "mlp_hidden": 64, "tie_embeddings": True}
    shape |= {"mixers": {"m": {"kind": "gru"}}}
    model = make_model(TransformerConfig.model_validate({**shape, "vocab_size": 300}), None, torch.float32)
    with pytest.raises(ConfigError, match=r"mup_base_width is 64(.|\n)*tie_embeddings = false"):
        param_optims(model, OptimConfig(mup_base_width=64))
    # on validation of a recipe
    with pytest.raises(ValueError, match=r"base_width \(64\) with model\.tie_embeddings"):
        PlanConfig.model_validate({"model": shape, "optim": {"mup_base_width": 64}})
    PlanConfig.model_validate({"model": shape, "optim": {"weight_decay": 0.1}})
