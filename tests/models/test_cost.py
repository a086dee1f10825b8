"""FLOPs, parameters and activation bytes of every network, against torch's counter and autograd."""

from __future__ import annotations

import pytest
import torch
from tests.support.models.initialization import generator
from tests.support.tiny import make_decoder
from torch.utils.flop_counter import FlopCounterMode

from whorl.models.cost import ProfiledModule
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.language_model import saved_bytes
from whorl.models.multi_token import MultiTokenPrediction
from whorl.models.vision.clip import DualEncoder
from whorl.models.vision.flamingo import Captioner
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import MLPMixer, ViT


def vit(classes: int = 8) -> ViT:
    return ViT(16, 4, 1, classes, d_model=32, n_layers=2, n_heads=2, mlp_hidden=64, backend="reference")


def encoder() -> Encoder:
    shape = {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 2, "mlp_hidden": 64, "max_length": 24}
    return Encoder(EncoderConfig.model_validate(shape))


NETWORKS: dict[str, tuple[ProfiledModule, int]] = {
    "encoder": (encoder(), 16),
    "clip": (DualEncoder(vit(), encoder(), generator()), 16),
    "captioner": (Captioner(make_decoder(), vit(0)), 12),
    "multi-token": (MultiTokenPrediction(32, 3, 2), 16),
    "ViT": (vit(), 16),
    "Mixer": (MLPMixer(16, 4, 1, 8, d_model=32, n_layers=2, token_hidden=16, mlp_hidden=64), 16),
    "ResNet": (ResNet(1, 8, widths=(8, 16), depths=(1, 1)), 16),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_cost_matches_torch(name: str) -> None:
    network, size = NETWORKS[name]
    before = {n: t.clone() for n, t in network.state_dict().items()}
    flops, n_bytes, sizes = network.flops(size), network.activation_bytes(3, size), network.params()
    assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())  # running statistics too
    assert all(p.grad is None for p in network.parameters())
    inputs = network.example_inputs(3, size, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.profiled_forward(*inputs)
    assert 3 * flops == pytest.approx(counter.get_total_flops(), rel=0.1)
    kept = saved_bytes(lambda: network.profiled_forward(*inputs), [*network.parameters(), *inputs])
    assert n_bytes == pytest.approx(kept, rel=0.15)
    assert sizes["total"] == sum(p.numel() for p in network.parameters())
    assert 0 <= sizes["embedding"] < sizes["active"] <= sizes["total"]
    assert network.kv_bytes_per_token() >= 0
