"""The optimizer and weight decay of each parameter, by name, in every kind of network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.train.pretraining import train_notes
from tests.support.train.tiny import job
from torch import nn

from whorl.models import Transformer, TransformerConfig, make_model, whorl_decoder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.multi_token import MultiTokenPrediction
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.flamingo import Captioner
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import MLPMixer, ViT
from whorl.objectives.next_token import Loss
from whorl.train.config import OptimConfig
from whorl.train.learner.learner import Learner
from whorl.train.learner.update import ParamOptim, Update, all_adamw
from whorl.train.lm.objective import param_optims
from whorl.train.optim.decay_mask import decayed_parameters

# Written by hand from parameter names, independent of the layer types that the code uses.
MATRIX = re.compile(
    r"""(^|\.)(
        head                                                         # of a language model
      | (q|k|v|out|qkv|uvqk|q_a|q_b|kv_a|kv_b)\.weight               # attention
      | (up|down|shared_gate)\.weight | experts\.(up|down)\.\d+      # MLPs and experts
      | (inward|recurrent|selection|delta)\.weight                   # recurrences, state spaces
      | router\.weight
      | (head|classifier|linear|projection|pooler)\.weight           # of encoders and vision; a patch embedding is linear
      | (stem|convolution\d?|shortcut|skip)(\.convolution)?\.weight  # of a ResNet
      | blocks\.\d+\.(tokens|channels)\.(up|down)\.weight
    )$""",
    re.VERBOSE,
)
TAPS = ("mixer.convolution.weight",)  # Mamba: one filter per feature

HEADS = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
MIXERS: dict[str, dict[str, Any]] = {
    "heads": {**HEADS, "bias": True, "qk_norm": True, "sink": True, "smear": True},
    "latent": {"kind": "latent", "n_heads": 2, "kv_rank": 8, "q_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 8},
    "linear": {"kind": "linear", "options": {"n_heads": 2, "decay": True}},
    "pointwise": {"kind": "pointwise", "options": {"n_heads": 2}},
    **{kind: {"kind": kind} for kind in ("rnn", "lstm", "gru", "mamba")},
}  # fmt: skip
EXPERTS = {"n_experts": 4, "top_k": 2, "hidden": 16, "shared_hidden": 16}
EXPERTS |= {"shared_gate": True, "bias_balance": True}
SMALL = {"d_model": 32, "n_layers": 1, "mlp_hidden": 64}
IMAGE = {"image_size": 16, "patch": 4, "channels": 1, **SMALL}


def transformer(mixer: str = "heads", **more: Any) -> nn.Module:
    base = {"vocab_size": 50, **SMALL, "mixers": {"m": MIXERS[mixer]}}
    return make_model(TransformerConfig.model_validate({**base, **more}))


def decoder() -> Transformer:
    return Transformer(whorl_decoder(vocab_size=50, **SMALL, **HEADS, mlp="swiglu", ngram_buckets=16))


def encoder(classes: int | None = 3) -> Encoder:
    shape = {"vocab_size": 50, **SMALL, "n_heads": 2, "max_length": 24}
    return Encoder(EncoderConfig.model_validate({**shape, **({"n_classes": classes} if classes else {})}))


def vit(classes: int = 8) -> ViT:
    return ViT(**IMAGE, classes=classes, n_heads=2)


NETWORKS: dict[str, Any] = {
    "decoder": decoder,
    **{kind: lambda kind=kind: transformer(kind) for kind in MIXERS},
    "experts": lambda: transformer(experts=EXPERTS),
    "tied, with positions": lambda: transformer(tie_embeddings=True, learned_positions=True, norm="layer"),
    "encoder": encoder,
    "two towers": lambda: DualEncoder(vit(), encoder(None)),
    "captioner": lambda: Captioner(decoder(), vit(0)),
    "further heads": lambda: MultiTokenPrediction(32, 3, 2),
    "ViT": vit,
    "Mixer": lambda: MLPMixer(**IMAGE, classes=8, token_hidden=16),
    "ResNet": lambda: ResNet(1, 8, widths=(8, 16), depths=(1, 1)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_decayed_parameters_match_handwritten_names(name: str) -> None:
    network = NETWORKS[name]()
    names = [n for n, _ in network.named_parameters()]
    expected = {n for n in names if MATRIX.search(n) and not n.endswith(TAPS)}
    assert decayed_parameters(network) == expected
    assert {n for n, t in all_adamw(network, 0.1).items() if t.decay_scale} == expected
    assert all(network.get_parameter(n).ndim >= 2 for n in expected)


def still(networks: nn.Module, found: dict[str, ParamOptim]) -> dict[str, float]:
    """Factor on each parameter after one step with zero gradients: 1 without decay."""
    for p in networks.parameters():
        torch.nn.init.constant_(p, 2.0)
    learner = Learner(networks, [Update(lambda part: None, found, weight_decay=0.5)])  # type: ignore[arg-type, return-value]
    zero = sum((p.sum() * 0.0 for p in networks.parameters()), torch.zeros(()))
    learner.updates[0].accumulate(Loss(zero, torch.ones(()), {}))
    learner.updates[0].step(1.0)
    return {n: float(p.detach().flatten()[0]) / 2 for n, p in networks.named_parameters()}


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_zero_gradient_step_decays_matrices_only(matrices: str) -> None:
    optim = OptimConfig.model_validate({"optimizer": matrices, "lr_muon": 0.1, "lr_adamw": 0.1})
    network = transformer(experts=EXPERTS)
    left = still(network, param_optims(network, optim))  # type: ignore[arg-type]
    rates = {"head": optim.lr_embedding, "blocks.0.mlp.router.weight": optim.lr_scalar}
    rates["blocks.0.mlp.shared_gate.weight"] = optim.lr_scalar  # [1, d]: cannot be orthogonalized
    for name, share in left.items():
        decays = MATRIX.search(name) is not None
        assert share == pytest.approx(1 - 0.5 * rates.get(name, 0.1) if decays else 1.0, abs=1e-6), name


def test_param_optim_without_decay_scale_keeps_weight() -> None:
    nets = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
    found = {**all_adamw(nets, 0.1, "a."), **{f"b.{n}": ParamOptim("adamw", 0.1) for n in ("weight", "bias")}}
    left = still(nets, found)
    assert left == pytest.approx({"a.weight": 0.95, "a.bias": 1.0, "b.weight": 1.0, "b.bias": 1.0}, abs=1e-6)


def test_adamw_for_matrices_learns(tokens: Path, tmp_path: Path) -> None:
    optim = OptimConfig(optimizer="adamw", lr_adamw=0.004, mup_base_width=16, weight_decay=0.01)
    seen = train_notes(job(tokens, optim=optim, steps=30), tmp_path).steps
    assert seen[-1]["nll"] < 0.6 * seen[0]["nll"]
    # The tiny decoder has width 32, twice the base: the logged rate is the effective one.
    assert max(s["learning_rate"] for s in seen) == pytest.approx(0.002)
    assert "muon" not in {t.optimizer for t in param_optims(decoder(), optim).values()}


def test_fused_adamw_trains_equally(tokens: Path, tmp_path: Path) -> None:
    plain, fused = (
        [m["nll"] for m in train_notes(job(tokens, optim=OptimConfig(fused=f)), tmp_path / str(f)).steps]
        for f in (None, True)
    )
    assert fused == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("bad", [{"optimizer": "sgd"}, {"mup_base_width": 0}, {"lr_adamw": 0.0}])
def test_optim_config_invalid_raises(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        OptimConfig.model_validate(bad)
