"""Quantized models: GPTQ against its definition, the effect of calibration, saving and loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models.initialization import add_noise, generator
from tests.support.tiny import decoder_config, transformer_config
from torch import Tensor

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import CheckpointError, ConfigError
from whorl.models import Transformer, load_model, save_model
from whorl.models.compression.activation_moments import second_moments
from whorl.models.compression.gptq import best_scales, gptq, quantize_model
from whorl.models.compression.quantize import QuantizationConfig, quantizable_layers
from whorl.models.transformer_config import AttentionConfig, MLAConfig, MoEConfig
from whorl.nn.quantized_linear import CODE_MAX, CODE_MIN, QuantizedLinear, compute_scales, dequantize, encode


def output_error(weight: Tensor, rounded: Tensor, moments: Tensor) -> float:
    """Return sum |(W - Q) x|^2 / sum |W x|^2 over the inputs of `moments`."""
    w, error = weight.detach().double(), (weight - rounded).detach().double()
    return float(((error @ moments) * error).sum() / ((w @ moments) * w).sum())


def decoder(**changes: object) -> Transformer:
    return add_noise(Transformer(decoder_config(vocab_size=48, **changes), generator(0)), 0.2, generator(1))


def transformer(**changes: object) -> Transformer:
    heads = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16, bias=True)
    config = transformer_config(**{"vocab_size": 48, "mixers": {"heads": heads}, **changes})
    return add_noise(Transformer(config, generator(0)), 0.2, generator(1))


def ids(rows: int = 4, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(48, (rows, length), generator=generator(seed))


def moments_of(d: int, seed: int) -> Tensor:
    """Return the second moments of correlated inputs of different sizes."""
    g = generator(seed)
    x = torch.randn(4 * d, d, generator=g) @ torch.randn(d, d, generator=g) * torch.rand(d, generator=g)
    return (x.t() @ x).double()


def gptq_by_definition(weight: Tensor, h: Tensor, scales: Tensor, kind: str, damping: float) -> Tensor:
    """Quantize by the two equations of Optimal Brain Quantization, with a new inverse for each column."""
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    order = h.diagonal().argsort(descending=True, stable=True).tolist()
    codes = torch.zeros(weight.shape, dtype=torch.int8)
    per = weight.shape[1] // scales.shape[1]
    for o in range(len(weight)):
        w = weight[o].double().clone()
        for n, j in enumerate(order):
            free = order[n:]
            inverse = torch.linalg.inv(h[free][:, free])
            scale = float(scales[o, j // per])
            code = min(max(round(float(w[j]) / scale), CODE_MIN[kind]), CODE_MAX[kind])
            codes[o, j] = code
            w[free] -= (w[j] - code * scale) / inverse[0, 0] * inverse[0]
    return codes


@pytest.mark.parametrize("block", [5, 128])
@pytest.mark.parametrize(("kind", "group"), [("int4", None), ("int4", 8), ("int8", None)])
def test_gptq_matches_definition(kind: str, group: int | None, block: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("whorl.models.compression.gptq.BLOCK", block)
    weight = torch.randn(6, 24, generator=generator(3))
    h, scales = moments_of(24, 0), compute_scales(weight, kind, group)
    h[3], h[:, 3] = 0.0, 0.0  # an input that is always 0
    assert torch.equal(gptq(weight, h, scales, kind), gptq_by_definition(weight, h, scales, kind, 0.01))


@pytest.mark.parametrize("seed", range(4))
def test_gptq_lowers_output_error(seed: int) -> None:
    weight = torch.randn(16, 64, generator=generator(seed))
    h = moments_of(64, seed)
    scales = compute_scales(weight, "int4", 32)
    chosen = best_scales(weight, h.diagonal(), "int4", 32)
    nearest = output_error(weight, dequantize(encode(weight, scales, "int4"), scales), h)
    rescaled = output_error(weight, dequantize(encode(weight, chosen, "int4"), chosen), h)
    calibrated = output_error(weight, dequantize(gptq(weight, h, chosen, "int4"), chosen), h)
    assert calibrated < 0.6 * rescaled and rescaled < 1.1 * nearest


def test_second_moments_sum_over_all_inputs() -> None:
    model, inputs, name = decoder(), [], "blocks.1.mlp.down"
    layer = model.get_submodule(name)
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    batches = [ids(2, 9), ids(3, 5, seed=1)]
    for batch in batches:
        model(batch)
    hook.remove()
    x = torch.cat(inputs).double()
    found = second_moments(model, batches, [name], stop_after=model.blocks[1])[name]
    assert torch.allclose(found, x.t() @ x, rtol=1e-5)
    with pytest.raises(ConfigError, match="no calibration text"):
        second_moments(model, [], [name])
    with pytest.raises(ConfigError, match="never called"):
        second_moments(model, batches, [name], stop_after=model.blocks[0])
    with pytest.raises(ConfigError, match="is a TransformerBlock"):
        second_moments(model, batches, ["blocks.0"])


SCHEMES = [
    QuantizationConfig(),
    QuantizationConfig(format="int4", group_size=32),
    QuantizationConfig(format="int8", dynamic=True, head=True, ngram=True),
    QuantizationConfig(format="fp8"),
    QuantizationConfig(format="int4", group_size=16, rounding="calibrated", head=True),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", ["decoder", "tied decoder", "transformer"])
def test_quantized_model_survives_saving(kind: str, scheme: QuantizationConfig, tmp_path: Path) -> None:
    model = transformer() if kind == "transformer" else decoder(tie_embeddings="tied" in kind)
    config, names, before = model.config, quantizable_layers(model), model.logits(model(ids()))
    quantize_model(model, scheme, [ids(8, seed=1)])
    after = model.logits(model(ids()))
    assert 0 < (after - before).norm() < (0.5 if scheme.format == "int4" else 0.1) * before.norm()
    save_model(model, tmp_path)
    found = load_model(tmp_path)
    assert found.config == config and found.quantization == scheme
    for layer in (*model.modules(), *found.modules()):
        if isinstance(layer, QuantizedLinear):
            layer.kernel = "dequantize"
    assert torch.equal(found.logits(found(ids())), model.logits(model(ids())))
    assert names and all(isinstance(found.get_submodule(name), QuantizedLinear) for name in names)
    low = load_model(tmp_path, torch.bfloat16)
    assert (low.logits(low(ids())) - after).norm() < 0.1 * after.norm()


def test_quantized_model_decodes_in_pieces_like_one_forward() -> None:
    model = quantize_model(decoder(), QuantizationConfig(format="int4", group_size=32, head=True, ngram=True))
    state, text = model.new_state(2, 12), ids(2, 12)
    parts = [model(part, state=state) for part in text.split([5, 1, 6], dim=1)]
    assert torch.allclose(torch.cat(parts, 1), model(text), atol=1e-4)


def test_engine_runs_quantized_model() -> None:
    model = quantize_model(decoder(), QuantizationConfig(dynamic=True, head=True, ngram=True))
    config = EngineConfig(max_num_seqs=2, max_model_len=32, block_size=4, max_num_batched_tokens=7)
    engine, greedy, prompts = Engine(model, config), SamplingParams(temperature=0), ids(3, 9).tolist()
    for n, prompt in enumerate(prompts):
        engine.add(Request(id=str(n), ids=tuple(prompt), sampling=greedy, max_tokens=5))
    found: dict[str, list[int]] = {}
    while engine.busy:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(token.id for token in delta.tokens)
    for n, text in enumerate(prompts):
        for _ in range(5):
            text.append(int(model.logits(model(torch.tensor([text])))[0, -1].argmax()))
        assert found[str(n)] == text[9:]


def test_quantize_skips_matrices_read_directly(tmp_path: Path) -> None:
    latent = MLAConfig(n_heads=2, kv_rank=16, nope_dim=16, rope_dim=16, v_dim=16)
    experts = MoEConfig(n_experts=4, top_k=2, hidden=32, shared_hidden=32, shared_gate=True)
    model = transformer(mixers={"latent": latent}, experts=experts)
    names = quantizable_layers(model)
    assert "blocks.0.mixer.kv_a" in names and "blocks.0.mixer.kv_b" not in names
    assert not any("router" in name or "shared_gate" in name for name in names)
    quantize_model(model, QuantizationConfig())
    save_model(model, tmp_path)
    found = load_model(tmp_path)
    assert torch.allclose(found.logits(found(ids())), model.logits(model(ids())), atol=1e-5)


def test_quantize_rejects_bad_input_before_any_work() -> None:
    for message, settings in (
        ("calibrated' without a text", {"format": "int4", "rounding": "calibrated"}),
        (r"group 64 does not divide the 32 columns of blocks\.0\.mixer\.qkv\.weight", {"group_size": 64}),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize_model(decoder(), QuantizationConfig.model_validate(settings))
    model = quantize_model(decoder(), QuantizationConfig())
    with pytest.raises(ConfigError, match="already quantized"):
        quantize_model(model, QuantizationConfig())
    damaged = decoder()
    damaged.blocks[1].mlp.up.weight.data[3, 4] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"blocks\.1\.mlp\.up\.weight is not finite"):
        quantize_model(damaged, QuantizationConfig())
    with pytest.raises(ValueError, match="dynamic needs one scale"):
        QuantizationConfig(dynamic=True, group_size=64)


def test_load_names_damaged_quantized_files(tmp_path: Path) -> None:
    save_model(quantize_model(decoder(), QuantizationConfig(format="int4", group_size=32)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def error_of(**changes: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError) as error:
            load_model(tmp_path)
        return str(error.value)

    quantization = config["quantization"]
    assert "blocks.0.mixer.out.scales" in error_of(quantization={**quantization, "group_size": 16})
    assert "codes" in error_of(quantization={**quantization, "format": "int8"})
    assert "cannot read a model" in error_of(quantization={**quantization, "format": "int3"})
    assert "blocks.1.mixer.out.codes" in error_of(transformer={**config["transformer"], "n_layers": 1})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cannot read a model"):
        load_model(tmp_path)
