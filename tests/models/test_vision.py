"""Vision models: against `transformers` and formulas, and cost against torch's counter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.initialization import generator as gen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from whorl.errors import ConfigError
from whorl.models.exchange import import_vision
from whorl.models.vision.resnet import ResNet
from whorl.models.vision.vit import MLPMixer, ViT

Build = Callable[[], nn.Module]


def randomized(model: nn.Module) -> nn.Module:
    """Draw every parameter and buffer: initial zeros and ones could hide a mistake."""
    for number, (name, p) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        if p.is_floating_point():
            random = torch.randn(p.shape, generator=gen(number))
            p.data = random.abs() + 0.5 if name.endswith("running_var") else 0.3 * random
    return model


SHAPE: dict[str, Any] = {"d_model": 12, "n_layers": 2, "n_heads": 3, "backend": "reference"}
OF_CLIP: dict[str, Any] = {"mlp": "quick_gelu", "patch_bias": False, "first_norm": True, "head_bias": False}
MODELS: dict[str, Build] = {
    "resnet": lambda: ResNet(3, 5, widths=(4, 8, 6), depths=(2, 1, 1), generator=gen()),
    "resnet_large": lambda: ResNet(3, 5, widths=(4, 8), depths=(1, 1), stem="large", generator=gen()),
    "resnet_2016": lambda: ResNet(3, 5, widths=(4, 8), depths=(2, 1), pre_activation=True, generator=gen()),
    "vit_class": lambda: ViT(16, 4, 3, 5, **SHAPE, generator=gen()),
    "vit_mean": lambda: ViT(16, 4, 3, 5, **SHAPE, pooling="mean", generator=gen()),
    "vit_of_clip": lambda: ViT(16, 4, 3, 5, **SHAPE, **OF_CLIP, generator=gen()),
    "vit_headless": lambda: ViT(16, 4, 3, 0, **SHAPE, generator=gen()),
    "mixer": lambda: MLPMixer(16, 4, 3, 5, d_model=12, n_layers=2, token_hidden=7, generator=gen()),
}
each = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits, or the features of a model without a head."""
    return model(images) if model.params()["head"] else model.features(images)


@each
def test_network_is_seeded_and_gets_gradients(build: Build) -> None:
    assert all(torch.equal(a, b) for a, b in zip(build().parameters(), build().parameters(), strict=True))
    model = randomized(build())
    out = outputs(model, torch.randn(3, 3, 16, 16, generator=gen(1)))
    assert out.shape == (3, 5 if model.params()["head"] else 12) and out.dtype == torch.float32
    (out * torch.randn(out.shape, generator=gen(2))).sum().backward()
    for name, p in model.named_parameters():
        # softmax cancels a key bias; layer norm cancels the last bias of a mixer's token MLP
        trained = float(p.grad.abs().max()) >= 1e-5
        assert trained or name.endswith(("attention.k.bias", "token_mlp.down.bias")), name


@each
def test_flops_and_params_match_torch(build: Build) -> None:
    model = build().eval()
    with FlopCounterMode(display=False) as counter:
        outputs(model, torch.randn(1, 3, 16, 16, generator=gen()))
    assert counter.get_total_flops() == model.flops(16)
    found = model.params()
    assert found["total"] == sum(p.numel() for p in model.parameters())
    assert found["total"] == sum(n for name, n in found.items() if name not in ("total", "active"))


@each
def test_features_in_bf16_are_close(build: Build) -> None:
    model = randomized(build()).eval()
    images = torch.randn(2, 3, 16, 16, generator=gen(1))
    low, high = model.features(images.bfloat16()), model.features(images)
    assert low.dtype == torch.bfloat16
    assert float((low.float() - high).detach().norm()) < 0.05 * float(high.detach().norm())


@each
def test_forward_rejects_images_of_another_shape(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"images are \[1, 2, 16, 16\]"):
        outputs(build(), torch.zeros(1, 2, 16, 16))


def test_constructor_rejects_bad_settings() -> None:
    vit = {"d_model": 8, "n_layers": 1, "n_heads": 2}
    constructors: dict[str, Build] = {
        "depths": lambda: ResNet(1, 2, widths=(4, 8), depths=(1,)),
        "stem is 'tiny'": lambda: ResNet(1, 2, stem="tiny"),  # type: ignore[arg-type]
        "patch is 3": lambda: ViT(8, 3, 1, 2, **vit),
        "n_heads is 3": lambda: ViT(8, 2, 1, 2, **{**vit, "n_heads": 3}),
        "pooling is 'max'": lambda: ViT(8, 2, 1, 2, **vit, pooling="max"),  # type: ignore[arg-type]
        "n_layers is 0": lambda: ViT(8, 2, 1, 2, **{**vit, "n_layers": 0}),
    }
    for message, constructor in constructors.items():
        with pytest.raises(ConfigError, match=message):
            constructor()
    mixer = MLPMixer(8, 2, 1, 2, d_model=8, n_layers=1)
    for attempt in (lambda: mixer(torch.zeros(1, 1, 8, 10)), lambda: mixer.flops(10)):
        with pytest.raises(ConfigError, match="side of 10"):
            attempt()


def test_vit_without_head_and_with_dtype() -> None:
    model = randomized(MODELS["vit_headless"]())
    images = torch.randn(2, 3, 16, 16, generator=gen(1))
    with pytest.raises(ConfigError, match="classes is 0"):
        model(images)
    bf16 = ViT(16, 4, 3, 0, **SHAPE, dtype=torch.bfloat16)
    bf16.load_state_dict(model.state_dict())
    assert torch.equal(bf16.features(images), model.features(images.bfloat16()))
    assert ViT(**model.config.model_dump()).config == model.config


def test_published_models_have_published_sizes() -> None:
    with torch.device("meta"):
        eighteen, twenty = ResNet(3, 1000, stem="large"), ResNet(3, 10, widths=(16, 32, 64), depths=(3, 3, 3))
        base, mixer = ViT(224, 16, 3, 1000), MLPMixer(224, 16, 3, 1000)
    assert eighteen.params()["total"] == 11_689_512  # torchvision's resnet18
    assert eighteen.flops(224) / 2 == pytest.approx(1.8e9, rel=0.02)  # table 1 of He et al. 2015
    assert twenty.params()["total"] == pytest.approx(0.27e6, rel=0.02)  # table 6
    assert base.params()["total"] == 86_567_656  # ViT-B/16 with 1,000 classes
    assert mixer.params()["total"] == 59_880_472  # Mixer-B/16


def with_gradient(network: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the gradient of their squares with respect to the images."""
    x = images.clone().requires_grad_()
    y = network(x)
    return y, torch.autograd.grad(y.square().sum(), x)[0]


def test_resnet_matches_transformers_with_gradients() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"num_channels": 3, "embedding_size": 4, "hidden_sizes": [4, 8, 8], "depths": [2, 1, 2]}
    config = transformers.ResNetConfig(**shape, layer_type="basic", num_labels=5)
    reference = randomized(transformers.ResNetForImageClassification(config))
    model = ResNet(3, 5, widths=(4, 8, 8), depths=(2, 1, 2), stem="large")

    def copy(target: nn.Module, norm: nn.Module, source: nn.Module) -> None:
        target.weight.data.copy_(source.convolution.weight)
        norm.load_state_dict(source.normalization.state_dict())

    copy(model.stem, model.norm, reference.resnet.embedder.embedder)
    layers = [layer for stage in reference.resnet.encoder.stages for layer in stage.layers]
    for block, layer in zip(model.blocks, layers, strict=True):
        copy(block.convolution1, block.norm1, layer.layer[0])
        copy(block.convolution2, block.norm2, layer.layer[1])
        assert (block.shortcut is None) == (not hasattr(layer.shortcut, "convolution"))
        if block.shortcut is not None:
            copy(block.shortcut, block.shortcut_norm, layer.shortcut)
    model.head.load_state_dict(reference.classifier[1].state_dict())
    images = torch.randn(4, 3, 32, 32, generator=gen(1))
    for training in (False, True):
        model.train(training), reference.train(training)
        want = with_gradient(lambda x: reference(x).logits, images)
        torch.testing.assert_close(with_gradient(model, images), want, atol=1e-4, rtol=1e-3)


def test_vit_matches_transformers_with_gradients(tmp_path: Path) -> None:
    from tests.support.models.exchange_vision_cases import save_hf_model

    reference = save_hf_model("vit", tmp_path)
    model = import_vision(tmp_path)
    for size in (16, 24):  # another size: positions are interpolated
        images = torch.randn(2, 3, size, size, generator=gen(1))
        want = with_gradient(lambda x: reference(x, interpolate_pos_encoding=True).logits, images)
        torch.testing.assert_close(with_gradient(model, images), want, atol=1e-5, rtol=1e-4)


def test_mixer_matches_formula() -> None:
    model = randomized(MLPMixer(8, 2, 1, 3, d_model=6, n_layers=2, token_hidden=5, mlp_hidden=9))
    images = torch.randn(2, 1, 8, 8, generator=gen(1))

    def norm(layer: nn.Module, x: Tensor) -> Tensor:
        return F.layer_norm(x, (6,), layer.weight, layer.bias, 1e-6)

    def mlp(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer.up.weight @ x + layer.up.bias
        return layer.down.weight @ (h * 0.5 * (1 + torch.erf(h / 2**0.5))) + layer.down.bias

    linear = model.embedding.linear
    for image, logits in zip(images[:, 0], model(images), strict=True):
        patches = [image[i : i + 2, j : j + 2].flatten() for i in range(0, 8, 2) for j in range(0, 8, 2)]
        x = torch.stack([linear.weight @ patch + linear.bias for patch in patches])
        for block in model.blocks:
            seen = norm(block.token_norm, x)
            x = x + torch.stack([mlp(block.token_mlp, seen[:, c]) for c in range(6)], dim=1)
            seen = norm(block.mlp_norm, x)
            x = x + torch.stack([mlp(block.mlp, token) for token in seen])
        want = model.head.weight @ norm(model.norm, x).mean(0) + model.head.bias
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)


def test_blocks_start_as_identity() -> None:
    """Except for the ReLU and where the shape changes."""
    for model in (MODELS["vit_mean"](), MODELS["mixer"]()):
        x = torch.randn(2, 16, 12, generator=gen())
        assert all(torch.equal(block(x), x) for block in model.blocks)
    x = torch.randn(2, 4, 8, 8, generator=gen())
    assert torch.equal(MODELS["resnet"]().blocks[0](x), F.relu(x))
    assert torch.equal(MODELS["resnet_2016"]().blocks[0](x), x)


def test_pre_activation_block_matches_formula() -> None:
    block = randomized(MODELS["resnet_2016"]()).eval().blocks[2]  # 4 -> 8 channels at stride 2
    x = torch.randn(2, 4, 8, 8, generator=gen())

    def norm(layer: nn.Module, x: Tensor) -> Tensor:
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)

    h = norm(block.norm1, x).relu()
    y = norm(block.norm2, F.conv2d(h, block.convolution1.weight, stride=2, padding=1)).relu()
    want = F.conv2d(h, block.shortcut.weight, stride=2) + F.conv2d(y, block.convolution2.weight, padding=1)
    torch.testing.assert_close(block(x), want, atol=1e-5, rtol=1e-4)
